"""The Hermite series of the paper, its orders and its tolerance."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import covprop as cp
from tests.cases import CASES
from tests.layers import propagate
from tests.oracles import assert_close, moments

MEANS, STDDEVS, RHO = (0.4, -0.8), (0.9, 1.6), 0.7


def gaussian(rho: float = RHO, means=MEANS, stddevs=STDDEVS) -> cp.Gaussian:
    cross = rho * stddevs[0] * stddevs[1]
    matrix = [[stddevs[0] ** 2, cross], [cross, stddevs[1] ** 2]]
    return cp.Gaussian(
        torch.tensor(means, dtype=torch.float64), torch.tensor(matrix, dtype=torch.float64)
    )


def expansion(name: str, order: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, variances and coefficients (order, 2) of both elements by quadrature."""
    case = CASES[name]
    rows = [
        moments(case.function, m, s, order, case.kinks) for m, s in zip(MEANS, STDDEVS, strict=True)
    ]
    means, variances, coefficients = zip(*rows, strict=True)
    return np.array(means), np.array(variances), np.stack(coefficients, axis=-1)


@pytest.mark.parametrize("order", [1, 2, 4, 7])
@pytest.mark.parametrize("name", CASES)
def test_the_series_is_the_papers_sum_with_the_exact_variance_on_the_diagonal(name, order):
    means, variances, a = expansion(name, order)
    cross = sum(RHO**k * a[k - 1, 0] * a[k - 1, 1] for k in range(1, order + 1))
    expected = torch.tensor([[variances[0], cross], [cross, variances[1]]], dtype=torch.float64)
    result = propagate(CASES[name].function, gaussian(), cp.Series(order=order))
    scale = float(variances.max()) + 1e-6
    assert_close(result.mean, torch.from_numpy(means), atol=1e-9 * scale, rtol=1e-9)
    assert_close(result.covariance_matrix, expected, atol=1e-9 * scale)


@pytest.mark.parametrize("name", ["relu", "sign", "gelu", "tanh", "exp", "elu(1.0)"])
def test_the_published_diagonal_is_the_truncated_sum(name):
    _, _, a = expansion(name, 4)
    method = cp.Series(order=4, exact_variance=False)
    found = propagate(CASES[name].function, gaussian(), method).variance
    assert_close(found, torch.from_numpy((a**2).sum(0)), rtol=1e-9)
    exact = propagate(CASES[name].function, gaussian()).variance
    assert bool((found < exact).all())


@pytest.mark.parametrize("name", ["relu", "sign", "hardtanh", "gelu", "tanh", "softsign", "selu"])
def test_the_error_shrinks_with_the_order(name):
    exact = propagate(CASES[name].function, gaussian())
    found = [propagate(CASES[name].function, gaussian(), cp.Series(order)) for order in (1, 8, 32)]
    first, second, third = (
        float((series.covariance_matrix - exact.covariance_matrix).abs().max()) for series in found
    )
    assert first > 10 * second > 100 * third


def test_without_correlation_every_order_is_exact():
    exact = propagate(torch.relu, gaussian(0.0)).covariance_matrix
    found = propagate(torch.relu, gaussian(0.0), cp.Series(1)).covariance_matrix
    assert_close(found, exact, rtol=1e-15)


def test_a_polynomial_ends_at_its_degree():
    exact = propagate(lambda x: x**3, gaussian()).covariance_matrix
    found = propagate(lambda x: x**3, gaussian(), cp.Series(3)).covariance_matrix
    assert_close(found, exact, rtol=1e-13)


def smallest_order(name: str, tolerance: float, highest: int = 60) -> int:
    """From the coefficients by quadrature: |rho|^(K+1) sqrt(R_1 R_2) / (sd_1 sd_2) <= tolerance."""
    _, variances, a = expansion(name, highest)
    rest = (1 - np.cumsum(a**2, axis=0) / variances).clip(min=0)
    bounds = RHO ** (np.arange(1, highest + 1) + 1) * np.sqrt(rest.prod(axis=-1))
    return int(np.argmax(bounds <= tolerance)) + 1


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("name", ["relu", "sign", "hardshrink(0.5)", "gelu", "tanh", "softsign"])
def test_a_tolerance_takes_the_smallest_order_that_suffices_and_is_met(name, tolerance):
    order = smallest_order(name, tolerance)
    function = CASES[name].function
    result = propagate(function, gaussian(), cp.Series(tolerance=tolerance)).covariance_matrix
    chosen = propagate(function, gaussian(), cp.Series(order=order)).covariance_matrix
    assert_close(result, chosen, rtol=1e-13)
    if order > 1:
        below = propagate(function, gaussian(), cp.Series(order=order - 1)).covariance_matrix
        assert float((result - below).abs().max()) > 1e-12
    exact = propagate(function, gaussian())
    error = (result - exact.covariance_matrix).abs()[0, 1] / exact.stddev.prod()
    assert float(error) <= tolerance


