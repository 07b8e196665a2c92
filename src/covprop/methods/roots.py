"""Square roots of the covariances of inputs, in the shapes of their means."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from covprop.covariance.roots import Root as Structure
from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class Root:
    """L with L L^T the covariance of x, as its structure has it."""

    x: Gaussian
    structure: Structure

    @classmethod
    def of(cls, x: Gaussian) -> "Root":
        """The root of a covariance, found once."""
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
