"""Orthant probabilities by sequential conditioning (Genz 1992).

With d = m + L xi for independent standard normal xi, the constraints d_i > 0 that only xi_1 enters
give its interval; given xi_1, those that only xi_1 and xi_2 enter give that of xi_2, and so on. The
probability is the average of the product of the intervals' probabilities over xi drawn within them.
A singular covariance has fewer columns in L than rows, and a column decides several constraints at
once (Genz & Kwong 2000).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.kernels.normal import (
    SQRT_2,
    cumulative,
    cumulative_difference,
    density,
    standard_deviation,
    standardise,
)

CONSTANT = -1
"""The column of a constraint that no column decides, as nothing in it varies."""


@final
@dataclass(frozen=True)
class Conditioning:
    """d = m + L xi, in an order that decides the doubtful constraints first.

    factor (rows, n, n): L, zero beyond its rank; stage (rows, n): the column that decides each
    constraint, which no later one enters.
    """

    mean: Tensor
    factor: Tensor
    stage: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, floor: Tensor) -> "Conditioning":
        """A pivoted Cholesky factor; the next pivot is what is least likely to hold.

        Columns before it stand at their means within their intervals (Gibson, Glasbey & Elston
        1994; Genz & Bretz 2009, section 4.1.3). floor (rows, n): variances that are rounding.
        """
        size = mean.shape[-1]
        rest, expected = covariance.clone(), mean.clone()
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        stage = torch.where(variance > floor, size, CONSTANT)
        factor = torch.zeros_like(covariance)
        rows = torch.arange(len(rest), device=rest.device)
        for column in range(size):
            waiting = stage == size
            varies = waiting.any(-1)
            if not bool(varies.any()):
                break
            left = torch.where(waiting, rest.diagonal(dim1=-2, dim2=-1), 0)
            z = standardise(expected, standard_deviation(left))
            pivot = torch.where(waiting, z, math.inf).argmin(-1)
            width = torch.where(varies, left[rows, pivot], 1).sqrt()
            entries = torch.where(waiting, rest[rows, :, pivot] / width[:, None], 0)
            factor[..., column] = entries
            expected = expected + entries * _truncated_mean(z[rows, pivot])[:, None]
            rest = rest - entries[:, :, None] * entries[:, None, :]
            decided = waiting & (rest.diagonal(dim1=-2, dim2=-1) <= floor)
            decided[rows, pivot] |= varies
            stage = torch.where(decided, column, stage)
        return cls(mean, factor, stage)

    def probability(self, uniform: Tensor) -> Tensor:
        """The product at every point: uniform (n - 1, points) -> (rows, points)."""
        return self._run(uniform)[0]

    def slope(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The average of the product, (rows,), and its derivative by the mean, (rows, n).

        Backwards through the columns. With e the probability of the interval (l, h) and x the point
        of it that has the share w below it, de = phi(h) dh - phi(l) dl and
        phi(x) dx = w phi(h) dh + (1 - w) phi(l) dl.
        """
        product, columns, xi = self._run(uniform)
        by_xi = torch.zeros_like(xi)
        by_mean = torch.zeros_like(self.mean)
        for k in reversed(range(len(columns))):
            column = columns[k]
            by_share = product / torch.where(column.share > 0, column.share, 1)
            by_low, by_high = -density(column.low) * by_share, density(column.high) * by_share
            if k < xi.shape[1]:
                x, part = xi[:, k], uniform[k]
                pulled = torch.where(column.share > 0, by_xi[:, k], 0)
                by_low = by_low + pulled * (1 - part) * _density_ratio(column.low, x)
                by_high = by_high + pulled * part * _density_ratio(column.high, x)
            by_at = column.pulled_back(by_low, by_high)  # (rows, members, points)
            by_mean.scatter_add_(1, column.constraints, by_at.mean(-1))
            by_xi[:, :k] += column.before.mT @ by_at
        return product.mean(-1), by_mean

    def _run(self, uniform: Tensor) -> tuple[Tensor, list["Column"], Tensor]:
        """The product (rows, points), the columns, and xi (rows, n - 1, points)."""
        rows, points = len(self.mean), uniform.shape[-1]
        fixed = self.stage == CONSTANT
        holds = (~fixed | (self.mean >= 0)).all(-1)
        ties = 1 + (fixed & (self.mean == 0)).sum(-1)
        product = (holds / ties).to(self.mean)[:, None].expand(rows, points)
        xi = uniform.new_zeros(rows, len(uniform), points)
        columns = []
        last = int(self.stage.max()) if self.stage.numel() else CONSTANT
        for k in range(last + 1):
            column = self._column(k, xi)
            columns.append(column)
            product = product * column.share
            if k < len(uniform):
                xi[:, k] = column.within(uniform[k])
        return product, columns, xi

    def _column(self, k: int, xi: Tensor) -> "Column":
        """The interval of xi_k, given those before it."""
        decides = self.stage == k
        count = max(1, int(decides.sum(-1).max()))
        index = decides.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :count]
        member = decides.gather(1, index)
        lines = self.factor.gather(1, index[..., None].expand(*index.shape, k + 1))
        entries = torch.where(member, lines[..., k], 0)
        at = self.mean.gather(1, index)[..., None] + lines[..., :k] @ xi[:, :k]
        bound = -at / torch.where(entries != 0, entries, 1)[..., None]
        low = torch.where((entries > 0)[..., None], bound, -math.inf)
        high = torch.where((entries < 0)[..., None], bound, math.inf)
        return Column.of(index, lines[..., :k], entries, low, high)


