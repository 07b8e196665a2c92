"""Estimators inside scikit-learn's tools, and scikit-learn's networks inside covprop."""

import numpy as np
import pytest
import torch
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
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import covprop as cp
from covprop.bayes import BayesClassifier, BayesRegressor
from tests.layers import propagate

QUICK = {"hidden": (8,), "epochs": 25, "learning_rate": 0.1, "batch_size": 200, "random_state": 0}
SAMPLES = 100_000


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


def as_torch(scaler: StandardScaler, network: MLPRegressor | MLPClassifier) -> nn.Sequential:
    """A fitted pipeline of scikit-learn as a module: the scaler, then the layers, in float64."""
    first = nn.Linear(len(scaler.scale_), len(scaler.scale_))
    weights = [np.diag(1 / scaler.scale_), *(w.T for w in network.coefs_)]
    biases = [-scaler.mean_ / scaler.scale_, *network.intercepts_]
    layers: list[nn.Module] = [first]
    for weight in weights[1:]:
        layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).double().requires_grad_(requires_grad=False)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, weight, bias in zip(linear, weights, biases, strict=True):
        layer.weight.copy_(torch.as_tensor(np.array(weight)))
        layer.bias.copy_(torch.as_tensor(bias))
    return model


def test_noise_goes_through_a_fitted_pipeline_of_scikit_learn(patients) -> None:
    """Sampled by scikit-learn's own predict, within 5 standard errors.

    One hidden layer: what reaches its ReLUs is Gaussian, so that the moments are exact.
    """
    x, y = patients
    pipeline = make_pipeline(
        StandardScaler(), MLPRegressor(hidden_layer_sizes=(30,), max_iter=60, random_state=0)
    )
    with pytest.warns(UserWarning, match="hasn't converged"):  # sixty rounds are enough here
        pipeline.fit(x, y)
    model = as_torch(*(step for _, step in pipeline.steps))
    points = torch.as_tensor(x[:2])
    np.testing.assert_allclose(model(points)[:, 0], pipeline.predict(x[:2]), rtol=1e-9)
    given = cp.Gaussian.isotropic(points, stddev=0.02, batch_dims=1)  # features have 0.048
    found = propagate(model, given)
    noise = np.random.default_rng(0).normal(size=(SAMPLES, x.shape[1]))
    for i in range(2):
        drawn = pipeline.predict(x[i] + 0.02 * noise)
        error = drawn.std() / SAMPLES**0.5
        assert abs(drawn.mean() - float(found.mean[i])) < 5 * error
        spread = (drawn - drawn.mean()) ** 2
        assert abs(spread.mean() - float(found.variance[i])) < 5 * spread.std() / SAMPLES**0.5
        assert spread.std() / SAMPLES**0.5 < 0.01 * spread.mean()
