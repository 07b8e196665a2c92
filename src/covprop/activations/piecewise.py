"""Piecewise-linear functions with any number of kinks and jumps.

g(y) = linear + sum_t [ w_t relu(y - t) + h_t 1(y >= t) ]: the covariance is the double sum of the
pairwise covariances of these units, written so that what is far from a knot contributes nothing
instead of cancelling.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from covprop.activations.base import Elements
from covprop.activations.correlated import Correlated
from covprop.kernels.hermite import hermite_functions
from covprop.kernels.normal import (
    correlation,
    cumulative,
    density,
    inverse_deviation,
    partial_expectation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import plackett, plackett_degenerate, plackett_mixed
from covprop.kernels.rectified import ORDER as RECTIFIED_ORDER
from covprop.kernels.rectified import rectified_coefficients, rectified_moments


@final
@dataclass(frozen=True)
class Piecewise(Correlated):
    """A piecewise-linear function.

    function: the function itself, which says what its value is at a jump when nothing varies;
    knots: ascending; slopes: one more than knots, numbers or tensors of shape (*batch, n);
    start: the value just left of the first knot; jumps: one per knot.
    """

    function: Callable[[Tensor], Tensor]
    knots: Sequence[float]
    slopes: Sequence[float | Tensor]
    start: float
    jumps: Sequence[float]

    def __post_init__(self) -> None:
        """Check that the pieces fit together."""
        if len(self.slopes) != len(self.knots) + 1 or len(self.jumps) != len(self.knots):
            raise ValueError(
                f"{len(self.knots)} knots need {len(self.knots) + 1} slopes and {len(self.knots)} "
                f"jumps, not {len(self.slopes)} and {len(self.jumps)}"
            )
        if not self.knots:
            raise ValueError("a piecewise-linear function needs at least one knot")
        if list(self.knots) != sorted(self.knots):
            raise ValueError(f"knots must ascend, not {tuple(self.knots)}")

    @property
    def has_jumps(self) -> bool:
        """Whether the function is discontinuous."""
        return any(self.jumps)

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + sum_t [ w_t sigma m(-|a_t|) -+ h_t Phi(-|a_t|) ], a_t = (mu - t) / sigma."""
        return self._mean(mean, variance, self._knots(mean, variance))

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance at rho = 1, with the factor sigma^2 explicit for its gradient at 0."""
        return self._variance(mean, variance, self._knots(mean, variance))

    @property
    def uniform(self) -> bool:
        """Unless slopes are those of single elements."""
        return not any(isinstance(slope, Tensor) for slope in self.slopes)

    @property
    def rises(self) -> bool:
        """Where no slope and no jump is negative."""
        return self.uniform and all(step >= 0 for step in (*self.slopes, *self.jumps))

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (-1)^k phi(a) [w sigma He_{k-2}(a) - h He_{k-1}(a)] / sqrt(k!), for every knot."""
        return self._coefficients(mean, variance, order, self._knots(mean, variance))

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from the same positions; those of a ReLU, without gradients, in few operations."""
        if self._is_relu and order <= RECTIFIED_ORDER and not torch.is_grad_enabled():
            first, spread, rows = rectified_coefficients(mean, variance)
            return first, spread, rows[:order]
        knots = self._knots(mean, variance)
        return (
            self._mean(mean, variance, knots),
            self._variance(mean, variance, knots),
            self._coefficients(mean, variance, order, knots),
        )

    def marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance from the same positions; those of a ReLU in few operations."""
        if self._is_relu:
            return rectified_moments(mean, variance)
        knots = self._knots(mean, variance)
        return self._mean(mean, variance, knots), self._variance(mean, variance, knots)

    @property
    def _is_relu(self) -> bool:
        slopes = [slope for slope in self.slopes if not isinstance(slope, Tensor)]
        shape = list(self.knots), slopes, self.start, list(self.jumps)
        return shape == ([0.0], [0.0, 1.0], 0.0, [0.0])

    def _mean(self, mean: Tensor, variance: Tensor, knots: "Sequence[_Knot]") -> Tensor:
        stddev = standard_deviation(variance)
        result = self._value(mean)
        for knot, weight, jump in zip(knots, self._weights(), self.jumps, strict=True):
            result = result + weight * stddev * knot.excess
            if jump:
                result = result - jump * knot.side * knot.tail
        return torch.where(variance > 0, result, self.function(mean)) if self.has_jumps else result

    def _variance(self, mean: Tensor, variance: Tensor, knots: "Sequence[_Knot]") -> Tensor:
        slope = self._expected_slope(mean, knots)
        share = slope.square()  # of sigma^2
        result = variance * share
        weights, stddev = self._weights(), standard_deviation(variance)
        if self.has_jumps:
            result = result + 2 * stddev * slope * self._expected_jump(knots)
        for i, one in enumerate(knots):
            for j, other in enumerate(knots):
                first, second = one.degenerate() if i == j else one.with_other(other)
                result = result + variance * (weights[i] * weights[j]) * second
                if self.jumps[i]:
                    mixed = plackett_mixed(one.a, other.a, torch.ones_like(one.a), first)
                    result = result + 2 * stddev * (self.jumps[i] * weights[j]) * mixed
                    result = result + self.jumps[i] * self.jumps[j] * first
        # Rounding must not make the variance of a constant negative.
        return torch.where(variance > 0, result, variance * share).clamp(min=0)

    def _coefficients(
        self, mean: Tensor, variance: Tensor, order: int, knots: "Sequence[_Knot]"
    ) -> Tensor:
        rows = [self._expected_slope(mean, knots)]
        rows += [torch.zeros_like(mean)] * (order - 1)
        for knot, weight, jump in zip(knots, self._weights(), self.jumps, strict=True):
            wanted = range(order if jump else order - 1)
            for k, hermite in zip(wanted, hermite_functions(knot.a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                if k + 2 <= order:
                    rows[k + 1] = rows[k + 1] + weight * (
                        sign * hermite / ((k + 1) * (k + 2)) ** 0.5
                    )
                if jump:
                    inverse = inverse_deviation(variance)
                    rows[k] = rows[k] + (sign * jump / (k + 1) ** 0.5) * hermite * inverse
        return torch.stack(rows)

    @property
    def key(self) -> Hashable:
        """The jumps; knots and slopes are in the elements."""
        return tuple(self.jumps)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """1 / sigma, E[slope], sum h phi(a), then a_t and then w_t sigma for every knot."""
        knots, stddev = self._knots(mean, variance), standard_deviation(variance)
        slope, jump = self._expected_slope(mean, knots), self._expected_jump(knots)
        positions = [knot.a for knot in knots]
        weights = [weight * stddev for weight in self._weights()]
        return (inverse_deviation(variance), slope, jump, *positions, *weights)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """c E[g'] E[g'] + sum_tu w_t w_u sigma sigma K1, and K0 and mixed terms for the jumps."""
        count = len(self.knots)
        (inverse_i, slope_i, jump_i), a, u = left[:3], left[3 : 3 + count], left[3 + count :]
        (inverse_j, slope_j, jump_j), b, v = right[:3], right[3 : 3 + count], right[3 + count :]
        rho = correlation(covariance, inverse_i, inverse_j)
        result = covariance * (slope_i * slope_j)
        if self.has_jumps:
            mixed = slope_i * (jump_j * inverse_j) + slope_j * (jump_i * inverse_i)
            result = result + covariance * mixed
        for i, height_i in enumerate(self.jumps):
            for j, height_j in enumerate(self.jumps):
                first, second = plackett(a[i], b[j], rho)
                result = result + (u[i] * v[j]) * second
                if height_i:
                    result = result + height_i * v[j] * plackett_mixed(a[i], b[j], rho, first)
                if height_j:
                    result = result + height_j * u[i] * plackett_mixed(b[j], a[i], rho, first)
                if height_i and height_j:
                    result = result + height_i * height_j * first
        return result

    def _weights(self) -> list[float | Tensor]:
        return [after - before for before, after in pairwise(self.slopes)]

    def _value(self, y: Tensor) -> Tensor:
        """g(y), continuous from the right."""
        result = self.start + self.slopes[0] * (y - self.knots[0])
        level: float | Tensor = self.start
        for i, knot in enumerate(self.knots):
            if i > 0:
                level = level + self.slopes[i] * (knot - self.knots[i - 1])
            level = level + self.jumps[i]
            result = torch.where(y >= knot, level + self.slopes[i + 1] * (y - knot), result)
        return result

    def _knots(self, mean: Tensor, variance: Tensor) -> "list[_Knot]":
        stddev = standard_deviation(variance)
        return [_Knot.at(mean - knot, stddev) for knot in self.knots]

    def _expected_slope(self, mean: Tensor, knots: "Sequence[_Knot]") -> Tensor:
        """E of the slopes alone: the slope at the mean, corrected by the tails beyond each knot."""
        result = torch.as_tensor(self.slopes[0], dtype=mean.dtype, device=mean.device)
        for knot, slope in zip(knots, self.slopes[1:], strict=True):
            result = torch.where(knot.side > 0, slope, result)
        for knot, weight in zip(knots, self._weights(), strict=True):
            result = result - weight * knot.side * knot.tail
        return result

    def _expected_jump(self, knots: "Sequence[_Knot]") -> Tensor:
        terms = [jump * density(knot.a) for knot, jump in zip(knots, self.jumps, strict=True)]
        return torch.stack(terms).sum(0)


@dataclass(frozen=True)
class _Knot:
    """A knot seen from Gaussians: distance a in standard deviations, side, what lies beyond."""

    a: Tensor
    side: Tensor
    tail: Tensor
    """Phi(-|a|)"""
    excess: Tensor
    """m(-|a|)"""

    @classmethod
    def at(cls, distance: Tensor, stddev: Tensor) -> "_Knot":
        a = standardise(distance, stddev)
        side = torch.where(distance >= 0, 1.0, -1.0).to(a.dtype)
        beyond = -side * a
        return cls(a, side, cumulative(beyond), partial_expectation(beyond))

    def degenerate(self) -> tuple[Tensor, Tensor]:
        """K0 and K1 at rho = 1 with itself: Phi(a) Phi(-a), and that less m(a) m(-a)."""
        first = self.tail * (1 - self.tail)
        return first, first - self.excess * (self.side * self.a + self.excess)

    def with_other(self, other: "_Knot") -> tuple[Tensor, Tensor]:
        """The same for two thresholds of one variable."""
        return plackett_degenerate(self.a, other.a)


def continuous(
    function: Callable[[Tensor], Tensor],
    knots: Sequence[float],
    slopes: Sequence[float | Tensor],
    start: float,
) -> Piecewise:
    """Build a piecewise-linear function without jumps."""
    return Piecewise(function, knots, slopes, start, [0.0] * len(knots))
