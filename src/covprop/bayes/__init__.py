"""Networks with random weights, trained and evaluated without sampling."""

from covprop.bayes.conversion import moments_of, to_bayesian, with_posterior
from covprop.bayes.elbo import ELBO, LinearAnnealing
from covprop.bayes.layers import BayesConv1d, BayesConv2d, BayesLinear
from covprop.bayes.likelihoods import HeteroskedasticGaussian, HomoskedasticGaussian
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

__all__ = [
    "ELBO",
    "BayesConv1d",
    "BayesConv2d",
    "BayesLinear",
    "Decomposition",
    "EmpiricalBayes",
    "FixedPrior",
    "HePrior",
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "LinearAnnealing",
    "LocalReparametrisation",
    "Posterior",
    "Prior",
    "ScaleMixturePrior",
    "TrainedPrior",
    "WideHePrior",
    "XavierPrior",
    "decompose",
    "draws",
    "kl",
    "moments_of",
    "predict",
    "to_bayesian",
    "with_posterior",
]
