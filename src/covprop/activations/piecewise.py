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
        stddev = standard_deviation(variance)
        result = self._value(mean)
        for knot, weight, jump in zip(self.knots, self._weights(), self.jumps, strict=True):
            side = _side(mean, knot)
            tail = -side * standardise(mean - knot, stddev)
            result = result + weight * stddev * partial_expectation(tail)
            result = result - jump * side * cumulative(tail)
        return torch.where(variance > 0, result, self.function(mean)) if self.has_jumps else result

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance at rho = 1, with the factor sigma^2 explicit for its gradient at 0."""
        stddev = standard_deviation(variance)
        positions = [standardise(mean - knot, stddev) for knot in self.knots]
        slope, jump = self._expected_slope(mean, positions), self._expected_jump(positions)
        result = variance * slope.square() + 2 * stddev * slope * jump
        weights = self._weights()
        for i, a in enumerate(positions):
            for j, b in enumerate(positions):
                first, second = plackett_degenerate(a, b)
                result = result + variance * (weights[i] * weights[j]) * second
                if self.has_jumps:
                    mixed = plackett_mixed(a, b, torch.ones_like(a), first)
                    result = result + 2 * stddev * (self.jumps[i] * weights[j]) * mixed
                    result = result + self.jumps[i] * self.jumps[j] * first
        # Rounding must not make the variance of a constant negative.
        return torch.where(variance > 0, result, variance * slope.square()).clamp(min=0)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (-1)^k phi(a) [w sigma He_{k-2}(a) - h He_{k-1}(a)] / sqrt(k!), for every knot."""
        stddev = standard_deviation(variance)
        positions = [standardise(mean - knot, stddev) for knot in self.knots]
        inverse = torch.where(variance > 0, 1 / torch.where(variance > 0, stddev, 1), 0)
        rows = [torch.zeros_like(mean) for _ in range(order)]
        rows[0] = self._expected_slope(mean, positions)
        for a, weight, jump in zip(positions, self._weights(), self.jumps, strict=True):
            for k, hermite in zip(range(order + 1), hermite_functions(a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                if k + 2 <= order:
                    rows[k + 1] = rows[k + 1] + weight * (
                        sign * hermite / ((k + 1) * (k + 2)) ** 0.5
                    )
                if jump and k + 1 <= order:
                    rows[k] = rows[k] + (sign * jump / (k + 1) ** 0.5) * hermite * inverse
        return torch.stack(rows)

    @property
    def key(self) -> Hashable:
        """The jumps; knots and slopes are in the elements."""
        return tuple(self.jumps)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """1 / sigma, E[slope], sum h phi(a), then a_t and then w_t sigma for every knot."""
        stddev = standard_deviation(variance)
        positions = [standardise(mean - knot, stddev) for knot in self.knots]
        slope, jump = self._expected_slope(mean, positions), self._expected_jump(positions)
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

    def _expected_slope(self, mean: Tensor, positions: Sequence[Tensor]) -> Tensor:
        """E of the slopes alone: the slope at the mean, corrected by the tails beyond each knot."""
        result = torch.as_tensor(self.slopes[0], dtype=mean.dtype, device=mean.device)
        for knot, slope in zip(self.knots, self.slopes[1:], strict=True):
            result = torch.where(mean >= knot, slope, result)
        for knot, a, weight in zip(self.knots, positions, self._weights(), strict=True):
            side = _side(mean, knot)
            result = result - weight * side * cumulative(-side * a)
        return result

    def _expected_jump(self, positions: Sequence[Tensor]) -> Tensor:
        terms = [jump * density(a) for a, jump in zip(positions, self.jumps, strict=True)]
        return torch.stack(terms).sum(0)


def _side(y: Tensor, knot: float) -> Tensor:
    return torch.where(y >= knot, 1.0, -1.0).to(y.dtype)


def continuous(
    function: Callable[[Tensor], Tensor],
    knots: Sequence[float],
    slopes: Sequence[float | Tensor],
    start: float,
) -> Piecewise:
    """Build a piecewise-linear function without jumps."""
    return Piecewise(function, knots, slopes, start, [0.0] * len(knots))
