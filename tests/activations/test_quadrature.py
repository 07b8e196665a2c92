"""Functions of the user: right where quadrature works, refused where it cannot."""

import math
import subprocess
import sys

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.activations import quadrature
from covprop.activations.moments import Scalar
from covprop.activations.nested import nested_covariance
from tests.layers import propagate
from tests.oracles import (
    assert_close,
    assert_gradients,
    evaluate,
    moments,
    normal_rule,
    pair_covariance,
)

MEANS, STDDEVS = (0.2, -0.5), (1.0, 2.0)


def gaussian(rho: float = 0.6, means=MEANS, stddevs=STDDEVS) -> cp.Gaussian:
    return cp.Gaussian(torch.tensor(means, dtype=torch.float64), covariance(rho, stddevs))


def covariance(rho: float, stddevs=STDDEVS) -> Tensor:
    cross = rho * stddevs[0] * stddevs[1]
    rows = [[stddevs[0] ** 2, cross], [cross, stddevs[1] ** 2]]
    return torch.tensor(rows, dtype=torch.float64)


def bump(y: Tensor) -> Tensor:
    return torch.sin(y) * torch.exp(-y.square() / 4)


def bent(y: Tensor) -> Tensor:
    """A kink in the slope at 0.3 and one in the second derivative at -1."""
    return (y - 0.3).abs() * torch.exp(-0.1 * y) + torch.relu(-y - 1).square()


def cauchy(y: Tensor) -> Tensor:
    return torch.atan(y)


def assert_moments_agree(function, result: cp.Gaussian, kinks=()) -> None:
    expected = [moments(function, m, s, 1, kinks) for m, s in zip(MEANS, STDDEVS, strict=True)]
    means, variances, _ = zip(*expected, strict=True)
    assert_close(result.mean, torch.tensor(means, dtype=torch.float64), atol=1e-9)
    assert_close(result.variance, torch.tensor(variances, dtype=torch.float64), rtol=1e-9)


