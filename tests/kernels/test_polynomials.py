"""Gauss-Legendre nodes, normalised Hermite functions and the series in the correlation."""

import itertools

import mpmath as mp
import pytest
import torch

from covprop.kernels.polynomials import (
    Panels,
    flushed,
    hermite_functions,
    in_units,
    power_series,
    series_units,
    unit_interval,
)
from tests.oracles import DIGITS, assert_close

pytestmark = pytest.mark.usefixtures("both_kernels")


def exact_hermite_function(k: int, x: float) -> mp.mpf:
    """He_k(x) phi(x) / sqrt(k!), He_k(x) = 2^(-k/2) H_k(x / sqrt 2)."""
    with mp.workdps(DIGITS + k // 2):
        z = mp.mpf(x)
        polynomial = mp.hermite(k, z / mp.sqrt(2)) / mp.mpf(2) ** (mp.mpf(k) / 2)
        weight = mp.exp(-z * z / 2) / mp.sqrt(2 * mp.pi)
        return polynomial * weight / mp.sqrt(mp.factorial(k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hermite_functions_agree_with_the_polynomials_up_to_order_64(dtype):
    x = torch.tensor([-9.0, -3.25, -1.0, 0.0, 0.125, 2.0, 5.5], dtype=dtype)
    found = torch.stack(list(itertools.islice(hermite_functions(x), 65)))
    expected = [[float(exact_hermite_function(k, float(v))) for v in x] for k in range(65)]
    assert_close(found, torch.tensor(expected, dtype=dtype), atol=50 * torch.finfo(dtype).eps)


def test_hermite_functions_stay_bounded_at_high_order():
    x = torch.linspace(-60, 60, 481, dtype=torch.float64)
    for function in itertools.islice(hermite_functions(x), 1024):
        assert float(function.abs().max()) < 0.4  # phi(0) = 0.3989 is the largest of all


def test_hermite_functions_are_orthonormal_over_the_density():
    x, step = torch.linspace(-20, 20, 8001, dtype=torch.float64), 40 / 8000
    functions = torch.stack(list(itertools.islice(hermite_functions(x), 20)))
    phi = functions[0]
    keep = phi > 1e-80
    gram = (functions[:, keep] / phi[keep]) @ functions[:, keep].T * step
    assert_close(gram, torch.eye(20, dtype=torch.float64), atol=1e-12)


def test_power_series_is_the_sum_term_by_term():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 7, 5, generator=generator, dtype=torch.float64)
    rho = torch.tensor([-1.0, -0.3, 0.0, 0.9, 1.0], dtype=torch.float64)
    expected = sum(rho**k * left[k] * right[k] for k in range(7))
    assert_close(power_series(rho, left, right), expected, atol=1e-14)


def test_power_series_of_one_term_ignores_the_correlation():
    left, right = torch.tensor([[2.0, 3.0]]), torch.tensor([[5.0, 7.0]])
    found = power_series(torch.tensor([0.1, -0.9]), left, right)
    assert_close(found, torch.tensor([10.0, 21.0]), rtol=0.0)


def test_power_series_has_the_gradients_of_its_sum():
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(4, 3, 1, generator=generator, dtype=torch.float64, requires_grad=True)
    right = torch.randn(4, 1, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([[0.5, -1.0], [0.0, 0.9], [1.0, -0.2]], dtype=torch.float64)
    assert torch.autograd.gradcheck(power_series, (rho.requires_grad_(), left, right))


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e-27, 1e-34])
def test_gradients_of_the_series_have_the_scale_of_what_is_differentiated(size):
    """What is flushed as denormal is so next to the other terms, not next to one."""
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.randn(6, 2, 5, 1, generator=generator),
        torch.randn(6, 2, 1, 4, generator=generator),
    )
    rho, weight = 2 * torch.rand(2, 2, 5, 4, generator=generator) - 1
    inputs = [one.requires_grad_() for one in (rho, left, right)]
    found = torch.autograd.grad(power_series(*inputs), inputs, size * weight)
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    terms = sum(doubles[0] ** k * doubles[1][k] * doubles[2][k] for k in range(6))
    expected = torch.autograd.grad(terms, doubles, weight.double())
    for one, other in zip(found, expected, strict=True):
        assert_close(one.double() / size, other, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("height", [1.0, 1e-6, 1e-13, 1e-18])
def test_float32_keeps_the_correlations_of_units_that_hardly_vary(height):
    """As a sigmoid does thirty deviations below its middle: the series is linear in each unit."""
    coefficients = height * torch.tensor([[1.0, 0.3], [0.5, -0.2], [1e-3, 0.1]]).double()
    units = series_units(coefficients, torch.float32)
    kept = flushed(coefficients / units, torch.float32).float()
    rho, one = torch.tensor([[1.0, 0.6], [0.6, 1.0]]), torch.ones(2, 2)
    series = power_series(rho, kept[..., :, None], kept[..., None, :])
    found = in_units(one, units.float()[:, None], units.float()[None, :]) * series
    steps = torch.arange(3)[:, None, None]
    both = coefficients[..., :, None] * coefficients[..., None, :]
    assert_close(
        found.double() / height**2, (rho.double() ** steps * both).sum(0) / height**2, 1e-6
    )


@pytest.mark.parametrize("place", [0.7, -3.0, 20.0, 37.5, -100.0, 700.0])
def test_hermite_functions_far_away_have_finite_derivatives(place):
    """Of the recurrence itself they overflow, and are NaN where the density is zero."""
    x = torch.tensor([place], dtype=torch.float64, requires_grad=True)
    rows = torch.stack([h for _, h in zip(range(512), hermite_functions(x), strict=False)])
    (slope,) = torch.autograd.grad(rows[:511].sum(), x, retain_graph=True)
    expected = -(torch.arange(1, 512).double().sqrt() * rows[1:512, 0].detach()).sum()
    assert float(slope) == pytest.approx(float(expected), rel=1e-12)
    step = 1e-5
    with torch.no_grad():
        low, high = (
            torch.stack([h for _, h in zip(range(9), hermite_functions(x + s), strict=False)])
            for s in (-step, step)
        )
    for k in range(9):
        (slope,) = torch.autograd.grad(rows[k, 0], x, retain_graph=True)
        # The third derivative is below 9^1.5 times the largest value.
        assert abs(float(slope - (high - low)[k] / (2 * step))) < 27 * step**2 + 1e-10


@pytest.mark.parametrize("count", [1, 2, 6, 12, 14])
def test_unit_interval_integrates_every_polynomial_up_to_degree_2n_minus_1(count):
    rule = unit_interval(count)
    for degree in range(2 * count):
        integral = sum(weight * node**degree for node, weight in rule)
        assert integral == pytest.approx(1 / (degree + 1), rel=1e-13)


BREAKPOINTS = torch.tensor(
    [[-2.0, -0.5, 0.0, 0.0, 1.0, 3.0], [-1.0, -1.0, -0.25, 0.0, 0.5, 0.5]], dtype=torch.float64
)
"""Uneven, with empty panels at zero and at the ends."""


def test_panels_integrate_over_the_whole_range():
    panels = Panels(BREAKPOINTS, 10)
    assert panels.nodes.shape == panels.weights.shape == (2, 5, 10)
    found = (panels.weights * torch.exp(panels.nodes)).sum((-2, -1))
    expected = torch.exp(BREAKPOINTS[:, -1]) - torch.exp(BREAKPOINTS[:, 0])
    assert_close(found, expected, rtol=1e-14)


def test_panels_integrate_from_zero_to_every_node():
    panels = Panels(BREAKPOINTS, 10)
    found = panels.integral_from_zero(panels.nodes**9 - 3 * panels.nodes**4)
    assert_close(found, panels.nodes**10 / 10 - 3 * panels.nodes**5 / 5, atol=1e-11)


def test_what_happens_far_out_does_not_blur_the_integral_near_zero():
    panels = Panels(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64), 10)
    huge = torch.where(panels.nodes.abs() > 1, 1e20, 1.0).double()
    near = panels.nodes.abs() < 1
    found = panels.integral_from_zero(huge)
    assert_close(found[near], panels.nodes[near], rtol=1e-13)


def test_panels_follow_the_dtype_of_their_breakpoints():
    panels = Panels(BREAKPOINTS.float(), 4)
    values = panels.integral_from_zero(panels.nodes)
    assert values.dtype == panels.weights.dtype == torch.float32
    assert_close(values, panels.nodes.square() / 2, atol=1e-6)
