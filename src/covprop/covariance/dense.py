"""The full matrix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covprop.covariance import congruence
from covprop.covariance.base import (
    SMALL,
    STRIP,
    Covariance,
    LinearMap,
    MatrixFunction,
    PairFunction,
    Pairs,
    both_triangles,
    is_finite,
    symmetric,
)
from covprop.covariance.congruence import (
    WIDE,
    complete_congruence,
    half_congruence,
)
from covprop.covariance.planned import KERNEL, PER_PAIR, PIECES, Cost, PlannedCovariance, Result
from covprop.covariance.semidefinite import matrix_flaw
from covprop.covariance.streamed import PlannedStreamed, Streamed
from covprop.kernels import compiled, compiled_pairs
from covprop.kernels.normal import in_dtype

BLOCK = 2**16
"""Entries of a covariance that an activation's kernel works on at a time."""
KEPT = 2**19
"""Entries up to which autograd keeps what it needs of them: faster than making it again."""

SAVED, FOLLOWED = 6, 3
"""Matrices that autograd keeps of a small kernel, and those that a large one makes beside."""


def streams(size: int, wider: int, batch_shape: torch.Size) -> bool:
    """Whether the result of a linear map to `wider` features is streamed, not materialized."""
    return wider > size and batch_shape.numel() * wider**2 > WIDE


def symmetrised(matrix: Tensor) -> Tensor:
    """The matrix itself where it is symmetric to the last bit, else its symmetric part.

    With autograd always the symmetric part: gradients are then symmetric whatever the last bits.
    """
    strips = range(0, matrix.shape[-1], STRIP if matrix.numel() > SMALL else matrix.shape[-1] or 1)
    known = not matrix.requires_grad and all(
        torch.equal(
            matrix[..., start : start + strips.step, start:],
            matrix[..., start:, start : start + strips.step].mT,
        )
        for start in strips
    )
    return matrix if known else symmetric(matrix)


