"""Exponentials, sines, cosines and polynomials: closed by the moment generating function."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements
from covprop.activations.grids import leading
from covprop.kernels.normal import standard_deviation


@final
@dataclass(frozen=True)
class Exponential(Activation):
    """exp(y)."""

    rises: ClassVar[bool] = True

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """exp(mu + sigma^2 / 2)."""
        return torch.exp(mean + variance / 2)

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[g]^2 (exp(sigma^2) - 1)."""
        return self.mean(mean, variance).square() * torch.expm1(variance)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = sigma^k E[g] / sqrt(k!)."""
        return _from_derivatives([self.mean(mean, variance)] * order, variance)

    @property
    def key(self) -> Hashable:
        """There is but one."""
        return None

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """E[g]."""
        return (self.mean(mean, variance),)

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """E[g_i] E[g_j] (exp(c) - 1)."""
        return left[0] * (right[0] * torch.expm1(covariance))  # left * right may overflow


@final
@dataclass(frozen=True)
class Sinusoid(Activation):
    """sin(y), or cos(y)."""

    cosine: bool = False

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) exp(-sigma^2 / 2)."""
        return self._derivative(mean, 0) * torch.exp(-variance / 2)

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance of an element with itself."""
        elements = self.elements(mean, variance)
        return self.pair(elements, elements, variance).clamp(min=0)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = sigma^k g^(k)(mu) exp(-sigma^2 / 2) / sqrt(k!)."""
        decay = torch.exp(-variance / 2)
        derivatives = [self._derivative(mean, k) * decay for k in range(1, order + 1)]
        return _from_derivatives(derivatives, variance)

    @property
    def key(self) -> Hashable:
        """Sine and cosine differ by their elements."""
        return None

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
        derivatives += [torch.zeros_like(mean)] * (order - len(derivatives))
        return _from_derivatives(derivatives, variance)

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
    return torch.stack(rows)
