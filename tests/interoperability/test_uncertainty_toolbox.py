"""Predictions of covprop under the metrics of uncertainty-toolbox."""

import numpy as np
import pytest
import torch
import uncertainty_toolbox as uct
from torch import nn

import covprop as cp
from covprop.bayes import BayesRegressor, metrics
from tests.layers import propagate

ROWS = 1000
BY_CHANCE = 0.022
"""One of a hundred calibrated sets of so many rows has a larger calibration error (simulated)."""


def test_intervals_of_a_noisy_sensor_are_calibrated() -> None:
    """The truth is what the network says of the true input; covprop sees a reading of it.

    With a flat prior the true input is Gaussian around the reading, so that the targets follow the
    Gaussians that come out, as far as these are Gaussian.
    """
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 40), nn.GELU(), nn.Linear(40, 1)).double()
    model.requires_grad_(requires_grad=False)
    reading = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    x = cp.Gaussian.isotropic(reading, stddev=0.2, batch_dims=1)
    target = model(x.sample(1, generator)[0])
    y = propagate(model, x)
    mean, stddev, truth = (tensor[:, 0].numpy() for tensor in (y.mean, y.stddev, target))
    assert uct.mean_absolute_calibration_error(mean, stddev, truth) < BY_CHANCE
    # A deviation half as large, as from variances alone, is far outside of that.
    assert uct.mean_absolute_calibration_error(mean, stddev / 2, truth) > 5 * BY_CHANCE
    assert uct.nll_gaussian(mean, stddev, truth) < uct.nll_gaussian(mean, stddev / 2, truth)
    assert uct.crps_gaussian(mean, stddev, truth) < uct.crps_gaussian(mean, stddev / 2, truth)


@pytest.fixture(scope="module")
def regression() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, deviation and target of rows that an estimator has not seen."""
    random = np.random.default_rng(0)
    x = random.uniform(-2, 2, size=(600, 1))
    y = np.sin(2 * x[:, 0]) + 0.2 * random.normal(size=600)
    model = BayesRegressor(
        hidden=(20,), epochs=60, learning_rate=0.1, batch_size=400, random_state=0
    ).fit(x[:400], y[:400])
    mean, stddev = model.predict(x[400:], return_std=True)
    return mean, stddev, y[400:]


def test_an_estimators_predictions_get_the_same_figures_from_both(regression) -> None:
    mean, stddev, target = (torch.as_tensor(each) for each in regression)
    rmse = float(metrics.rmse(mean, target))
    crps = float(metrics.crps(mean, stddev, target))
    sharpness = float(metrics.sharpness(stddev))
    assert rmse == pytest.approx(uct.prediction_error_metrics(*regression[::2])["rmse"], rel=1e-12)
    assert crps == pytest.approx(uct.crps_gaussian(*regression), rel=1e-9)
    assert sharpness == pytest.approx(uct.sharpness(regression[1]), rel=1e-9)


def test_an_estimators_predictions_can_be_recalibrated(regression) -> None:
    """Its isotonic regression takes our quantiles and gives it their true shares."""
    mean, stddev, target = regression
    wide = 3 * stddev  # underconfident, as an early stop may leave a network
    expected, observed = uct.get_proportion_lists_vectorized(mean, wide, target)
    recalibrate = uct.iso_recal(expected, observed)
    before = uct.mean_absolute_calibration_error(mean, wide, target)
    after = uct.mean_absolute_calibration_error(mean, wide, target, recal_model=recalibrate)
    assert before > 0.1
    assert after < before / 3
