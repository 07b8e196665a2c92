"""The functions of the normal distribution keep their relative accuracy where they are tiny."""

import mpmath as mp
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from covprop.kernels import normal
from covprop.kernels.normal import rectified_coefficients, rectified_moments
from tests import oracles
from tests.oracles import assert_close

# Steps that are exact in both dtypes, out to where each dtype's numbers end.
FAR = {torch.float32: 12.0, torch.float64: 36.0}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ORACLES = {
    "density": oracles.normal_pdf,
    "cumulative": oracles.normal_cdf,
    "partial_expectation": oracles.rectified_mean,
}


def exactly(values: list[mp.mpf], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64).to(dtype)


@DTYPES
@pytest.mark.parametrize("name", ORACLES)
def test_tails_are_accurate_relative_to_themselves(name, dtype):
    z = torch.arange(-FAR[dtype], FAR[dtype] + 0.1, 0.1875, dtype=dtype)
    expected = exactly([ORACLES[name](float(x)) for x in z], dtype)
    error = ((getattr(normal, name)(z) - expected) / expected).abs()
    # exp(-z^2 / 2) multiplies the rounding of its argument by z^2 / 2.
    assert_close(error / (4 + z.square()), torch.zeros_like(z), atol=4 * torch.finfo(dtype).eps)


@DTYPES
def test_partial_expectation_of_a_large_argument_is_the_argument(dtype):
    z = torch.tensor([20.0, 100.0, 1e6], dtype=dtype)
    assert_close(normal.partial_expectation(z), z, rtol=0.0)
    assert_close(normal.partial_expectation(-100 * z), torch.zeros_like(z), rtol=0.0)


@pytest.mark.parametrize(
    ("high", "low"), [(8.5, 8.0), (-8.0, -8.5), (30.0, 7.0), (1.0, -9.0), (-2.0, 3.0), (0.0, -1e-9)]
)
def test_differences_of_cumulatives_do_not_cancel_in_the_tails(high, low):
    with mp.workdps(oracles.DIGITS):
        expected = exactly([oracles.normal_cdf(high) - oracles.normal_cdf(low)], torch.float64)
    found = normal.cumulative_difference(*torch.tensor([[high], [low]], dtype=torch.float64))
    # Two numbers of the size of the smaller tail, or of one half, are subtracted.
    nearer = min(abs(high), abs(low)) if high * low > 0 else 0.0
    size = float(oracles.normal_cdf(-nearer))
    assert_close(found, expected, atol=size * 1e-14)


def test_partial_expectation_has_first_and_second_derivatives():
    z = torch.tensor([-8.0, -1.0, 0.0, 0.5, 9.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(normal.partial_expectation, z)
    assert gradgradcheck(normal.partial_expectation, z)


def test_derivative_of_partial_expectation_is_accurate_in_the_tail():
    z = torch.tensor([-30.0, -12.0], dtype=torch.float64, requires_grad=True)
    normal.partial_expectation(z).sum().backward()
    expected = exactly([oracles.normal_cdf(x) for x in z.tolist()], torch.float64)
    assert_close(z.grad, expected, rtol=1e-12)


def test_standard_deviation_is_the_root_with_a_finite_gradient():
    variance = torch.tensor([0.0, 4.0, 1e-300, -1e-20], dtype=torch.float64, requires_grad=True)
    stddev = normal.standard_deviation(variance)
    stddev.sum().backward()
    assert_close(stddev, torch.tensor([0.0, 2.0, 1e-150, 0.0], dtype=torch.float64), rtol=1e-15)
    expected = torch.tensor([0.0, 0.25, 5e149, 0.0], dtype=torch.float64)
    assert_close(variance.grad, expected, rtol=1e-15)


def test_standardise_divides_up_to_saturation_and_holds_beyond():
    far = normal.SATURATION
    distance = torch.tensor([3.0, -3.0, 1.0, -1.0, 0.0, 1e9], dtype=torch.float64)
    stddev = torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0, 1e-9], dtype=torch.float64)
    expected = torch.tensor([1.5, -1.5, far, -far, far, far], dtype=torch.float64)
    assert_close(normal.standardise(distance, stddev), expected, rtol=0.0)


def test_gradients_through_standardise_are_finite_at_zero_and_beyond_saturation():
    distance = torch.tensor([0.0, 1.0, 1e9, 3.0], dtype=torch.float64, requires_grad=True)
    stddev = torch.tensor([0.0, 0.0, 1e-9, 2.0], dtype=torch.float64, requires_grad=True)
    normal.standardise(distance, stddev).sum().backward()
    assert_close(distance.grad, torch.tensor([0.0, 0.0, 0.0, 0.5], dtype=torch.float64), rtol=0.0)
    assert_close(stddev.grad, torch.tensor([0.0, 0.0, 0.0, -0.75], dtype=torch.float64), rtol=0.0)


