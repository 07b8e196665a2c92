"""scikit-learn's estimators on Bayesian networks (extra `bayes`)."""

from covprop.bayes.estimators.classifier import BayesClassifier
from covprop.bayes.estimators.regressor import BayesRegressor

__all__ = ["BayesClassifier", "BayesRegressor"]
