"""The probability that all elements of a Gaussian vector are positive.

One and two dimensions in closed form, more by sequential conditioning at quasi-random points.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.kernels.normal import (
    cumulative,
    density,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.kernels.plackett import plackett
from covprop.robustness.conditioning import Conditioning
from covprop.robustness.randomisation import Randomisation

DEGENERATE = 4.0
"""In units of rounding: a variance this small against what it is the difference of is zero."""
HELD = 2**21
"""Numbers that are held for the elements of all points at a time."""
KEPT = 4
"""Times as much is kept on the way to a derivative."""
CLOSED = 2
"""Dimensions up to which there is a closed form."""


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
        return torch.where(variance > self.floor, variance, 0)

    @property
    def floor(self) -> Tensor:
        """Variances up to these are rounding, (rows, n)."""
        return DEGENERATE * self.rounding * self.size

    def conditioning(self) -> Conditioning:
        """The order in which constraints are decided."""
        return Conditioning.of(self.mean, self.covariance, self.floor)

    def __getitem__(self, rows: slice | Tensor) -> "Vectors":
        """Some of them."""
        return Vectors(self.mean[rows], self.covariance[rows], self.size[rows], self.rounding)

    def take(self, index: Tensor) -> "Vectors":
        """Some elements of each, index (rows, k)."""
        rows = torch.arange(len(index), device=index.device)[:, None, None]
        matrix = self.covariance[rows, index[:, :, None], index[:, None, :]]
        return Vectors(
            self.mean.gather(1, index), matrix, self.size.gather(1, index), self.rounding
        )


def orthant(vectors: Vectors, points: Randomisation) -> Tensor:
    """P(every element > 0), (replicates, rows): one replicate where it is exact.

    Elements that are zero for certain are ties, which all that tie share alike.
    """
    size = vectors.mean.shape[-1]
    if size <= CLOSED:
        return _closed(vectors)[None]
    uniform = points.uniform(size - 1, vectors.mean.device)
    parts = [vectors.mean.new_zeros(points.replicates, 0)]
    for part, index in _parts(vectors, uniform.numel()):
        product = part.conditioning().probability(uniform[: index.shape[1] - 1])
        parts.append(product.unflatten(1, (points.replicates, points.each)).mean(-1).mT)
    return torch.cat(parts, dim=1)


def orthant_slope(vectors: Vectors, points: Randomisation) -> tuple[Tensor, Tensor]:
    """The same averaged over the replicates, (rows,), and its derivative by the mean (rows, n).

    dP/dm_i = density of d_i at 0 times P(the others are positive | d_i = 0)  in two dimensions.
    """
    size = vectors.mean.shape[-1]
    if size <= CLOSED:
        return _closed(vectors), _closed_slope(vectors)
    uniform = points.uniform(size - 1, vectors.mean.device)
    values, slopes = [vectors.mean.new_zeros(0)], [vectors.mean.new_zeros(0, size)]
    for part, index in _parts(vectors, KEPT * uniform.numel()):
        value, slope = part.conditioning().slope(uniform[: index.shape[1] - 1])
        values.append(value)
        slopes.append(slope.new_zeros(len(slope), size).scatter_(1, index, slope))
    return torch.cat(values), torch.cat(slopes)


def _parts(vectors: Vectors, each: int) -> Iterator[tuple[Vectors, Tensor]]:
    """Some rows at a time, as each takes so many numbers, and the elements that matter in them."""
    step = max(1, HELD // max(1, each))
    for start in range(0, len(vectors.mean), step):
        part = vectors[slice(start, start + step)]
        index = _doubtful(part)
        yield part.take(index), index


def _doubtful(vectors: Vectors) -> Tensor:
    """The elements that may well be negative, (rows, as many as the row with most of them needs).

    What all others together could change, sum_i P(d_i < 0), is rounding to P <= min_i P(d_i > 0).
    """
    z = _standardised(vectors)
    chance = torch.where((vectors.mean == 0) & (vectors.variance == 0), 1, cumulative(-z))
    least = torch.finfo(z.dtype).eps / z.shape[-1] * cumulative(z).amin(-1, keepdim=True)
    count = max(1, int((chance > least).sum(-1).max()))
    return chance.argsort(dim=-1, descending=True, stable=True)[:, :count]


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
    slope = density(z) * inverse
    if z.shape[-1] == CLOSED:
        gain = vectors.covariance[:, 0, 1, None] * inverse.square()  # of the other on this one
        mean = vectors.mean.flip(-1) - gain * vectors.mean
        rest = variance.flip(-1) - gain * vectors.covariance[:, 0, 1, None]
        spread = standard_deviation(torch.where(rest > vectors.floor.flip(-1), rest, 0))
        slope = slope * cumulative(standardise(mean, spread))
    return slope / _ties(vectors)[:, None]
