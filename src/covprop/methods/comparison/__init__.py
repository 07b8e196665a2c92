"""Methods of others, to compare with."""

from covprop.methods.comparison.daunizeau import DaunizeauSigmoid
from covprop.methods.comparison.piecewise import PiecewiseLinear
from covprop.methods.comparison.wu2019 import Wu2019

__all__ = ["DaunizeauSigmoid", "PiecewiseLinear", "Wu2019"]
