"""Piecewise-linear functions as sums of knots and narrow ramps: moments, and covariances of pairs.

g(y) = linear + sum_t [ w_t relu(y - t) + h_t 1(y >= t) ]: the covariance is the double sum of the
pairwise covariances of these units, written so that what is far from a knot contributes nothing
instead of cancelling. Where the deviation is wide against a segment, the weights at its ends nearly
cancel: it is a ramp instead, the average of steps. The pair formula needs nothing but the numbers
of the elements, so that it is the same for two functions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.activations.base import Elements
from covprop.activations.correlated import select_pairs
from covprop.kernels import compiled_pairs
from covprop.kernels.normal import (
    SATURATION,
    correlation,
    cumulative,
    density,
    inverse_deviation,
    partial_expectation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import gap_to_one, plackett, plackett_degenerate, plackett_mixed
from covprop.kernels.polynomials import hermite_functions
from covprop.kernels.ramps import NARROW, ramp_excess, ramp_nodes, ramp_relu, ramp_step

FINE = {torch.float32: 1.0, torch.float64: NARROW}
"""Widths of segments below which differences of K1 need float64, or ramps."""
COST = 150.0
"""Of K1, compiled, in terms of the series."""
BLOCK = 2**16
"""Pairs with such segments that are computed at a time."""


@dataclass(frozen=True)
class Knot:
    """A knot seen from Gaussians: distance a in standard deviations, its sign, and the tails.

    tail: Phi(-|a|); excess: m(-|a|).
    """

    a: Tensor
    side: Tensor
    tail: Tensor
    excess: Tensor

    @classmethod
    def at(cls, distance: Tensor, stddev: Tensor) -> "Knot":
        """The knot at this distance below the means."""
        a = standardise(distance, stddev)
        side = torch.where(distance >= 0, 1.0, -1.0).to(a.dtype)
        beyond = -side * a
        return cls(a, side, cumulative(beyond), partial_expectation(beyond))

    def degenerate(self) -> tuple[Tensor, Tensor]:
        """K0 and K1 at rho = 1 with itself: Phi(a) Phi(-a), and that less m(a) m(-a)."""
        first = self.tail * (1 - self.tail)
        return first, first - self.excess * (self.side * self.a + self.excess)


@dataclass(frozen=True)
class Ramp:
    """The segment after a knot at a; width and height are 0 where it is not narrow."""

    segment: int
    a: Tensor
    width: Tensor
    height: Tensor

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Thresholds and heights of the steps whose average it is."""
        for position, weight in zip(*ramp_nodes(self.a, self.width), strict=True):
            yield position, weight * self.height


