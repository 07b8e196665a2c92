"""Moments of samples that come in blocks, and their standard errors.

Samples come alone, or in antithetic pairs, or in replicates of a quasi-random sequence: what is
independent is the group. Sums are kept about a centre c, the mean of the first block, in place, and
moved to the mean at the end. Little cancels: the centre is k of the N samples' own mean, so that
its squared distance from the mean is at most N / k variances.

Each group has d = its mean - c and g = its mean of (y - c)(y - c)^T. The standard error of the
covariance is that of the mean of g - delta d^T - d delta^T, with delta the mean of d: what g would
be about the mean of all samples, but for a constant.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric
from covprop.sampling import SamplingError

Result = tuple[Tensor, Tensor, SamplingError]


def add_products(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add sums over samples (count, *batch, m) of all pairs to a total (*batch, m, m), in place."""
    count, *batch, size = left.shape
    shape = count, torch.Size(batch).numel(), size
    total.view(shape[1], size, size).baddbmm_(
        left.reshape(shape).permute(1, 2, 0), right.reshape(shape).permute(1, 0, 2), alpha=factor
    )


@dataclass
class _Sums:
    """Over groups: of d, d_i d_j, g_ij d_j and g_ij^2; of b_i b_j where there are pairs."""

    first: Tensor
    second: Tensor
    mixed: Tensor
    squares: Tensor
    halves: Tensor | None


@final
class Moments:
    """Samples, or antithetic pairs, one after another.

    A sample has g = d d^T. A pair has its half sum c + d and its half difference b, and
    g = d d^T + b b^T.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._count = 0
        self._centre: Tensor | None = None
        self._sums: _Sums | None = None

    def add(self, values: Tensor, opposite: Tensor | None = None) -> None:
        """A block (count, *batch, m), or one and its antithetic counterpart."""
        middle = values if opposite is None else (values + opposite) / 2
        if self._centre is None or self._sums is None:
            self._centre = centre = middle.mean(0)
            second, mixed, squares = (_zeros(centre) for _ in range(3))
            halves = None if opposite is None else _zeros(centre)
            self._sums = _Sums(torch.zeros_like(centre), second, mixed, squares, halves)
        sums, d = self._sums, middle - self._centre
        self._count += len(values)
        sums.first += d.sum(0)
        square = d.square()
        add_products(sums.second, d, d)
        add_products(sums.mixed, d, square)
        add_products(sums.squares, square, square)
        if opposite is not None and sums.halves is not None:
            half = (values - opposite) / 2
            both = d * half
            add_products(sums.halves, half, half)
            add_products(sums.mixed, half, both)
            add_products(sums.squares, both, both, 2)
            square = half.square()
            add_products(sums.squares, square, square)

    def result(self) -> Result:
        """Mean, unbiased covariance and their standard errors; the sums are used up.

        The mean of g about the mean is the covariance of the samples about their mean, to which
        the covariance of that mean is added.
        """
        assert self._centre is not None
        assert self._sums is not None
        n, sums, self._sums = self._count, self._sums, None
        delta = sums.first / n
        total = sums.second if sums.halves is None else sums.halves.add_(sums.second)
        sums.squares.addcmul_(total, total, value=-1 / n)
        sums.mixed.addcmul_(total, _column(delta), value=-1)
        sums.second.addcmul_(_row(delta), _column(delta), value=-n)
        if sums.halves is not None:
            total.addcmul_(_row(delta), _column(delta), value=-n)
        stderr = _stderr(n, sums.squares, sums.mixed, sums.second, delta)
        mean_stderr = _mean_stderr(n, sums.second)
        if sums.halves is None:
            covariance = total.div_(n - 1)
        else:
            covariance = total.add_(sums.second, alpha=1 / (n - 1)).div_(n)
        size = n if sums.halves is None else 2 * n
        del sums
        return self._centre + delta, symmetric(covariance), SamplingError(size, mean_stderr, stderr)


@dataclass
class _Spread:
    """Over replicates: the mean of g, sums of squares of its deviations, and with those of d."""

    own: Tensor
    """The sum of the present replicate."""
    average: Tensor
    mixed: Tensor
    squares: Tensor


@final
class Replicates:
    """Independent replicates of a sequence, equally long, one after another.

    Deviations of g from its mean are tiny, and updated by Welford's formula.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._samples = self._length = 0
        self._centre: Tensor | None = None
        self._first: list[Tensor] = []
        self._spread: _Spread | None = None

    def add(self, values: Tensor) -> None:
        """A block (count, *batch, m) of the present replicate."""
        if self._centre is None or self._spread is None:
            self._centre = values.mean(0)
            self._spread = _Spread(*(_zeros(self._centre) for _ in range(4)))
        d = values - self._centre
        if not self._length:
            self._first.append(torch.zeros_like(self._centre))
        self._first[-1] += d.sum(0)
        self._length += len(values)
        add_products(self._spread.own, d, d)

    def close(self) -> None:
        """The present replicate is complete."""
        assert self._spread is not None
        spread, count = self._spread, len(self._first)
        self._first[-1] /= self._length
        *earlier, d = self._first
        move = d - torch.stack(earlier).mean(0) if earlier else d
        step = spread.own.div_(self._length).sub_(spread.average)
        spread.average.add_(step, alpha=1 / count)
        spread.squares.addcmul_(step, step, value=1 - 1 / count)
        spread.mixed.addcmul_(step, _column(move), value=1 - 1 / count)
        self._samples, self._length = self._samples + self._length, 0
        spread.own.zero_()

    def result(self) -> Result:
        """Mean, covariance and their standard errors; the sums are used up."""
        assert self._centre is not None
        assert self._spread is not None
        n, spread, self._spread = len(self._first), self._spread, None
        first = torch.stack(self._first)
        delta = first.mean(0)
        second = spread.own
        add_products(second, first - delta, first - delta)
        stderr = _stderr(n, spread.squares, spread.mixed, second, delta)
        covariance = spread.average.addcmul_(_row(delta), _column(delta), value=-1)
        covariance.add_(second, alpha=1 / (n * (n - 1)))
        error = SamplingError(self._samples, _mean_stderr(n, second), stderr)
        del spread, second
        return self._centre + delta, symmetric(covariance), error


