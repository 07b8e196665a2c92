"""Piecewise-linear functions with any number of kinks and jumps.

g(y) = linear + sum_t [ w_t relu(y - t) + h_t 1(y >= t) ]: the covariance is the double sum of the
pairwise covariances of these units, written so that what is far from a knot contributes nothing
instead of cancelling. A segment that is narrow against the deviation is the average of steps.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from covprop.activations.base import Elements
from covprop.activations.correlated import Correlated
from covprop.activations.grids import Scalar
from covprop.activations.knots import Knot, Ramp, Side, knots_covariance
from covprop.kernels.hermite import hermite_functions
from covprop.kernels.normal import (
    SATURATION,
    cumulative,
    density,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import plackett_degenerate, plackett_mixed
from covprop.kernels.ramps import NARROW
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
        return self._mean(mean, variance, self._pieces(mean, variance))

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The covariance at rho = 1, with the factor sigma^2 explicit for its gradient at 0."""
        return self._variance(mean, variance, self._pieces(mean, variance))

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
        return self._coefficients(mean, variance, order, self._pieces(mean, variance))

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from the same positions; those of a ReLU, without gradients, in few operations."""
        if self._is_relu and order <= RECTIFIED_ORDER and not torch.is_grad_enabled():
            first, spread, rows = rectified_coefficients(mean, variance)
            return first, spread, rows[:order]
        pieces = self._pieces(mean, variance)
        return (
            self._mean(mean, variance, pieces),
            self._variance(mean, variance, pieces),
            self._coefficients(mean, variance, order, pieces),
        )

    def marginals(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance from the same positions; those of a ReLU in few operations."""
        if self._is_relu:
            return rectified_moments(mean, variance)
        pieces = self._pieces(mean, variance)
        return self._mean(mean, variance, pieces), self._variance(mean, variance, pieces)

    @property
    def _is_relu(self) -> bool:
        slopes = [slope for slope in self.slopes if not isinstance(slope, Tensor)]
        shape = list(self.knots), slopes, self.start, list(self.jumps)
        return shape == ([0.0], [0.0, 1.0], 0.0, [0.0])

    def _mean(self, mean: Tensor, variance: Tensor, pieces: "_Pieces") -> Tensor:
        stddev = standard_deviation(variance)
        result = self._value(mean, pieces.slopes)
        for knot, weight, jump in zip(pieces.knots, pieces.weights, self.jumps, strict=True):
            result = result + weight * stddev * knot.excess
            if jump:
                result = result - jump * knot.side * knot.tail
        for ramp in pieces.ramps:
            for position, height in ramp.steps():
                result = result + height * cumulative(position)
        return torch.where(variance > 0, result, self.function(mean)) if self.has_jumps else result

    def _variance(self, mean: Tensor, variance: Tensor, pieces: "_Pieces") -> Tensor:
        slope = pieces.expected_slope(mean)
        share = slope.square()  # of sigma^2
        result = variance * share
        weights, stddev = pieces.weights, standard_deviation(variance)
        if self.has_jumps or pieces.ramps:
            result = result + 2 * stddev * slope * self._expected_jump(pieces)
        for i, one in enumerate(pieces.knots):
            for j, other in enumerate(pieces.knots):
                first, second = one.degenerate() if i == j else one.with_other(other)
                result = result + variance * (weights[i] * weights[j]) * second
                if self.jumps[i]:
                    mixed = plackett_mixed(one.a, other.a, torch.ones_like(one.a), first)
                    result = result + 2 * stddev * (self.jumps[i] * weights[j]) * mixed
                    result = result + self.jumps[i] * self.jumps[j] * first
        result = result + self._variance_of_ramps(stddev, pieces)
        # Rounding must not make the variance of a constant negative.
        return torch.where(variance > 0, result, variance * share).clamp(min=0)

    def _variance_of_ramps(self, stddev: Tensor, pieces: "_Pieces") -> Tensor:
        """What narrow segments have with each other and with the rest."""
        total = torch.zeros_like(stddev)
        steps = [step for ramp in pieces.ramps for step in ramp.steps()]
        for a, height in steps:
            for knot, weight, jump in zip(pieces.knots, pieces.weights, self.jumps, strict=True):
                first = plackett_degenerate(a, knot.a)[0]
                mixed = plackett_mixed(a, knot.a, torch.ones_like(a), first)
                total = total + 2 * height * (stddev * weight * mixed + jump * first)
            for b, other in steps:
                total = total + height * other * plackett_degenerate(a, b)[0]
        for ramp in pieces.ramps:
            total = total + ramp.excess()
        return total

    def _coefficients(
        self, mean: Tensor, variance: Tensor, order: int, pieces: "_Pieces"
    ) -> Tensor:
        rows = [pieces.expected_slope(mean)]
        rows += [torch.zeros_like(mean)] * (order - 1)
        for knot, weight in zip(pieces.knots, pieces.weights, strict=True):
            for k, hermite in zip(range(order - 1), hermite_functions(knot.a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                term = sign * hermite / ((k + 1) * (k + 2)) ** 0.5
                rows[k + 1] = rows[k + 1] + weight * term
        inverse = inverse_deviation(variance)
        for a, height in self._steps(pieces):
            for k, hermite in zip(range(order), hermite_functions(a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                rows[k] = rows[k] + sign / (k + 1) ** 0.5 * height * hermite * inverse
        return torch.stack(rows)

    @property
    def key(self) -> Hashable:
        """All of them share the double sum over knots, which are in the elements."""
        return None

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """As `Side` has them."""
        pieces, stddev = self._pieces(mean, variance), standard_deviation(variance)
        nothing = mean.new_zeros(0, *mean.shape)
        weights = [weight * stddev for weight in pieces.weights]
        heights = [torch.full_like(mean, jump) for jump in self.jumps] if self.has_jumps else []
        ramps = {ramp.segment: ramp.height for ramp in pieces.ramps}
        ups = [ramps.get(k, torch.zeros_like(mean)) for k in range(len(pieces.widths))]
        return Side(
            inverse_deviation(variance),
            pieces.expected_slope(mean),
            self._expected_jump(pieces),
            torch.stack([knot.a for knot in pieces.knots]),
            torch.stack(weights),
            torch.stack(heights) if heights else nothing,
            torch.stack(list(pieces.widths)) if pieces.widths else nothing,
            torch.stack(ups) if ups else nothing,
        )

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, or its segments if their slopes are those of single elements."""
        del variance
        if self.uniform:
            jumps = [(t, h) for t, h in zip(self.knots, self.jumps, strict=True) if h]
            scalar = Scalar(self.function, self.knots, self.mean, jumps=jumps)
            return [(torch.ones_like(mean), scalar)]
        parts = [self._steps_alone()] if self.has_jumps else []
        found = [scalar for part in parts for scalar in part.scalars(mean, mean)]
        for k, slope in enumerate(self.slopes):
            factor = torch.as_tensor(slope, dtype=mean.dtype, device=mean.device).expand_as(mean)
            found.append((factor, self._segment(k)))
        return found

    def _steps_alone(self) -> "Piecewise":
        """The function without its slopes."""
        flat = [0.0] * len(self.slopes)

        def function(y: Tensor) -> Tensor:
            return self._value(y, flat)

        return Piecewise(function, self.knots, flat, self.start, self.jumps)

    def _segment(self, k: int) -> Scalar:
        """A function of slope one on a segment, and constant elsewhere."""
        ends = [-math.inf, *self.knots, math.inf][k : k + 2]
        function = partial(torch.clamp, min=ends[0], max=ends[1])
        knots = [end for end in ends if math.isfinite(end)]
        slopes = [0.0] * (k > 0) + [1.0] + [0.0] * (k < len(self.knots))
        return Scalar(function, knots, continuous(function, knots, slopes, knots[0]).mean)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """c E[g'] E[g'] + sum_tu w_t w_u sigma sigma K1, and K0 and mixed terms for the jumps."""
        return knots_covariance(left, right, covariance)

    def value(self, y: Tensor) -> Tensor:
        """g(y), continuous from the right."""
        return self._value(y, self.slopes)

    def _value(self, y: Tensor, slopes: Sequence[float | Tensor]) -> Tensor:
        """The function of these slopes, continuous from the right."""
        result = self.start + slopes[0] * (y - self.knots[0])
        level: float | Tensor = self.start
        for i, knot in enumerate(self.knots):
            if i > 0:
                level = level + slopes[i] * (knot - self.knots[i - 1])
            level = level + self.jumps[i]
            result = torch.where(y >= knot, level + slopes[i + 1] * (y - knot), result)
        return result

    def _pieces(self, mean: Tensor, variance: Tensor) -> "_Pieces":
        stddev = standard_deviation(variance)
        knots = [Knot.at(mean - knot, stddev) for knot in self.knots]
        slopes, lengths = list(self.slopes), [v - u for u, v in pairwise(self.knots)]
        sloped = [isinstance(slope, Tensor) or slope != 0 for slope in slopes[1:-1]]
        if not any(sloped):
            return _Pieces(knots, slopes, [], [])
        ramps, widths = [], [torch.full_like(stddev, SATURATION) for _ in lengths]
        for k, length in enumerate(lengths):
            if not sloped[k]:
                continue
            widths[k] = standardise(torch.full_like(stddev, length), stddev)
            narrow = widths[k] < NARROW
            if bool(narrow.any()):
                slope = torch.as_tensor(slopes[k + 1], dtype=mean.dtype, device=mean.device)
                width, height = (torch.where(narrow, t, 0) for t in (widths[k], slope * length))
                ramps.append(Ramp(k, knots[k].a, width, height))
                slopes[k + 1] = torch.where(narrow, 0, slope)
        return _Pieces(knots, slopes, widths, ramps)

    def _steps(self, pieces: "_Pieces") -> list[tuple[Tensor, float | Tensor]]:
        """Thresholds and heights of jumps, and of those whose averages ramps are."""
        jumps = zip(pieces.knots, self.jumps, strict=True)
        steps: list[tuple[Tensor, float | Tensor]] = [
            (knot.a, jump) for knot, jump in jumps if jump
        ]
        return steps + [step for ramp in pieces.ramps for step in ramp.steps()]

    def _expected_jump(self, pieces: "_Pieces") -> Tensor:
        terms = [height * density(a) for a, height in self._steps(pieces)]
        return torch.stack(terms).sum(0) if terms else torch.zeros_like(pieces.knots[0].a)


@dataclass(frozen=True)
class _Pieces:
    """Knots of a function, slopes without narrow segments, widths of segments, narrow ones."""

    knots: Sequence[Knot]
    slopes: Sequence[float | Tensor]
    widths: Sequence[Tensor]
    ramps: Sequence[Ramp]

    @property
    def weights(self) -> list[float | Tensor]:
        """By how much the slope changes at each knot."""
        return [after - before for before, after in pairwise(self.slopes)]

    def expected_slope(self, mean: Tensor) -> Tensor:
        """E of the slopes alone: the slope at the mean, corrected by the tails beyond each knot."""
        result = torch.as_tensor(self.slopes[0], dtype=mean.dtype, device=mean.device)
        for knot, slope in zip(self.knots, self.slopes[1:], strict=True):
            result = torch.where(knot.side > 0, slope, result)
        for knot, weight in zip(self.knots, self.weights, strict=True):
            result = result - weight * knot.side * knot.tail
        return result


def continuous(
    function: Callable[[Tensor], Tensor],
    knots: Sequence[float],
    slopes: Sequence[float | Tensor],
    start: float,
) -> Piecewise:
    """Build a piecewise-linear function without jumps."""
    return Piecewise(function, knots, slopes, start, [0.0] * len(knots))
