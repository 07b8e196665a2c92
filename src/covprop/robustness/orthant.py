"""The probability that all elements of a Gaussian vector are positive.

One and two dimensions in closed form, more by sequential conditioning (Genz 1992): with
d = m + L xi, the constraints on xi_1 give its interval, given xi_1 those on xi_2 and so on; the
probability is the average of the product of the intervals' probabilities over xi drawn within them.
A singular covariance has fewer columns in L than rows, and a column decides several constraints at
once (Genz & Kwong 2000).
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.kernels.normal import (
    SQRT_2,
    cumulative,
    cumulative_difference,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import plackett
from covprop.robustness.randomisation import Randomisation

DEGENERATE = 4.0
"""In units of rounding: a variance this small against what it is the difference of is zero."""
HELD = 2**21
"""Numbers that are held for the elements of all points at a time."""
KEPT = 4
"""Times as much is kept on the way to a derivative."""
CLOSED = 2
"""Dimensions up to which there is a closed form."""
CONSTANT = -1
"""The column of a constraint that no column decides, as nothing in it varies."""


@final
@dataclass(frozen=True)
class Vectors:
    """Gaussian vectors: mean (rows, n), covariance (rows, n, n), the size of what has cancelled.

    size (rows, n): what the variances are differences of; rounding: its relative error.
    """

    mean: Tensor
    covariance: Tensor
    size: Tensor
    rounding: float

    @property
    def variance(self) -> Tensor:
        """Variances (rows, n), exactly zero where rounding cannot tell them from it."""
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        return torch.where(variance > DEGENERATE * self.rounding * self.size, variance, 0)

    def __getitem__(self, rows: slice | Tensor) -> "Vectors":
        """Some of them."""
        return Vectors(self.mean[rows], self.covariance[rows], self.size[rows], self.rounding)


def orthant(vectors: Vectors, randomisation: Randomisation) -> Tensor:
    """P(every element > 0), (replicates, rows): one replicate where it is exact.

    Elements that are zero for certain are ties, which all that tie share alike.
    """
    rows, size = vectors.mean.shape
    if size <= CLOSED:
        return _closed(vectors)[None]
    uniform = randomisation.uniform(size - 1, vectors.mean.device)
    step = max(1, HELD // uniform.numel())
    parts = [vectors.mean.new_zeros(len(uniform), 0)]
    for start in range(0, rows, step):
        part = vectors[start : start + step]
        parts.append(average(part.mean, Conditioning.of(part), uniform))
    return torch.cat(parts, dim=1)


def orthant_slope(vectors: Vectors, randomisation: Randomisation) -> tuple[Tensor, Tensor]:
    """The same averaged over the replicates, (rows,), and its derivative by the mean (rows, n).

    dP/dm_i = density of d_i at 0 times P(the others are positive | d_i = 0)  in two dimensions.
    """
    rows, size = vectors.mean.shape
    if size <= CLOSED:
        return _closed(vectors), _closed_slope(vectors)
    uniform = randomisation.uniform(size - 1, vectors.mean.device)
    step = max(1, HELD // (KEPT * uniform.numel()))
    values, slopes = [vectors.mean.new_zeros(0)], [vectors.mean.new_zeros(0, size)]
    for start in range(0, rows, step):
        part = vectors[start : start + step]
        conditioning = Conditioning.of(part)

        def value(mean: Tensor, conditioning: "Conditioning" = conditioning) -> Tensor:
            return average(mean, conditioning, uniform).mean(0)

        made = torch.func.vjp(value, part.mean)
        values.append(made[0])
        slopes.append(made[1](torch.ones_like(made[0]))[0])
    return torch.cat(values), torch.cat(slopes)


def _standardised(vectors: Vectors) -> Tensor:
    return standardise(vectors.mean, standard_deviation(vectors.variance))


def _ties(vectors: Vectors) -> Tensor:
    """How many share a tie, (rows,)."""
    return 1 + ((vectors.mean == 0) & (vectors.variance == 0)).sum(-1)


def _closed(vectors: Vectors) -> Tensor:
    """1, Phi(a), or Phi(a) Phi(b) + K0(a, b, rho) (Plackett 1954)."""
    z = _standardised(vectors)
    product = cumulative(z).prod(-1)
    if z.shape[-1] == CLOSED:
        product = (product + plackett(z[:, 0], z[:, 1], _correlation(vectors))[0]).clamp(0, 1)
    return product / _ties(vectors)


def _correlation(vectors: Vectors) -> Tensor:
    inverse = inverse_deviation(vectors.variance)
    return (vectors.covariance[:, 0, 1] * inverse[:, 0] * inverse[:, 1]).clamp(-1, 1)


def _closed_slope(vectors: Vectors) -> Tensor:
    variance = vectors.variance
    inverse = inverse_deviation(variance)
    z = _standardised(vectors)
    slope = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * inverse
    if z.shape[-1] == CLOSED:
        gain = vectors.covariance[:, 0, 1, None] * inverse.square()  # of the other on this one
        mean = vectors.mean.flip(-1) - gain * vectors.mean
        rest = variance.flip(-1) - gain * vectors.covariance[:, 0, 1, None]
        floor = DEGENERATE * vectors.rounding * vectors.size.flip(-1)
        spread = standard_deviation(torch.where(rest > floor, rest, 0))
        slope = slope * cumulative(standardise(mean, spread))
    return slope / _ties(vectors)[:, None]


@final
@dataclass(frozen=True)
class Conditioning:
    """d = m + L xi for independent xi, in an order that decides the doubtful constraints first.

    factor (rows, n, n): L, zero beyond its rank; stage (rows, n): the column that decides each
    constraint, which no later one enters.
    """

    factor: Tensor
    stage: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, vectors: Vectors) -> "Conditioning":
        """A pivoted Cholesky factor; the next pivot is what is least likely to hold.

        (Gibson, Glasbey & Elston 1994; Genz & Bretz 2009, section 4.1.3), the columns before it at
        their means within their intervals.
        """
        size = vectors.mean.shape[-1]
        rest, expected = vectors.covariance.clone(), vectors.mean.clone()
        floor = DEGENERATE * vectors.rounding * vectors.size
        stage = torch.where(vectors.variance > 0, size, CONSTANT)
        columns = []
        rows = torch.arange(len(rest), device=rest.device)
        for column in range(size):
            open_ = stage == size
            left = rest.diagonal(dim1=-2, dim2=-1)
            z = standardise(expected, standard_deviation(torch.where(open_, left, 0)))
            pivot = torch.where(open_, z, math.inf).argmin(-1)
            varies = open_.any(-1)
            width = torch.where(varies, left[rows, pivot], 1).sqrt()
            entries = torch.where(varies[:, None], rest[rows, :, pivot] / width[:, None], 0)
            entries = torch.where(open_, entries, 0)
            columns.append(entries)
            expected = expected + entries * _truncated_mean(z[rows, pivot])[:, None]
            rest = rest - entries[:, :, None] * entries[:, None, :]
            decided = open_ & (rest.diagonal(dim1=-2, dim2=-1) <= floor)
            decided[rows, pivot] |= varies
            stage = torch.where(decided, column, stage)
        return cls(torch.stack(columns, dim=-1), stage)


def _truncated_mean(z: Tensor) -> Tensor:
    """E[xi | xi > -z] = phi(z) / Phi(z), also far in the tail."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(-z / SQRT_2)