@final
@dataclass(frozen=True)
class Dense(Covariance):
    """Every covariance, written out.

    Args:
        values: The matrix (*batch, n, n).
        nonnegative: Whether it is known that no variance is negative, nor NaN.

    Example:
        matrix = torch.tensor([[1.0, 0.3], [0.3, 0.5]])
        cp.Gaussian(torch.zeros(2), cp.covariance.Dense(matrix))
    """

    values: Tensor
    nonnegative: bool = False

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-2]

    @property
    def size(self) -> int:
        """The number of features n."""
        return self.values.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the matrix."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """That of the matrix."""
        return self.values.device

    def diagonal(self) -> Tensor:
        """Variances (*batch, n)."""
        return self.values.diagonal(dim1=-2, dim2=-1)

    def matrix(self) -> Tensor:
        """The matrix itself."""
        return self.values

    def planned(self) -> "PlannedDense":
        """A matrix of its size."""
        return PlannedDense(self.batch_shape, self.size, self.values.itemsize)

    def shape_flaw(self) -> str | None:
        """A matrix that is not square."""
        shape = tuple(self.values.shape)
        if len(shape) >= 2 and shape[-1] == shape[-2]:  # noqa: PLR2004
            return None
        return (
            f"a covariance has shape (*batch, n, n), not {shape}; for variances alone use "
            "cp.Gaussian.diagonal(mean, variance=...)"
        )

    def finite(self) -> bool:
        """Whether all of the matrix is."""
        return is_finite(self.values)

    def flaw(self, rounding: float) -> str | None:
        """Entries that no covariance has."""
        return matrix_flaw(self.values, rounding)

    def symmetrised(self) -> "Dense":
        """The symmetric part."""
        return Dense(symmetrised(self.values))

    def push(self, linear: LinearMap) -> Covariance:
        """A S A^T: the map on the rows, then on the columns; where that is far wider, on demand."""
        layer = linear.layer
        if layer is not None and not streams(self.size, layer.outputs(self.size), self.batch_shape):
            found = layer.congruence(self.values)
            if found is not None:
                return Dense(found[0], nonnegative=found[1] >= 0)
        small = self.values.numel() <= congruence.ROWS
        half = linear(self.values) if small else half_congruence(self.values, linear)
        if streams(self.size, half.shape[-1], self.batch_shape) and not half.requires_grad:
            return Streamed.through(half, linear, Dense)
        if half.numel() <= congruence.ROWS:
            return Dense(symmetric(linear(half.mT)))
        return Dense(complete_congruence(half, linear))

    def pushed_variances(self, linear: LinearMap) -> Tensor:
        """One of the two products of `push`, and the diagonal of the other."""
        half = half_congruence(self.values, linear)
        variance = None if linear.layer is None else linear.layer.diagonal(half)
        return super().pushed_variances(linear) if variance is None else variance

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
        if isinstance(pair, Pairs):
            whole = pair.matrix(in_dtype(elements, self.dtype), self.values, variance)
            if whole is not None:
                return Dense(whole)
        matrix = torch.empty_like(self.values)
        for start, stop, block in self._blocks(pair, elements):
            inner = block[..., : stop - start]
            matrix[..., start:stop, start:stop] = symmetric(inner)
            both_triangles(matrix, start, stop, block[..., stop - start :])
        matrix.diagonal(dim1=-2, dim2=-1).copy_(variance)
        return Dense(matrix)

    def of_matrix(self, function: MatrixFunction) -> "tuple[Tensor, Covariance] | None":
        """Apply the function to the matrix."""
        found = function(self.values)
        return None if found is None else (found[0], Dense(found[1]))

    @torch.no_grad()
    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """The largest size of `pair` off the diagonal."""
        blocks = self._blocks(pair, elements)
        ends = [torch.stack(torch.aminmax(block)) for _, _, block in blocks if block.numel()]
        return float(torch.stack(ends).abs().max()) if ends else 0.0

    def largest_correlation(self) -> float:
        """By a compiled kernel in one pass, where it is usable."""
        values = self.values.detach()
        if compiled.usable(values):
            return compiled_pairs.largest_correlation(values)
        return super().largest_correlation()

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
        """The same for autograd, by whole rows, with checkpoints if they are many."""
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


@dataclass(frozen=True)
class PlannedDense(PlannedCovariance):
    """A matrix."""

    @property
    def nbytes(self) -> int:
        """The rows that one process holds."""
        rows = -(-self.size // self.processes)
        return self.batch * self.itemsize * rows * self.size

    def _like(self, result: Result) -> "PlannedDense":
        return replace(self, size=result.size, itemsize=result.itemsize)

    def push(self, result: Result) -> Cost:
        """A map of rows and then of columns, in blocks."""
        before, after, unit = self.size, result.size, self.batch * result.itemsize
        work = 2.0 * self.batch * result.fan_in * after * (before + after) / self.processes
        pieces = PIECES * self.block(congruence.ROWS, max(before, after), result.itemsize)
        made, wide = self._like(result), streams(before, after, self.batch_shape)
        if wide and self.processes == 1 and not result.needs_grad:
            streamed = PlannedStreamed(self.batch_shape, after, result.itemsize, before, made)
            return Cost(streamed, streamed.nbytes + pieces, work)  # its half is transposed once
        half = unit * before * after
        held = (half + min(pieces, unit * after**2)) // self.processes
        if result.needs_grad or self.batch * before * after <= congruence.ROWS:
            held += made.nbytes  # it is made as a whole, and symmetrised
        return Cost(made, held, work, graph=half)

    def take(self, index: Tensor, result: Result) -> Cost:
        """Rows, then columns."""
        del index
        half = self.batch * result.itemsize * result.size * self.size // self.processes
        return Cost(self._like(result), half, 2.0 * self.batch * result.size**2)

    def scale(self, result: Result) -> Cost:
        """The outer product of the factors beside the result."""
        return self._beside(result)

    def plus(self, result: Result) -> Cost:
        """Noise as a matrix beside the result."""
        return self._beside(result)

    def _beside(self, result: Result) -> Cost:
        held = self.batch * result.itemsize * self.size**2 // self.processes
        work = 2.0 * self.batch * self.size**2 / self.processes
        return Cost(self._like(result), held, work, graph=held)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Block by block of half of the entries; a process with a share takes all of its rows."""
        entries = self.batch * self.size**2
        matrix = entries * result.itemsize
        if result.needs_grad and result.compiled:  # only the argument is kept
            return Cost(self._like(result), vectors + matrix, PER_PAIR * entries / 2)
        held = vectors + max(grid, KERNEL * self.block(BLOCK, self.size, result.itemsize))
        held += FOLLOWED * matrix if result.needs_grad else 0
        pairs = entries / (2 if self.processes == 1 else self.processes)
        graph = vectors + (SAVED if entries <= KEPT else 1) * matrix
        return Cost(self._like(result), held, PER_PAIR * pairs, graph=graph)

    def map(self, result: Result) -> Cost:
        """A copy."""
        return Cost(self._like(result), work=2.0 * self.batch * self.size**2)


def _without_diagonal(block: Tensor, offset: int = 0) -> Tensor:
    """A copy with zeros on the diagonal, whose rho = 1 would need the most terms."""
    copy = block.clone(memory_format=torch.contiguous_format)
    copy.diagonal(offset=offset, dim1=-2, dim2=-1).zero_()
    return copy
