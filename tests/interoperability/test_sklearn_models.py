"""Fitted models of scikit-learn as modules, against its own predictions and samples of them."""

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import linear_model as linear
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_wine, make_multilabel_classification
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    PolynomialFeatures,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
)
from sklearn.utils.estimator_checks import check_estimator

import covprop as cp
from covprop.sklearn_models import LINEAR_REGRESSORS, ROWS
from tests.layers import propagate

SAMPLES = 100_000
X, Y = load_diabetes(return_X_y=True)
X, Y = X[:200] * 20 + np.arange(10), Y[:200]  # features with means and a spread of about one
TWO = np.stack([Y, X @ np.linspace(-1, 1, 10)], axis=1)
WINES, GRAPES = load_wine(return_X_y=True)
ACTIVATIONS = ["identity", "logistic", "tanh", "relu"]


def network(kind: type = MLPRegressor, **options: Any) -> Any:
    return kind(**{"hidden_layer_sizes": (12, 7), "max_iter": 20, "random_state": 0} | options)


def fitted(estimator: Any, x: Any = X, y: Any = Y) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few rounds are enough here
        return estimator.fit(x, y)


def module_values(estimator: Any, x: Any) -> np.ndarray:
    model = cp.from_sklearn(estimator)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    return model(torch.as_tensor(x)).numpy()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """To a relative error of 1e-12 of the largest number."""
    if expected.ndim == 1:
        assert found.shape == (len(expected), 1)
        expected = expected[:, None]
    assert found.shape == expected.shape
    assert found.dtype == np.float64
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()
    assert np.ptp(expected) > 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("y", [Y, TWO], ids=["one output", "two outputs"])
def test_a_regression_network_predicts_the_same(activation: str, y: np.ndarray) -> None:
    model = fitted(network(activation=activation), y=y)
    assert_same(module_values(model, X), model.predict(X))


def test_a_network_for_counts_predicts_the_same() -> None:
    model = fitted(network(loss="poisson", max_iter=5), y=Y / 100)
    assert model.out_activation_ == "exp"
    assert_same(module_values(model, X), model.predict(X))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_classification_network_has_the_same_probabilities(activation: str, classes: int) -> None:
    rows = classes > GRAPES
    steps = make_pipeline(StandardScaler(), network(MLPClassifier, activation=activation))
    model = fitted(steps, WINES[rows], GRAPES[rows])
    assert_same(module_values(model, WINES), model.predict_proba(WINES))


def test_a_network_with_several_labels_has_the_same_probabilities() -> None:
    x, y = make_multilabel_classification(60, 5, n_classes=3, random_state=0)
    model = fitted(network(MLPClassifier), x, y)
    assert_same(module_values(model, x), model.predict_proba(x))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_logistic_regression_has_the_same_probabilities(classes: int, sparse: bool) -> None:
    rows = classes > GRAPES
    x = WINES / WINES.max(0)
    model = linear.LogisticRegression(max_iter=300).fit(x[rows], GRAPES[rows])
    expected = model.predict_proba(x)
    if sparse:
        model.sparsify()
    assert_same(module_values(model, x), expected)


def test_one_against_the_rest_is_refused() -> None:
    model = linear.LogisticRegression(max_iter=300).fit(WINES / WINES.max(0), GRAPES)
    model.solver = "liblinear"  # which no longer fits three classes, but files of old versions do
    with pytest.raises(cp.UnsupportedOperation, match="fit it with another solver"):
        cp.from_sklearn(model)


@pytest.mark.parametrize("kind", LINEAR_REGRESSORS, ids=lambda kind: kind.__name__)
def test_a_linear_regressor_predicts_the_same(kind: type) -> None:
    several = kind.__name__.startswith("MultiTask")
    options = {"alpha": 1e-3} if kind is linear.QuantileRegressor else {}  # its default is flat
    model = fitted(kind(**options), StandardScaler().fit_transform(X), TWO if several else Y)
    assert_same(module_values(model, X), model.predict(X))


@pytest.mark.parametrize("kind", [linear.LinearRegression, linear.Ridge, linear.Lasso])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_linear_regressor_of_two_targets_predicts_the_same(kind: type, intercept: bool) -> None:
    model = kind(fit_intercept=intercept).fit(X, TWO)
    assert_same(module_values(model, X), model.predict(X))


SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    StandardScaler(with_std=False),
    StandardScaler(with_mean=False, with_std=False),
    MinMaxScaler((-2, 3)),
    MinMaxScaler(clip=True),
    MaxAbsScaler(),
    RobustScaler(),
    RobustScaler(with_centering=False, unit_variance=True),
    RobustScaler(with_scaling=False),
    PCA(4),
    PCA(whiten=True),
    IncrementalPCA(3, whiten=True),
    TruncatedSVD(3, random_state=0),
]