class Pieces:
    """The knots, slopes and narrow segments of a function, seen from Gaussians (*batch, n)."""

    def __init__(
        self,
        mean: Tensor,
        variance: Tensor,
        knots: Sequence[float],
        slopes: Sequence[float | Tensor],
        jumps: Sequence[float],
    ) -> None:
        self._mean, self._variance, self._jumps = mean, variance, jumps
        stddev = standard_deviation(variance)
        self.knots = [Knot.at(mean - knot, stddev) for knot in knots]
        self.slopes = list(slopes)  # without those of narrow segments
        self.ramps: list[Ramp] = []
        self.widths: list[Tensor] = []  # of segments; large if they have no slope
        self.narrow = torch.zeros_like(stddev, dtype=torch.bool)  # elements with ramps
        sloped = [isinstance(slope, Tensor) or slope != 0 for slope in slopes[1:-1]]
        if not any(sloped):
            return
        lengths = [v - u for u, v in pairwise(knots)]
        self.widths = [torch.full_like(stddev, SATURATION) for _ in lengths]
        for k, length in enumerate(lengths):
            if not sloped[k]:
                continue
            self.widths[k] = standardise(torch.full_like(stddev, length), stddev)
            narrow = self.widths[k] < NARROW
            if bool(narrow.any()):
                slope = torch.as_tensor(slopes[k + 1], dtype=mean.dtype, device=mean.device)
                parts = self.widths[k], slope * length
                width, height = (torch.where(narrow, part, 0) for part in parts)
                self.narrow = self.narrow | narrow
                self.ramps.append(Ramp(k, self.knots[k].a, width, height))
                self.slopes[k + 1] = torch.where(narrow, 0, slope)

    @property
    def weights(self) -> list[float | Tensor]:
        """By how much the slope changes at each knot."""
        return [after - before for before, after in pairwise(self.slopes)]

    def expected_slope(self) -> Tensor:
        """Only E of the slopes: the slope at the mean, corrected by the tails beyond each knot."""
        mean = self._mean
        result = torch.as_tensor(self.slopes[0], dtype=mean.dtype, device=mean.device)
        for knot, slope in zip(self.knots, self.slopes[1:], strict=True):
            result = torch.where(knot.side > 0, slope, result)
        for knot, weight in zip(self.knots, self.weights, strict=True):
            result = result - weight * knot.side * knot.tail
        return result

    def steps(self) -> list[tuple[Tensor, float | Tensor]]:
        """Thresholds and heights of jumps, and of the steps whose averages are ramps."""
        jumps = zip(self.knots, self._jumps, strict=True)
        steps: list[tuple[Tensor, float | Tensor]] = [
            (knot.a, jump) for knot, jump in jumps if jump
        ]
        return steps + [step for ramp in self.ramps for step in ramp.steps()]

    def expected_jump(self) -> Tensor:
        """sum h phi(a), with the steps of ramps."""
        terms = [height * density(a) for a, height in self.steps()]
        return torch.stack(terms).sum(0) if terms else torch.zeros_like(self.knots[0].a)

    def mean(self, at_mean: Tensor) -> Tensor:
        """g(mu) + sum_t [ w_t sigma m(-|a_t|) -+ h_t Phi(-|a_t|) ], a_t = (mu - t) / sigma."""
        stddev = standard_deviation(self._variance)
        result = at_mean
        for knot, weight, jump in zip(self.knots, self.weights, self._jumps, strict=True):
            result = result + weight * stddev * knot.excess
            if jump:
                result = result - jump * knot.side * knot.tail
        for ramp in self.ramps:
            for position, height in ramp.steps():
                result = result + height * cumulative(position)
        return result

    def variance(self) -> Tensor:
        """The covariance at rho = 1, with the factor sigma^2 explicit for its gradient at 0."""
        variance, jumps = self._variance, self._jumps
        slope = self.expected_slope()
        share = slope.square()  # of sigma^2
        result = variance * share
        weights, stddev = self.weights, standard_deviation(variance)
        if any(jumps) or self.ramps:
            result = result + 2 * stddev * slope * self.expected_jump()
        for i, one in enumerate(self.knots):
            for j, other in enumerate(self.knots):
                first, second = one.degenerate() if i == j else plackett_degenerate(one.a, other.a)
                result = result + variance * (weights[i] * weights[j]) * second
                if jumps[i]:
                    mixed = plackett_mixed(one.a, other.a, torch.ones_like(one.a), first)
                    result = result + 2 * stddev * (jumps[i] * weights[j]) * mixed
                    result = result + jumps[i] * jumps[j] * first
        result = result + self._variance_of_ramps(stddev)
        # Rounding must not make the variance of a constant negative.
        return torch.where(variance > 0, result, variance * share).clamp(min=0)

    def _variance_of_ramps(self, stddev: Tensor) -> Tensor:
        """The variance of narrow segments, and twice their covariance with the rest."""
        total = torch.zeros_like(stddev)
        steps = [step for ramp in self.ramps for step in ramp.steps()]
        for a, height in steps:
            for knot, weight, jump in zip(self.knots, self.weights, self._jumps, strict=True):
                first = plackett_degenerate(a, knot.a)[0]
                mixed = plackett_mixed(a, knot.a, torch.ones_like(a), first)
                total = total + 2 * height * (stddev * weight * mixed + jump * first)
            for b, other in steps:
                total = total + height * other * plackett_degenerate(a, b)[0]
        for ramp in self.ramps:
            total = total + ramp.height.square() * ramp_excess(ramp.a, ramp.width)
        return total

    def coefficients(self, order: int) -> Tensor:
        """a_k = (-1)^k phi(a) [w sigma He_{k-2}(a) - h He_{k-1}(a)] / sqrt(k!), for every knot."""
        rows = [self.expected_slope()]
        rows += [torch.zeros_like(self._mean)] * (order - 1)
        for knot, weight in zip(self.knots, self.weights, strict=True):
            for k, hermite in zip(range(order - 1), hermite_functions(knot.a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                term = sign * hermite / ((k + 1) * (k + 2)) ** 0.5
                rows[k + 1] = rows[k + 1] + weight * term
        inverse = inverse_deviation(self._variance)
        for a, height in self.steps():
            for k, hermite in zip(range(order), hermite_functions(a), strict=False):
                sign = 1.0 if k % 2 == 0 else -1.0
                rows[k] = rows[k] + sign / (k + 1) ** 0.5 * height * hermite * inverse
        return torch.stack(rows)

    def side(self) -> "Side":
        """The numbers of each element that a pair needs."""
        mean, stddev = self._mean, standard_deviation(self._variance)

        def stacked(rows: list[Tensor]) -> Tensor:
            return torch.stack(rows) if rows else mean.new_zeros(0, *mean.shape)

        weights = [weight * stddev for weight in self.weights]
        heights = [torch.full_like(mean, jump) for jump in self._jumps]
        ramps = {ramp.segment: ramp.height for ramp in self.ramps}
        return Side(
            inverse_deviation(self._variance),
            self.expected_slope(),
            self.expected_jump(),
            stacked([knot.a for knot in self.knots]),
            stacked(weights),
            stacked(heights if any(self._jumps) else []),
            stacked(self.widths),
            stacked([ramps.get(k, torch.zeros_like(mean)) for k in range(len(self.widths))]),
        )


class Side(NamedTuple):
    """What a pair needs of one of its elements; rows of knots and of the segments between them.

    There are no heights if the function has no jumps, and no widths and ramps if no segment between
    two knots has a slope.
    """

    inverse: Tensor
    """1 / sigma"""
    slope: Tensor
    """E of the slopes, without those of ramps"""
    density: Tensor
    """sum h phi(a), with those of ramps"""
    positions: Tensor
    """a of each knot"""
    weights: Tensor
    """w sigma of each knot, without those of ramps"""
    heights: Tensor
    """h of each knot"""
    widths: Tensor
    """of each segment between two knots, in standard deviations; large if it has no slope"""
    ramps: Tensor
    """the height of each of them that is narrow, 0 if it is not"""


def knots_covariance(left: Elements, right: Elements, covariance: Tensor) -> Tensor:
    """Cov[g(y_i), h(y_j)] of two piecewise-linear functions; see `Side`."""
    one, other = Side(*left), Side(*right)
    rho = correlation(covariance, one.inverse, other.inverse)
    index = _with_narrow(one, other, rho)
    if index is None:
        return _linear(one, other, covariance) + _knots(one, other, rho)
    if len(index[0]) < rho.numel():
        result = _linear(one, other, covariance) + _knots(one, other, rho)
    else:
        result = torch.zeros_like(rho)
    for start in range(0, len(index[0]), BLOCK):
        part = tuple(axis[start : start + BLOCK] for axis in index)
        rows, columns = (
            Side(*(select_pairs(t, part, rho.shape).double() for t in side))
            for side in (one, other)
        )
        fine = _fine(rows, columns, covariance[part].double(), rho[part])
        result = result.index_put(part, fine.to(result.dtype))
    return result


def knots_formula(left: Elements, right: Elements) -> compiled_pairs.Direct | None:
    """The same of a compiled kernel, which knows neither jumps nor narrow segments."""
    one, other = Side(*left), Side(*right)
    if len(one.heights) or len(other.heights) or _narrow_elements(one, other):
        return None
    rows = torch.cat([one.slope[None], one.positions, one.weights])
    columns = (
        rows if left is right else torch.cat([other.slope[None], other.positions, other.weights])
    )
    knots = len(one.positions), len(other.positions)
    return compiled_pairs.Direct("knots", rows, columns, COST * knots[0] * knots[1], knots)


def _narrow_elements(left: Side, right: Side) -> list[Tensor]:
    """Which elements have segments that are too narrow for differences of K1; none if none has."""
    limit = FINE[left.slope.dtype]
    masks = [(side.widths < limit).any(0) for side in (left, right) if len(side.widths)]
    return masks if any(bool(mask.any()) for mask in masks) else []


def _with_narrow(left: Side, right: Side, rho: Tensor) -> tuple[Tensor, ...] | None:
    """The pairs of which one element has segments that are too narrow for differences of K1."""
    masks = _narrow_elements(left, right)
    if not masks:
        return None
    either = masks[0] if len(masks) == 1 else masks[0] | masks[1]
    return either.broadcast_to(rho.shape).nonzero(as_tuple=True)


def _linear(left: Side, right: Side, covariance: Tensor) -> Tensor:
    """What the expected slopes make of the covariance: each with each, and with the jumps."""
    slopes = left.slope * right.slope
    if len(left.heights) or len(left.ramps):
        slopes = slopes + right.slope * (left.density * left.inverse)
    if len(right.heights) or len(right.ramps):
        slopes = slopes + left.slope * (right.density * right.inverse)
    return covariance * slopes


def _knots(left: Side, right: Side, rho: Tensor) -> Tensor:
    """sum_tu w_t w_u sigma sigma K1, and K0 and mixed terms for the jumps."""
    total: Tensor | float = 0.0
    for i, (a, u) in enumerate(zip(left.positions, left.weights, strict=True)):
        for j, (b, v) in enumerate(zip(right.positions, right.weights, strict=True)):
            first, second = plackett(a, b, rho)
            total = total + (u * v) * second
            if len(left.heights):
                total = total + left.heights[i] * v * plackett_mixed(a, b, rho, first)
            if len(right.heights):
                total = total + right.heights[j] * u * plackett_mixed(b, a, rho, first)
            if len(left.heights) and len(right.heights):
                total = total + left.heights[i] * right.heights[j] * first
    assert isinstance(total, Tensor)  # there is at least one knot
    return total


def _fine(left: Side, right: Side, covariance: Tensor, rho: Tensor) -> Tensor:
    """The same in float64, for vectors of pairs, with ramps."""
    # float64 must not resolve a difference from 1 that is rounding in float32.
    certain = torch.where(gap_to_one(rho) > 0, rho, torch.sign(rho))
    rho = (rho + (certain - rho).detach()).double()
    left, right = (side._replace(positions=_placed(side)) for side in (left, right))
    result = _linear(left, right, covariance)
    if _any(left.weights, left.heights) and _any(right.weights, right.heights):
        result = result + _knots(left, right, rho)
    result = result + _ramps_and_knots(left, right, rho) + _ramps_and_knots(right, left, rho)
    for a, width_a, up_a in zip(left.positions, *_narrow(left), strict=False):
        for b, width_b, up_b in zip(right.positions, *_narrow(right), strict=False):
            if _any(up_a) and _any(up_b):
                result = result + up_a * up_b * ramp_step(a, width_a, b, width_b, rho)
    return result


def _ramps_and_knots(left: Side, right: Side, rho: Tensor) -> Tensor:
    """The ramps of one with the knots of the other."""
    total, step = torch.zeros_like(rho), torch.zeros_like(rho)
    for a, width, up in zip(left.positions, *_narrow(left), strict=False):
        if not _any(up):
            continue
        for b, v in zip(right.positions, right.weights, strict=True):
            if _any(v):
                total = total + up * v * ramp_relu(a, width, b, rho)
        for b, height in zip(right.positions, right.heights, strict=False):
            if _any(height):
                total = total + up * height * ramp_step(a, width, b, step, rho)
    return total


def _narrow(side: Side) -> tuple[Tensor, Tensor]:
    """Widths and heights of ramps, 0 where a segment is not one."""
    return torch.where(side.ramps != 0, side.widths, 0), side.ramps


def _placed(side: Side) -> Tensor:
    """Positions of knots, from that of the one before where it is near, which rounding blurs."""
    if not len(side.widths):
        return side.positions
    rows = [side.positions[0]]
    for width, position in zip(side.widths, side.positions[1:], strict=True):
        rows.append(torch.where(width < FINE[torch.float32], rows[-1] - width, position))
    return torch.stack(rows)


def _any(*tensors: Tensor) -> bool:
    return any(bool(tensor.any()) for tensor in tensors)
