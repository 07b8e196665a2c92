"""Ways to find the moments of a network's output."""

from covprop.methods.auto import Auto
from covprop.methods.base import (
    FunctionMethod,
    Method,
    WrappingMethod,
    is_method,
)
from covprop.methods.comparison.piecewise import PiecewiseLinear
from covprop.methods.comparison.published import Wu2019
from covprop.methods.control import ControlVariate
from covprop.methods.cumulants import Cumulants
from covprop.methods.layerwise import AssumedDensity, Exact, GaussianLayers, LayerwiseMethod
from covprop.methods.linearized import Linearized, Unscented
from covprop.methods.montecarlo import MonteCarlo
from covprop.methods.names import as_method, parse_method
from covprop.methods.network import Network
from covprop.methods.quasi_monte_carlo import QuasiMonteCarlo
from covprop.methods.root import Root
from covprop.methods.series import Series
from covprop.methods.sketched import Sketched
from covprop.methods.split import Split

__all__ = [
    "AssumedDensity",
    "Auto",
    "ControlVariate",
    "Cumulants",
    "Exact",
    "FunctionMethod",
    "GaussianLayers",
    "LayerwiseMethod",
    "Linearized",
    "Method",
    "MonteCarlo",
    "Network",
    "PiecewiseLinear",
    "QuasiMonteCarlo",
    "Root",
    "Series",
    "Sketched",
    "Split",
    "Unscented",
    "WrappingMethod",
    "Wu2019",
    "as_method",
    "is_method",
    "parse_method",
]
