"""K0 and K1: covariances of steps and ramps, in both branches and at the degenerate end."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covprop.kernels.normal import SATURATION
from covprop.kernels.plackett import (
    SWITCH,
    bivariate_density,
    gap_to_one,
    plackett,
    plackett_degenerate,
    plackett_mixed,
)
from covprop.kernels.ramps import NARROW, SHARP, ramp_relu, ramp_step
from tests import oracles
from tests.activations.ramps import Linear, covariance
from tests.oracles import assert_close

pytestmark = pytest.mark.usefixtures("both_kernels")

# Every number is exact in float32. 1 - 2^-7 = 0.992, 1 - 2^-20 = 0.999999.
SIZES = [0.0, 2.0**-20, 0.25, 0.5, 0.6875, 0.703125, 0.875, 1 - 2.0**-7, 1 - 2.0**-20, 1.0]
PLACES = [(0.5, -1.25), (-3.0, -2.75), (1.0, 1.015625)]
POINTS = [(a, s * b, s * r) for r, (a, b), s in itertools.product(SIZES, PLACES, (1.0, -1.0))]
CLOSE = [(0.75, 0.75, 1 - 1e-9), (-1.5, -1.5, 1 - 1e-13), (1.0, -1.0 - 1e-7, -1 + 1e-12)]
"""Too close to one for float32."""
ABSOLUTE = {torch.float32: 1e-7, torch.float64: 1e-13}


def exactly(points: list[tuple[float, ...]]) -> tuple[Tensor, Tensor]:
    rows = [[float(value) for value in oracles.plackett(*point)] for point in points]
    return tuple(torch.tensor(rows, dtype=torch.float64).T)


def arguments(points: list[tuple[float, ...]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return list(torch.tensor(points, dtype=torch.float64).to(dtype).T.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kernels_are_accurate_for_every_correlation(dtype):
    points = POINTS + (CLOSE if dtype == torch.float64 else [])
    for found, expected in zip(plackett(*arguments(points, dtype)), exactly(points), strict=True):
        assert_close(found, expected.to(dtype), atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kernels_are_closed_at_zero(dtype):
    rho = torch.linspace(-1, 1, 65, dtype=dtype)  # steps of 1/32: exact
    angle, rest = torch.asin(rho.double()), 1 - rho.double().square()
    expected = (angle, rho.double() * angle + rest.sqrt() - 1)
    zero = torch.zeros_like(rho)
    for found, wanted in zip(plackett(zero, zero, rho), expected, strict=True):
        assert_close(found, (wanted / (2 * torch.pi)).to(dtype), atol=ABSOLUTE[dtype])


def test_double_precision_is_accurate_relative_to_the_two_standard_deviations():
    points = [(-7.0, -6.5, r) for r in (0.5, 0.9, 1.0)] + [(6.0, -6.5, r) for r in (-0.6, -0.99)]
    cdf = torch.tensor(
        [[[float(oracles.normal_cdf(s * z)) for z in p[:2]] for s in (1, -1)] for p in points]
    ).double()
    scale = cdf.prod(1).sqrt().prod(-1)  # of the two steps
    for found, expected in zip(plackett(*arguments(points)), exactly(points), strict=True):
        assert_close(found / scale, expected / scale, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kernels_grow_from_zero_to_their_value_at_correlation_one(dtype):
    # Or a covariance would exceed the product of its two standard deviations.
    a, b, rho = torch.meshgrid(
        torch.arange(-12, 12.5, 1.5, dtype=dtype),
        torch.arange(-12, 12.5, 1.5, dtype=dtype),
        torch.tensor([0.1, 0.5, 0.69, 0.71, 0.8, 0.9, 0.97, 0.999], dtype=dtype),
        indexing="ij",
    )
    ends = (plackett_degenerate(a, b), plackett_degenerate(a, a), plackett_degenerate(b, b))
    for kernel, largest, first, second in zip(plackett(a, b, rho), *ends, strict=True):
        rounding = 1e-4 * first.sqrt() * second.sqrt() + torch.finfo(dtype).tiny
        assert bool((kernel >= -rounding).all())
        assert bool((kernel <= largest + rounding).all())


def test_the_branches_meet():
    places = torch.linspace(-6, 6, 41, dtype=torch.float64)
    a, b = torch.meshgrid(places, places, indexing="ij")
    below = plackett(a, b, torch.full_like(a, SWITCH))
    above = plackett(a, b, torch.full_like(a, SWITCH * (1 + 1e-15)))
    for left, right in zip(below, above, strict=True):
        assert_close(left, right, atol=5e-15)


def test_degenerate_kernels_are_those_at_correlation_one():
    points = [(a, b, 1.0) for a, b in PLACES]
    a, b, _ = arguments(points)
    for found, expected in zip(plackett_degenerate(a, b), exactly(points), strict=True):
        assert_close(found, expected, atol=1e-15)


@pytest.mark.parametrize("rho", [0.3, -0.5, 0.8, -0.9375, 0.999])
def test_every_derivative_agrees_with_finite_differences(rho):
    a = torch.tensor([-1.5, 0.0, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([-1.4, 0.3, -1.1, 2.0], dtype=torch.float64, requires_grad=True)
    c = torch.full((4,), rho, dtype=torch.float64, requires_grad=True)
    assert gradcheck(plackett, (a, b, c))


def test_mixed_kernel_is_the_covariance_of_a_step_and_a_ramp():
    points = [(0.4, -0.8, r) for r in (0.2, -0.6, 0.9, 0.99)]
    a, b, rho = arguments(points)
    found = plackett_mixed(a, b, rho, plackett(a, b, rho)[0])
    z, weight = (torch.from_numpy(t) for t in oracles.normal_rule(0.0, 1.0, kinks=(-0.4,)))
    q = (1 - rho.square()).sqrt()[:, None]
    ratio = (b[:, None] + rho[:, None] * z) / q
    pdf = torch.exp(-ratio.square() / 2) / (2 * torch.pi) ** 0.5
    ramp = q * (ratio * torch.special.ndtr(ratio) + pdf)  # E[relu(y + b) | x]
    step = (z > -0.4).double()
    joint, single = (weight * step * ramp).sum(-1), (weight * step).sum() * (weight * ramp).sum(-1)
    phi_a = torch.exp(-a.square() / 2) / (2 * torch.pi) ** 0.5
    expected = joint - single - rho * phi_a * torch.special.ndtr(b)
    assert_close(found, expected, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_are_finite_at_the_degenerate_end_and_at_saturation(dtype, sign):
    a = torch.tensor([0.0, 1.0, 1.0, SATURATION, -SATURATION, SATURATION], dtype=dtype)
    b = torch.tensor([0.0, 1.0, 2.0, SATURATION, 0.5, -SATURATION], dtype=dtype) * sign
    inputs = [t.requires_grad_() for t in (a, b, torch.full_like(a, sign))]
    for kernel in plackett(*inputs):
        assert bool(torch.isfinite(kernel).all())
        for gradient in torch.autograd.grad(kernel.sum(), inputs, retain_graph=True):
            assert bool(torch.isfinite(gradient).all())


def test_gradients_at_correlation_one_are_those_of_one_variable():
    a = torch.tensor([-0.3, 0.4, 1.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.9, 0.1, -2.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a, b: plackett(a, b, torch.ones_like(a)), (a, b))


def test_density_agrees_with_its_formula_and_vanishes_where_there_is_none():
    a, b, rho = arguments([(0.5, -1.0, 0.3), (2.0, 1.5, 0.99), (1.0, -1.2, -0.95)])
    rest = 1 - rho.square()
    exponent = (a.square() + b.square() - 2 * rho * a * b) / (2 * rest)
    expected = torch.exp(-exponent) / (2 * torch.pi * rest.sqrt())
    assert_close(bivariate_density(a, b, rho), expected, rtol=1e-12)
    assert float(bivariate_density(a, a, torch.ones_like(a)).abs().max()) == 0.0


def test_a_correlation_beyond_one_by_rounding_is_one():
    eps = torch.finfo(torch.float64).eps
    rho = torch.tensor([1 + 2 * eps, 1 - 3 * eps, -1 - 2 * eps, 1.0], dtype=torch.float64)
    assert float(gap_to_one(rho).abs().max()) == 0.0
    assert float(gap_to_one(torch.tensor(1 - 1e-14, dtype=torch.float64))) > 0
    a = torch.full_like(rho, 0.25)
    sign = torch.sign(rho)
    for found, expected in zip(
        plackett(a, sign * a, rho), plackett(a, sign * a, sign), strict=True
    ):
        assert_close(found, expected, atol=4 * eps)


def test_arguments_broadcast():
    a = torch.linspace(-1, 1, 3, dtype=torch.float64)[:, None]
    b = torch.linspace(-2, 2, 4, dtype=torch.float64)
    for kernel in plackett(a, b, torch.tensor(0.9, dtype=torch.float64)):
        assert kernel.shape == (3, 4)


EPS = torch.finfo(torch.float64).eps
CORRELATIONS = [0.0, 0.6, -0.95, 0.999, -1 + 1e-4, 1 - 1e-6, 1.0, -1.0]
RAMPS = [
    (0.3, 0.05, 0.3, 0.05), (0.3, 0.04, 0.28, 0.01), (0.3, 0.01, 0.3, 0.0),
    (-1.0, 1e-3, -0.5, 0.02), (0.0, 1e-6, 0.0, 1e-6), (0.0, 0.0, 0.0, 0.03),
]  # fmt: skip


def rise(y: Tensor, a: float, width: float) -> Tensor:
    """The share of thresholds -t, t in [a - width, a], that y exceeds."""
    return ((y + a) / width).clamp(0, 1) if width else (y + a >= 0).to(y)


def ramp(a: float, width: float) -> Linear:
    function = partial(rise, a=a, width=width)
    if not width:
        return Linear(function, (-a,), (0.0, 0.0), (1.0,), 0.0)
    return Linear(function, (-a, width - a), (0.0, 1 / width, 0.0), (0.0, 0.0), 0.0)


def vectors(*numbers: float) -> list[Tensor]:
    return [torch.tensor([number], dtype=torch.float64) for number in numbers]


@pytest.mark.parametrize("rho", CORRELATIONS)
@pytest.mark.parametrize("place", RAMPS)
def test_averages_of_steps_are_covariances_of_ramps(place, rho):
    a, width_a, b, width_b = place
    b = -b + width_b if rho < 0 else b
    found = float(ramp_step(*vectors(a, width_a, b, width_b, rho)))
    expected = covariance(ramp(a, width_a), ramp(b, width_b), (0.0, 0.0), (1.0, 1.0), rho)
    # Positions of ramps of width w are known to eps, of which a step of the oracle is eps / w.
    blur = max((1 - rho**2) ** 0.5, width_a, width_b, EPS**0.5)
    assert abs(found - expected) <= 32 * EPS * (1 + 1 / blur) + 1e-13


@pytest.mark.parametrize("rho", [0.6, -0.95, 0.999, 1 - 1e-6, 1.0, -1.0])
@pytest.mark.parametrize("width", [0.05, 0.01, 1e-6])
def test_averages_with_a_relu_are_covariances_of_a_ramp_with_it(width, rho):
    b = 0.29 if rho > 0 else -0.29
    found = ramp_relu(*vectors(0.3, width, b, rho))
    relu = Linear(lambda y: torch.relu(y + b), (-b,), (0.0, 1.0), (0.0,), 0.0)
    expected = covariance(ramp(0.3, width), relu, (0.0, 0.0), (1.0, 1.0), rho)
    density = covariance(ramp(0.3, width), Linear(lambda y: y, (0.0,), (1.0, 1.0), (0.0,), 0.0),
                         (0.0, 0.0), (1.0, 1.0), 1.0)  # fmt: skip
    above = float(torch.special.ndtr(torch.tensor(b, dtype=torch.float64)))
    assert abs(float(found) + rho * density * above - expected) <= 1e-12


@pytest.mark.parametrize("width", [0.01, NARROW])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
def test_formulas_of_ramps_meet_where_they_change(width, ratio):
    """A last bit of rho on either side of each switch changes nothing but rounding."""
    for limit in {width, width * ratio} - {0.0}:
        rho = (1 - (SHARP * limit) ** 2) ** 0.5
        sides = [rho * (1 - 1e-12), rho * (1 + 1e-12)]
        low, high = (
            float(ramp_step(*vectors(0.3, width, 0.3, width * ratio, rho))) for rho in sides
        )
        assert abs(low - high) <= 1e-12 / limit + 1e-13


@pytest.mark.parametrize("rho", [0.3, -0.9, 0.999, -1 + 1e-4])
@pytest.mark.parametrize("place", RAMPS[:4])
def test_gradients_of_ramps_agree_with_finite_differences(place, rho):
    a, width_a, b, width_b = place
    inputs = [t.requires_grad_() for t in vectors(a, width_a, b if rho > 0 else -b, width_b, rho)]
    inputs[3].requires_grad_(width_b > 0)
    step = 1e-8 if abs(rho) > 0.99 else 1e-6
    assert gradcheck(ramp_step, inputs, eps=step, atol=1e-6, rtol=1e-4)
    del inputs[3]
    assert gradcheck(ramp_relu, inputs, eps=step, atol=1e-6, rtol=1e-4)
