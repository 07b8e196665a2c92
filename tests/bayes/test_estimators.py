"""The estimators: scikit-learn's conventions, odd data, and what they predict."""

import pickle
import warnings
from functools import partial

import joblib
import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.base import clone
from sklearn.datasets import load_wine, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import check_estimator

import covprop as cp
from covprop import bayes
from covprop.bayes import BayesClassifier, BayesRegressor
from covprop.bayes.estimators.regressor import _quantile

QUICK = {"hidden": (10,), "epochs": 60, "batch_size": 1000, "learning_rate": 0.05}
QUICK |= {"random_state": 0}
ROWS = "mini-batches are drawn by row: two rows may part ways, and a weight of two cannot"


def regression(rows: int = 120, features: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(5, 3, (rows, features))
    return x, 100 + 20 * np.sin(x[:, 0] / 3) + 5 * x[:, 1] + rng.normal(0, 2, rows)


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
    checked(kind(**QUICK | {"epochs": 30, "learning_rate": 0.1}))


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


def test_predictions_are_in_units_of_the_target():
    x, y = regression()
    model = BayesRegressor(**QUICK | {"epochs": 150}).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert model.score(x, y) > 0.7
    assert 0.5 < np.mean(((y - mean) / std) ** 2) < 1.5
    lower, upper = model.predict_interval(x, 0.8)
    assert (lower < mean).all()
    assert (mean < upper).all()
    inside = model.cumulative(x, upper) - model.cumulative(x, lower)
    np.testing.assert_allclose(inside, 0.8, atol=1e-9)
    parts = model.decompose(x)
    np.testing.assert_allclose(parts.total[:, 0].sqrt(), std, rtol=1e-9)
    scaled = BayesRegressor(**QUICK | {"epochs": 150}).fit(x, 1000 * y - 7)
    np.testing.assert_allclose(scaled.predict(x, return_std=True)[1], 1000 * std, rtol=1e-5)
    density = model.log_predictive(x, y) - scaled.log_predictive(x, 1000 * y - 7)
    np.testing.assert_allclose(density, np.log(1000), rtol=1e-4)


def test_the_density_integrates_to_one():
    x, y = regression(30)
    model = BayesRegressor(**QUICK).fit(x, y)
    grid = np.linspace(-200, 400, 4001)
    density = np.exp(model.log_predictive(np.repeat(x[:1], len(grid), 0), grid))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-6)


def test_several_targets_at_once():
    x, y = make_regression(80, 4, n_targets=3, noise=1.0, random_state=0)
    model = BayesRegressor(**QUICK | {"epochs": 150}).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (80, 3)
    assert model.score(x, y) > 0.7
    assert model.log_predictive(x, y).shape == (80,)
    assert model.predict_interval(x)[0].shape == (80, 3)


@pytest.mark.parametrize("method", ["exact", "series", "dvi", "ddvi", "mcvi", cp.Series(order=2)])
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


def test_homoskedastic_noise_is_in_units_of_the_target():
    x, y = regression()
    known = bayes.HomoskedasticGaussian(2.0, learned=False)
    model = BayesRegressor(**QUICK, likelihood=known).fit(x, y)
    noise = model.decompose(x).aleatoric
    np.testing.assert_allclose(noise, 4.0, rtol=1e-6)
    assert float(known.log_variance) == pytest.approx(np.log(4))  # the parameter is untouched
    learned = BayesRegressor(**QUICK, likelihood="homoskedastic").fit(x, y)
    assert learned.decompose(x).aleatoric.std() < 1e-9


def test_counts_have_a_likelihood_of_their_own():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    y = rng.poisson(np.exp(1 + x[:, 0] / 2))
    model = BayesRegressor(**QUICK, likelihood="poisson").fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert (mean > 0).all()
    assert (std >= np.sqrt(mean)).all()
    assert mean.mean() == pytest.approx(y.mean(), rel=0.2)
    with pytest.raises(ValueError, match="whole numbers"):
        model.fit(x, y - 0.5)
    with pytest.raises(ValueError, match="Gaussian noise"):
        model.predict_interval(x)


def test_noise_of_a_sensor_widens_the_prediction():
    x, y = regression()
    covariance = np.diag([0.25, 0.25, 0.25])
    models = [
        BayesRegressor(**QUICK, input_noise=noise).fit(x, y)
        for noise in (0.5, [0.5, 0.5, 0.5], covariance)
    ]
    parts = [model.decompose(x) for model in models]
    assert (parts[0].input > 0).double().mean() > 0.9
    for other in parts[1:]:
        np.testing.assert_allclose(other.input, parts[0].input, rtol=1e-5, atol=1e-8)
    for wrong in (-1.0, [1.0, 2.0], np.ones((3, 3)) - 2 * np.eye(3), np.nan):
        with pytest.raises(ValueError, match="input_noise"):
            BayesRegressor(**QUICK, input_noise=wrong).fit(x, y)


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


