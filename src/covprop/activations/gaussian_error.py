"""Functions made of the normal cdf: probit, erf and GELU.

Phi(y) is the probability that y plus independent standard normal noise is positive, so a Gaussian
of variance sigma^2 behaves like one of variance S^2 = 1 + sigma^2 at a hard step.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.activations.base import Elements
from covprop.activations.correlated import Correlated
from covprop.kernels.hermite import hermite_functions
from covprop.kernels.nodes import unit_interval
from covprop.kernels.normal import (
    cumulative,
    density,
    partial_expectation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import bivariate_density, gap_to_one, plackett

GELU_SWITCH = 0.5
"""The |R| below which GELU's covariance is integrated and above which it is closed."""

GELU_NODES = {torch.float32: 6, torch.float64: 14}


@final
@dataclass(frozen=True)
class Probit(Correlated):
    """offset + height * Phi(rate * y)."""

    rate: float = 1.0
    height: float = 1.0
    offset: float = 0.0

    @property
    def rises(self) -> bool:
        """Where rate and height have one sign."""
        return self.rate * self.height >= 0

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[Phi(rate y)] = Phi(A), A = rate mu / S."""
        position = self._position(mean, variance)[0]
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
        ratio = -shrink * standard_deviation(variance)
        powers = _powers(ratio, order)
        return torch.stack(
            [
                self.height * shrink * power * hermite / math.sqrt(k + 1)
                for k, power, hermite in zip(
                    range(order), powers, hermite_functions(position), strict=False
                )
            ]
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

    def _position(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        shrink = self.rate / (1 + self.rate**2 * variance.clamp(min=0)).sqrt()
        return mean * shrink, shrink


@final
@dataclass(frozen=True)
class GaussianErrorLinear(Correlated):
    """GELU(y) = y Phi(y) = E_e[relu(y + e)] - phi(y), e standard normal."""

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Mu Phi(A) + sigma^2 phi(A) / S."""
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

    @property
    def key(self) -> Hashable:
        """There is but one."""
        return None

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


def _gelu_integral(
    a: Tensor, s1: Tensor, slope1: Tensor, b: Tensor, s2: Tensor, slope2: Tensor, c: Tensor
) -> Tensor:
    """C E[g'] E[g'] + int_0^c (c - r) E_r[g'' g''] dr, with g'' = phi - phi''.

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
    a: Tensor, s1: Tensor, slope1: Tensor, b: Tensor, s2: Tensor, slope2: Tensor, c: Tensor
) -> Tensor:
    """E[G_i G_j] by the relu of u and its conditional expectations given u = 0, less the means."""
    del slope1, slope2
    rho = c / (s1 * s2)
    gap = gap_to_one(rho)
    root = standard_deviation(gap * (2 - gap))  # sqrt(1 - rho^2), 0 for huge variances
    relu = s1 * s2 * (rho * cumulative(a) * cumulative(b) + plackett(a, b, rho)[1])

    def given_zero(a: Tensor, b: Tensor, ratio: Tensor) -> Tensor:
        shift = b - rho * a
        tail = partial_expectation(-standardise(shift, root).abs())
        inner = shift.clamp(min=0) + root * tail - partial_expectation(b)
        return density(a) * ratio * inner

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
