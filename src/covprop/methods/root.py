"""Roots of the covariances of inputs, and the numbers that are drawn along them."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance.semidefinite import Root as Structure
from covprop.gaussian import Gaussian
from covprop.kernels import pearson
from covprop.skewed import Skewed


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

    def _skewness(self) -> Tensor | None:
        """That of the columns (*batch, width), one for each of independent elements."""
        if not isinstance(self.x, Skewed):
            return None
        return self.x.skewness.detach().reshape(*self.x.batch_shape, self.width)
