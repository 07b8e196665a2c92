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
        1994; Genz & Bretz 2009, chapter 4). floor (rows, n): variances that are rounding.
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

        Backwards through the columns.
        """
        product, columns, xi = self._run(uniform)
        by_xi, by_mean = torch.zeros_like(xi), torch.zeros_like(self.mean)
        nothing = torch.zeros_like(product)  # what the last column's xi, never drawn, leads to
        for k in reversed(range(len(columns))):
            column = columns[k]
            by_share = product / torch.where(column.share > 0, column.share, 1)
            drawn = (by_xi[:, k], xi[:, k], uniform[k]) if k < len(uniform) else (nothing,) * 3
            by_at = column.pulled_back(by_share, *drawn)  # (rows, members, points)
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
        return Column.of(index, lines[..., :k], entries, at)


class Column(NamedTuple):
    """The interval of one xi: which constraints give it, and its probability."""

    constraints: Tensor
    """Their numbers, (rows, members)."""
    before: Tensor
    """What the columns before it do to them, (rows, members, k)."""
    entries: Tensor
    """What this one does, (rows, members); 0 for those that fill up the row."""
    ends: list[tuple[Tensor, Tensor]]
    """The lower end and the member that gives it, (rows, points); the upper one if there is any."""
    share: Tensor
    """(rows, points)"""

    @classmethod
    def of(cls, constraints: Tensor, before: Tensor, entries: Tensor, at: Tensor) -> "Column":
        """From what the constraints are without this xi, at (rows, members, points)."""
        bound = -at / torch.where(entries != 0, entries, 1)[..., None]
        low, below = torch.where((entries > 0)[..., None], bound, -math.inf).max(1)
        if not bool((entries < 0).any()):  # as always where the covariance is not singular
            return cls(constraints, before, entries, [(low, below)], cumulative(-low))
        high, above = torch.where((entries < 0)[..., None], bound, math.inf).min(1)
        share = cumulative_difference(high, low).clamp(min=0)
        return cls(constraints, before, entries, [(low, below), (high, above)], share)

    def within(self, uniform: Tensor) -> Tensor:
        """The point of the interval below which the uniform part of its probability is.

        Found in the tail where probabilities are small; where the interval has none, the product is
        zero whatever the point.
        """
        at, sign = (1 - uniform) * self.share, torch.tensor(-1.0).to(uniform)
        if len(self.ends) > 1:
            (low, _), (high, _) = self.ends
            upper = high + low > 0
            start = cumulative(torch.where(upper, -high, low))
            at = torch.where(upper, start + at, start + uniform * self.share)
            sign = torch.where(upper, -1.0, 1.0).to(uniform)
        inside = (at > torch.finfo(at.dtype).tiny) & (at < 1)
        return torch.where(inside, sign * torch.special.ndtri(torch.where(inside, at, 0.5)), 0)

    def pulled_back(self, by_share: Tensor, by_xi: Tensor, xi: Tensor, uniform: Tensor) -> Tensor:
        """Derivatives by the share and by xi as those by the constraints (rows, members, points).

        With e the share of the interval (l, h) and x the point of it that has the part w below it,
        de = phi(h) dh - phi(l) dl and phi(x) dx = w phi(h) dh + (1 - w) phi(l) dl.
        """
        by_xi = torch.where(self.share > 0, by_xi, 0)
        by_bound = by_xi.new_zeros(*self.entries.shape, by_xi.shape[-1])
        for (end, member), sign, part in zip(
            self.ends, (-1, 1), (1 - uniform, uniform), strict=False
        ):
            ratio = torch.exp((xi.square() - end.square()) / 2)  # phi(end) / phi(xi)
            by_end = sign * density(end) * by_share + by_xi * part * ratio
            by_bound.scatter_add_(1, member[:, None], by_end[:, None])
        return -by_bound / torch.where(self.entries != 0, self.entries, math.inf)[..., None]


def _truncated_mean(z: Tensor) -> Tensor:
    """E[xi | xi > -z] = phi(z) / Phi(z), also far in the tail."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(-z / SQRT_2)
