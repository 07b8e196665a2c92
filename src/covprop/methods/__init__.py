"""Ways to treat nonlinearities."""

from covprop.methods.assumed import AssumedDensity
from covprop.methods.base import LayerwiseMethod
from covprop.methods.exact import Exact
from covprop.methods.series import Series
from covprop.methods.wu2019 import Wu2019

__all__ = ["AssumedDensity", "Exact", "LayerwiseMethod", "Series", "Wu2019"]