def _stderr(n: int, squares: Tensor, mixed: Tensor, second: Tensor, delta: Tensor) -> Tensor:
    """Of the mean over n groups of g - delta d^T - d delta^T, in place of the squares.

    Sums over groups: squares of (g - mean g)_ij^2, mixed of (g - mean g)_ij (d - delta)_j, second
    of (d - delta)_i (d - delta)_j. Mixed is used up.
    """
    row, column, variance = _row(delta), _column(delta), second.diagonal(dim1=-2, dim2=-1)
    mixed.addcmul_(second, column, value=-0.5)  # half of 2 delta_i delta_j second_ij on each side
    squares.addcmul_(mixed, row, value=-2).addcmul_(mixed.mT, column, value=-2)
    squares.addcmul_(row.square(), _column(variance)).addcmul_(_row(variance), column.square())
    return squares.clamp_(min=0).div_(n * (n - 1)).sqrt_()


def _mean_stderr(n: int, second: Tensor) -> Tensor:
    return second.diagonal(dim1=-2, dim2=-1).clamp(min=0).div(n * (n - 1)).sqrt()


def _zeros(mean: Tensor) -> Tensor:
    return mean.new_zeros(*mean.shape, mean.shape[-1])


def _row(vector: Tensor) -> Tensor:
    """What multiplies the row of its number."""
    return vector[..., :, None]


def _column(vector: Tensor) -> Tensor:
    """What multiplies the column of its number."""
    return vector[..., None, :]
