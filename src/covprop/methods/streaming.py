"""Moments of samples that come in blocks, and their standard errors.

Samples come alone, or in antithetic pairs, or in replicates of a quasi-random sequence: what is
independent is the group. Sums are kept about the mean so far; two blocks are put together by
moving both to their common mean (Chan, Golub & LeVeque), so that nothing cancels.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric
from covprop.gaussian import SamplingError

Result = tuple[Tensor, Tensor, SamplingError]


def products(left: Tensor, right: Tensor) -> Tensor:
    """Sums over samples (count, *batch, m) of all pairs, (*batch, m, m)."""
    return left.movedim(0, -1) @ right.movedim(0, -2)


@final
@dataclass(frozen=True)
class Halves:
    """Sums of half differences b of antithetic pairs beside half sums a, a about its mean.

    squares sum b_i b_j, fourth sum b_i^2 b_j^2, mixed sum a_i b_i a_j b_j, third sum a_i b_i b_j.
    """

    squares: Tensor
    fourth: Tensor
    mixed: Tensor
    third: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "Halves":
        """Of a block, a centred."""
        both = a * b
        squares = b.square()
        return cls(products(b, b), products(squares, squares), products(both, both),
                   products(both, b))  # fmt: skip

    def about(self, shift: Tensor) -> "Halves":
        """The same sums for a - shift."""
        row, column = shift[..., :, None], shift[..., None, :]
        mixed = self.mixed - column * self.third - row * self.third.mT + row * column * self.squares
        return Halves(self.squares, self.fourth, mixed, self.third - row * self.squares)

    def plus(self, other: "Halves") -> "Halves":
        """Of both, about the same mean."""
        return Halves(self.squares + other.squares, self.fourth + other.fourth,
                      self.mixed + other.mixed, self.third + other.third)  # fmt: skip


@final
@dataclass(frozen=True)
class Moments:
    """Sums over groups about their mean: of d_i d_j, d_i^2 d_j and d_i^2 d_j^2.

    A group is a sample, or an antithetic pair: then d is its half sum, and `halves` has the rest.
    """

    count: int
    mean: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor
    halves: Halves | None = None

    @classmethod
    def of(cls, values: Tensor, opposite: Tensor | None = None) -> "Moments":
        """Of a block (count, *batch, m), or of one and its antithetic counterpart."""
        half = None if opposite is None else (values - opposite) / 2
        values = values if opposite is None else (values + opposite) / 2
        mean = values.mean(0)
        deviation = values - mean
        square = deviation.square()
        halves = None if half is None else Halves.of(deviation, half)
        return cls(len(values), mean, products(deviation, deviation),
                   products(square, deviation), products(square, square), halves)  # fmt: skip

    def plus(self, other: "Moments") -> "Moments":
        """Of both sets of samples."""
        count = self.count + other.count
        step = other.mean - self.mean
        one, two = (
            self._about(step * (other.count / count)), other._about(step * (-self.count / count)),
        )  # fmt: skip
        halves = one.halves and two.halves and one.halves.plus(two.halves)
        return Moments(count, one.mean, one.second + two.second, one.third + two.third,
                       one.fourth + two.fourth, halves)  # fmt: skip

    def result(self) -> Result:
        """Mean, unbiased covariance and their standard errors.

        With w = a_i a_j + b_i b_j of each group, the mean of w is the covariance of the samples
        about their mean, to which the covariance of that mean is added.
        """
        n = self.count
        of_mean = self.second / (n * (n - 1))
        products_of, squares = self.second, self.fourth
        if self.halves is not None:
            products_of = products_of + self.halves.squares
            squares = squares + 2 * self.halves.mixed + self.halves.fourth
        average = products_of / n
        spread = (squares / n - average.square()).clamp(min=0)
        size = n if self.halves is None else 2 * n
        error = SamplingError(size, _deviation(of_mean), (spread / (n - 1)).sqrt())
        return self.mean, symmetric(average + of_mean), error

    def _about(self, shift: Tensor) -> "Moments":
        """The same sums about the mean + shift, which is then called the mean."""
        n, row, column = self.count, shift[..., :, None], shift[..., None, :]
        variance = self.second.diagonal(dim1=-2, dim2=-1)
        of_row, of_column = variance[..., :, None], variance[..., None, :]
        third = (
            self.third - column * of_row - 2 * row * self.second - n * row.square() * column
        )  # fmt: skip
        fourth = (
            self.fourth
            - 2 * column * self.third - 2 * row * self.third.mT
            + column.square() * of_row + row.square() * of_column + 4 * row * column * self.second
            + n * row.square() * column.square()
        )  # fmt: skip
        halves = None if self.halves is None else self.halves.about(shift)
        return Moments(n, self.mean + shift, self.second + n * row * column, third, fourth, halves)


@final
class Replicates:
    """Means and covariances of independent replicates, and how they spread."""

    def __init__(self) -> None:
        """Begin without any."""
        self._count = self._samples = 0
        self._means: list[Tensor] = []
        self._average: Tensor | None = None
        self._spread: Tensor | None = None

    def add(self, replicate: Moments) -> None:
        """One more; its covariance enters by Welford's update."""
        inner = replicate.second / replicate.count
        self._count += 1
        self._samples += replicate.count
        self._means.append(replicate.mean)
        if self._average is None or self._spread is None:
            self._average, self._spread = inner, torch.zeros_like(inner)
            return
        step = inner - self._average
        self._average = self._average + step / self._count
        self._spread = self._spread + step * (inner - self._average)

    def result(self) -> Result:
        """The mean of the means; within and between replicates, and the covariance of the mean."""
        assert self._average is not None
        assert self._spread is not None
        count, means = self._count, torch.stack(self._means)
        mean = means.mean(0)
        between = products(means - mean, means - mean)
        of_mean = between / (count * (count - 1))
        covariance = self._average + between / count + of_mean
        stderr = (self._spread / (count * (count - 1))).sqrt()
        return (
            mean,
            symmetric(covariance),
            SamplingError(self._samples, _deviation(of_mean), stderr),
        )


def _deviation(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
