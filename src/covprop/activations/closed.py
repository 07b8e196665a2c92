"""Functions in closed form: normal cdf (probit, erf, GELU), exponential, sinusoids, polynomials.

Phi(y) is the probability that y plus independent standard normal noise is positive, so a Gaussian
of variance sigma^2 behaves like one of variance S^2 = 1 + sigma^2 at a hard step. The others follow
from the moment generating function.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements
from covprop.activations.correlated import Correlated
from covprop.activations.moments import Scalar, leading
from covprop.kernels import compiled_pairs
from covprop.kernels.normal import (
    cumulative,
    density,
    partial_expectation,
    rectified_moments,
    standard_deviation,
)
from covprop.kernels.plackett import bivariate_density, gap_to_one, plackett
from covprop.kernels.polynomials import hermite_functions, unit_interval

GELU_SWITCH = 0.5
"""The |R| below which GELU's covariance is integrated and above which it is closed."""
COSTS = {"probit": 150.0, "gelu": 400.0}
"""Of direct formulas, compiled, in terms of the series."""
GELU_NODES = {torch.float32: 6, torch.float64: 14}


@final
@dataclass(frozen=True)
class Probit(Correlated):
    """offset + height * Phi(rate * y)."""

    rate: float = 1.0
    height: float = 1.0
    offset: float = 0.0

    @property
    def nondecreasing(self) -> bool:
        """Whether rate and height have one sign."""
        return self.rate * self.height >= 0

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[Phi(rate y)] = Phi(A), A = rate mu / S."""
        position = self._position(mean, variance)[0]
        if not self.offset:  # small values keep their digits
            return self.height * cumulative(position)
        # Centred on 1/2 so that erf, an odd function, keeps small means.
        centred = torch.erf(position / math.sqrt(2)) / 2
        return (self.offset + self.height / 2) + self.height * centred

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """height^2 K0(A, A, R)."""
        position, shrink = self._position(mean, variance)
        return self.height**2 * plackett(position, position, shrink.square() * variance)[0]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = height (rate sigma / S)^k (-1)^(k-1) He_{k-1}(A) phi(A) / sqrt(k!)."""
        position, shrink = self._position(mean, variance)
        powers = _powers(-shrink * standard_deviation(variance), order)
        rows = zip(range(order), powers, hermite_functions(position), strict=False)
        return torch.stack(
            [self.height * shrink * power * h / math.sqrt(k + 1) for k, power, h in rows]
        )

    @property
    def key(self) -> Hashable:
        """The height; the rate is in the elements."""
        return self.height

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """A and rate / S."""
        return self._position(mean, variance)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """height^2 K0(A_i, A_j, R), R = rate^2 c / (S_i S_j)."""
        rho = covariance * (left[1] * right[1])
        return self.height**2 * plackett(left[0], right[0], rho)[0]

    def compiled_direct(self, left: Elements, right: Elements) -> compiled_pairs.Direct | None:
        """The formula of `direct`, and its numbers."""
        return compiled_pairs.Direct(
            "probit", torch.stack(left), torch.stack(right), COSTS["probit"], height=self.height
        )

    def _position(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        shrink = self.rate / (1 + self.rate**2 * variance.clamp(min=0)).sqrt()
        return mean * shrink, shrink


@final
@dataclass(frozen=True)
class GaussianErrorLinear(Correlated):
    """GELU(y) = y Phi(y) = E_e[relu(y + e)] - phi(y), e standard normal."""

    key: ClassVar[Hashable] = None

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """mu Phi(A) + sigma^2 phi(A) / S."""
        position, spread = _widened(mean, variance)
        return mean * cumulative(position) + variance.clamp(min=0) * density(position) / spread

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance of an element with itself."""
        elements = self.elements(mean, variance)
        return self.direct(elements, elements, variance).clamp(min=0)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (-sigma/S)^k phi(A) [S He_{k-2}(A) - He_k(A) / S] / sqrt(k!) for k > 1."""
        position, spread = _widened(mean, variance)
        powers = _powers(-standard_deviation(variance) / spread, order)
        hermite = [h for _, h in zip(range(order + 1), hermite_functions(position), strict=False)]
        rows = [_expected_slope(position, spread)]
        for k in range(2, order + 1):
            inner = hermite[k] / spread - spread * hermite[k - 2] / math.sqrt(k * (k - 1))
            rows.append(powers[k - 1] * inner / spread)
        return torch.stack(rows)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """A, S and E[g']."""
        position, spread = _widened(mean, variance)
        return position, spread, _expected_slope(position, spread)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Price's integral for small R, where the closed form cancels; the closed form else."""
        tensors = torch.broadcast_tensors(*left, *right, covariance)
        ratio = (covariance / (left[1] * right[1])).abs()
        small = ratio <= GELU_SWITCH
        if bool(small.all()):
            return _gelu_integral(*tensors)
        result = torch.empty_like(tensors[-1])
        result = result.masked_scatter(small, _gelu_integral(*(t[small] for t in tensors)))
        return result.masked_scatter(~small, _gelu_closed(*(t[~small] for t in tensors)))

    def compiled_direct(self, left: Elements, right: Elements) -> compiled_pairs.Direct | None:
        """The formulas of `direct`, and their numbers."""
        return compiled_pairs.Direct("gelu", torch.stack(left), torch.stack(right), COSTS["gelu"])


def _gelu_integral(
    a: Tensor, s1: Tensor, slope1: Tensor, b: Tensor, s2: Tensor, slope2: Tensor, c: Tensor
) -> Tensor:
    """c E[g'] E[g'] + int_0^c (c - r) E_r[g'' g''] dr, with g'' = phi - phi''.

    E_r[g''(y_i) g''(y_j)] = (1 - d_i^2)(1 - d_j^2) of the density of (u_i, u_j) at 0, u = y + e.
    """
    limit = c / (s1 * s2)
    angle = torch.asin(limit)
    halves, product = (a.square() + b.square()) / 2, a * b
    total = torch.zeros_like(limit)
    for node, weight in unit_interval(GELU_NODES[c.dtype]):
        r = torch.sin(angle * node)
        rest = 1 - r.square()
        first, second = (a - r * b) / (s1 * rest), (b - r * a) / (s2 * rest)
        cross = r / (s1 * s2 * rest)
        polynomial = (
            (1 + 1 / (s1.square() * rest) - first.square())
            * (1 + 1 / (s2.square() * rest) - second.square())
            + 4 * first * second * cross
            + 2 * cross.square()
        )
        value = torch.exp((product * r - halves) / rest) * weight
        total = total + value * (limit - r) * polynomial
    return c * (slope1 * slope2) + (s1 * s2) * total * angle / (2 * math.pi)


def _gelu_closed(
    a: Tensor, s1: Tensor, _: Tensor, b: Tensor, s2: Tensor, __: Tensor, c: Tensor
) -> Tensor:
    """E[G_i G_j] by the relu of u and its conditional expectations given u = 0, less the means."""
    rho = c / (s1 * s2)
    gap = gap_to_one(rho)
    rest = gap * (2 - gap)  # 1 - rho^2, 0 for huge variances
    relu = s1 * s2 * (rho * cumulative(a) * cumulative(b) + plackett(a, b, rho)[1])

    def given_zero(a: Tensor, b: Tensor, ratio: Tensor) -> Tensor:
        above, _ = rectified_moments(b - rho * a, rest)
        return density(a) * ratio * (above - partial_expectation(b))

    both = (bivariate_density(a, b, rho) - density(a) * density(b)) / (s1 * s2)
    return relu - given_zero(a, b, s2 / s1) - given_zero(b, a, s1 / s2) + both


def _widened(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    spread = (1 + variance.clamp(min=0)).sqrt()
    return mean / spread, spread


def _expected_slope(position: Tensor, spread: Tensor) -> Tensor:
    return cumulative(position) + position * density(position) / spread.square()


def _powers(base: Tensor, count: int) -> list[Tensor]:
    powers = [torch.ones_like(base)]
    for _ in range(count - 1):
        powers.append(powers[-1] * base)
    return powers


@final
@dataclass(frozen=True)
class Exponential(Activation):
    """exp(y)."""

    nondecreasing: ClassVar[bool] = True
    key: ClassVar[Hashable] = None

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """exp(mu + sigma^2 / 2)."""
        return torch.exp(mean + variance / 2)

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[g]^2 (exp(sigma^2) - 1)."""
        return self.mean(mean, variance).square() * torch.expm1(variance)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = sigma^k E[g] / sqrt(k!)."""
        return _from_derivatives([self.mean(mean, variance)] * order, variance)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """E[g]."""
        return (self.mean(mean, variance),)

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """E[g_i] E[g_j] (exp(c) - 1)."""
        return left[0] * (right[0] * torch.expm1(covariance))  # left * right may overflow


@final
@dataclass(frozen=True)
class Sinusoid(Activation):
    """sin(y), or cos(y), which differ by their elements."""

    cosine: bool = False
    key: ClassVar[Hashable] = None
    periodic: ClassVar[bool] = True

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) exp(-sigma^2 / 2)."""
        return self._derivative(mean, 0) * torch.exp(-variance / 2)

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance of an element with itself."""
        elements = self.elements(mean, variance)
        return self.pair(elements, elements, variance).clamp(min=0)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = sigma^k g^(k)(mu) exp(-sigma^2 / 2) / sqrt(k!)."""
        stddev, rows = standard_deviation(variance), []
        # sigma^(k-1) / sqrt(k!) overflows where exp is zero: factor 2^exponent, the factor below 1.
        factor, exponent = torch.ones_like(stddev), torch.zeros_like(stddev)
        for k in range(1, order + 1):
            factor = factor / math.sqrt(k)
            decay = torch.exp(exponent * math.log(2) - variance / 2)
            rows.append(factor * decay * self._derivative(mean, k))
            factor = factor * stddev
            shift = torch.frexp(factor.detach()).exponent.clamp(min=0).to(factor)
            factor, exponent = factor * torch.exp2(-shift), exponent + shift
        return torch.stack(rows)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """g(mu), g'(mu) and sigma^2 / 2."""
        return self._derivative(mean, 0), self._derivative(mean, 1), variance / 2

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """exp(-(sigma_i^2 + sigma_j^2)/2) [g_i g_j (cosh c - 1) + g'_i g'_j sinh c]."""
        sign = torch.where(covariance < 0, -1, 1).to(covariance.dtype)
        size = covariance * sign
        # |c| never exceeds the mean variance: with it in the exponent nothing overflows.
        scale = torch.exp(size - (left[2] + right[2])) / 2
        even = (left[0] * right[0]) * torch.expm1(-size).square()
        odd = (left[1] * right[1]) * sign * torch.expm1(-2 * size)
        return scale * (even - odd)

    def _derivative(self, y: Tensor, k: int) -> Tensor:
        k = k + 1 if self.cosine else k
        value = torch.sin(y) if k % 2 == 0 else torch.cos(y)
        return -value if k // 2 % 2 else value


@final
@dataclass(frozen=True)
class Polynomial(Activation):
    """sum_p coefficient_p y^p; its Hermite series ends at its degree.

    Coefficients are numbers, or tensors (*batch, n) of a number for each element.
    """

    polynomial: Sequence[float | Tensor]

    @property
    def power_coefficients(self) -> Sequence[float | Tensor]:
        """Its own."""
        return self.polynomial

    @property
    def degree(self) -> int:
        """The highest power, 1 at least."""
        return max(1, len(self.polynomial) - 1)

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The polynomial of the raw moments."""
        return self._expected_derivatives(mean, variance)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """sum_k sigma^(2k) E[g^(k)]^2 / k!, no term of which is negative."""
        elements = self.elements(mean, variance)
        return self.pair(elements, elements, variance)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = sigma^k E[g^(k)] / sqrt(k!), zero beyond the degree."""
        derivatives = self._expected_derivatives(mean, variance)[1 : order + 1]
        nothing = mean.new_zeros(order - len(derivatives), *mean.shape)
        return torch.cat([_from_derivatives(derivatives, variance), nothing])

    @property
    def key(self) -> Hashable:
        """The degree."""
        return len(self.polynomial)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """E[g^(k)] / sqrt(k!) for k = 1 ... degree."""
        derivatives = self._expected_derivatives(mean, variance)[1:]
        return tuple(d / math.sqrt(math.factorial(k)) for k, d in enumerate(derivatives, start=1))

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """sum_k c^k E[g^(k)]_i E[g^(k)]_j / k!."""
        result, power = torch.zeros_like(covariance), torch.ones_like(covariance)
        for a, b in zip(left, right, strict=True):
            power = power * covariance
            result = result + a * (b * power)  # a * b may overflow
        return result

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """Its powers, and their coefficients."""
        del variance
        terms = []
        for exponent, coefficient in enumerate(self.polynomial[1:], start=1):
            factor = torch.as_tensor(coefficient, dtype=mean.dtype, device=mean.device)
            power = partial(torch.pow, exponent=exponent)
            terms.append((factor.expand(mean.shape), Scalar(power)))
        return terms or [(torch.zeros_like(mean), Scalar(torch.zeros_like))]

    def _expected_derivatives(self, mean: Tensor, variance: Tensor) -> list[Tensor]:
        """E[g^(k)(y)] for k = 0 ... degree."""
        moments = [torch.ones_like(mean), mean]
        for p in range(2, len(self.polynomial)):
            moments.append(mean * moments[p - 1] + (p - 1) * variance * moments[p - 2])
        rows, polynomial = [], list(self.polynomial)
        while polynomial:
            terms = [leading(c, mean) * m for c, m in zip(polynomial, moments, strict=False)]
            rows.append(torch.stack(terms).sum(0))
            polynomial = [p * c for p, c in enumerate(polynomial)][1:]
        return rows


def power(exponent: int) -> Polynomial:
    """Build y^exponent for an exponent of 0, 1, 2 ..."""
    return Polynomial([0.0] * exponent + [1.0])


def _from_derivatives(derivatives: Sequence[Tensor], variance: Tensor) -> Tensor:
    """a_k / sigma = sigma^(k-1) E[g^(k)] / sqrt(k!) for k = 1 ..."""
    stddev = standard_deviation(variance)
    factor, rows = torch.ones_like(stddev), []
    for k, derivative in enumerate(derivatives, start=1):
        factor = factor / math.sqrt(k)
        rows.append(factor * derivative)
        factor = factor * stddev
    return torch.stack(rows) if rows else stddev.new_zeros(0, *stddev.shape)