def average(mean: Tensor, conditioning: Conditioning, uniform: Tensor) -> Tensor:
    """The product of the intervals' probabilities, averaged over each replicate's points.

    mean (rows, n), uniform (replicates, points, n - 1): the result (replicates, rows) is
    differentiable with respect to the mean.
    """
    rows, size = mean.shape
    stage = conditioning.stage
    fixed = stage == CONSTANT
    holds = torch.where(fixed, mean >= 0, True).all(-1)
    ties = 1 + (fixed & (mean == 0)).sum(-1)
    at = mean.expand(*uniform.shape[:2], rows, size)  # of every constraint, (R, N, rows, n)
    product = (holds / ties).to(mean.dtype).expand(at.shape[:-1])
    for column in range(int(stage.max()) + 1):
        entries = conditioning.factor[..., column]
        low, high = _interval(at, entries, stage == column)
        share = cumulative_difference(high, low).clamp(min=0)
        product = product * share
        if column < size - 1:
            xi = _within(low, high, share, uniform[:, :, column, None])
            at = at + xi[..., None] * entries
    return product.mean(1)


def _interval(at: Tensor, entries: Tensor, decides: Tensor) -> tuple[Tensor, Tensor]:
    """Where at + entries xi > 0 for every constraint that is decided now."""
    bound = -at / torch.where(decides & (entries != 0), entries, 1)
    low = torch.where(decides & (entries > 0), bound, -math.inf).amax(-1)
    if not bool((decides & (entries < 0)).any()):
        return low, torch.full_like(low, math.inf)
    return low, torch.where(decides & (entries < 0), bound, math.inf).amin(-1)


def _within(low: Tensor, high: Tensor, share: Tensor, uniform: Tensor) -> Tensor:
    """The point of the interval below which the uniform part of its probability is.

    In the tail on the other side of zero, where probabilities are small; where the interval has
    none, the product is zero whatever the point.
    """
    upper = high + low > 0
    start = cumulative(torch.where(upper, -high, low))
    part = torch.where(upper, 1 - uniform, uniform)
    at = start + part * share
    inside = (at > torch.finfo(at.dtype).tiny) & (at < 1)
    xi = torch.special.ndtri(torch.where(inside, at, 0.5))
    return torch.where(inside, torch.where(upper, -xi, xi), 0)
