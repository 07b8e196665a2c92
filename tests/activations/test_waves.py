"""Sines and cosines of wide elements: their series, and covariances with other functions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import covprop as cp
from covprop.activations.closed import Sinusoid, power
from covprop.activations.powers import expected_derivatives
from covprop.errors import QuadratureError
from covprop.kernels.polynomials import flushed
from tests.layers import propagate

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "tanh": (torch.tanh, np.tanh),
    "relu": (torch.relu, lambda y: np.maximum(y, 0)),
    "ndtr": (torch.special.ndtr, np.vectorize(lambda y: math.erfc(-y / math.sqrt(2)) / 2)),
}
MEANS = -0.4, 0.7
Z = np.linspace(-10, 10, 400_001)
DENSITY = np.exp(-Z * Z / 2) / np.exp(-Z * Z / 2).sum()
"""The trapezium rule, which converges as fast as any for what is smooth on its steps."""


def together(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of the first element beside the cosine of the second."""
    return lambda x: torch.cat([function(x[..., :1]), torch.cos(x[..., 1:])], -1)


def gaussian(stddevs: tuple[float, float], rho: float, means: Tensor | None = None) -> cp.Gaussian:
    scale = torch.tensor(stddevs, dtype=torch.float64)
    correlation = torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64)
    mean = torch.tensor(MEANS, dtype=torch.float64) if means is None else means
    return cp.Gaussian(mean, scale[:, None] * correlation * scale)


def oracle(name: str, stddevs: tuple[float, float], rho: float, means=MEANS) -> float:
    """E[(g(y1) - E g) E[cos(y2) | y1]], with y2 given y1 averaged by e^(-s^2 / 2)."""
    function = FUNCTIONS[name][1](means[0] + stddevs[0] * Z)
    blur = math.exp(-((stddevs[1]) ** 2) * (1 - rho**2) / 2)
    wave = blur * np.cos(means[1] + rho * stddevs[1] * Z)
    return float((DENSITY * (function - (DENSITY * function).sum()) * wave).sum())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("stddevs", "rho"),
    [((40.0, 40.0), 1.0), ((74.0, 74.0), -1.0), ((9.0, 300.0), 1.0), ((150.0, 60.0), 0.9999)],
)
def test_the_covariance_of_a_wave_with_another_function(name, stddevs, rho) -> None:
    y = propagate(together(FUNCTIONS[name][0]), gaussian(stddevs, rho))
    # The trapezium rule sees a kink within one step of its variable.
    step = (Z[1] - Z[0]) ** 2 if name == "relu" else 0.0
    allowed = (1e-11 + step) * float(y.stddev.prod())
    assert float(y.covariance_matrix[0, 1]) == pytest.approx(
        oracle(name, stddevs, rho), abs=allowed
    )


def test_many_wide_elements_whose_series_is_long() -> None:
    """More pairs than units: the order is 512, at which powers of the deviation overflow."""
    factor = torch.tensor([[-1.5, 0.375], [-0.625, -0.5], [-0.5, 0.0], [0.375, -0.5]]).double()
    factor = torch.cat([factor, -factor]) * 48
    x = cp.Gaussian(torch.full((8,), 0.3, dtype=torch.float64), factor @ factor.mT)
    y = propagate(lambda x: torch.cat([torch.tanh(x + 0.25), torch.cos(x)], -1), x)
    for i in range(8):
        deviation = float(x.stddev[i])
        wave, other = np.cos(0.3 + deviation * Z), np.tanh(0.55 + deviation * Z)
        expected = (DENSITY * wave * other).sum() - (DENSITY * wave).sum() * (DENSITY * other).sum()
        assert float(y.covariance_matrix[i, 8 + i]) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("stddev", "rho"), [(20.0, 0.995), (60.0, 1.0), (300.0, 0.98)])
