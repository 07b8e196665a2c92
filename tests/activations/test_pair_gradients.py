"""Gradients of covariances: finite differences inside, Price's theorem at the degenerate end."""

import pytest
import torch
from torch import Tensor

import covprop as cp
from tests.cases import CASES, CONTINUOUS
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients, normal_rule

pytestmark = pytest.mark.usefixtures("both_kernels")

MEAN, STDDEV = 0.3, 1.2
PRICE = 1e-7
"""torch has the derivative of hardsigmoid as a float32: 1/6 is off by 3e-8, its square by 6e-8."""


CORRELATIONS = torch.tensor([0.0, 0.4, -0.85, 0.97], dtype=torch.float64)


def covariance(name: str, mean: Tensor, variance: Tensor, cross: Tensor) -> Tensor:
    """Matrices (batch, 2, 2) of pairs, given by vectors so that they are differentiated freely."""
    first, second = (
        torch.stack(row, -1) for row in ((variance[:, 0], cross), (cross, variance[:, 1]))
    )
    x = cp.Gaussian(mean, torch.stack([first, second], -2), validate_args=False)
    return propagate(CASES[name].function, x).covariance_matrix


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_finite_differences(name):
    mean = torch.tensor([-0.6, 0.35], dtype=torch.float64).repeat(len(CORRELATIONS), 1)
    variance = torch.tensor([1.3, 0.4], dtype=torch.float64).repeat(len(CORRELATIONS), 1)
    inputs = (mean, variance, CORRELATIONS * (1.3 * 0.4) ** 0.5)
    assert_gradients(lambda *args: covariance(name, *args), inputs, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_at_zeros_and_kinks_agree_with_finite_differences(name):
    """Where a formula takes a case by the sign of a distance, and each side has half a slope."""
    places = sorted({0.0, *CASES[name].kinks})
    means = [(first, second) for first in places for second in places] * len(CORRELATIONS)
    mean = torch.tensor(means, dtype=torch.float64)
    variance = torch.tensor([1.3, 1.9], dtype=torch.float64).repeat(len(mean), 1)
    cross = CORRELATIONS.repeat_interleave(len(places) ** 2) * (1.3 * 1.9) ** 0.5
    assert_gradients(lambda *args: covariance(name, *args), (mean, variance, cross), atol=1e-6)


def duplicated(sign: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance of y, sign y and a constant."""
    mean = torch.tensor([MEAN, sign * MEAN, 0.7], dtype=torch.float64, requires_grad=True)
    direction = torch.tensor([STDDEV, sign * STDDEV, 0.0], dtype=torch.float64)
    return mean, torch.outer(direction, direction).requires_grad_()


def derivatives_on_nodes(name: str, sign: float) -> tuple[Tensor, ...]:
    """Nodes, weights, and g and g' of y and of sign y."""
    case = CASES[name]
    kinks = [*case.kinks, *(sign * kink for kink in case.kinks)]
    nodes, weights = (torch.from_numpy(t) for t in normal_rule(MEAN, STDDEV, kinks))
    columns = []
    for y in (MEAN + STDDEV * nodes, sign * (MEAN + STDDEV * nodes)):
        point = y.requires_grad_()
        value = case.function(point)
        columns.append(value.detach())
        columns.append(torch.autograd.grad(value.sum(), point)[0])
    return nodes, weights, *columns


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradients_of_a_duplicated_unit_are_expectations_of_derivatives(name, sign):
    mean, matrix = duplicated(sign)
    x = cp.Gaussian(mean, matrix, validate_args=False)
    result = propagate(CASES[name].function, x).covariance_matrix
    anchor = 0 * (mean.sum() + matrix.sum())  # a constant has no graph of its own
    by_mean, by_matrix = torch.autograd.grad(result[0, 1] + anchor, (mean, matrix))
    z, weight, first, first_slope, second, second_slope = derivatives_on_nodes(name, sign)

    def covary(left: Tensor, right: Tensor) -> Tensor:
        centred = left - (weight * left).sum()
        return (weight * centred * right).sum()

    # d/dc = E[g'(y1) g'(y2)] (Price), d/dmu_1 = Cov(g'(y1), g(y2)).
    cross = (weight * first_slope * second_slope).sum()
    assert_close(by_matrix[0, 1] + by_matrix[1, 0], cross, rtol=PRICE, atol=1e-10)
    expected = torch.stack([covary(first_slope, second), covary(first, second_slope)])
    assert_close(by_mean[:2], expected, rtol=PRICE, atol=1e-10)
    # d/dv_1 = E[g''(y1) g(y2)] / 2, integrated by parts where g' jumps.
    bend = covary(second, first_slope * z) / STDDEV - sign * cross
    assert_close(by_matrix[0, 0], bend / 2, rtol=PRICE, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_gradients_with_duplicates_and_constants_are_finite(name, dtype):
    both = zip(duplicated(1.0), duplicated(-1.0), strict=True)
    mean, matrix = (torch.stack(two).detach().to(dtype).requires_grad_() for two in both)
    result = propagate(CASES[name].function, cp.Gaussian(mean, matrix))
    anchor = 0 * (mean.sum() + matrix.sum())
    total = result.mean.sum() + result.covariance_matrix.sum() + anchor
    for gradient in torch.autograd.grad(total, (mean, matrix)):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_units_on_their_kink_without_variance_are_finite(name):
    kinks = CASES[name].kinks or (0.0,)
    mean = torch.tensor([*kinks, 0.1], dtype=torch.float64, requires_grad=True)
    matrix = torch.zeros(len(mean), len(mean), dtype=torch.float64, requires_grad=True)
    result = propagate(CASES[name].function, cp.Gaussian(mean, matrix))
    assert_close(result.mean, CASES[name].function(mean.detach()), atol=1e-15)
    assert_close(result.covariance_matrix, torch.zeros_like(matrix), rtol=0.0)
    anchor = 0 * (mean.sum() + matrix.sum())
    total = result.mean.sum() + result.covariance_matrix.sum() + anchor
    for gradient in torch.autograd.grad(total, (mean, matrix)):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_unit_without_variance_has_gradients_beside_many_copies_of_another(name):
    """Cov[g(y1), g(y2)] is E[g'(y1)] g'(mu_2) c to first order in c = Cov[y1, y2]."""
    factor = torch.tensor([1.0] * 7 + [0.0], dtype=torch.float64)
    mean = torch.tensor([MEAN] * 7 + [0.62], dtype=torch.float64)
    matrix = torch.outer(factor, factor).mul_(STDDEV**2).requires_grad_()
    result = propagate(CASES[name].function, cp.Gaussian(mean, matrix)).covariance_matrix
    (gradient,) = torch.autograd.grad(result[0, 7] + 0 * matrix.sum(), matrix)
    _, weight, _, slope, _, _ = derivatives_on_nodes(name, 1.0)
    point = mean[7].clone().requires_grad_()
    (there,) = torch.autograd.grad(CASES[name].function(point) + 0 * point, point)
    expected = (weight * slope).sum() * there
    assert_close(gradient[0, 7] + gradient[7, 0], expected, rtol=PRICE, atol=1e-10)