@pytest.mark.parametrize("scaler", SCALERS, ids=str)
def test_a_transformer_gives_the_same(scaler: Any) -> None:
    scaler = clone(scaler).fit(X[:100])
    assert_same(module_values(scaler, X), scaler.transform(X))  # beyond the range of the fit


def test_a_scaler_keeps_the_digits_of_a_large_mean() -> None:
    x = 1e8 + X
    scaler = StandardScaler().fit(x)
    assert_same(module_values(scaler, x), scaler.transform(x))


def test_whitening_of_data_without_full_rank_gives_the_same() -> None:
    x = np.concatenate([X, X[:, :2]], axis=1)
    components = PCA(whiten=True, svd_solver="covariance_eigh").fit(x)
    found = module_values(components, x)[:, :10]
    assert_same(found, components.transform(x)[:, :10])  # the others are rounding alone


TARGETS = [
    {"transformer": StandardScaler()},
    {"transformer": MinMaxScaler()},
    {"transformer": MaxAbsScaler()},
    {"transformer": RobustScaler()},
    {"func": np.log, "inverse_func": np.exp},
    {"func": np.log1p, "inverse_func": np.expm1},
    {},
]


@pytest.mark.parametrize("options", TARGETS, ids=lambda options: str(list(options.values())))
@pytest.mark.parametrize("y", [Y, TWO - TWO.min(0) + 1], ids=["one output", "two outputs"])
def test_a_transformed_target_is_transformed_back(options: Any, y: np.ndarray) -> None:
    model = TransformedTargetRegressor(linear.Ridge(), **options).fit(X, y)
    assert_same(module_values(model, X), model.predict(X))


def test_pipelines_inside_others_and_searches_predict_the_same() -> None:
    inner = Pipeline([("none", "passthrough"), ("scale", StandardScaler()), ("pca", PCA(4))])
    regressor = TransformedTargetRegressor(network(), transformer=StandardScaler())
    model = fitted(Pipeline([("features", inner), ("target", regressor)]))
    assert_same(module_values(model, X), model.predict(X))
    assert_same(module_values(FrozenEstimator(model), X), model.predict(X))
    assert_same(module_values(model[:1], X), model[:1].transform(X))
    search = GridSearchCV(make_pipeline(PCA(), linear.Ridge()), {"pca__n_components": [2, 5]}, cv=2)
    assert_same(module_values(search.fit(X, Y), X), search.predict(X))


def test_the_module_is_a_copy_and_follows_the_dtype_of_its_numbers() -> None:
    model = fitted(make_pipeline(StandardScaler(), PCA(whiten=True), network()))
    module, before = cp.from_sklearn(model), model.predict(X)
    model[-1].coefs_[0][:] = 0
    assert_same(module(torch.as_tensor(X)).numpy(), before)
    single = module.float()(torch.as_tensor(X).float())
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single[:, 0], before, rtol=1e-4)


def test_the_module_can_be_copied_and_pickled() -> None:
    steps = make_pipeline(MinMaxScaler(clip=True), linear.Ridge())
    model = TransformedTargetRegressor(steps, func=np.log, inverse_func=np.exp).fit(X, Y)
    module = cp.from_sklearn(model)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(torch.as_tensor(X)), module(torch.as_tensor(X)))


def test_a_network_fitted_in_single_precision_predicts_in_double() -> None:
    model = fitted(network(), X.astype(np.float32), Y.astype(np.float32))
    assert model.coefs_[0].dtype == np.float32
    assert_same(module_values(model, X), model.predict(X))


class OwnRidge(linear.Ridge):
    def predict(self, X: Any) -> Any:
        return 2 * super().predict(X)


UNSUPPORTED = [
    (Pipeline([("powers", PolynomialFeatures()), ("fit", linear.Ridge())]),
     "step 'powers' of the pipeline is a PolynomialFeatures, .* nn.Sequential, or draw inputs"),
    (make_pipeline(StandardScaler(), RandomForestRegressor(2)),
     "step 'randomforestregressor' of the pipeline is a RandomForestRegressor"),
    (OwnRidge(), "the estimator is a OwnRidge"),
    (FrozenEstimator(OwnRidge().fit(X, Y)), "the frozen estimator is a OwnRidge"),
    (TransformedTargetRegressor(linear.Ridge(), transformer=PowerTransformer()),
     "the transformer of the target is a PowerTransformer"),
    (TransformedTargetRegressor(linear.Ridge(), func=np.sqrt, inverse_func=np.square),
     "transformed back by <ufunc 'square'>, .* append the function"),
    (make_pipeline(FunctionTransformer(np.log1p), linear.Ridge()), "'functiontransformer'"),
]  # fmt: skip


