"""The probability that all elements of a Gaussian vector are positive, and its derivatives.

One and two dimensions have a closed form. More are integrated by sequential conditioning (Genz
1992) at quasi-random points: with d = m + L xi for independent standard normal xi, the constraints
d_i > 0 that only xi_1 enters give its interval; given xi_1, those that only xi_1 and xi_2 enter
give that of xi_2, and so on. The probability is the average of the product of the intervals'
probabilities over xi drawn within them. A singular covariance has fewer columns in L than rows, and
a column decides several constraints at once (Genz & Kwong 2000).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.kernels.normal import (
    SQRT_2,
    cumulative,
    cumulative_difference,
    density,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import plackett
from covprop.robustness.logits import Randomisation

CHUNK = 2**21
"""Numbers in memory for the elements of all points at a time."""
BACKWARD_FACTOR = 4
"""A derivative keeps this many times as much in memory."""
CLOSED_FORM = 2
"""Dimensions up to which there is a closed form."""
CONSTANT = -1
"""The column of a constraint that does not vary, and so no column decides."""


class Vectors(NamedTuple):
    """Gaussian vectors: mean (rows, n), covariance (rows, n, n), floor of variances (rows, n)."""

    mean: Tensor
    covariance: Tensor
    floor: Tensor

    @property
    def variance(self) -> Tensor:
        """Variances (rows, n), exactly zero where rounding cannot tell them from it."""
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        return torch.where(variance > self.floor, variance, 0)

    @property
    def standardised(self) -> Tensor:
        """Means over standard deviations, (rows, n)."""
        return standardise(self.mean, standard_deviation(self.variance))

    @property
    def always_zero(self) -> Tensor:
        """Elements that are zero with certainty: ties, (rows, n)."""
        return (self.mean == 0) & (self.variance == 0)

    def take(self, index: Tensor) -> "Vectors":
        """Some elements of each vector, index (rows, k)."""
        rows = torch.arange(len(index), device=index.device)[:, None, None]
        matrix = self.covariance[rows, index[:, :, None], index[:, None, :]]
        return Vectors(self.mean.gather(1, index), matrix, self.floor.gather(1, index))


def orthant(vectors: Vectors, points: Randomisation) -> Tensor:
    """P(every element > 0), (replicates, rows): one replicate where it is exact.

    Elements that are zero with certainty are ties, which all that tie share equally.
    """
    size = vectors.mean.shape[-1]
    if size <= CLOSED_FORM:
        return _closed(vectors)[None]
    uniform = points.uniform(size - 1, vectors.mean.device)
    parts = [vectors.mean.new_zeros(points.replicates, 0)]
    for part, index in _chunks(vectors, uniform.numel()):
        product, _, _ = Conditioning.of(part).integrand(uniform[: index.shape[1] - 1])
        parts.append(product.unflatten(1, (points.replicates, points.each)).mean(-1).mT)
    return torch.cat(parts, dim=1)


def orthant_slope(vectors: Vectors, points: Randomisation) -> tuple[Tensor, Tensor]:
    """The same averaged over the replicates, (rows,), and its derivative by the mean, (rows, n).

    dP/dm_i = density of d_i at 0 times P(the others are positive | d_i = 0)  in two dimensions.
    """
    size = vectors.mean.shape[-1]
    if size <= CLOSED_FORM:
        return _closed(vectors), _closed_slope(vectors)
    uniform = points.uniform(size - 1, vectors.mean.device)
    values, slopes = [vectors.mean.new_zeros(0)], [vectors.mean.new_zeros(0, size)]
    for part, index in _chunks(vectors, BACKWARD_FACTOR * uniform.numel()):
        value, slope = Conditioning.of(part).slope(uniform[: index.shape[1] - 1])
        values.append(value)
        slopes.append(slope.new_zeros(len(slope), size).scatter_(1, index, slope))
    return torch.cat(values), torch.cat(slopes)


def _chunks(vectors: Vectors, numbers: int) -> Iterator[tuple[Vectors, Tensor]]:
    """Chunks of rows that take so many numbers each, reduced to the elements that matter."""
    step = max(1, CHUNK // max(1, numbers))
    for start in range(0, len(vectors.mean), step):
        part = Vectors(*(tensor[start : start + step] for tensor in vectors))
        index = _uncertain(part)
        yield part.take(index), index


def _uncertain(vectors: Vectors) -> Tensor:
    """The elements that may be negative, (rows, as many as the row with most of them needs).

    What all others together could change, sum_i P(d_i < 0), is rounding to P <= min_i P(d_i > 0).
    """
    z = vectors.standardised
    chance = torch.where(vectors.always_zero, 1, cumulative(-z))
    least = torch.finfo(z.dtype).eps / z.shape[-1] * cumulative(z).amin(-1, keepdim=True)
    count = max(1, int((chance > least).sum(-1).max()))
    return chance.argsort(dim=-1, descending=True, stable=True)[:, :count]


def _closed(vectors: Vectors) -> Tensor:
    """1, Phi(a), or Phi(a) Phi(b) + K0(a, b, rho) (Plackett 1954)."""
    z = vectors.standardised
    product = cumulative(z).prod(-1)
    if z.shape[-1] == CLOSED_FORM:
        inverse = inverse_deviation(vectors.variance)
        correlation = vectors.covariance[:, 0, 1] * inverse[:, 0] * inverse[:, 1]
        product = product + plackett(z[:, 0], z[:, 1], correlation.clamp(-1, 1))[0]
        product = product.clamp(0, 1)
    return product / (1 + vectors.always_zero.sum(-1))


def _closed_slope(vectors: Vectors) -> Tensor:
    variance = vectors.variance
    inverse = inverse_deviation(variance)
    slope = density(vectors.standardised) * inverse
    if slope.shape[-1] == CLOSED_FORM:
        covariance = vectors.covariance[:, 0, 1, None]
        gain = covariance * inverse * inverse  # regression of the other element on this one
        mean = vectors.mean.flip(-1) - gain * vectors.mean
        rest = variance.flip(-1) - gain * covariance
        spread = standard_deviation(torch.where(rest > vectors.floor.flip(-1), rest, 0))
        slope = slope * cumulative(standardise(mean, spread))
    return slope / (1 + vectors.always_zero.sum(-1))[:, None]


@final
@dataclass(frozen=True)
class Conditioning:
    """d = m + L xi, in an order that decides the least likely constraints first.

    factor (rows, n, n): L, zero beyond its rank; stage (rows, n): the column that decides each
    constraint, which no later column enters.
    """

    mean: Tensor
    factor: Tensor
    stage: Tensor

    @classmethod
    def of(cls, vectors: Vectors) -> "Conditioning":
        """A pivoted Cholesky factor; the next pivot is the constraint least likely to hold.

        Columns before it are at their means within their intervals (Gibson, Glasbey & Elston
        1994; Genz & Bretz 2009, chapter 4).
        """
        mean, covariance, floor = vectors
        size = mean.shape[-1]
        rest, expected = covariance.clone(), mean.clone()
        stage = torch.where(covariance.diagonal(dim1=-2, dim2=-1) > floor, size, CONSTANT)
        factor = torch.zeros_like(covariance)
        rows = torch.arange(len(rest), device=rest.device)
        for column in range(size):
            undecided = stage == size
            varies = undecided.any(-1)
            if not bool(varies.any()):
                break
            variance = torch.where(undecided, rest.diagonal(dim1=-2, dim2=-1), 0)
            z = standardise(expected, standard_deviation(variance))
            pivot = torch.where(undecided, z, math.inf).argmin(-1)
            width = torch.where(varies, variance[rows, pivot], 1).sqrt()
            entries = torch.where(undecided, rest[rows, :, pivot] / width[:, None], 0)
            factor[..., column] = entries
            # E[xi | xi > -z] = phi(z) / Phi(z), also far in the tail.
            tail = math.sqrt(2 / math.pi) / torch.special.erfcx(-z[rows, pivot] / SQRT_2)
            expected = expected + entries * tail[:, None]
            rest = rest - entries[:, :, None] * entries[:, None, :]
            decided = undecided & (rest.diagonal(dim1=-2, dim2=-1) <= floor)
            decided[rows, pivot] |= varies
            stage = torch.where(decided, column, stage)
        return cls(mean, factor, stage)

    def slope(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The average of the integrand, (rows,), and its derivative by the mean, (rows, n).

        Reverse-mode differentiation through the columns.
        """
        product, columns, xi = self.integrand(uniform)
        by_xi, by_mean = torch.zeros_like(xi), torch.zeros_like(self.mean)
        nothing = torch.zeros_like(product)  # the last column's xi is never drawn
        for k in reversed(range(len(columns))):
            column = columns[k]
            by_share = product / torch.where(column.share > 0, column.share, 1)
            drawn = (by_xi[:, k], xi[:, k], uniform[k]) if k < len(uniform) else (nothing,) * 3
            by_at = column.backward(by_share, *drawn)  # (rows, members, points)
            by_mean.scatter_add_(1, column.constraints, by_at.mean(-1))
            by_xi[:, :k] += column.before.mT @ by_at
        return product.mean(-1), by_mean

    def integrand(self, uniform: Tensor) -> tuple[Tensor, list["Column"], Tensor]:
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
                xi[:, k] = column.sample(uniform[k])
        return product, columns, xi

    def _column(self, k: int, xi: Tensor) -> "Column":
        """The interval of xi_k, given those before it."""
        decides = self.stage == k
        count = max(1, int(decides.sum(-1).max()))
        index = decides.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :count]
        lines = self.factor.gather(1, index[..., None].expand(*index.shape, k + 1))
        entries = torch.where(decides.gather(1, index), lines[..., k], 0)
        at = self.mean.gather(1, index)[..., None] + lines[..., :k] @ xi[:, :k]
        return Column.of(index, lines[..., :k], entries, at)