@pytest.mark.parametrize("rho", [0.6, -0.95])
def test_a_smooth_function_needs_no_more_than_its_code(rho):
    result = propagate(cp.activation(bump), gaussian(rho))
    assert_moments_agree(bump, result)
    expected = pair_covariance(bump, MEANS, STDDEVS, rho)
    assert float(result.covariance_matrix[0, 1]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("rho", [0.6, -0.95])
def test_a_function_with_its_kinks_named_is_integrated_between_them(rho):
    kinks = (-1.0, 0.3)
    result = propagate(cp.activation(bent, kinks=kinks), gaussian(rho))
    assert_moments_agree(bent, result, kinks)
    expected = pair_covariance(bent, MEANS, STDDEVS, rho, kinks)
    assert float(result.covariance_matrix[0, 1]) == pytest.approx(expected, rel=1e-9)


def test_the_order_in_which_kinks_are_named_does_not_matter():
    first, second = (
        propagate(cp.activation(bent, kinks=kinks), gaussian()).covariance_matrix
        for kinks in ((-1.0, 0.3), (0.3, -1.0))
    )
    assert_close(first, second, rtol=1e-14)


def test_options_reach_the_function_and_tensors_pass_through():
    @cp.activation
    def stretched(y: Tensor, rate: float, shift: float = 0.0) -> Tensor:
        return torch.tanh(rate * y + shift)

    y = torch.linspace(-1, 1, 5)
    assert_close(stretched(y, 2.0, shift=0.5), torch.tanh(2 * y + 0.5), rtol=0.0)
    result = propagate(lambda x: stretched(x, 2.0, shift=0.5), gaussian())
    expected = propagate(lambda x: torch.tanh(2 * x + 0.5), gaussian())
    assert_close(result.covariance_matrix, expected.covariance_matrix, rtol=1e-10)


def test_kinks_can_be_given_above_the_definition():
    @cp.activation(kinks=(0.3,))
    def shifted(y: Tensor) -> Tensor:
        return (y - 0.3).abs()

    assert_moments_agree(lambda y: (y - 0.3).abs(), propagate(shifted, gaussian()), (0.3,))


def test_a_constant_function_has_no_variance():
    result = propagate(cp.activation(lambda y: torch.full_like(y, 2.5)), gaussian())
    assert_close(result.mean, torch.full((2,), 2.5, dtype=torch.float64), rtol=0.0)
    assert_close(result.covariance_matrix, torch.zeros(2, 2, dtype=torch.float64), rtol=0.0)


REFUSED = {
    "kink": (lambda y: (y - 0.3).abs(), "kinks="),
    "small kink": (lambda y: y + 1e-4 * (y - 0.3).abs(), "kinks="),
    "root": (lambda y: y.abs().sqrt(), "kinks="),
    "pole": (lambda y: 1 / y, "."),
    "jump": (lambda y: y + torch.where(y > 0.3, 1.0, 0.0), "Piecewise"),
    "small jump": (lambda y: y + 1e-4 * torch.where(y > 0.3, 1.0, 0.0), "Piecewise"),
    "steps": (torch.floor, "Piecewise"),
    "jump with another slope": (lambda y: torch.where(y > 0.3, y, torch.zeros_like(y)), "."),
    "gradient of its own": (lambda y: y + (y.round() - y).detach(), "gradient of its own"),
    "no gradient": (lambda y: y.detach().square(), "gradient of its own"),
    "logarithm": (torch.log, "not finite"),
    "square root": (torch.sqrt, "not finite"),
    "overflow": (lambda y: torch.exp(y.square()), "not finite"),
    "sum": (lambda y: y.sum(-1), "element-wise"),
    "number": (lambda _: 3.0, "element-wise"),
    "softmax": (lambda y: torch.softmax(y, -1), "."),
    "centred": (lambda y: y - y.mean(), "."),
    "running sum": (lambda y: y.cumsum(-1), "."),
    "flip": (lambda y: y.flip(-1), "."),
}


def test_moments_from_beyond_the_grid_are_refused():
    """E[y exp(y)] = s^2 exp(s^2 / 2), of which half comes from beyond 12 deviations at s = 12."""
    function = cp.activation(lambda y: y * torch.exp(y))
    for stddev, right in ((1.0, True), (2.5, True), (8.0, False), (14.0, False)):
        x = cp.Gaussian.isotropic(torch.zeros(2, dtype=torch.float64), stddev=stddev)
        if right:
            expected = torch.full((2,), stddev**2 * math.exp(stddev**2 / 2), dtype=torch.float64)
            assert_close(propagate(function, x).mean, expected, rtol=1e-9)
        else:
            with pytest.raises(cp.QuadratureError, match="12 standard deviations"):
                propagate(function, x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_quadrature_cannot_do_is_refused_with_advice(name):
    function, advice = REFUSED[name]
    with pytest.raises(cp.QuadratureError, match=advice):
        propagate(cp.activation(function), gaussian())


@pytest.fixture
def direct_pairs(monkeypatch):
    """The numbers of pairs that were integrated directly instead of by a series."""
    counts = []
    original = quadrature.nested_covariance

    def spy(scalar, left, right, *pairs):
        counts.append(len(pairs[0]))
        return original(scalar, left, right, *pairs)

    monkeypatch.setattr(quadrature, "nested_covariance", spy)
    return counts


WIDE = ((0.4, -1.5), (9.0, 6.0))


@pytest.mark.parametrize(
    ("function", "kinks", "rho", "stddevs"),
    [
        (cauchy, (), 0.999, WIDE[1]),
        (cauchy, (), -0.9999, WIDE[1]),
        (bent, (-1.0, 0.3), 0.97, STDDEVS),
        (bent, (-1.0, 0.3), -0.99, STDDEVS),
    ],
)
def test_wide_strongly_correlated_pairs_are_integrated_directly(
    function, kinks, rho, stddevs, direct_pairs
):
    x = gaussian(rho, WIDE[0], stddevs)
    result = propagate(cp.activation(function, kinks=kinks), x)
    assert direct_pairs
    expected = pair_covariance(function, WIDE[0], stddevs, rho, kinks)
    scale = float(result.stddev.prod())
    assert float(result.covariance_matrix[0, 1]) == pytest.approx(expected, abs=1e-9 * scale)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_at_correlation_one_the_covariance_is_a_single_integral(sign, direct_pairs):
    result = propagate(cp.activation(cauchy), gaussian(sign, *WIDE))
    assert direct_pairs
    (m1, m2), (s1, s2) = WIDE
    z, weight = normal_rule(0.0, max(s1, s2))
    first, second = evaluate(cauchy, m1 + s1 * z), evaluate(cauchy, m2 + sign * s2 * z)
    expected = (weight * (first - (weight * first).sum()) * second).sum()
    assert float(result.covariance_matrix[0, 1]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    "function", [cauchy, torch.nn.functional.softsign, torch.nn.functional.elu]
)
def test_gradients_of_directly_integrated_pairs_agree_with_differences(function, direct_pairs):
    element_wise = cp.activation(cauchy) if function is cauchy else function

    def pair(mean: Tensor, variance: Tensor, cross: Tensor) -> Tensor:
        matrix = torch.diag(variance) + cross * torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double()
        x = cp.Gaussian(mean, matrix, validate_args=False)
        return propagate(element_wise, x).covariance_matrix[0, 1]

    mean = torch.tensor([0.4, -0.5], dtype=torch.float64)
    variance = torch.tensor([8.0, 14.0], dtype=torch.float64)
    cross = torch.tensor(0.999 * 112**0.5, dtype=torch.float64)
    assert_gradients(pair, (mean, variance, cross), atol=1e-7)
    assert direct_pairs


@pytest.mark.parametrize("rate", [5.0, 10.0])
@pytest.mark.parametrize("function", [torch.tanh, torch.nn.functional.softplus])
def test_duplicates_of_a_function_with_narrow_features_covary_as_much_as_they_vary(function, rate):
    def narrow(y: Tensor) -> Tensor:
        return function(rate * y)

    matrix = propagate(cp.activation(narrow), gaussian(1.0, (0.3, 0.3), (3.0, 3.0)))
    matrix = matrix.covariance_matrix
    assert_close(matrix[0, 1], matrix[0, 0], rtol=1e-8)


def test_weakly_correlated_pairs_are_never_integrated_directly(direct_pairs):
    propagate(cp.activation(bump), gaussian(0.3))
    assert not direct_pairs


def test_single_precision_is_integrated_in_double():
    x = gaussian(0.6).to(torch.float32)
    result = propagate(cp.activation(bump), x)
    assert result.dtype == torch.float32
    expected = propagate(cp.activation(bump), x.to(torch.float64))
    assert_close(result.mean, expected.mean.float(), atol=1e-7)
    assert_close(result.covariance_matrix, expected.covariance_matrix.float(), atol=1e-6)


def test_the_covariance_of_a_pair_does_not_depend_on_its_order():
    function = cp.activation(bent, kinks=(-1.0, 0.3))
    straight = propagate(function, gaussian(0.999)).covariance_matrix[0, 1]
    swapped = gaussian(0.999, MEANS[::-1], STDDEVS[::-1])
    swapped = propagate(function, swapped).covariance_matrix[0, 1]
    assert math.isclose(float(straight), float(swapped), rel_tol=1e-12)


WIDE_PAIR = """
import resource, torch, covprop as cp
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
matrix = 300.0**2 * torch.tensor([[1, 0.95], [0.95, 1]], dtype=torch.float64)
x = cp.Gaussian(torch.zeros(2, dtype=torch.float64), matrix)
y = cp.propagate(torch.nn.functional.softsign, x, cp.GaussianLayers())
assert 0.5 < float(y.correlation_matrix[0, 1]) < 1
"""


@pytest.mark.slow
def test_a_single_very_wide_pair_fits_into_memory():
    done = subprocess.run([sys.executable, "-c", WIDE_PAIR], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize("at", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("deviation", [1e-3, 5e-7, 1e-12])
def test_gradients_near_a_kink_do_not_depend_on_the_width(at, deviation):
    """By the variance the mean of SELU has the slope of a ramp on one side, at any width."""
    scale, alpha = 1.0507009873554804934, 1.6732632423543772848

    def expected(variance):
        s, m = mp.sqrt(variance), mp.mpf(at * deviation)
        positive = m * mp.ncdf(m / s) + s * mp.npdf(m / s)
        negative = mp.exp(m + variance / 2) * mp.ncdf(-(m + variance) / s) - mp.ncdf(-m / s)
        return scale * (positive + alpha * negative)

    mean = torch.tensor([at * deviation], dtype=torch.float64)
    variance = torch.tensor([[deviation**2]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(propagate(F.selu, cp.Gaussian(mean, variance)).mean, variance)
    with mp.workdps(60):
        true = float(mp.diff(expected, mp.mpf(deviation) ** 2, h=mp.mpf(deviation) ** 2 * 1e-12))
    assert_close(slope, torch.full_like(slope, true), rtol=1e-6, atol=1e-15 / deviation)


@pytest.mark.parametrize("rho", [0.5, 0.99, 0.999999])
def test_integrals_of_pairs_on_a_kink_do_not_depend_on_the_width(rho):
    """SELU is two slopes where it is narrow: moments of ramps, in units of the deviation."""

    def scaled(deviation: float) -> Tensor:
        numbers = (0.0, deviation, 0.0, deviation, rho)
        pair = (torch.tensor([number], dtype=torch.float64) for number in numbers)
        return nested_covariance(Scalar(F.selu, (0.0,)), [], [], *pair) / deviation**2

    up, down = 1.0507009873554805, 1.0507009873554805 * 1.6732632423543772
    angle, wave = math.acos(-rho), math.sqrt(1 - rho**2)
    alike = (wave + rho * angle) / (2 * math.pi)  # E[relu(x) relu(y)], as Cho & Saul have it
    unlike = (wave - rho * math.acos(rho)) / (2 * math.pi)  # E[relu(x) relu(-y)]
    mean = (up - down) / math.sqrt(2 * math.pi)
    expected = (up**2 + down**2) * alike - 2 * up * down * unlike - mean**2
    for deviation in (1e-7, 5e-8, 1e-9):
        assert_close(scaled(deviation), torch.tensor([expected]).double(), rtol=2e-6)


def test_what_follows_from_the_other_variable_is_not_integrated_over():
    """The features of a linear layer with one input: the work of one integral, not of two."""
    evaluated = []

    def function(y: Tensor) -> Tensor:
        evaluated.append(y.numel())
        return torch.relu(y).square()

    weight = torch.linspace(0.5, 1.5, 20, dtype=torch.float64)[:, None]
    x = cp.Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    activation = cp.activation(function, kinks=(0.0,))
    y = propagate(lambda x: activation(F.linear(x, weight)), x)
    square = weight.square()
    assert_close(y.covariance_matrix, 1.25 * square * square.mT, rtol=1e-10)  # E r^4 = 3 / 2
    assert sum(evaluated) < 1e6
