"""Networks with random weights, trained and evaluated without sampling."""

import importlib
from typing import TYPE_CHECKING, Any

from covprop.bayes import metrics
from covprop.bayes import random_weights as random_weights  # registers the rule of the layers
from covprop.bayes.conversion import moments_of, to_bayesian, with_posterior
from covprop.bayes.correlated import from_laplace, with_factor
from covprop.bayes.discrete_likelihoods import Bernoulli, Categorical, Delta, Poisson
from covprop.bayes.elbo import ELBO, LinearAnnealing
from covprop.bayes.gaussian_likelihoods import HeteroskedasticGaussian, HomoskedasticGaussian
from covprop.bayes.layers import BayesConv1d, BayesConv2d, BayesLinear
from covprop.bayes.likelihoods import Cubature, Likelihood, Prediction
from covprop.bayes.prediction import (
    Decomposition,
    LocalReparametrisation,
    decompose,
    draws,
    kl,
    log_predictive,
    predict,
    predict_target,
)
from covprop.bayes.priors import (
    EmpiricalBayes,
    FixedPrior,
    HePrior,
    Posterior,
    Prior,
    ScaleMixturePrior,
    TrainedPrior,
    WideHePrior,
    XavierPrior,
)
from covprop.bayes.training import History, fit

if TYPE_CHECKING:
    from covprop.bayes.estimators import BayesClassifier, BayesRegressor

__all__ = [
    "ELBO", "BayesClassifier", "BayesConv1d", "BayesConv2d", "BayesLinear", "BayesRegressor",
    "Bernoulli", "Categorical", "Cubature",
    "Decomposition", "Delta", "EmpiricalBayes", "FixedPrior", "HePrior", "HeteroskedasticGaussian",
    "History", "HomoskedasticGaussian", "Likelihood", "LinearAnnealing", "LocalReparametrisation",
    "Poisson", "Posterior", "Prediction", "Prior", "ScaleMixturePrior", "TrainedPrior",
    "WideHePrior", "XavierPrior", "decompose", "draws", "fit", "from_laplace", "kl",
    "log_predictive", "metrics", "moments_of", "predict", "predict_target", "to_bayesian",
    "with_factor", "with_posterior",
]  # fmt: skip

ESTIMATORS = ("BayesClassifier", "BayesRegressor")


if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is none

    def __getattr__(name: str) -> Any:
        # The estimators need scikit-learn, so they are imported at first use.
        if name not in ESTIMATORS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module("covprop.bayes.estimators"), name)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"bayes.{name} needs scikit-learn; install it with "
                "pip install '.[bayes]' in covprop's folder"
            ) from error


def __dir__() -> list[str]:
    return list(__all__)