def test_intervals_are_finite_where_the_variance_is_not():
    """E[exp(l)] is beyond all numbers, far from the data; the quantiles are not."""
    x, y = regression()
    model = BayesRegressor(**QUICK | {"hidden": (20,), "epochs": 200}).fit(x, y)
    far = 1e4 * x[:3]
    assert np.isinf(model.predict(far, return_std=True)[1]).all()
    lower, upper = model.predict_interval(far, 0.9)
    assert np.isfinite(lower).all()
    assert np.isfinite(upper).all()
    assert np.allclose(model.cumulative(far, lower), 0.05, atol=1e-6)
    assert np.allclose(model.cumulative(far, upper), 0.95, atol=1e-6)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("size", [-30.0, 0.0])
def test_quantiles_are_those_of_the_integral(spread, size):
    """Noise of deviation exp(l / 2), l ~ N(size, spread^2), on a mean that is known."""
    share, unit = 0.95, np.exp(size / 2)

    def below(t):
        nodes, weights = np.polynomial.legendre.leggauss(400)
        z = 9 * nodes
        return weights @ (norm.cdf(t * np.exp(-spread * z / 2)) * norm.pdf(z)) * 9 - share

    output = cp.Gaussian(
        torch.tensor([[2.0, size]], dtype=torch.float64),
        torch.diag(torch.tensor([0.0, spread**2], dtype=torch.float64))[None],
    )
    likelihood = bayes.HeteroskedasticGaussian()
    found = _quantile(partial(likelihood.cumulative, output), output.mean[:, :1], share)
    expected = brentq(below, 0, 1e6, xtol=1e-13)
    assert float(found - 2) / unit == pytest.approx(expected, rel=1e-6)


def test_a_decomposition_does_not_depend_on_how_many_rows_are_taken_at_a_time(monkeypatch):
    x, y = regression(30)
    model = BayesRegressor(**QUICK | {"epochs": 3}, input_noise=0.1).fit(x, y)
    whole = model.decompose(x)
    monkeypatch.setattr("covprop.bayes.evaluation.ROWS", 7)
    pieces = model.decompose(x)
    for name in ("aleatoric", "epistemic", "input"):
        assert torch.allclose(getattr(pieces, name), getattr(whole, name), rtol=1e-12)
    assert np.allclose(whole.total.sqrt()[:, 0], model.predict(x, return_std=True)[1])


@pytest.mark.parametrize("likelihood", ["heteroskedastic", "homoskedastic", "poisson"])
@pytest.mark.parametrize("method", ["exact", "mcvi"])
@pytest.mark.parametrize("noise", [None, 0.3])
def test_a_decomposition_adds_up_to_the_variance(likelihood, method, noise):
    x, y = regression(30)
    y = np.abs(np.round(y / 20)) if likelihood == "poisson" else y
    options = {"likelihood": likelihood, "method": method, "input_noise": noise}
    model = BayesRegressor(**QUICK | {"epochs": 3}, **options).fit(x, y)
    total = model.decompose(x).total[:, 0]
    assert np.allclose(total.sqrt(), model.predict(x, return_std=True)[1], rtol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_decomposition_of_classes_adds_up_to_the_variance_of_their_indicators(classes):
    x, y = load_wine(return_X_y=True)
    x, y = x[y < classes], y[y < classes]
    model = BayesClassifier(**QUICK | {"epochs": 5}, input_noise=0.1).fit(x, y)
    parts, p = model.decompose(x), torch.as_tensor(model.predict_proba(x))
    assert parts.total.shape == (len(x), 1 if classes == 2 else 3)
    assert torch.allclose(parts.total, (p * (1 - p))[:, -parts.total.shape[1] :], atol=1e-9)
    assert bool((parts.epistemic > 0).all())
    assert bool(parts.input.any())


@pytest.mark.parametrize("likelihood", ["heteroskedastic", "homoskedastic"])
def test_intervals_of_draws_are_those_of_the_mixture(likelihood):
    """As the densities are: one Gaussian for every draw of the network."""
    x, y = regression(30)
    options = {"likelihood": likelihood, "method": "mcvi"}
    model = BayesRegressor(**QUICK | {"epochs": 40}, **options).fit(x, y)
    lower, upper = model.predict_interval(x, 0.8)
    np.testing.assert_allclose(model.cumulative(x, lower), 0.1, atol=1e-9)
    np.testing.assert_allclose(model.cumulative(x, upper), 0.9, atol=1e-9)
    method = model._inference()
    with torch.no_grad():
        values = bayes.draws(model.network_, model._inputs(x), method.samples, method.generator)
        log_variance = getattr(model.likelihood_, "log_variance", values[..., 1:])
    width = (log_variance / 2).exp().detach().numpy()
    place = ((lower - model.targets_.mean) / model.targets_.stddev)[:, None]
    below = norm.cdf((place - values[..., :1].numpy()) / width).mean(0)
    np.testing.assert_allclose(below, 0.1, atol=1e-9)


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
        kind(**QUICK).fit(x, y).predict(broken)


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
