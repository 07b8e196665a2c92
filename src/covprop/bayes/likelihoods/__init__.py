"""Likelihoods: expected, predictive and plain, and the moments of what they predict."""

from covprop.bayes.likelihoods.base import Likelihood, Prediction
from covprop.bayes.likelihoods.categorical import Categorical, Delta
from covprop.bayes.likelihoods.cubature import Cubature
from covprop.bayes.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian
from covprop.bayes.likelihoods.scalar import Bernoulli, Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "Cubature",
    "Delta",
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "Likelihood",
    "Poisson",
    "Prediction",
]
