"""Estimators of covprop.bayes inside scikit-learn's tools."""

import numpy as np
import pytest
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_wine
from sklearn.ensemble import VotingClassifier
from sklearn.inspection import permutation_importance
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_predict,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from covprop.bayes import BayesClassifier, BayesRegressor

QUICK = {"hidden": (8,), "epochs": 25, "learning_rate": 0.1, "batch_size": 200, "random_state": 0}


@pytest.fixture(scope="module")
def patients() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_diabetes(return_X_y=True)
    return x[:200], y[:200]


@pytest.fixture(scope="module")
def wines() -> tuple[np.ndarray, np.ndarray]:
    return load_wine(return_X_y=True)


def test_cross_validation_scores_a_pipeline(wines, patients) -> None:
    classifier = make_pipeline(StandardScaler(), BayesClassifier(**QUICK))
    scores = cross_validate(classifier, *wines, cv=3, scoring=["accuracy", "neg_log_loss"])
    assert scores["test_accuracy"].min() > 0.9
    assert scores["test_neg_log_loss"].min() > -0.3  # guessing has -1.1
    regressor = make_pipeline(StandardScaler(), BayesRegressor(**QUICK))
    assert cross_val_score(regressor, *patients, cv=3, scoring="r2").mean() > 0.25


def test_a_search_chooses_a_prior_and_a_method(patients) -> None:
    steps = [("scale", StandardScaler()), ("network", BayesRegressor(**QUICK | {"epochs": 4}))]
    grid = {"network__prior": ["he", "empirical-bayes"], "network__method": ["exact", "ddvi"]}
    search = GridSearchCV(Pipeline(steps), grid, cv=2).fit(*patients)
    assert set(search.best_params_) == set(grid)
    assert len(search.cv_results_["mean_test_score"]) == 4
    mean, stddev = search.best_estimator_.predict(patients[0], return_std=True)
    assert mean.shape == stddev.shape == (200,)
    assert stddev.min() > 0


def test_probabilities_of_unseen_rows_are_distributions(wines) -> None:
    x, y = wines
    probability = cross_val_predict(
        BayesClassifier(**QUICK), x, y, cv=3, method="predict_proba"
    )  # it scales features itself
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-12)
    assert np.mean(probability.argmax(1) == y) > 0.9


def test_it_votes_with_others_and_tells_what_features_matter(wines) -> None:
    voters = [("linear", LogisticRegression(max_iter=200)), ("network", BayesClassifier(**QUICK))]
    vote = make_pipeline(StandardScaler(), VotingClassifier(voters, voting="soft")).fit(*wines)
    assert vote.score(*wines) > 0.95
    found = permutation_importance(vote, *wines, n_repeats=1, random_state=0)
    assert found.importances_mean.max() > 0.02


def test_a_target_may_be_transformed_outside(patients) -> None:
    model = TransformedTargetRegressor(BayesRegressor(**QUICK), func=np.log, inverse_func=np.exp)
    predicted = model.fit(*patients).predict(patients[0])
    assert np.corrcoef(predicted, patients[1])[0, 1] > 0.5
