"""Ways to find the moments of a network's output."""

from covprop.methods.assumed import AssumedDensity
from covprop.methods.base import (
    FunctionMethod,
    LayerwiseMethod,
    Method,
    Propagation,
    WrappingMethod,
)
from covprop.methods.control import ControlVariate
from covprop.methods.exact import Exact
from covprop.methods.jacobian import linearize
from covprop.methods.linearized import Linearized
from covprop.methods.montecarlo import MonteCarlo
from covprop.methods.network import Network
from covprop.methods.piecewise import PiecewiseLinear
from covprop.methods.roots import Root
from covprop.methods.series import Series
from covprop.methods.sketched import Sketched
from covprop.methods.split import Split
from covprop.methods.unscented import Unscented
from covprop.methods.wu2019 import Wu2019

__all__ = [
    "AssumedDensity",
    "ControlVariate",
    "Exact",
    "FunctionMethod",
    "LayerwiseMethod",
    "Linearized",
    "Method",
    "MonteCarlo",
    "Network",
    "PiecewiseLinear",
    "Propagation",
    "Root",
    "Series",
    "Sketched",
    "Split",
    "Unscented",
    "WrappingMethod",
    "Wu2019",
    "linearize",
]
