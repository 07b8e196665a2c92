"""Knots and narrow ramps of piecewise-linear functions, seen from Gaussians and from pairs of them.

g(y) = linear + sum_t [ w_t relu(y - t) + h_t 1(y >= t) ]. Where the deviation is wide against a
segment, the weights at its ends nearly cancel: it is a ramp instead, the average of steps. The pair
formula needs nothing but the numbers of the elements, so that it is the same for two functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.activations.base import Elements
from covprop.activations.correlated import picked
from covprop.kernels.normal import correlation, cumulative, partial_expectation, standardise
from covprop.kernels.plackett import (
    gap_to_one,
    plackett,
    plackett_degenerate,
    plackett_mixed,
)
from covprop.kernels.ramps import NARROW, nodes_of, ramp_excess, ramp_relu, ramp_step

FINE = {torch.float32: 1.0, torch.float64: NARROW}
"""Widths of segments below which differences of K1 need float64, or ramps."""
PART = 2**16
"""Pairs with such segments that are treated at a time."""


@dataclass(frozen=True)
class Knot:
    """A knot seen from Gaussians: distance a in standard deviations, side, what lies beyond."""

    a: Tensor
    side: Tensor
    tail: Tensor
    """Phi(-|a|)"""
    excess: Tensor
    """m(-|a|)"""

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

    def with_other(self, other: "Knot") -> tuple[Tensor, Tensor]:
        """The same for two thresholds of one variable."""
        return plackett_degenerate(self.a, other.a)


@dataclass(frozen=True)
class Ramp:
    """The segment after a knot at a; width and height are 0 where it is not narrow."""

    segment: int
    a: Tensor
    width: Tensor
    height: Tensor

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Thresholds and heights of the steps whose average it is."""
        for position, weight in zip(*nodes_of(self.a, self.width), strict=True):
            yield position, weight * self.height

    def excess(self) -> Tensor:
        """What its variance exceeds that of its steps."""
        return self.height.square() * ramp_excess(self.a, self.width)


class Side(NamedTuple):
    """What a pair needs of one of its elements; rows of knots and of the segments between them.

    There are no heights if no function jumps, and no widths and ramps if no segment between two
    knots has a slope.
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
    for start in range(0, len(index[0]), PART):
        part = tuple(axis[start : start + PART] for axis in index)
        rows, columns = (
            Side(*(picked(t, part, rho.shape).double() for t in side)) for side in (one, other)
        )
        fine = _fine(rows, columns, covariance[part].double(), rho[part])
        result = result.index_put(part, fine.to(result.dtype))
    return result


def _with_narrow(left: Side, right: Side, rho: Tensor) -> tuple[Tensor, ...] | None:
    """The pairs of which one element has segments that are too narrow for differences of K1."""
    limit = FINE[rho.dtype]
    masks = [(side.widths < limit).any(0) for side in (left, right) if len(side.widths)]
    if not any(bool(mask.any()) for mask in masks):
        return None
    found = masks[0] if len(masks) == 1 else masks[0] | masks[1]
    return found.broadcast_to(rho.shape).nonzero(as_tuple=True)


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
    # What float32 cannot tell from 1 must not be told from 1 by float64.
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