def test_its_gradient(name: str, stddev: float, rho: float) -> None:
    """Also where given the other element nothing is left of the wave."""
    stddevs, step = (stddev, stddev), 1e-4
    means = torch.tensor(MEANS, dtype=torch.float64, requires_grad=True)
    y = propagate(together(FUNCTIONS[name][0]), gaussian(stddevs, rho, means))
    (found,) = torch.autograd.grad(y.covariance_matrix[0, 1], means)
    expected = [
        (oracle(name, stddevs, rho, up) - oracle(name, stddevs, rho, down)) / (2 * step)
        for up, down in [
            ((MEANS[0] + step, MEANS[1]), (MEANS[0] - step, MEANS[1])),
            ((MEANS[0], MEANS[1] + step), (MEANS[0], MEANS[1] - step)),
        ]
    ]
    allowed = (1e-6 if name == "relu" else 1e-8) * float(y.stddev.detach().prod())
    assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=allowed, rtol=1e-7)


def test_what_has_too_many_waves_is_refused() -> None:
    with pytest.raises(QuadratureError, match="too many waves"):
        propagate(together(torch.tanh), gaussian((1e5, 1e5), 1.0))
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(QuadratureError, match="too many waves"):
        expected_derivatives(Sinusoid(), one, 1e10 * one, 4)
    y = propagate(together(torch.tanh), gaussian((1e5, 1e5), 0.99))  # nothing is left of them
    assert float(y.covariance_matrix[0, 1]) == 0


@pytest.mark.parametrize("cosine", [True, False])
@pytest.mark.parametrize("stddev", [0.0, 1e-3, 1.0, 20.0, 74.0])
def test_coefficients_of_any_order(cosine: bool, stddev: float) -> None:
    """a_k / sigma is sigma^(k-1) exp(-sigma^2 / 2) / sqrt(k!), by logarithms, times g^(k)(mu)."""
    mean = torch.tensor([0.3], dtype=torch.float64)
    variance = torch.tensor([stddev**2], dtype=torch.float64)
    found = Sinusoid(cosine).coefficients(mean, variance, 6000)[:, 0]
    k = np.arange(1, 6001)
    factorials = np.array([math.lgamma(one + 1) for one in k]) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.where(k == 1, 0.0, (k - 1) * np.log(stddev))
    wave = np.sin(0.3 + (k + cosine) * np.pi / 2)
    expected = torch.from_numpy(np.exp(powers - factorials - stddev**2 / 2) * wave)
    assert_close(found, expected, rtol=1e-10, atol=1e-300)


def test_coefficients_of_a_polynomial_end_for_wide_elements_too() -> None:
    mean, variance = torch.ones(2, 3, dtype=torch.float64), torch.full((2, 3), 1e8).double()
    found = power(2).coefficients(mean, variance, 400)
    assert_close(found[0], 2 * mean)
    assert_close(found[1], math.sqrt(2) * variance.sqrt())
    assert (found[2:] == 0).all()


@pytest.mark.parametrize("stddev", [5.0, 74.0, 200.0])
def test_expected_derivatives_of_powers_of_a_wave(stddev: float) -> None:
    mean, variance = (torch.tensor([one], dtype=torch.float64) for one in (0.9, stddev**2))
    found = expected_derivatives(Sinusoid(cosine=True), mean, variance, 2)
    wave = np.cos(0.9 + stddev * Z)
    wave = wave - (DENSITY * wave).sum()
    for power_of, rows in enumerate(found, start=1):
        expected = [float((DENSITY * wave**power_of * he).sum()) for he in (Z**0, Z, Z**2 - 1)]
        assert_close(rows[:3, 0].tolist(), expected, atol=1e-12, rtol=0)


def test_what_is_no_number_is_not_taken_as_small() -> None:
    numbers = torch.tensor([1e-300, torch.nan, 1.0], dtype=torch.float64)
    found = flushed(numbers, torch.float64)
    assert found[0] == 0
    assert found[1].isnan()
    assert found[2] == 1
