"""covprop: the mean and full covariance of a neural network's output for Gaussian input."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covprop import activations, covariance, rules
from covprop.error_estimate import ErrorEstimate
from covprop.errors import (
    ApproximationWarning,
    BatchDimensionError,
    BatchWarning,
    CovpropError,
    DropoutWarning,
    InconsistentBranches,
    InvalidFile,
    InvalidGaussian,
    MomentOverflow,
    QuadratureError,
    ToleranceNotReached,
    TooLarge,
    TrainingDiverged,
    UnsupportedOperation,
)
from covprop.flow.carrier import Carrier
from covprop.flow.table import Batch, rule
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.methods import (
    AssumedDensity,
    Auto,
    ControlVariate,
    Cumulants,
    Exact,
    GaussianLayers,
    Linearized,
    MonteCarlo,
    PiecewiseLinear,
    QuasiMonteCarlo,
    Series,
    Sketched,
    Split,
    Unscented,
    Wu2019,
)
from covprop.methods.comparison import DaunizeauSigmoid
from covprop.methods.plan import Plan
from covprop.mixture import Mixture
from covprop.propagate import joint, plan, propagate
from covprop.rules.elementwise import activation, register_activation
from covprop.rules.noise import dropout_active
from covprop.skewed import Skewed

if TYPE_CHECKING:
    from covprop import bayes, robustness
    from covprop.diagnostics.compare import compare
    from covprop.diagnostics.comparison import Comparison
    from covprop.diagnostics.steps import Trace
    from covprop.diagnostics.trace import trace
    from covprop.diagnostics.verdict import kl_divergence, series_error_bound, wasserstein_distance

__version__ = "0.1.0"

__all__ = [
    "ApproximationWarning",
    "AssumedDensity",
    "Auto",
    "Batch",
    "BatchDimensionError",
    "BatchWarning",
    "Carrier",
    "Comparison",
    "ControlVariate",
    "CovpropError",
    "Cumulants",
    "DaunizeauSigmoid",
    "DropoutWarning",
    "ErrorEstimate",
    "Exact",
    "Gaussian",
    "GaussianLayers",
    "GaussianTensor",
    "InconsistentBranches",
    "InvalidFile",
    "InvalidGaussian",
    "Linearized",
    "Mixture",
    "MomentOverflow",
    "MonteCarlo",
    "PiecewiseLinear",
    "Plan",
    "QuadratureError",
    "QuasiMonteCarlo",
    "Series",
    "Sketched",
    "Skewed",
    "Split",
    "ToleranceNotReached",
    "TooLarge",
    "Trace",
    "TrainingDiverged",
    "Unscented",
    "UnsupportedOperation",
    "Wu2019",
    "activation",
    "activations",
    "bayes",
    "compare",
    "covariance",
    "dropout_active",
    "joint",
    "kl_divergence",
    "plan",
    "propagate",
    "register_activation",
    "robustness",
    "rule",
    "rules",
    "series_error_bound",
    "trace",
    "wasserstein_distance",
]

_IMPORTED_WHEN_USED = {
    "Comparison": "diagnostics.comparison",
    "Trace": "diagnostics.steps",
    "bayes": "bayes",
    "compare": "diagnostics.compare",
    "kl_divergence": "diagnostics.verdict",
    "robustness": "robustness",
    "series_error_bound": "diagnostics.verdict",
    "trace": "diagnostics.trace",
    "wasserstein_distance": "diagnostics.verdict",
}
"""Where names are that a first call of `propagate` does not need."""


def __getattr__(name: str) -> Any:
    """Import what is named for the first time."""
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _IMPORTED_WHEN_USED[name]
    module = import_module(f"{__name__}.{place}")
    globals()[name] = module if place == name else getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    """Also what is not imported yet."""
    return sorted({*globals(), *__all__})
