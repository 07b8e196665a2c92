"""The estimators: scikit-learn's conventions, and odd data."""

import pickle
import warnings

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

import covprop as cp
from covprop import bayes
from covprop.bayes import BayesClassifier, BayesRegressor
from tests.bayes.quick import QUICK, regression

ROWS = "mini-batches are drawn by row: two rows may part ways, and a weight of two cannot"


def checked(estimator, expected=None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of skipped checks (pandas), and of made-up data
        results = check_estimator(estimator, on_fail=None, expected_failed_checks=expected)
    failed = [r["check_name"] for r in results if r["status"] == "failed"]
    assert failed == []
    assert sum(r["status"] == "passed" for r in results) > 50
    assert {r["check_name"] for r in results if r["status"] == "xfail"} == set(expected or {})


@pytest.mark.parametrize("kind", [BayesRegressor, BayesClassifier])
def test_scikit_learn_finds_nothing_wrong(kind):
    checked(kind(**QUICK | {"epochs": 12, "learning_rate": 0.2}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BayesRegressor, BayesClassifier])
def test_scikit_learn_finds_one_thing_wrong_with_mini_batches(kind):
    small = {"epochs": 20, "batch_size": 16, "learning_rate": 0.03}
    checked(kind(**QUICK | small), {"check_sample_weight_equivalence_on_dense_data": ROWS})


def test_construction_stores_parameters_and_nothing_else():
    odd = object()
    estimator = BayesRegressor(hidden=odd, likelihood=odd, method=odd, input_noise=odd)
    assert estimator.get_params()["method"] is odd
    assert set(vars(estimator)) == set(estimator.get_params())


@pytest.mark.parametrize(
    "method", ["gaussian-layers", "exact", "series", "dvi", "ddvi", "mcvi", cp.Series(order=2)]
)
def test_every_method_by_name_or_object(method):
    x, y = regression(40)
    model = BayesRegressor(**QUICK | {"epochs": 3, "method": method}).fit(x, y)
    first, second = model.predict(x), model.predict(x)
    assert np.isfinite(first).all()
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    "prior", [None, "fixed", "he", "wide-he", "xavier", "mixture", "empirical-bayes"]
)
def test_every_prior_by_name(prior):
    x, y = regression(20)
    BayesRegressor(**QUICK | {"epochs": 2, "prior": prior}).fit(x, y)


def test_constant_features_change_nothing():
    x, y = regression()
    constant = np.column_stack([x, np.full(len(x), 0.1), np.full(len(x), 1e9)])
    model = BayesRegressor(**QUICK).fit(constant, y)
    assert model.score(constant, y) > 0.5
    assert list(model.features_.stddev[3:]) == [0, 0]


def test_a_constant_target_is_predicted_with_certainty_and_a_warning():
    x, _ = regression(20)
    with pytest.warns(UserWarning, match="y is the same for all rows"):
        model = BayesRegressor(**QUICK).fit(x, np.full(20, 0.3))
    mean, std = model.predict(x, return_std=True)
    assert (mean == 0.3).all()
    assert (std == 0).all()
    lower, upper = model.predict_interval(x)
    assert (lower == 0.3).all()
    assert (upper == 0.3).all()
    assert list(model.cumulative(x[:2], [0.2, 0.3])) == [0, 1]
    assert list(model.log_predictive(x[:2], [0.2, 0.3])) == [-np.inf, np.inf]
    far = 1e5 * x  # where the noise, of targets that vary, would be infinite
    assert (model.predict(far, return_std=True)[1] == 0).all()
    assert not model.decompose(far).total.any()
    with pytest.warns(UserWarning, match=r"y in columns \[1\] is the same"):
        BayesRegressor(**QUICK).fit(x, np.column_stack([x[:, 0], np.ones(20)]))


def test_a_constant_target_has_the_noise_that_was_given():
    x, _ = regression(20)
    noise = bayes.HomoskedasticGaussian(0.5, learned=False)
    model = BayesRegressor(**QUICK, likelihood=noise).fit(x, np.full(20, 3.0))
    mean, std = model.predict(x, return_std=True)
    assert (std > 0.5).all()
    assert (abs(mean - 3) < std).all()


