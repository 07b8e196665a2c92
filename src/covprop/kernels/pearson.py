"""Pearson's type III distribution: that of a shifted gamma variable, by its skewness.

With mean 0, variance 1 and skewness s > 0 it is z = (g - a) / sqrt(a), g of the gamma distribution
with the shape a = 4 / s^2; s < 0 is its reflection, and s -> 0 the normal distribution. With
mu = s z / 2 and v = sign(mu) sqrt(2 a (mu - log(1 + mu))), the density is phi(v) / (1 + mu) / G,
G = Gamma(a) / (sqrt(2 pi / a) (a / e)^a), and (Temme 1979; DLMF 8.12)

    P(Z > z) = Phi(-v) + phi(v) (s / 2) sum_k c_k(eta) (s / 2)^(2 k),  eta = s v / 2:

v and eta come from mu without cancellation, so that nothing is lost as s -> 0. This is used for
shapes from `LARGE` on; torch.special.gammainc, good to 1e-14 below, has errors of 1e-9 there.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.normal import SQRT_2, density

LARGE = 15.0
"""The shape from which Temme's expansion is taken; torch's own begins at 20."""
WIDEST = 1.0
"""|eta| up to which it is; its coefficients are series in eta of radius 3.5."""
ORDERS, DEGREE = 14, 29
"""Terms in 1 / a, and in eta: the rest is below rounding at the shape and width above."""
NEGLIGIBLE = 1e-18
"""Terms below this, there, are left out."""
NEAR = 0.25
"""|mu| up to which mu - log(1 + mu) is taken as a series, and its number of terms."""
TERMS = 27
TINY = 1e-17
"""A gamma variable below which P(a, x) = x^a / Gamma(a + 1) to rounding."""
FARTHEST = 37.0
"""Normal scores beyond which quantiles are those of this one: probabilities of 1e-299."""
FAR = 1e100
"""Standard deviations from the mean beyond which nothing changes."""
ROUNDS = 80
"""Steps of Newton's method at most; about six are needed, and bisection needs fifty."""
STEP = 2e-3
"""Of differences of fourth order, relative to the scale of a function."""
LOG_SQRT_2PI = math.log(2 * math.pi) / 2
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
"""Coefficients of log G in odd powers of 1 / a."""
SMALLEST = 1e-5
"""Skewness below which samples are z + s (z^2 - 1) / 6, right to the order s."""


class _Tails(NamedTuple):
    """Logarithms of P(Z <= z), of P(Z > z) and of dP / dy, y = log(1 + mu) 2 / s."""

    below: Tensor
    above: Tensor
    rate: Tensor


@cache
def _coefficients() -> tuple[tuple[float, ...], ...]:
    """Of eta^n (s / 2)^(2 k), row by row for each n, without those below rounding.

    mu mu' = eta (1 + mu) gives mu as a series in eta, 1 / mu = 1 / eta + c_0, and
    c_k = c_{k-1}' / eta - d_{k-1,1} / mu, which has no pole, for c_k = sum_n d_{k,n} eta^n.
    """
    size = DEGREE + 2 * ORDERS + 2
    mu = [Fraction(0), Fraction(1)]
    for n in range(2, size + 2):  # the coefficient of eta^n in mu mu' - eta mu
        rest = sum(((n + 1 - i) * mu[i] * mu[n + 1 - i] for i in range(2, n)), Fraction(0))
        mu.append((mu[n - 1] - rest) / (n + 1))
    inverse = [Fraction(1)]  # of mu / eta
    for n in range(1, size):
        inverse.append(-sum((mu[i + 1] * inverse[n - i] for i in range(1, n + 1)), Fraction(0)))
    first = inverse[1:]
    columns = [first]
    for _ in range(ORDERS - 1):
        last = columns[-1]
        columns.append([(n + 2) * last[n + 2] - last[1] * first[n] for n in range(len(last) - 2)])
    rows = []
    for n in range(DEGREE):
        row = [float(column[n]) for column in columns if n < len(column)]
        while row and abs(row[-1]) * LARGE ** (1 - len(row)) * WIDEST**n < NEGLIGIBLE:
            row.pop()
        rows.append(tuple(row))
    return tuple(rows)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[-1] if coefficients else 0.0)
    for coefficient in reversed(coefficients[:-1]):
        result = result.mul_(x).add_(coefficient)
    return result