def test_saturation_changes_nothing():
    far = torch.tensor([-normal.SATURATION], dtype=torch.float64)
    for function in (normal.density, normal.cumulative, normal.partial_expectation):
        assert float(function(far)) == 0.0


def test_correlation_with_a_constant_is_zero_and_differentiable():
    covariance = torch.tensor([0.0, 0.6, -6.0], dtype=torch.float64, requires_grad=True)
    left = torch.tensor([0.0, 4.0, 4.0], dtype=torch.float64, requires_grad=True)
    right = torch.tensor([1.0, 0.25, 9.0], dtype=torch.float64, requires_grad=True)
    inverse = [normal.inverse_deviation(variance) for variance in (left, right)]
    rho = normal.correlation(covariance, *inverse)
    rho.sum().backward()
    assert_close(rho, torch.tensor([0.0, 0.6, -1.0], dtype=torch.float64), rtol=1e-15)
    assert_close(covariance.grad, torch.tensor([0.0, 1.0, 1 / 6], dtype=torch.float64), rtol=1e-15)
    assert_close(left.grad, torch.tensor([0.0, -0.075, 0.125], dtype=torch.float64), rtol=1e-15)


def test_gradients_of_tiny_variances_do_not_overflow():
    """The derivative is -v^(-3/2) / 2, which is beyond float64; what comes of it is not."""
    variance = torch.tensor([1e-280, 1e-300, 5e-324, 0.0], dtype=torch.float64, requires_grad=True)
    found = normal.inverse_deviation(variance)
    smallest = 2.0**537  # of 2^-1074
    expected = torch.tensor([1e140, 1e150, smallest, 0.0], dtype=torch.float64)
    assert_close(found, expected, rtol=1e-14)
    above = torch.tensor([1e-200, 0.0, 1.0, 1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(found, variance, above)
    expected = torch.tensor([-0.5e220, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert_close(gradient, expected, rtol=1e-14)


MEANS = [-30.0, -8.0, -2.0, -0.1, 0.0, 0.1, 2.0, 8.0, 30.0, 1e4]
DEVIATIONS = [1e-6, 1e-2, 1.0, 20.0]


def expected(mean: float, stddev: float) -> tuple[mp.mpf, mp.mpf]:
    """From the definition, with 60 digits against the cancellation."""
    with mp.workdps(60):
        mu, sigma = mp.mpf(mean), mp.mpf(stddev)
        a = mu / sigma
        below = mp.erfc(-a / mp.sqrt(2)) / 2
        height = mp.exp(-(a**2) / 2) / mp.sqrt(2 * mp.pi)
        first = mu * below + sigma * height
        second = (mu**2 + sigma**2) * below + mu * sigma * height
        return first, second - first**2


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("stddev", DEVIATIONS)
def test_moments_are_accurate_relative_to_themselves(mean: float, stddev: float) -> None:
    got = rectified_moments(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([stddev], dtype=torch.float64) ** 2
    )
    for value, want in zip(got, expected(mean, stddev), strict=True):
        if want > 1e-290:  # far below zero all of it underflows
            assert float(value) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("stddev", DEVIATIONS)
def test_coefficients_are_those_of_the_step_and_of_its_derivative(
    mean: float, stddev: float
) -> None:
    place, spread = (torch.tensor([each], dtype=torch.float64) for each in (mean, stddev**2))
    *moments, rows = rectified_coefficients(place, spread)
    assert moments == list(rectified_moments(place, spread))
    with mp.workdps(30):
        a = mp.mpf(mean) / mp.mpf(stddev)
        wanted = mp.erfc(-a / mp.sqrt(2)) / 2, mp.exp(-(a**2) / 2) / mp.sqrt(4 * mp.pi)
    for value, want in zip(rows[:, 0], wanted, strict=True):
        if want > 1e-290:
            assert float(value) == pytest.approx(float(want), rel=1e-12)


def inputs() -> list[Tensor]:
    mean = torch.tensor([-3.0, -0.5, 0.0, 0.7, 4.0, 300.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 0.2], dtype=torch.float64)
    return [mean.requires_grad_(), variance.requires_grad_()]


def test_derivatives_are_right_the_first_and_the_second_time() -> None:
    assert gradcheck(rectified_moments, inputs())
    assert gradgradcheck(rectified_moments, inputs())


def test_what_does_not_vary_has_the_limits() -> None:
    mean = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    variance = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    value, spread = rectified_moments(mean, variance)
    assert value.tolist() == [0.0, 0.0, 3.0]
    assert spread.tolist() == [0.0, 0.0, 0.0]
    of_mean = torch.autograd.grad(value.sum(), (mean, variance), retain_graph=True)
    of_spread = torch.autograd.grad(spread.sum(), (mean, variance))
    assert of_mean[0].tolist() == [0.0, 1.0, 1.0]
    assert of_mean[1].tolist() == [0.0, 0.0, 0.0]
    assert of_spread[0].tolist() == [0.0, 0.0, 0.0]
    assert of_spread[1].tolist() == [0.0, 1.0, 1.0]