@pytest.mark.parametrize("kind", [BayesRegressor, BayesClassifier])
def test_a_single_row_is_refused(kind):
    with pytest.raises(ValueError, match=r"1 sample.* minimum of 2 is required"):
        kind(**QUICK).fit([[1.0, 2.0]], [1])


@pytest.mark.parametrize("kind", [BayesRegressor, BayesClassifier])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_missing_values_are_refused(kind, value):
    x, y = regression(10)
    y = (y > np.median(y)).astype(float)
    broken = x.copy()
    broken[3, 1] = value
    with pytest.raises(ValueError, match=r"X contains (NaN|infinity)"):
        kind(**QUICK).fit(broken, y)
    with pytest.raises(ValueError, match=r"y contains (NaN|infinity)"):
        kind(**QUICK).fit(x, np.where(np.arange(10) == 2, value, y))
    with pytest.raises(ValueError, match=r"X contains (NaN|infinity)"):
        kind(**QUICK | {"epochs": 2}).fit(x, y).predict(broken)


def test_missing_targets_have_no_density():
    x, y = regression(10)
    model = BayesRegressor(**QUICK).fit(x, y)
    for measure in (model.cumulative, model.log_predictive):
        with pytest.raises(ValueError, match="y contains NaN"):
            measure(x, np.where(np.arange(10) == 2, np.nan, y))


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="one class, 'a'; a classifier needs at least two"):
        BayesClassifier(**QUICK).fit([[1.0], [2.0]], np.array(["a", "a"], dtype=object))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("method", "best"), ("method", cp.MonteCarlo()),
        ("prior", 3), ("likelihood", "categorical"), ("activation", "swish2"),
        ("hidden", (0,)), ("hidden", "big"), ("epochs", 0), ("learning_rate", -1.0),
        ("learning_rate", "slow"), ("method", bayes.LocalReparametrisation(1)),
        ("dtype", "float16"), ("patience", 0), ("cooldown", 2), ("validation_fraction", 1.5),
        ("batch_size", 2.5),
    ],
)  # fmt: skip
def test_parameters_are_checked_by_fit(option, value):
    x, y = regression(10)
    with pytest.raises(ValueError, match=f"{option}|LocalReparametrisation"):
        BayesRegressor(**QUICK | {option: value}).fit(x, y)


def test_what_may_be_chosen_is_said_as_it_is():
    x, y = regression(10)
    with pytest.raises(ValueError, match=r"tanh; not 'swish2'"):  # no objects
        BayesRegressor(**QUICK, activation="swish2").fit(x, y)
    with pytest.raises(ValueError, match=r"or an object of LayerwiseMethod, LocalRep.*; not Monte"):
        BayesRegressor(**QUICK, method=cp.MonteCarlo()).fit(x, y)


def test_labels_of_any_kind():
    data = load_wine()
    names = np.array(["red", "white", "rosé"], dtype=object)[data.target]
    model = BayesClassifier(**QUICK).fit(data.data, names)
    assert list(model.classes_) == ["red", "rosé", "white"]
    assert model.score(data.data, names) > 0.95
    probability = model.predict_proba(data.data)
    np.testing.assert_allclose(probability.sum(1), 1, atol=1e-12)
    far = model.mutual_information(data.data + 20 * data.data.std(0))
    assert far.mean() > 2 * model.mutual_information(data.data).mean()
    two = BayesClassifier(**QUICK).fit(data.data, data.target == 1)
    assert isinstance(two.likelihood_, bayes.Bernoulli)
    assert two.predict_proba(data.data).shape == (178, 2)
    with pytest.raises(ValueError, match="two classes"):
        BayesClassifier(**QUICK, likelihood="bernoulli").fit(data.data, names)


