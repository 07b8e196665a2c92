"""What the estimators predict: units, intervals, variances by origin."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.datasets import load_wine, make_regression

import covprop as cp
from covprop import bayes
from covprop.bayes import BayesClassifier, BayesRegressor
from covprop.bayes.estimators import _quantile
from tests.bayes.quick import QUICK, regression


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
        BayesRegressor(**QUICK | {"epochs": 15}, input_noise=noise).fit(x, y)
        for noise in (0.5, [0.5, 0.5, 0.5], covariance)
    ]
    parts = [model.decompose(x) for model in models]
    assert (parts[0].input > 0).double().mean() > 0.9
    for other in parts[1:]:
        np.testing.assert_allclose(other.input, parts[0].input, rtol=1e-5, atol=1e-8)
    for wrong in (-1.0, [1.0, 2.0], np.ones((3, 3)) - 2 * np.eye(3), np.nan):
        with pytest.raises(ValueError, match="input_noise"):
            BayesRegressor(**QUICK, input_noise=wrong).fit(x, y)


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
    monkeypatch.setattr("covprop.bayes.prediction.ROWS", 7)
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
