"""Likelihoods: expected, predictive and plain, and the moments of what they predict."""

from covprop.bayes.likelihoods.base import Cubature, Likelihood, Prediction
from covprop.bayes.likelihoods.discrete import Bernoulli, Categorical, Delta, Poisson
from covprop.bayes.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian

__all__ = [
    "Bernoulli", "Categorical", "Cubature", "Delta", "HeteroskedasticGaussian",
    "HomoskedasticGaussian", "Likelihood", "Poisson", "Prediction",
]  # fmt: skip