@pytest.mark.parametrize(("estimator", "message"), UNSUPPORTED)
def test_what_has_no_module_gets_a_sentence(estimator: Any, message: str) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=message):
        cp.from_sklearn(clone(estimator).fit(np.abs(X), Y))


@pytest.mark.parametrize("estimator", [linear.Ridge(), make_pipeline(PCA(), linear.Ridge())])
def test_what_is_not_fitted_says_so(estimator: Any) -> None:
    with pytest.raises(NotFittedError):
        cp.from_sklearn(estimator)


@pytest.mark.parametrize("scaler", [StandardScaler(), MinMaxScaler(), RobustScaler()])
def test_a_scaler_does_not_broadcast_one_feature_to_all(scaler: Any) -> None:
    model = cp.from_sklearn(clone(scaler).fit(X))
    with pytest.raises(ValueError, match="takes 10 features, and x has 1"):
        model(torch.zeros(5, 1).double())


def assert_moments_of_samples(found: cp.Gaussian, drawn: np.ndarray) -> None:
    """Mean and variance within 5 standard errors, which are small.

    found: without a batch; drawn: (samples, outputs).
    """
    error = drawn.std(0) / SAMPLES**0.5
    assert (np.abs(drawn.mean(0) - found.mean.numpy()) < 5 * error).all()
    square = (drawn - drawn.mean(0)) ** 2
    error = square.std(0) / SAMPLES**0.5
    assert (np.abs(square.mean(0) - found.variance.numpy()) < 5 * error).all()
    assert (error < 0.02 * square.mean(0)).all()


@pytest.mark.parametrize("transformer", [StandardScaler(), MinMaxScaler()])
def test_noise_goes_through_a_fitted_pipeline(transformer: Any) -> None:
    """One hidden layer: what reaches its ReLUs is Gaussian, so that the moments are exact."""
    regressor = network(hidden_layer_sizes=(30,), max_iter=60)
    target = TransformedTargetRegressor(regressor, transformer=StandardScaler())
    pipeline = fitted(make_pipeline(clone(transformer), PCA(6, whiten=True), target), y=TWO)
    noisy = cp.Gaussian.isotropic(torch.as_tensor(X[:2]), stddev=0.4, batch_dims=1)
    found = propagate(cp.from_sklearn(pipeline), noisy)
    noise = np.random.default_rng(0).normal(size=(SAMPLES, X.shape[1]))
    for i in range(2):
        assert_moments_of_samples(found[i], pipeline.predict(X[i] + 0.4 * noise))


def test_noise_goes_through_a_fitted_classifier() -> None:
    """Of two classes: the score is Gaussian, and its sigmoid by quadrature."""
    rows = GRAPES < 2
    pipeline = make_pipeline(StandardScaler(), linear.LogisticRegression())
    pipeline.fit(WINES[rows], GRAPES[rows])
    spread = 0.5 * WINES.std(0)
    point = WINES[rows].mean(0)
    noisy = cp.Gaussian.diagonal(torch.as_tensor(point), stddev=torch.as_tensor(spread))
    noise = np.random.default_rng(0).normal(size=(SAMPLES, len(point)))
    drawn = pipeline.predict_proba(point + spread * noise)
    found = propagate(cp.from_sklearn(pipeline), noisy)
    assert_moments_of_samples(found, drawn)
    np.testing.assert_allclose(found.mean.sum(), 1, rtol=1e-12)
    np.testing.assert_allclose(found.covariance_matrix.sum(), 0, atol=1e-12)


@pytest.mark.parametrize("regressor", [linear.Ridge(), make_pipeline(PCA(), linear.Ridge())])
def test_the_wrapper_passes_the_checks_of_scikit_learn(regressor: Any) -> None:
    model = cp.NoisyInputRegressor(regressor, X_stddev=0.1)
    results = check_estimator(model, on_fail=None, on_skip=None)
    failed = [result for result in results if result["status"] not in ("passed", "skipped")]
    assert failed == []
    assert sum(result["status"] == "passed" for result in results) > 40


def test_deviations_of_a_linear_model_have_a_closed_form() -> None:
    model = cp.NoisyInputRegressor(linear.LinearRegression()).fit(X, TWO)
    spread = np.random.default_rng(0).uniform(0, 1, X.shape)
    mean, stddev = model.predict(X, X_stddev=spread, return_std=True)
    np.testing.assert_allclose(mean, model.predict(X), rtol=1e-12)
    np.testing.assert_allclose(stddev, np.sqrt(spread**2 @ model.estimator_.coef_.T**2), rtol=1e-12)
    for given, same in ((0.3, np.full(X.shape, 0.3)), (spread[0], np.tile(spread[0], (200, 1)))):
        one, other = (model.predict(X, X_stddev=s, return_std=True)[1] for s in (given, same))
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model.predict(X, X_stddev=0.0, return_std=True)[1], 0)