def _quotient(values: Tensor, argument: Tensor) -> Tensor:
    """f(u) / u for a function f with the slope 1 at 0."""
    usual = argument.abs() > torch.finfo(argument.dtype).tiny
    return torch.where(usual, values / torch.where(usual, argument, 1), 1)


def _score(z: Tensor, mu: Tensor) -> Tensor:
    """v = z sqrt(2 (mu - log(1 + mu)) / mu^2), whatever the size of mu."""
    near = mu.abs() < NEAR
    series = _polynomial(
        [2 * (-1.0) ** n / (n + 2) for n in range(TERMS)], torch.where(near, mu, 0)
    )
    other = torch.where(near, 1, mu)
    direct = 2 * (other - torch.log1p(other)) / other / other
    return z * torch.where(near, series, direct).sqrt()


def _log_gamma_ratio(skewness: Tensor) -> Tensor:
    """log G of the shape 4 / s^2."""
    inverse = skewness.square() / 4
    large = inverse * LARGE < 1
    small = torch.where(large, inverse, 0)
    series = small * _polynomial(STIRLING, small.square())
    shape = 1 / torch.where(large, 1, inverse)
    exact = torch.lgamma(shape) - (shape - 0.5) * shape.log() + shape - LOG_SQRT_2PI
    return torch.where(large, series, exact)


def _log_complement(log_probability: Tensor) -> Tensor:
    return torch.log1p(-log_probability.exp().clamp(max=1))


def _tails(z: Tensor, mu: Tensor, log_ratio: Tensor, skewness: Tensor) -> _Tails:
    """At z > -2 / s, for s >= 0; mu = s z / 2, log_ratio = log(1 + mu)."""
    v = _score(z, mu)
    eta = v * skewness / 2
    rate = -v.square() / 2 - LOG_SQRT_2PI - _log_gamma_ratio(skewness)
    inverse = skewness.square() / 4
    expanded = (inverse * LARGE < 1) & (eta.abs() <= WIDEST)
    near, order = torch.where(expanded, eta, 0), torch.where(expanded, inverse, 0)
    series = torch.zeros_like(near)
    for row in reversed(_coefficients()):
        series = series.mul_(near).add_(_polynomial(row, order))
    series = series * skewness / 2
    below_half = v < 0
    # Over phi(v), the smaller of both probabilities.
    share = math.sqrt(math.pi / 2) * torch.special.erfcx(v.abs() / SQRT_2)
    share = share + torch.where(below_half, -series, series)
    smaller = -v.square() / 2 - LOG_SQRT_2PI + torch.where(expanded, share, 1).log()
    larger = _log_complement(smaller)
    below = torch.where(below_half, smaller, larger)
    above = torch.where(below_half, larger, smaller)
    if not bool(expanded.all()):
        others = ~expanded
        direct = _incomplete(1 / inverse[others], log_ratio[others])
        below, above = below.clone(), above.clone()
        below[others], above[others] = direct
    return _Tails(below, above, rate)


