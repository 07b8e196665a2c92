"""Edges of the lineage whose transposes are known: linear maps, factors and movements.

An edge takes Cov(parent, w) (*batch, n, m) to its share of Cov(child, w). Its transpose takes rows,
seen from the child, to rows seen from the parent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from covprop.covariance import LinearMap


@final
@dataclass(frozen=True)
class Along:
    """A linear map of the event."""

    linear: LinearMap

    def __call__(self, cross: Tensor) -> Tensor:
        """A C."""
        return self.linear.without_buffers()(cross.mT).mT

    def transposed(self, rows: Tensor) -> Tensor | None:
        """Rows (*batch, p, m) times A, if its layer has a short way to it."""
        layer = self.linear.layer
        return None if layer is None else layer.transposed(rows)


@final
@dataclass(frozen=True)
class Scaled:
    """A number for each element, (*batch, n)."""

    factor: Tensor

    def __call__(self, cross: Tensor) -> Tensor:
        """diag(f) C."""
        return self.factor.to(cross.dtype)[..., None] * cross

    def transposed(self, rows: Tensor) -> Tensor:
        """Rows times diag(f)."""
        return rows * self.factor.to(rows.dtype)[..., None, :]


@final
@dataclass(frozen=True)
class Times:
    """One number for all elements."""

    weight: float

    def __call__(self, cross: Tensor) -> Tensor:
        """A multiple."""
        return cross if self.weight == 1 else self.weight * cross

    def transposed(self, rows: Tensor) -> Tensor:
        """The same multiple."""
        return rows if self.weight == 1 else self.weight * rows


@final
@dataclass(frozen=True)
class Taken:
    """Elements of an index (m,), of so many."""

    index: Tensor
    size: int

    def __call__(self, cross: Tensor) -> Tensor:
        """Rows of the index."""
        return cross.index_select(-2, self.index)

    def transposed(self, rows: Tensor) -> Tensor:
        """Each back to where it was taken from."""
        result = rows.new_zeros(*rows.shape[:-1], self.size)
        return result.index_add_(-1, self.index, rows)


@final
@dataclass(frozen=True)
class Deferred:
    """A linear map that is made when it is needed."""

    make: Callable[[], LinearMap]

    def __call__(self, cross: Tensor) -> Tensor:
        """A C."""
        return self.make()(cross.mT).mT


def transfer_of(part: LinearMap | float) -> Along | Times:
    """What a term of a sum does to a cross-covariance."""
    return Along(part.without_buffers()) if isinstance(part, LinearMap) else Times(part)