class Column(NamedTuple):
    """The interval of one xi: which constraints give it, and its probability."""

    constraints: Tensor
    """Their numbers, (rows, members)."""
    before: Tensor
    """What the columns before it do to them, (rows, members, k)."""
    entries: Tensor
    """What this one does, (rows, members); 0 for those that fill up the row."""
    binding: tuple[Tensor, Tensor]
    """Which member gives the lower end and which the upper, (rows, points)."""
    low: Tensor
    high: Tensor
    share: Tensor
    """(rows, points)"""

    @classmethod
    def of(
        cls, index: Tensor, before: Tensor, entries: Tensor, low: Tensor, high: Tensor
    ) -> "Column":
        """From the ends that each member gives, (rows, members, points)."""
        lowest, highest = low.max(1), high.min(1)
        share = cumulative_difference(highest.values, lowest.values).clamp(min=0)
        binding = (lowest.indices, highest.indices)
        return cls(index, before, entries, binding, lowest.values, highest.values, share)

    def within(self, uniform: Tensor) -> Tensor:
        """The point of the interval below which the uniform part of its probability is.

        Found in the tail where probabilities are small; where the interval has none, the product is
        zero whatever the point.
        """
        upper = self.high + self.low > 0
        start = cumulative(torch.where(upper, -self.high, self.low))
        at = start + torch.where(upper, 1 - uniform, uniform) * self.share
        inside = (at > torch.finfo(at.dtype).tiny) & (at < 1)
        xi = torch.special.ndtri(torch.where(inside, at, 0.5))
        return torch.where(inside, torch.where(upper, -xi, xi), 0)

    def pulled_back(self, by_low: Tensor, by_high: Tensor) -> Tensor:
        """Derivatives by the ends as derivatives by the members, (rows, members, points)."""
        shape = (*self.entries.shape, by_low.shape[-1])
        by_bound = by_low.new_zeros(shape).scatter_add_(
            1, self.binding[0][:, None], by_low[:, None]
        )
        by_bound.scatter_add_(1, self.binding[1][:, None], by_high[:, None])
        return -by_bound / torch.where(self.entries != 0, self.entries, math.inf)[..., None]


def _truncated_mean(z: Tensor) -> Tensor:
    """E[xi | xi > -z] = phi(z) / Phi(z), also far in the tail."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(-z / SQRT_2)


def _density_ratio(end: Tensor, x: Tensor) -> Tensor:
    """phi(end) / phi(x), 0 at an infinite end."""
    return torch.exp((x.square() - end.square()) / 2)
