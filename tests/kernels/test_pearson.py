"""Pearson's type III distribution, against scipy and mpmath, which share no code with it."""

import mpmath
import pytest
import torch
from scipy import stats
from torch import Tensor

from covprop.kernels import pearson
from tests.gaussians import numbers, seeded
from tests.oracles import assert_close

SKEWNESS = (1e-9, 1e-3, 0.1, 0.3, 0.516, 0.517, 0.7, 1.0, 2.0, 3.0, 8.0, 30.0)
"""The hand-over from the expansion to torch.special is at 2 / sqrt(15) = 0.5164."""
PLACES = (-9.0, -4.0, -1.5, -0.6, -0.05, 0.0, 0.01, 0.7, 2.0, 6.0, 15.0, 30.0)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def truth(z: float, skewness: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """P(Z <= z) and P(Z > z) to fifty digits."""
    with mpmath.workdps(60):
        shape = 4 / mpmath.mpf(skewness) ** 2
        x = shape + mpmath.sqrt(shape) * mpmath.mpf(z)
        if x <= 0:
            return mpmath.mpf(0), mpmath.mpf(1)
        power = mpmath.exp(shape * mpmath.log(x) - x - mpmath.loggamma(shape + 1))
        if x < 1.5 * shape + 3:
            below = power * mpmath.hyp1f1(1, shape + 1, x)
            return below, 1 - below
        above = mpmath.gammainc(shape, x, mpmath.inf, regularized=True)
        return 1 - above, above


def relative(found: Tensor, expected: mpmath.mpf) -> float:
    return float(abs(mpmath.mpf(float(found)) / expected - 1))


def tolerance(probability: mpmath.mpf) -> float:
    """A tail is exp(E) times a series: eight roundings of an exponent of the size of log p."""
    exponent = float(abs(mpmath.log(probability)))
    return 2e-13 + 8 * torch.finfo(torch.float64).eps * exponent


@pytest.mark.parametrize("skewness", [s for s in SKEWNESS if s > 0.01])
def test_both_tails_are_right_to_rounding(skewness: float) -> None:
    for z in PLACES:
        below, above = truth(z, skewness)
        found = pearson.cumulative(double(z), double(skewness))
        opposite = pearson.cumulative(double(-z), double(-skewness))
        if below > 1e-290:
            assert relative(found, below) < tolerance(below)
        else:
            assert float(found) < 1e-289
        if above > 1e-290:
            assert relative(opposite, above) < tolerance(above)


def test_nothing_is_lost_where_the_skewness_goes_to_zero() -> None:
    z = torch.linspace(-6, 6, 49, dtype=torch.float64)
    normal = torch.erfc(-z / 2**0.5) / 2
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    assert_close(pearson.cumulative(z, double(0.0)), normal, rtol=1e-14)
    for s in (1e-12, 1e-9, 1e-7):  # Edgeworth: the next term is of the order s^2
        found = (pearson.cumulative(z, double(s)) - normal) / s
        expected = density * (1 - z.square()) / 6
        assert_close(found, expected, rtol=0.0, atol=1e-15 / s + 2 * s)
    tiny = pearson.cumulative(z, double(1e-200))
    assert_close(tiny, normal, rtol=1e-14)


@pytest.mark.parametrize("skewness", [0.2, 0.8, 2.5, -0.4, -1.7])
def test_probabilities_and_quantiles_are_those_of_scipy(skewness: float) -> None:
    z = torch.linspace(-5, 5, 41, dtype=torch.float64)
    expected = torch.from_numpy(stats.pearson3.cdf(z.numpy(), skewness))
    assert_close(pearson.cumulative(z, double(skewness)), expected, rtol=0.0, atol=1e-12)
    p = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    expected = torch.from_numpy(stats.pearson3.ppf(p.numpy(), skewness))
    found = pearson.quantile(torch.special.ndtri(p), double(skewness))
    assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("skewness", SKEWNESS)
def test_quantiles_are_the_inverse(skewness: float) -> None:
    score = torch.linspace(-8, 36, 89, dtype=torch.float64)
    z = pearson.quantile(score, double(skewness))
    above = pearson.cumulative(-z, double(-skewness))
    expected = torch.erfc(score / 2**0.5) / 2
    # z is rounded, and of a large skewness the lowest of them are all the end of the support.
    inner = (score > -1) if skewness > 1 else torch.ones_like(score, dtype=torch.bool)
    inner &= z + 2 / skewness > 1e-3
    assert_close(above[inner], expected[inner], rtol=1e-11)
    assert bool((z.diff() >= 0).all())
    assert bool((z >= -2 / skewness).all())


def test_quantiles_end_where_the_support_does() -> None:
    s = double(0.0, 0.5, -0.5)
    low, high = (pearson.quantile(double(x).expand(3), s) for x in (-torch.inf, torch.inf))
    assert low.tolist() == [-torch.inf, -4.0, -torch.inf]
    assert high.tolist() == [torch.inf, torch.inf, 4.0]
    far = double(-1e300, 1e300, -torch.inf, torch.inf)
    assert pearson.cumulative(far, double(0.5)).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert bool(pearson.cumulative(double(torch.nan), double(0.5)).isnan())


@pytest.mark.parametrize("skewness", [-2.5, -0.5, -0.01, 0.0, 0.01, 0.3, 0.516, 0.517, 1.5, 4.0])
def test_gradients_are_derivatives(skewness: float) -> None:
    z = double(-2.0, -0.35, -0.1, 0.0, 0.3, 1.0, 2.5).requires_grad_()
    s = torch.full_like(z, skewness).requires_grad_()
    inside = (z.detach() * skewness / 2 > -0.9).nonzero()[:, 0]
    one, other = z.detach()[inside].requires_grad_(), s.detach()[inside].requires_grad_()
    assert torch.autograd.gradcheck(pearson.cumulative, (one, other), eps=1e-5, atol=1e-8)
    score = double(-1.0, -0.4, 0.1, 0.9, 2.0).requires_grad_()
    s = torch.full_like(score, skewness).requires_grad_()
    assert torch.autograd.gradcheck(
        pearson.quantile, (score, s), eps=1e-5, rtol=1e-5, atol=1e-7 * (1 + skewness**4)
    )


@pytest.mark.parametrize("z", [-3.0, 0.5, 8.0])
@pytest.mark.parametrize("skewness", [0.05, 0.5, 0.6, 3.0])
def test_the_derivative_by_the_skewness_is_that_of_many_digits(z: float, skewness: float) -> None:
    if skewness * z / 2 <= -1:
        return
    with mpmath.workdps(50):
        h = mpmath.mpf(10) ** -15
        above = [truth(z, mpmath.mpf(skewness) + sign * h)[1] for sign in (1, -1)]
        expected = float(-(above[0] - above[1]) / (2 * h))
    s = double(skewness).requires_grad_()
    pearson.cumulative(double(z), s).sum().backward()
    assert s.grad is not None
    assert_close(s.grad, double(expected), rtol=1e-7)


def test_second_derivatives_are_refused() -> None:
    z = double(0.3).requires_grad_()
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(pearson.cumulative(z, double(1.0)), z, create_graph=True)


@pytest.mark.parametrize("skewness", [0.0, 1e-6, 0.3, -1.0, 2.0, -4.0])
def test_draws_have_the_three_moments(skewness: float) -> None:
    count = 400_000
    drawn = pearson.draw(double(skewness), count, seeded(3))[:, 0]
    moments = [drawn, drawn.square(), drawn**3]
    for values, expected in zip(moments, (0.0, 1.0, skewness), strict=True):
        assert abs(float(values.mean()) - expected) < 4.5 * float(values.std()) / count**0.5
    below = (drawn <= 0.4).double().mean()
    expected_share = float(pearson.cumulative(double(0.4), double(skewness)))
    assert abs(float(below) - expected_share) < 4.5 * 0.5 / count**0.5


def test_shapes_broadcast() -> None:
    z, s = numbers(4, 1), numbers(3)
    assert pearson.cumulative(z, s).shape == (4, 3)
    assert pearson.quantile(z.float(), s.float()).dtype == torch.float64
    assert pearson.quantile(numbers(0), numbers(0)).shape == (0,)
    assert pearson.draw(s, 5, seeded()).shape == (5, 3)
