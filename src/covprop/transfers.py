"""Edges of the lineage whose transposes are known: linear maps, and numbers for each element.

An edge takes Cov(parent, w) (*batch, n, m) to its share of Cov(child, w). Its transpose takes rows,
seen from the child, to rows seen from the parent.
"""

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
        return self.linear.at_rest()(cross.mT).mT

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
