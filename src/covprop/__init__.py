"""covprop: the mean and full covariance of a neural network's output for Gaussian input."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.serialization import add_safe_globals

from covprop import activations, covariance, extending
from covprop import rules as rules
from covprop.error_estimate import ErrorEstimate, SamplingError
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
from covprop.flow.carrier import Carrier as Carrier
from covprop.flow.table import Batch, rule
from covprop.flow.tensor import GaussianTensor as GaussianTensor
from covprop.gaussian import Gaussian
from covprop.mc_dropout import mc_dropout
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
from covprop.methods.comparison.published import DaunizeauSigmoid
from covprop.methods.plan import Plan
from covprop.mixture import Mixture
from covprop.propagate import joint, plan, propagate
from covprop.rules.elementwise import activation, register_activation
from covprop.rules.noise import dropout_active
from covprop.skewed import Skewed

if TYPE_CHECKING:
    from covprop import bayes, filters, report, robustness
    from covprop.attribution import UncertaintyBudget, uncertainty_budget
    from covprop.diagnostics.compare import compare
    from covprop.diagnostics.comparison import Comparison
    from covprop.diagnostics.steps import Trace
    from covprop.diagnostics.trace import trace
    from covprop.diagnostics.verdict import kl_divergence, series_error_bound, wasserstein_distance
    from covprop.sklearn_models import NoisyInputRegressor, from_sklearn

__version__ = "0.1.0"

# Values that torch.load reads without weights_only=False: they run no code of a file.
add_safe_globals(
    [
        Gaussian, Mixture, Skewed, ErrorEstimate, SamplingError,
        AssumedDensity, Auto, ControlVariate, Cumulants, DaunizeauSigmoid, GaussianLayers,
        Linearized, MonteCarlo, PiecewiseLinear, QuasiMonteCarlo, Series, Sketched, Split,
        Unscented, Wu2019,
    ]
)  # fmt: skip

__all__ = [
    "ApproximationWarning",
    "AssumedDensity",
    "Auto",
    "Batch",
    "BatchDimensionError",
    "BatchWarning",
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
    "InconsistentBranches",
    "InvalidFile",
    "InvalidGaussian",
    "Linearized",
    "Mixture",
    "MomentOverflow",
    "MonteCarlo",
    "NoisyInputRegressor",
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
    "UncertaintyBudget",
    "Unscented",
    "UnsupportedOperation",
    "Wu2019",
    "activation",
    "activations",
    "bayes",
    "compare",
    "covariance",
    "dropout_active",
    "extending",
    "filters",
    "from_sklearn",
    "joint",
    "kl_divergence",
    "mc_dropout",
    "plan",
    "propagate",
    "register_activation",
    "report",
    "robustness",
    "rule",
    "series_error_bound",
    "trace",
    "uncertainty_budget",
    "wasserstein_distance",
]

_IMPORTED_WHEN_USED = {
    "Comparison": "diagnostics.comparison",
    "NoisyInputRegressor": "sklearn_models",
    "UncertaintyBudget": "attribution",
    "Trace": "diagnostics.steps",
    "bayes": "bayes",
    "compare": "diagnostics.compare",
    "filters": "filters",
    "from_sklearn": "sklearn_models",
    "kl_divergence": "diagnostics.verdict",
    "report": "report",
    "robustness": "robustness",
    "series_error_bound": "diagnostics.verdict",
    "trace": "diagnostics.trace",
    "uncertainty_budget": "attribution",
    "wasserstein_distance": "diagnostics.verdict",
}
"""Where names are that a first call of `propagate` does not need."""


if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is none

    def __getattr__(name: str) -> Any:
        """Import what is named for the first time."""
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = _IMPORTED_WHEN_USED[name]
        try:
            module = import_module(f"{__name__}.{place}")
        except ModuleNotFoundError as error:
            if place != "sklearn_models":
                raise
            raise ImportError(
                f"cp.{name} needs scikit-learn; install it with "
                "pip install '.[bayes]' in covprop's folder"
            ) from error
        globals()[name] = module if place == name else getattr(module, name)
        return globals()[name]


def __dir__() -> list[str]:
    return list(__all__)