def test_the_worst_pair_of_a_batch_decides_the_order():
    far, near = gaussian(0.2), gaussian(0.99)
    both = cp.Gaussian(
        torch.stack([far.mean, near.mean]),
        torch.stack([far.covariance_matrix, near.covariance_matrix]),
    )
    method = cp.Series(tolerance=1e-4)
    together = propagate(torch.relu, both, method).covariance_matrix
    alone = propagate(torch.relu, near, method).covariance_matrix
    assert_close(together[1], alone, rtol=1e-14)


def duplicated() -> cp.Gaussian:
    return gaussian(1.0, (0.4, 0.4), (1.0, 1.0))


def test_duplicated_relu_units_cannot_reach_a_tight_tolerance():
    with pytest.raises(cp.ToleranceNotReached, match=r"cp\.GaussianLayers\(\)"):
        propagate(torch.relu, duplicated(), cp.Series(tolerance=1e-8))


def test_duplicated_units_of_a_polynomial_reach_any_tolerance():
    result = propagate(torch.square, duplicated(), cp.Series(tolerance=1e-12))
    exact = propagate(torch.square, duplicated())
    assert_close(result.covariance_matrix, exact.covariance_matrix, rtol=1e-12)


def test_independent_units_need_one_term_at_any_tolerance():
    x = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=1.0)
    result = propagate(torch.relu, x, cp.Series(tolerance=1e-15))
    assert_close(result.covariance_matrix, propagate(torch.relu, x).covariance_matrix, rtol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 0}, "whole number from 1"),
        ({"order": -3}, "whole number from 1"),
        ({"order": 2.5}, "whole number from 1"),
        ({"order": "4"}, "whole number from 1"),
        ({"tolerance": 0.0}, "positive"),
        ({"tolerance": -1e-3}, "positive"),
        ({"tolerance": math.nan}, "positive"),
        ({"order": 4, "tolerance": 1e-3}, "not both"),
    ],
)
def test_a_series_without_a_meaning_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cp.Series(**options)


def test_the_default_is_the_papers_fourth_order_and_can_be_read_off():
    assert cp.Series().order == 4
    result = propagate(torch.relu, gaussian(), cp.Series())
    assert result.method == cp.Series(order=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.method.order = 5


def random_covariances(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Full rank, rank two, with duplicated and with constant elements."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(count, size, generator=generator, dtype=torch.float64)
    factor = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    factor[1::4, :, 2:] = 0
    factor[2::4, 1] = factor[2::4, 0]
    mean[2::4, 1] = mean[2::4, 0]
    factor[3::4, -1] = 0
    return mean, factor @ factor.mT / 2


@pytest.mark.parametrize("exact_variance", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_every_order_is_positive_semi_definite(name, exact_variance):
    x = cp.Gaussian(*random_covariances(12, 6))
    for order in (1, 2, 3, 4, 7, 12):
        method = cp.Series(order=order, exact_variance=exact_variance)
        matrix = propagate(CASES[name].function, x, method).covariance_matrix
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert bool((eigenvalues[:, 0] >= -1e-13 * eigenvalues[:, -1]).all())


@pytest.mark.parametrize("name", ["relu", "hardshrink(0.5)", "erf", "gelu", "tanh", "sin"])
def test_gradients_of_the_series_agree_with_finite_differences(name):
    def series(mean: Tensor, cross: Tensor) -> Tensor:
        matrix = torch.diag(torch.tensor([1.3, 0.4]).double())
        matrix = matrix + cross * torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
        x = cp.Gaussian(mean, matrix, validate_args=False)
        return propagate(CASES[name].function, x, cp.Series(3)).covariance_matrix

    mean = torch.tensor([-0.6, 0.35], dtype=torch.float64, requires_grad=True)
    for cross in (0.0, 0.5, -0.6):
        inputs = (mean, torch.tensor(cross, dtype=torch.float64, requires_grad=True))
        assert torch.autograd.gradcheck(series, inputs, atol=1e-6, rtol=1e-6)