class Column(NamedTuple):
    """The interval of one xi: which constraints give it, and its probability.

    constraints (rows, members): their numbers; before (rows, members, k): their entries in earlier
    columns of L; entries (rows, members): those in this one, 0 for padding; ends: the lower end and
    the member that gives it, (rows, points), and the upper one if there is any; share (rows,
    points): the probability.
    """

    constraints: Tensor
    before: Tensor
    entries: Tensor
    ends: list[tuple[Tensor, Tensor]]
    share: Tensor

    @classmethod
    def of(cls, constraints: Tensor, before: Tensor, entries: Tensor, at: Tensor) -> "Column":
        """From the constraints' values without this xi, at (rows, members, points)."""
        bound = -at / torch.where(entries != 0, entries, 1)[..., None]
        low, below = torch.where((entries > 0)[..., None], bound, -math.inf).max(1)
        if not bool((entries < 0).any()):  # as always where the covariance is not singular
            return cls(constraints, before, entries, [(low, below)], cumulative(-low))
        high, above = torch.where((entries < 0)[..., None], bound, math.inf).min(1)
        share = cumulative_difference(high, low).clamp(min=0)
        return cls(constraints, before, entries, [(low, below), (high, above)], share)

    def sample(self, uniform: Tensor) -> Tensor:
        """The quantile of the normal distribution truncated to the interval.

        Computed in the tail where probabilities are small; where the interval has none, the product
        is zero whatever the point.
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

    def backward(self, by_share: Tensor, by_xi: Tensor, xi: Tensor, uniform: Tensor) -> Tensor:
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
