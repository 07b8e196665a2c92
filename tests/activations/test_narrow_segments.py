"""Piecewise-linear functions of inputs that are wide against the segments between their knots."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.activations import Piecewise
from covprop.kernels.ramps import NARROW
from tests.activations.ramps import Linear, covariance
from tests.layers import propagate
from tests.oracles import assert_close, normal_cdf, panels

pytestmark = pytest.mark.usefixtures("both_kernels")


Pair = tuple[float, float]
Case = tuple[Pair, Pair, float]
"""Two means, two standard deviations, a correlation."""
NO_JUMPS = (0.0, 0.0)


def ramp(low: float, high: float) -> Linear:
    return Linear(partial(torch.clamp, min=low, max=high), (low, high), (0.0, 1.0, 0.0), NO_JUMPS,
                  low)  # fmt: skip


def stairs(y: Tensor) -> Tensor:
    """A ramp, a steeper one beside it, a jump, and leaky ends."""
    steep = 3 * (y.clamp(1, 1.5) - 1) + 2 * (y >= 1.5).to(y)
    return 1e-3 * y.clamp(max=0) + y.clamp(0, 1) + steep


FUNCTIONS = {
    "hardtanh": ramp(-1.0, 1.0),
    "relu6": ramp(0.0, 6.0),
    "hardsigmoid": Linear(
        lambda y: (y / 6 + 0.5).clamp(0, 1), (-3.0, 3.0), (0.0, 1 / 6, 0.0), NO_JUMPS, 0.0
    ),
    "softshrink": Linear(F.softshrink, (-0.5, 0.5), (1.0, 0.0, 1.0), NO_JUMPS, 0.0),
    "leaky clamp": Linear(
        lambda y: 0.1 * y + 0.9 * y.clamp(-1, 1), (-1.0, 1.0), (0.1, 1.0, 0.1), NO_JUMPS, -1.0
    ),
    "stairs": Linear(stairs, (0.0, 1.0, 1.5), (1e-3, 1.0, 3.0, 0.0), (0.0, 0.0, 2.0), 0.0),
    "relu": Linear(torch.relu, (0.0,), (0.0, 1.0), (0.0,), 0.0),
    "sign": Linear(torch.sign, (0.0,), (0.0, 0.0), (2.0,), -1.0),
}
SPREADS = [1e-3, 19.0, 41.0, 1e3, 1e8, 1e20]
CORRELATIONS = [0.0, -0.6, 0.95, 0.9999, -1 + 1e-7, 1.0, -1.0]
ROUNDING = 16 / NARROW**2 * torch.finfo(torch.float64).eps
"""Four terms of a second difference, of a few epsilon each, over the square of the least width."""


def made(linear: Linear) -> Piecewise:
    return Piecewise(linear.function, linear.knots, linear.slopes, linear.start, linear.jumps)


def pairs(
    one: Linear, other: Linear, cases: Sequence[Case], dtype: torch.dtype = torch.float64
) -> list[float]:
    """Cov[g(y1), h(y2)] of all cases by the formula that any two functions share."""
    mean, stddev = (
        torch.tensor(numbers, dtype=torch.float64) for numbers in list(zip(*cases, strict=True))[:2]
    )
    left = made(one).elements(mean[:, 0], stddev[:, 0].square())
    right = made(other).elements(mean[:, 1], stddev[:, 1].square())
    rho = torch.tensor([rho for *_, rho in cases], dtype=torch.float64)
    sides = (tuple(t.to(dtype) for t in side) for side in (left, right))
    return made(one).direct(*sides, (rho * stddev.prod(-1)).to(dtype)).tolist()


def deviation(linear: Linear, mean: float, stddev: float) -> float:
    return math.sqrt(covariance(linear, linear, (mean, mean), (stddev, stddev), 1.0))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_variances_of_a_batch_are_those_of_its_elements(name: str, spread: float) -> None:
    mean = torch.tensor([[0.0, 1.0, 0.3 * spread], [-1.0, 2.0, 1.0]], dtype=torch.float64)
    variance = torch.full_like(mean, spread**2)
    alone = made(FUNCTIONS[name]).variance(mean.flatten(), variance.flatten())
    together = made(FUNCTIONS[name]).variance(mean, variance)
    assert_close(together.flatten(), alone, rtol=1e-13)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_variances_agree_with_an_integral_of_the_function(name: str, spread: float) -> None:
    mean = torch.tensor([0.0, 0.3 * spread, -2 * spread, 1.0], dtype=torch.float64)
    variance = torch.full_like(mean, spread**2)
    found = made(FUNCTIONS[name]).variance(mean, variance)
    expected = [deviation(FUNCTIONS[name], m, spread) ** 2 for m in mean.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=ROUNDING, atol=1e-30)


def assert_agrees(one: Linear, other: Linear, *cases: Case) -> None:
    """The pair formula and the integral, relative to the deviations of the functions."""
    for (means, stddevs, rho), found in zip(cases, pairs(one, other, cases), strict=True):
        parts = zip((one, other), means, stddevs, strict=True)
        size = math.prod(deviation(*each) for each in parts)
        # A last bit of 1 - |rho| is worth its root there.
        conditioning = torch.finfo(torch.float64).eps / math.sqrt(max(1 - abs(rho), 1e-15))
        expected = covariance(one, other, means, stddevs, rho)
        assert abs(found - expected) <= size * (ROUNDING + 4 * conditioning) + 1e-30, rho


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", ["hardtanh", "hardsigmoid", "softshrink", "leaky clamp", "stairs"])
def test_pairs_agree_with_an_integral_over_one_of_them(name: str, spread: float) -> None:
    means, stddevs = (0.3 * spread, 0.2 * spread), (spread, spread * 0.8)
    cases = [(means, stddevs, rho) for rho in CORRELATIONS]
    assert_agrees(FUNCTIONS[name], FUNCTIONS[name], *cases)


@pytest.mark.parametrize("other", FUNCTIONS)
@pytest.mark.parametrize("name", ["hardtanh", "stairs", "relu", "sign"])
def test_two_functions_of_unequal_widths_agree_with_it_too(name: str, other: str) -> None:
    one, two = FUNCTIONS[name], FUNCTIONS[other]
    assert_agrees(
        one,
        two,
        ((0.4, 0.4), (1e5, 1e5), 1.0),
        ((0.4, -0.4), (70.0, 80.0), -1 + 1e-7),
        ((0.4, 0.4), (1e5, 300.0), 0.9999),
        ((0.4, 1.0), (300.0, 1.3), 0.6),
    )


@pytest.mark.parametrize("spread", [1.9, 2.1, 19.0, 41.0, 1e4, 1e12])
@pytest.mark.parametrize("name", ["hardtanh", "hardsigmoid", "stairs"])
def test_float32_is_accurate_for_every_width(name: str, spread: float) -> None:
    linear = FUNCTIONS[name]
    cases: list[Case] = [
        ((0.3, 0.3 * math.copysign(1, rho)), (spread, spread), rho)
        for rho in (0.6, -0.9, 0.999, 1.0)
    ]
    for case, found in zip(cases, pairs(linear, linear, cases, torch.float32), strict=True):
        means, _, rho = case
        size = math.prod(deviation(linear, mean, spread) for mean in means)
        # A few roundings, those of the correlation enlarged by 1 / sqrt(1 - rho^2).
        bound = 16 * torch.finfo(torch.float32).eps / math.sqrt(max(1 - rho**2, 1e-2))
        assert abs(found - covariance(linear, linear, *case)) <= bound * size, rho


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_examples_of_the_issue(dtype: torch.dtype) -> None:
    """A wide hardtanh is the sign of its input, of covariance 2 asin(rho) / pi."""
    arcsine = 2 * math.asin(0.6) / math.pi
    matrix = torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
    for variance in (1e10, 1e30) if dtype == torch.float32 else (1e20, 1e40):
        x = cp.Gaussian(torch.zeros(2, dtype=dtype), (variance * matrix).to(dtype))
        found = propagate(F.hardtanh, x).covariance_matrix
        expected = torch.tensor([[1.0, arcsine], [arcsine, 1.0]], dtype=dtype)
        assert_close(found, expected, atol=max(2 / variance**0.5, 8 * torch.finfo(dtype).eps))
    x = cp.Gaussian(torch.zeros(2, dtype=dtype), matrix.to(dtype))
    low, high = 0.2, 0.2 + 1e-9
    found = propagate(lambda y: y.clamp(low, high) / (high - low), x).covariance_matrix
    probability = float(normal_cdf(0.2))
    expected = torch.full((2,), probability * (1 - probability), dtype=dtype)
    assert_close(found.diagonal(), expected, atol=max(4e-9, 4 * torch.finfo(dtype).eps))
    assert bool((torch.linalg.eigvalsh(found) > 0.1).all())


@pytest.mark.parametrize("order", [4, 64, 512])
@pytest.mark.parametrize("spread", [41.0, 1e6, 1e20])
def test_coefficients_of_a_wide_ramp_agree_with_quadrature(spread: float, order: int) -> None:
    """a_k = E[g' He_{k-1}] / sqrt(k!), on forty nodes of the ramp."""
    mean = torch.tensor([0.3 * spread], dtype=torch.float64)
    found = made(ramp(-1.0, 1.0)).coefficients(mean, torch.full_like(mean, spread**2), order)
    nodes, weights = (torch.from_numpy(t) for t in panels(np.array([-1.0, 1.0]), 40))
    x = (nodes - mean) / spread
    previous, current = torch.zeros_like(x), torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    for k in range(order):
        expected = (weights * current).sum() / math.sqrt(k + 1)
        assert abs(float(found[k, 0] * spread - expected)) <= 1e-11
        following = (x * current - math.sqrt(k) * previous) / math.sqrt(k + 1)
        previous, current = current, following


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1.0, 50.0, 1e12])
@pytest.mark.parametrize("name", ["hardtanh", "stairs"])
def test_matrices_are_positive_semi_definite(name: str, spread: float, dtype: torch.dtype) -> None:
    """With copies, negatives and near copies; all pairs directly, and by the series with them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(140, 60, dtype=torch.float64, generator=generator)
    rows[10], rows[11], rows[12] = rows[0], -rows[1], rows[2] + 1e-6 * rows[3]
    rows[20:40] += 3 * rows[0]
    rows *= spread / rows.norm(dim=-1, keepdim=True)
    mean = spread * torch.randn(140, dtype=torch.float64, generator=generator)
    method = cp.Exact(activations={torch.relu: made(FUNCTIONS[name])})
    for count in (40, 140) if name == "hardtanh" else (40,):
        matrix = (rows @ rows.mT)[:count, :count].to(dtype)
        x = cp.Gaussian(mean[:count].to(dtype), matrix, validate_args=False)
        found = propagate(torch.relu, x, method=method).covariance_matrix.double()
        stddev = found.diagonal().sqrt()
        correlations = found / stddev[:, None] / stddev
        assert float(torch.linalg.eigvalsh(correlations)[0]) >= -16 * count * torch.finfo(dtype).eps


def gradients(function: Callable[..., Tensor], points: Tensor) -> tuple[Tensor, Tensor]:
    """By autograd and by central differences, each over the size of its argument.

    function: of numbers (batch,) each; points: (batch, arguments). All differences are one call.
    """
    inputs = [column.clone().requires_grad_() for column in points.unbind(-1)]
    analytic = torch.stack(torch.autograd.grad(function(*inputs).sum(), inputs), -1)
    size = points.abs()
    steps = torch.where(size >= 1, 1e-6 * size, 1e-3 * (1 - size))
    moves, centre = torch.diag_embed(steps), points[:, None]
    with torch.no_grad():
        ends = function(*torch.stack([centre + moves, centre - moves]).flatten(0, 2).unbind(-1))
    up, down = ends.reshape(2, *points.shape)
    return analytic * points, (up - down) / (2 * steps) * points


@pytest.mark.parametrize("spread", [15.0, 45.0, 1e9])
@pytest.mark.parametrize("name", ["hardtanh", "stairs"])
def test_gradients_agree_with_finite_differences(name: str, spread: float) -> None:
    method = cp.Exact(activations={torch.relu: made(FUNCTIONS[name])})

    def total(mean: Tensor, other: Tensor, stddev: Tensor, last: Tensor, share: Tensor) -> Tensor:
        cross = share * stddev * last
        rows = [torch.stack([stddev.square(), cross], -1), torch.stack([cross, last.square()], -1)]
        means = torch.stack([mean, other], -1)
        x = cp.Gaussian(means, torch.stack(rows, -2), validate_args=False)
        result = propagate(torch.relu, x, method=method)
        return result.mean @ torch.tensor([1.0, 0.5]).double() + (
            result.covariance_matrix * torch.tensor([[1.0, 0.7], [0.7, 0.4]])
        ).sum((-2, -1))

    points = [
        [0.3 * spread, 0.2 * spread * math.copysign(1, rho), spread, 0.9 * spread, rho]
        for rho in (0.3, -0.99, 0.9999)
    ]
    analytic, numeric = gradients(total, torch.tensor(points, dtype=torch.float64))
    scale = numeric.abs().amax(-1, keepdim=True)
    assert bool(((analytic - numeric).abs() <= 1e-5 * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [50.0, 1e4, 1e12])
def test_gradients_of_copies_are_finite_and_symmetric(spread: float, dtype: torch.dtype) -> None:
    mean = torch.tensor([0.3, 0.3, -0.3], dtype=dtype, requires_grad=True)
    sides = spread * torch.tensor([1.0, 1.0, -1.0], dtype=dtype)
    matrix = torch.outer(sides, sides).requires_grad_()
    found = propagate(F.hardtanh, cp.Gaussian(mean, matrix)).covariance_matrix
    by_mean, by_matrix = torch.autograd.grad(found[0, 1] - found[0, 2], (mean, matrix))
    assert bool(torch.isfinite(by_mean).all() and torch.isfinite(by_matrix).all())
    # Price: d/dc = E[g'(y1) g'(y2)] = P(-1 < y < 1) for a copy, as for a negative.
    inside = float(normal_cdf(1.3 / spread) - normal_cdf(-0.7 / spread))
    found_slope = (by_matrix[0, 1] + by_matrix[1, 0]).double()
    assert abs(float(found_slope) - inside) <= 1e-5 * inside