def test_the_wrapper_predicts_moments_of_samples_and_rows_do_not_meet() -> None:
    pipeline = fitted(make_pipeline(StandardScaler(), network(hidden_layer_sizes=(20,))))
    model = cp.NoisyInputRegressor(pipeline, X_stddev=0.4, method="gaussian-layers")  # no fit
    many = np.concatenate([X, X])
    assert len(many) > ROWS
    mean, stddev = model.predict(many, return_std=True)
    assert mean.shape == stddev.shape == (len(many),)
    np.testing.assert_array_equal(model.predict(many), mean)
    noise = np.random.default_rng(0).normal(size=(SAMPLES, X.shape[1]))
    for i in (0, len(many) - 1):
        alone = [part[0] for part in model.predict(many[i : i + 1], return_std=True)]
        np.testing.assert_allclose(alone, [mean[i], stddev[i]], rtol=1e-10)
        drawn = pipeline.predict(many[i] + 0.4 * noise)
        found = cp.Gaussian(torch.tensor(mean[i : i + 1]), torch.tensor([[stddev[i] ** 2]]))
        assert_moments_of_samples(found, drawn[:, None])


def test_the_wrapper_works_in_the_tools_of_scikit_learn() -> None:
    model = cp.NoisyInputRegressor(make_pipeline(StandardScaler(), linear.Ridge()), X_stddev=0.1)
    assert clone(model).get_params()["estimator__ridge__alpha"] == 1.0
    plain = cross_val_score(model.estimator, X, Y, cv=3)
    np.testing.assert_allclose(cross_val_score(model, X, Y, cv=3), plain, rtol=1e-9)
    search = GridSearchCV(model, {"estimator__ridge__alpha": [0.1, 1.0]}, cv=2).fit(X, Y)
    mean, stddev = search.best_estimator_.predict(X, return_std=True)
    assert mean.shape == stddev.shape == (200,)
    steps = make_pipeline(PCA(3), cp.NoisyInputRegressor(linear.Ridge())).fit(X, Y)
    _, stddev = steps.predict(X, X_stddev=0.1, return_std=True)
    np.testing.assert_allclose(stddev, 0.1 * np.linalg.norm(steps[-1].estimator_.coef_))
    assert_same(module_values(steps, X), steps.predict(X))


def test_a_frozen_regressor_is_not_fitted_again() -> None:
    ridge = linear.Ridge().fit(X, Y)
    model = cp.NoisyInputRegressor(FrozenEstimator(ridge), X_stddev=0.1).fit(X[:50], -Y[:50])
    np.testing.assert_allclose(model.predict(X), ridge.predict(X), rtol=1e-12)


def test_sample_weights_reach_the_regressor() -> None:
    weight = np.arange(200.0)
    model = cp.NoisyInputRegressor(linear.Ridge()).fit(X, Y, sample_weight=weight)
    expected = linear.Ridge().fit(X, Y, sample_weight=weight).predict(X)
    np.testing.assert_array_equal(model.predict(X), expected)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (None, "return_std=True needs X_stddev"),
        (-0.1, "negative or not finite"),
        (np.full(10, np.nan), "negative or not finite"),
        (np.ones(200), r"shape \(200,\); it is a number, one for each of 10 features"),
    ],
)
def test_noise_that_means_nothing_is_refused(noise: Any, message: str) -> None:
    model = cp.NoisyInputRegressor(linear.Ridge().fit(X, Y))
    with pytest.raises(ValueError, match=message):
        model.predict(X, X_stddev=noise, return_std=True)


def test_the_wrapper_refuses_classifiers_and_what_is_not_fitted() -> None:
    classifier = linear.LogisticRegression(max_iter=300)
    with pytest.raises(TypeError, match="takes a regressor, not a LogisticRegression"):
        cp.NoisyInputRegressor(classifier).fit(WINES / WINES.max(0), GRAPES)
    classifier.fit(WINES / WINES.max(0), GRAPES)
    with pytest.raises(TypeError, match="takes a regressor, not a LogisticRegression"):
        cp.NoisyInputRegressor(classifier, X_stddev=0.1).predict(WINES)
    with pytest.raises(NotFittedError):
        cp.NoisyInputRegressor(linear.Ridge()).predict(X)