def _incomplete(shape: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of P(a, x) and Q(a, x) for x = a exp(log_ratio)."""
    log_x = shape.log() + log_ratio
    tiny = log_x < math.log(TINY)
    x = torch.where(tiny, 1, shape * log_ratio.exp()).clamp(max=torch.finfo(shape.dtype).max)
    power = shape * log_x - torch.lgamma(shape + 1)
    below = torch.where(tiny, power, torch.special.gammainc(shape, x).log())
    above = torch.where(tiny, _log_complement(power), torch.special.gammaincc(shape, x).log())
    return below, above


def _at(z: Tensor, skewness: Tensor) -> tuple[Tensor, _Tails, Tensor]:
    """Whether z is in the support, for s >= 0, and there tails and log(1 + mu)."""
    mu = skewness * z / 2
    inside = ~(mu <= -1)  # also of a NaN, which is to stay one
    z, mu = torch.where(inside, z, 0), torch.where(inside, mu, 0)
    log_ratio = torch.log1p(mu)
    return inside, _tails(z, mu, log_ratio, skewness), log_ratio


def _reflected(z: Tensor, skewness: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whether s is negative, and z and s with their signs changed there."""
    z, skewness = torch.broadcast_tensors(z, skewness)
    negative = skewness < 0
    return negative, torch.where(negative, -z, z).clamp(-FAR, FAR), skewness.abs()


def _probabilities(z: Tensor, skewness: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P(Z <= z), P(Z > z) and the density, in float64, for every z and s."""
    negative, z, skewness = _reflected(z, skewness)
    inside, tails, log_ratio = _at(z, skewness)
    below = torch.where(inside, tails.below.exp(), 0)
    above = torch.where(inside, tails.above.exp(), 1)
    height = torch.where(inside, (tails.rate - log_ratio).exp(), 0)
    return torch.where(negative, above, below), torch.where(negative, below, above), height


def _by_skewness(z: Tensor, skewness: Tensor) -> Tensor:
    """dP(Z <= z) / ds by differences of fourth order.

    Where the expansion holds, in s; else in the shape, as P(a, x) is smooth in it up to the end of
    the support: dP / ds = -(8 / s^3) (dP/da + p(x) dx/da), x = a + sqrt(a) z.
    """
    _, point, size = _reflected(z, skewness)
    mu = size * point / 2
    inside = ~(mu <= -1)
    mu = torch.where(inside, mu, 0)
    eta = _score(torch.where(inside, point, 0), mu) * size / 2
    smooth = (size.square() * (LARGE / 4) < 1) & (eta.abs() <= WIDEST)
    scale = 1 + point.abs() ** 3 / 6  # of the logarithmic derivative
    in_s = _difference(lambda h: _smaller(point, size + h), STEP / scale)
    shape = 4 / torch.where(smooth, 1, size).square()
    root = shape.sqrt()
    x = (shape + root * point).clamp(min=0)
    change = STEP * torch.minimum(shape, root)

    def lower(h: Tensor) -> Tensor:
        above = point > 0
        p, q = torch.special.gammainc(shape + h, x), torch.special.gammaincc(shape + h, x)
        return torch.where(above, -q, p)

    height = _probabilities(point, size)[2]
    along = height / root * (1 + point / (2 * root))
    in_shape = -shape * root * (_difference(lower, change) + along)
    # As P(z; s) = 1 - P(-z; -s), the derivative is that at the reflected point.
    return torch.where(inside, torch.where(smooth, in_s, in_shape), 0)


def _smaller(z: Tensor, skewness: Tensor) -> Tensor:
    """P(Z <= z), or -P(Z > z) above the mean, which has the same derivatives."""
    below, above, _ = _probabilities(z, skewness)
    return torch.where(z > 0, -above, below)


def _difference(function: Any, step: Tensor) -> Tensor:
    near = function(step) - function(-step)
    far = function(2 * step) - function(-2 * step)
    return (8 * near - far) / (12 * step)


def _quantile(score: Tensor, skewness: Tensor) -> Tensor:
    """The z with P(Z <= z) = Phi(score), by Newton's method for the logarithm of the smaller tail.

    It is a concave function of y = log(1 + mu) 2 / s, so that Newton's method converges from one
    side; a bracket guards it: g is at least (p Gamma(a + 1))^(1/a), and in z at least
    -sqrt(2 t) and at most sqrt(2 t) + s t / 2 for tails of exp(-t) (Boucheron, Lugosi & Massart
    2013), the median is between a - 1/3 and a (Chen & Rubin 1986).
    """
    negative, score, skewness = _reflected(score, skewness)
    end = torch.where(score > 0, math.inf, -2 / skewness)
    infinite = score.abs() >= FAR
    score = score.clamp(-FARTHEST, FARTHEST)
    lower = score <= 0
    target = torch.special.log_ndtr(-score.abs())
    half = skewness / 2
    shape = 1 / half.square().clamp(min=1 / FAR)
    reach = (-2 * target).sqrt()
    start = (torch.special.log_ndtr(score) + torch.lgamma(shape + 1)) / shape - shape.log()
    start = torch.where(half > 1 / FAR, start / half.clamp(min=1 / FAR), -math.inf)
    low = _logarithmic(torch.where(lower, -reach, -half / 3), half)
    low = torch.maximum(low, torch.where(shape < FAR ** (1 / 4), start, -math.inf))
    high = _logarithmic(torch.where(lower, 0, reach - half * target), half)
    guess = 1 - half.square() / 9 + half * score / 3  # Wilson & Hilferty 1931: its cube is 1 + mu
    cube = torch.where(guess > 0, guess, 1) ** 3 - 1
    y = _logarithmic(torch.where(half > SMALLEST, cube / half.clamp(min=SMALLEST), score), half)
    y = torch.where((guess > 0) & (y > low) & (y < high), y, (low + high) / 2)
    y = _newton(y.flatten(), low.flatten(), high.flatten(), target.flatten(),
                lower.flatten(), half.flatten()).reshape(y.shape)  # fmt: skip
    u = half * y
    z = torch.where(half > SMALLEST, torch.expm1(u) / half, y * _quotient(torch.expm1(u), u))
    z = torch.where(infinite, end, z)
    return torch.where(negative, -z, z)


def _newton(
    y: Tensor, low: Tensor, high: Tensor, target: Tensor, lower: Tensor, half: Tensor
) -> Tensor:
    """The y between low and high where the logarithm of the tail is the target."""
    rounding = 4 * torch.finfo(y.dtype).eps
    result, active = y.clone(), torch.arange(len(y), device=y.device)
    for _ in range(ROUNDS):
        u = half * y
        mu = torch.expm1(u)
        tails = _tails(y * _quotient(mu, u), mu, u, 2 * half)
        tail = torch.where(lower, tails.below, tails.above)
        excess = torch.where(lower, tail - target, target - tail)  # it rises with y
        low, high = torch.where(excess < 0, y, low), torch.where(excess > 0, y, high)
        moved = y - excess * (tail - tails.rate).exp()
        moved = torch.where((moved >= low) & (moved <= high), moved, (low + high) / 2)
        result[active] = moved
        going = (moved - y).abs() > rounding * moved.abs().clamp(min=1)
        going &= excess.abs() > rounding * (1 + target.abs())
        if not bool(going.any()):
            break
        active = active[going]
        y, low, high, target, lower, half = (
            part[going] for part in (moved, low, high, target, lower, half)
        )
    return result


def _logarithmic(z: Tensor, half: Tensor) -> Tensor:
    """y for a z, -inf at the end of the support and beyond."""
    mu = (half * z).clamp(min=-1)
    return z * _quotient(torch.log1p(mu), mu)


class _Cumulative(Function):
    @staticmethod
    def forward(z: Tensor, skewness: Tensor) -> Tensor:
        return _probabilities(z, skewness)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        z, skewness = ctx.saved_tensors
        by_z = gradient * _probabilities(z, skewness)[2] if ctx.needs_input_grad[0] else None
        by_s = gradient * _by_skewness(z, skewness) if ctx.needs_input_grad[1] else None
        return by_z, by_s


class _Quantile(Function):
    @staticmethod
    def forward(score: Tensor, skewness: Tensor) -> Tensor:
        return _quantile(score, skewness)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of P(z; s) = Phi(score): implicit differentiation."""
        score, skewness, z = ctx.saved_tensors
        height = _probabilities(z, skewness)[2]
        slope = torch.where(height > 0, gradient / torch.where(height > 0, height, 1), 0)
        by_s = -slope * _by_skewness(z, skewness) if ctx.needs_input_grad[1] else None
        return slope * density(score), by_s


def cumulative(z: Tensor, skewness: Tensor) -> Tensor:
    """P(Z <= z) in float64, accurate relative to itself in the lower tail.

    Differentiable once: with respect to the skewness by differences of fourth order.
    """
    z, skewness = torch.broadcast_tensors(z.double(), skewness.double())
    return _Cumulative.apply(z, skewness)


def quantile(score: Tensor, skewness: Tensor) -> Tensor:
    """The z with P(Z <= z) = Phi(score) in float64, which rises with the score.

    Differentiable once, by implicit differentiation of `cumulative`.
    """
    score, skewness = torch.broadcast_tensors(score.double(), skewness.double())
    return _Quantile.apply(score, skewness)


@torch.no_grad()
def draw(skewness: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Independent draws (count, *shape) in float64 for a skewness (*shape)."""
    s = skewness.double().expand(count, *skewness.shape)
    normal = torch.randn(s.shape, dtype=s.dtype, device=s.device, generator=generator)
    root = 2 / s.abs().clamp(min=SMALLEST)
    skewed = (torch._standard_gamma(root.square(), generator) / root - root) * s.sign()
    return torch.where(s.abs() > SMALLEST, skewed, normal + s * (normal.square() - 1) / 6)