def test_a_weight_of_two_is_a_row_twice():
    x, y = regression(40)
    weight = np.arange(40) % 3
    model = BayesRegressor(**QUICK).fit(x, y, sample_weight=weight)
    twice = BayesRegressor(**QUICK).fit(np.repeat(x, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(model.predict(x), twice.predict(x), rtol=1e-6)
    with pytest.raises(ValueError, match="non-zero number"):
        model.fit(x, y, sample_weight=np.zeros(40))


def test_a_seed_gives_the_same_network_and_leaves_global_generators_alone():
    x, y = regression(30)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    options = QUICK | {"epochs": 3, "batch_size": 8, "early_stopping": True, "method": "mcvi"}
    first, second = (BayesRegressor(**options).fit(x, y).predict(x) for _ in range(2))
    assert np.array_equal(first, second)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # noqa: NPY002
    other = BayesRegressor(**options | {"random_state": 1}).fit(x, y).predict(x)
    assert not np.array_equal(first, other)


def test_early_stopping_holds_rows_of_every_class_out():
    data = load_wine()
    options = QUICK | {"early_stopping": True, "patience": 3, "epochs": 500, "batch_size": 32}
    model = BayesClassifier(**options, validation_fraction=0.2).fit(data.data, data.target)
    history = model.history_
    assert model.n_iter_ == len(history.validation) == int(history.best_epoch) + 4 < 500
    _, held = model._split(178, data.target, torch.Generator().manual_seed(0))
    assert list(np.bincount(data.target[held])) == [12, 14, 10]
    with pytest.raises(ValueError, match="is no row"):
        BayesRegressor(**options).fit(*regression(4))


def test_pipelines_and_searches():
    x, y = regression(60)
    pipeline = make_pipeline(PolynomialFeatures(2), BayesRegressor(**QUICK | {"epochs": 20}))
    search = GridSearchCV(
        pipeline,
        {"bayesregressor__prior": ["he", bayes.FixedPrior(0.5)], "bayesregressor__hidden": [5]},
        cv=2,
    ).fit(x, y)
    assert search.best_score_ > 0
    copied = clone(search.best_estimator_)
    assert copied.get_params()["bayesregressor__hidden"] == 5


@pytest.mark.parametrize("kind", [BayesRegressor, BayesClassifier])
def test_pickle_and_joblib(kind, tmp_path):
    x, y = regression(20)
    model = kind(**QUICK).fit(x, y > np.median(y))
    again = pickle.loads(pickle.dumps(model))
    joblib.dump(model, tmp_path / "model")
    for other in (again, joblib.load(tmp_path / "model")):
        assert np.array_equal(other.predict(x), model.predict(x))


def test_draws_with_a_generator_of_their_own_can_be_copied():
    x, y = regression(20)
    method = bayes.LocalReparametrisation(3, torch.Generator().manual_seed(0))
    model = clone(BayesRegressor(**QUICK | {"epochs": 2}, method=method))
    assert np.isfinite(model.fit(x, y).predict(x)).all()


def test_methods_ask_for_fit_first():
    x, y = regression(5)
    for call in (
        lambda m: m.predict(x),
        lambda m: m.predict_interval(x),
        lambda m: m.cumulative(x, y),
        lambda m: m.log_predictive(x, y),
        lambda m: m.decompose(x),
        lambda m: m.save("nowhere"),
    ):
        with pytest.raises(NotFittedError):
            call(BayesRegressor())


def test_float32_is_near_float64():
    x, y = regression(40)
    double = BayesRegressor(**QUICK | {"epochs": 10}).fit(x, y).predict(x)
    single = BayesRegressor(**QUICK | {"epochs": 10, "dtype": "float32"}).fit(x, y)
    assert next(single.network_.parameters()).dtype == torch.float32
    assert single.predict(x).shape == double.shape
    assert np.isfinite(single.log_predictive(x, y)).all()


def test_a_bar_is_shown(capsys):
    BayesRegressor(**QUICK | {"epochs": 2}, verbose=True).fit(*regression(10))
    assert "2/2" in capsys.readouterr().err


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "covprop.bayes.estimators", None)
    with pytest.raises(ImportError, match=r"\.\[bayes\]"):
        bayes.BayesRegressor  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute"):
        bayes.Nothing  # noqa: B018
