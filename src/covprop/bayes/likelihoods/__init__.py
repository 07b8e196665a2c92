"""Likelihoods: expected, predictive and plain, and the moments of what they predict."""

from covprop.bayes.likelihoods.base import Likelihood, Prediction
from covprop.bayes.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian

__all__ = [
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "Likelihood",
    "Prediction",
]
