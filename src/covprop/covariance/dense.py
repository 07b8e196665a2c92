"""The full matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covprop.covariance.base import Covariance, LinearMap, PairFunction

BLOCK = 2**18
"""Entries of a covariance that an activation's kernel works on at a time."""


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

    def push(self, linear: LinearMap) -> "Dense":
        """A S A^T: the map on the rows, then on the columns."""
        half = linear(self.values)  # (*batch, n, m): S A^T
        return Dense(symmetric(linear(half.mT)))

    def take(self, index: Tensor) -> "Dense":
        """Rows and columns of the index; the matrix itself where nothing moves."""
        if len(index) == self.size and bool((index.diff() == 1).all()):
            return self
        return Dense(self.values.index_select(-2, index).index_select(-1, index))

    def scale(self, factor: Tensor) -> "Dense":
        """f_i S_ij f_j."""
        return Dense(self.values * (factor[..., :, None] * factor[..., None, :]))

    def pairwise(self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor) -> "Dense":
        """Evaluate `pair` block by block; a backward pass evaluates each block again."""
        blocks = list(self._blocks(pair, elements))
        matrix = symmetric(torch.cat(blocks, dim=-2) if len(blocks) > 1 else blocks[0])
        return Dense(torch.diagonal_scatter(matrix, variance.to(self.dtype), dim1=-2, dim2=-1))

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """The largest value of `pair` off the diagonal."""
        return max((float(block.max()) for block in self._blocks(pair, elements)), default=0.0)

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """By the Cholesky factor, or the eigenvectors where the matrix is singular."""
        standard = torch.randn(
            (count, *self.batch_shape, self.size, 1),
            dtype=self.dtype,
            device=self.device,
            generator=generator,
        )
        factor, failed = torch.linalg.cholesky_ex(self.values)
        if bool(failed.any()):
            eigenvalues, eigenvectors = torch.linalg.eigh(self.values)
            factor = eigenvectors * eigenvalues.clamp(min=0).sqrt()[..., None, :]
        return (factor @ standard).squeeze(-1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Dense":
        """Apply a function to the matrix."""
        return Dense(function(self.values))

    def _blocks(self, pair: PairFunction, elements: Sequence[Tensor]) -> Iterator[Tensor]:
        rows = max(1, BLOCK // max(1, self.batch_shape.numel() * self.size))
        elements = [element.to(self.dtype) for element in elements]
        right = tuple(element[..., None, :] for element in elements)
        again = rows < self.size and torch.is_grad_enabled()
        for start in range(0, self.size, rows):
            block = self.values[..., start : start + rows, :]
            # The diagonal is known; left in, its rho = 1 would make every block a hard one.
            diagonal = block.diagonal(offset=start, dim1=-2, dim2=-1)
            block = torch.diagonal_scatter(
                block, torch.zeros_like(diagonal), offset=start, dim1=-2, dim2=-1
            )
            left = tuple(element[..., start : start + rows, None] for element in elements)
            if again:
                yield checkpoint(
                    pair, left, right, block, use_reentrant=False, preserve_rng_state=False
                )
            else:
                yield pair(left, right, block)


def symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part of a matrix that is symmetric but for rounding."""
    return (matrix + matrix.mT).mul_(0.5)
