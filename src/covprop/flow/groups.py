"""Groups of elements that have a length together: what norms of all kinds are made of.

Within a group the moments are exact for Gaussian input (`kernels.directions`); between groups, and
with all other tensors, the dependence is that of the expected slope.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap
from covprop.kernels.directions import Direction, Vector, diagonalised

SPANNED = 1e-12
"""The share of a mean that is rounding, if all of it but so much is in the span of the noise."""

Slope: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map of the groups of vectors, (*batch, G, count, n)."""


@final
@dataclass(frozen=True)
class Groups:
    """Which elements of a flat event have a length together, index (G, n), less their mean or not.

    offset: what is added to the square of the length.
    """

    index: Tensor
    centred: bool = False
    offset: float = 0.0

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the blocks of a matrix."""
        return self.index[:, :, None], self.index[:, None, :]

    def take(self, vectors: Tensor) -> Tensor:
        """The groups of vectors (*any, N): (*any, G, n)."""
        return self.less_mean(vectors[..., self.index])

    def put(self, values: Tensor) -> Tensor:
        """Groups (*any, G, n) as vectors (*any, N)."""
        flat = values.flatten(-2)
        return torch.zeros_like(flat).index_copy(-1, self.index.flatten(), flat)

    def blocks(self, covariance: Covariance) -> Tensor:
        """The covariances of the groups, (*batch, G, n, n)."""
        if covariance.independent:
            blocks = torch.diag_embed(covariance.diagonal().double()[..., self.index])
        else:
            blocks = covariance.matrix()[(..., *self.pairs)].double()
        return self.less_mean(self.less_mean(blocks).mT)

    def normalizing_map(self, slope: Slope, weight: Tensor) -> LinearMap:
        """The expected slope of normalised groups, as a map of vectors (*batch, count, N)."""

        def linear(vectors: Tensor) -> Tensor:
            taken = self.take(vectors).movedim(-3, -2)
            return self.put(slope(taken).movedim(-2, -3) * weight.to(vectors.dtype))

        return LinearMap(linear, torch.Size((self.index.numel(),)), leading=True)

    def length_map(self, row: Tensor) -> LinearMap:
        """The expected slope (*batch, G, n) of the lengths of groups, as a map of vectors."""
        rows = row[..., None, :].movedim(-2, -3)

        def linear(vectors: Tensor) -> Tensor:
            return (self.take(vectors) * rows.to(vectors.dtype)).sum(-1)

        return LinearMap(linear, torch.Size((self.index.numel(),)), leading=True)

    def less_mean(self, values: Tensor) -> Tensor:
        """Values (*any, n) of groups, less their mean if these are centred."""
        return values - values.mean(-1, keepdim=True) if self.centred else values


@final
@dataclass(frozen=True)
class GroupBases:
    """Groups as vectors in bases (*batch, G, n, r) in which their covariances are diagonal."""

    vector: Vector
    basis: Tensor
    groups: Groups

    @classmethod
    def of_covariance(cls, groups: Groups, mean: Tensor, covariance: Covariance) -> "GroupBases":
        """Eigenvectors of the blocks; mean (*batch, N)."""
        return cls(*diagonalised(groups.take(mean.double()), groups.blocks(covariance)), groups)

    @classmethod
    def of_rows(cls, groups: Groups, mean: Tensor, rows: Tensor) -> "GroupBases":
        """Singular vectors of rows S (*batch, q, N) with S^T S the covariance."""
        mean = groups.take(mean.double())
        rows = groups.take(rows.double()).movedim(-3, -2)  # (*batch, G, q, n)
        _, values, basis = torch.linalg.svd(rows, full_matrices=False)
        along = (basis @ mean[..., None])[..., 0]
        rest, whole = mean, mean.square().sum(-1, keepdim=True).sqrt()
        for _ in range(2):  # once more, for what rounding has left
            rest = rest - (rest[..., None, :] @ basis.mT @ basis)[..., 0, :]
        size = rest.square().sum(-1, keepdim=True).sqrt()
        beyond = size > SPANNED * whole
        unit = torch.where(beyond, rest / torch.where(beyond, size, 1), 0)
        basis = torch.cat([basis, unit[..., None, :]], -2)
        variance = torch.cat([values.square(), torch.zeros_like(size)], -1)
        mean = torch.cat([along, torch.where(beyond, size, 0)], -1)
        return cls(Vector(mean, variance), basis.mT, groups)

    def whole(self, vectors: Tensor) -> Tensor:
        """(*batch, G, r) as (*batch, G, n)."""
        return (self.basis @ vectors[..., None])[..., 0]

    def slope(self, direction: Direction, dtype: torch.dtype) -> Slope:
        """E[dv/dz] of vectors (*batch, G, count, n), which keeps one matrix for each group."""
        basis = self.basis.to(dtype)
        if basis.shape[-1] >= basis.shape[-2]:
            # Of centred groups without the mean, whose rounding would outweigh what is left of two.
            matrix = self.basis @ direction.slope @ self.basis.mT
            matrix = self.groups.less_mean(self.groups.less_mean(matrix).mT).mT.to(dtype)
            return lambda vectors: vectors @ matrix.to(vectors.dtype)
        inside, rest = direction.slope.to(dtype), direction.idle.to(dtype)[..., None, None]

        def along(vectors: Tensor) -> Tensor:
            turned, kind = basis.to(vectors.dtype), vectors.dtype
            seen = vectors @ turned
            beyond = rest.to(kind) * (vectors - seen @ turned.mT)
            return seen @ inside.to(kind) @ turned.mT + beyond

        return along
