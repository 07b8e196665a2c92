"""covprop: the mean and full covariance of a neural network's output for Gaussian input."""

from covprop import activations, bayes, covariance, robustness, rules
from covprop.activations.daunizeau import DaunizeauSigmoid
from covprop.bound import series_error_bound
from covprop.compare import compare
from covprop.comparison import Comparison
from covprop.dispatch import rule
from covprop.divergences import kl_divergence, wasserstein_distance
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
from covprop.gaussian import Gaussian
from covprop.joint import joint
from covprop.methods import (
    AssumedDensity,
    ControlVariate,
    Exact,
    Linearized,
    MonteCarlo,
    PiecewiseLinear,
    Series,
    Sketched,
    Split,
    Unscented,
    Wu2019,
)
from covprop.mixture import Mixture
from covprop.plan import Plan
from covprop.propagate import plan, propagate
from covprop.rules.elementwise import activation, register_activation
from covprop.rules.noise import dropout_active
from covprop.steps import Trace
from covprop.tensor import GaussianTensor
from covprop.trace import trace

__version__ = "0.1.0"

__all__ = [
    "ApproximationWarning",
    "AssumedDensity",
    "BatchDimensionError",
    "BatchWarning",
    "Comparison",
    "ControlVariate",
    "CovpropError",
    "DaunizeauSigmoid",
    "DropoutWarning",
    "Exact",
    "Gaussian",
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
    "Series",
    "Sketched",
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
