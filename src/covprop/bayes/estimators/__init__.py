"""scikit-learn's estimators on Bayesian networks (extra `bayes`)."""

from covprop.bayes.estimators.models import BayesClassifier, BayesRegressor

__all__ = ["BayesClassifier", "BayesRegressor"]
