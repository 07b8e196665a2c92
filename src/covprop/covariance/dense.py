"""The full matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    both_triangles,
    symmetric,
)
from covprop.covariance.congruence import WIDE, begun, completed
from covprop.covariance.streamed import Streamed

BLOCK = 2**16
"""Entries of a covariance that an activation's kernel works on at a time."""
KEPT = 2**19
"""Entries up to which autograd keeps what it needs of them: faster than making it again."""


def streams(size: int, wider: int, batch_shape: torch.Size) -> bool:
    """Whether a linear map to so many features leaves the new covariance unwritten."""
    return wider > size and batch_shape.numel() * wider**2 > WIDE


@final
@dataclass(frozen=True)
class Dense(Covariance):
    """Every covariance, written out: matrix (*batch, n, n)."""

    values: Tensor

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-2]

    def diagonal(self) -> Tensor:
        """Variances (*batch, n)."""
        return self.values.diagonal(dim1=-2, dim2=-1)

    def matrix(self) -> Tensor:
        """The matrix itself."""
        return self.values

    def push(self, linear: LinearMap) -> Covariance:
        """A S A^T: the map on the rows, then on the columns; where that is far wider, on demand."""
        half = begun(self.values, linear)
        if streams(self.size, half.shape[-1], self.batch_shape) and not half.requires_grad:
            return Streamed.through(half, linear, Dense)
        return Dense(completed(half, linear))

    def take(self, index: Tensor) -> "Dense":
        """Rows and columns of the index; the matrix itself where nothing moves."""
        if len(index) == self.size and bool((index.diff() == 1).all()):
            return self
        return Dense(self.values.index_select(-2, index).index_select(-1, index))

    def scale(self, factor: Tensor) -> "Dense":
        """f_i S_ij f_j."""
        return Dense(self.values * (factor[..., :, None] * factor[..., None, :]))

    def plus(self, variance: Tensor) -> "Dense":
        """More on the diagonal."""
        return Dense(self.values + torch.diag_embed(variance))

    def pairwise(self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor) -> "Dense":
        """Evaluate `pair` block by block; a backward pass evaluates each block again."""
        variance = variance.to(self.dtype)
        if any(t.requires_grad for t in (self.values, *elements)) and torch.is_grad_enabled():
            matrix = self._differentiable(pair, elements)
            return Dense(torch.diagonal_scatter(matrix, variance, dim1=-2, dim2=-1))
        matrix = torch.empty_like(self.values)
        for start, stop, block in self._blocks(pair, elements):
            inner = block[..., : stop - start]
            matrix[..., start:stop, start:stop] = symmetric(inner)
            both_triangles(matrix, start, stop, block[..., stop - start :])
        matrix.diagonal(dim1=-2, dim2=-1).copy_(variance)
        return Dense(matrix)

    @torch.no_grad()
    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """The largest size of `pair` off the diagonal."""
        blocks = self._blocks(pair, elements)
        ends = [torch.stack(torch.aminmax(block)) for _, _, block in blocks if block.numel()]
        return float(torch.stack(ends).abs().max()) if ends else 0.0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Dense":
        """Apply a function to the matrix."""
        return Dense(function(self.values))

    def _blocks(
        self, pair: PairFunction, elements: Sequence[Tensor]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Rows [start, stop) of the upper triangle, from the diagonal on: start, stop, block."""
        left = [element.to(self.dtype)[..., :, None] for element in elements]
        right = [element.to(self.dtype)[..., None, :] for element in elements]
        for start, stop in self._rows():
            block = _without_diagonal(self.values[..., start:stop, start:])
            rows = tuple(element[..., start:stop, :] for element in left)
            yield start, stop, pair(rows, tuple(element[..., start:] for element in right), block)

    def _differentiable(self, pair: PairFunction, elements: Sequence[Tensor]) -> Tensor:
        """The same for autograd: whole rows; if they are many, they are not kept but made again."""
        left = [element.to(self.dtype)[..., :, None] for element in elements]
        right = tuple(element.to(self.dtype)[..., None, :] for element in elements)
        blocks = []
        for start, stop in self._rows():
            block = _without_diagonal(self.values[..., start:stop, :], start)
            rows = tuple(element[..., start:stop, :] for element in left)
            if self.values.numel() <= KEPT:
                blocks.append(pair(rows, right, block))
            else:
                blocks.append(
                    checkpoint(
                        pair, rows, right, block, use_reentrant=False, preserve_rng_state=False
                    )
                )
        return symmetric(torch.cat(blocks, dim=-2) if len(blocks) > 1 else blocks[0])

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, each about a block; later ones have fewer columns to fill."""
        start = 0
        while start < self.size:
            columns = max(1, self.batch_shape.numel() * (self.size - start))
            stop = min(self.size, start + max(1, BLOCK // columns))
            yield start, stop
            start = stop


def _without_diagonal(block: Tensor, offset: int = 0) -> Tensor:
    """A copy with zeros on the diagonal, which is known; its rho = 1 would make it a hard block."""
    copy = block.clone(memory_format=torch.contiguous_format)
    copy.diagonal(offset=offset, dim1=-2, dim2=-1).zero_()
    return copy
