"""Networks with random weights, trained and evaluated without sampling."""

from covprop.bayes import metrics
from covprop.bayes.conversion import moments_of, to_bayesian, with_posterior
from covprop.bayes.elbo import ELBO, LinearAnnealing
from covprop.bayes.evaluation import log_predictive, predict_target
from covprop.bayes.layers import BayesConv1d, BayesConv2d, BayesLinear
from covprop.bayes.likelihoods import (
    Bernoulli,
    Categorical,
    Cubature,
    Delta,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    Poisson,
    Prediction,
)
from covprop.bayes.prediction import Decomposition, decompose, kl, predict
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
from covprop.bayes.sampling import LocalReparametrisation, draws
from covprop.bayes.training import History, fit

__all__ = [
    "ELBO",
    "BayesConv1d",
    "BayesConv2d",
    "BayesLinear",
    "Bernoulli",
    "Categorical",
    "Cubature",
    "Decomposition",
    "Delta",
    "EmpiricalBayes",
    "FixedPrior",
    "HePrior",
    "HeteroskedasticGaussian",
    "History",
    "HomoskedasticGaussian",
    "Likelihood",
    "LinearAnnealing",
    "LocalReparametrisation",
    "Poisson",
    "Posterior",
    "Prediction",
    "Prior",
    "ScaleMixturePrior",
    "TrainedPrior",
    "WideHePrior",
    "XavierPrior",
    "decompose",
    "draws",
    "fit",
    "kl",
    "log_predictive",
    "metrics",
    "moments_of",
    "predict",
    "predict_target",
    "to_bayesian",
    "with_posterior",
]
