"""Roots of the covariances of inputs, and the numbers that are drawn along them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance.semidefinite import FactorRoot
from covprop.covariance.semidefinite import Root as Structure
from covprop.gaussian import Gaussian
from covprop.kernels import pearson
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.skewed import Skewed

REDUCED = 2**18
"""Entries of a root up to which its rank is looked for."""


@final
@dataclass(frozen=True)
class Root:
    """L with L L^T the covariance of x, as its structure has it, in the shapes of the mean."""

    x: Gaussian
    structure: Structure

    @classmethod
    def of(cls, x: Gaussian) -> "Root":
        """The root of a covariance, computed once."""
        return cls(x, x.covariance.root())

    @classmethod
    def of_full_rank(cls, x: Gaussian) -> "Root":
        """A root with as few columns as the rank, the largest directions first, if that is cheap.

        That of elements which are independent has a column for each that varies; that of a matrix
        has the principal axes of its correlations, so that units do not count. Of a batch, as many
        as the largest rank.
        """
        full = x.covariance.root()
        rows = x.event_shape.numel()
        if rows * full.width > REDUCED or not rows or isinstance(x, Skewed):
            return cls(x, full)
        columns = full.columns(0, full.width)
        if x.covariance.independent:
            varies = (columns != 0).any(-2).reshape(-1, full.width).any(0)
            if bool(varies.all()):
                return cls(x, full)
            return cls(x, FactorRoot(columns[..., varies]))
        # What the roundings of a correlation matrix amount to is no direction.
        least = torch.finfo(x.dtype).eps * rows
        if x.covariance.factor_and_noise() is not None:
            deviation = columns.double().square().sum(-1, keepdim=True).sqrt()
            left, sizes, _ = torch.linalg.svd(columns * _inverse(deviation), full_matrices=False)
            sizes, least = sizes.square(), least**2  # a factor has more than its square
        else:
            matrix = x.covariance_matrix.double()
            deviation = standard_deviation(matrix.diagonal(dim1=-2, dim2=-1))[..., None]
            inverse = _inverse(deviation)
            sizes, left = torch.linalg.eigh(matrix * inverse * inverse.mT)
            sizes, left = sizes.flip(-1), left.flip(-1)
        rank = int((sizes > least * sizes[..., :1]).sum(-1).max())
        kept = standard_deviation(sizes[..., None, :rank])
        axes = deviation * left[..., :rank] * kept
        return cls(x, FactorRoot(axes.to(x.dtype)))

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.structure.width

    def times(self, numbers: Tensor) -> Tensor:
        """L z for numbers (count, *batch, width), in the shape (count, *batch, *event)."""
        return self.structure.times(numbers).reshape(len(numbers), *self.x.mean.shape)

    def after(self, jacobian: Tensor) -> Tensor:
        """J L for a Jacobian (*batch, m, n)."""
        return self.structure.after(jacobian.to(self.x.dtype))

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of L as (count, *batch, *event)."""
        columns = self.structure.columns(start, stop)
        return columns.movedim(-1, 0).reshape(stop - start, *self.x.mean.shape)

    def normal(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers (count, *batch, width)."""
        shape = count, *self.x.batch_shape, self.width
        return torch.randn(shape, dtype=self.x.dtype, device=self.x.device, generator=generator)

    def standardised(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Numbers z (count, *batch, width) for which mean + L z is a draw of x.

        Independent, of mean 0 and variance 1: normal ones, or with the skewness of the elements.
        """
        if (skewness := self._skewness()) is None:
            return self.normal(count, generator)
        return pearson.draw(skewness, count, generator).to(self.x.dtype)

    def transformed(self, numbers: Tensor) -> Tensor:
        """The same made of standard normal numbers, by a function that rises with them."""
        if (skewness := self._skewness()) is None:
            return numbers
        return pearson.quantile(numbers, skewness).to(self.x.dtype)

    def standardised_points(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """The same (sets, count, *batch, width) of sets of points (sets, count, width).

        Every Gaussian of a batch has the same points, of mean 0 and variance 1 by their weights
        (sets, count), also where the skewness changes them.
        """
        ones = (1,) * len(self.x.batch_shape)
        numbers = numbers.to(self.x.mean).reshape(*weights.shape, *ones, self.width)
        numbers = numbers.expand(*weights.shape, *self.x.batch_shape, self.width)
        if self._skewness() is None:
            return numbers
        drawn = self.transformed(numbers)
        shares = weights.to(drawn).reshape(*weights.shape, *ones, 1)
        drawn = drawn - (shares * drawn).sum(1, keepdim=True)
        return drawn * inverse_deviation((shares * drawn.square()).sum(1, keepdim=True))

    def _skewness(self) -> Tensor | None:
        """That of the columns (*batch, width), one for each of independent elements."""
        if not isinstance(self.x, Skewed):
            return None
        return self.x.skewness.detach().reshape(*self.x.batch_shape, self.width)


def _inverse(values: Tensor) -> Tensor:
    """1 / v, 0 where v is 0."""
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1), 0)
