"""A wide covariance between two smaller ones, a few rows at a time.

`linear -> activation -> linear` from k over n to m features with n the largest: the n x n matrix
A S A^T, or the covariance of an activation of it, exists only in blocks of rows, each of which
goes through the next linear map at once. What is held is k x n and n x m.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from covprop.covariance import congruence
from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    both_triangles,
    symmetric,
)
from covprop.covariance.congruence import complete_congruence
from covprop.covariance.planned import KERNEL, PER_PAIR, PIECES, Cost, PlannedCovariance, Result

ROWS = 2**22
"""Entries of the wide matrix that are held at a time."""
PAIRS = 2**18
"""Entries of it that the kernel of an activation works on at a time."""


ELEMENTS = 2**9
"""Bytes that an activation keeps of each feature."""


class Activity(NamedTuple):
    """An activation that was applied to the matrix."""

    pair: PairFunction
    elements: tuple[Tensor, ...]
    variance: Tensor


@final
@dataclass(frozen=True)
class Streamed(Covariance):
    """A S A^T, or an activation of it, computed on demand from half = S A^T (*batch, k, n).

    dense: the structure of the matrix when it is written out.
    """

    half: Tensor
    linear: LinearMap
    variance: Tensor
    dense: Callable[[Tensor], Covariance]
    activity: Activity | None = None

    deferred: ClassVar[bool] = True

    @classmethod
    def through(
        cls, half: Tensor, linear: LinearMap, dense: Callable[[Tensor], Covariance]
    ) -> "Streamed":
        """From half = S A^T; computes the variances, which every operation needs."""
        half = half.mT.contiguous().mT  # its columns are read, some at a time
        variance = None if linear.layer is None else linear.layer.diagonal(half)
        if variance is not None:
            return cls(half, linear, variance, dense)
        whole = cls(half, linear, half.new_zeros(*half.shape[:-2], half.shape[-1]), dense)
        parts = [rows.diagonal(offset=start, dim1=-2, dim2=-1) for start, _, rows in whole.blocks()]
        return replace(whole, variance=torch.cat(parts, dim=-1))

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.half.shape[:-2]

    def diagonal(self) -> Tensor:
        """Variances (*batch, n)."""
        return self.variance if self.activity is None else self.activity.variance

    def matrix(self) -> Tensor:
        """The materialized matrix, which is kept."""
        return self._written

    @cached_property
    def _written(self) -> Tensor:
        """The upper triangle of all blocks of rows, and the same below."""
        if self.half.requires_grad or self.size**2 <= ROWS:
            return symmetric(self._gathered(lambda rows: rows))
        matrix = self.half.new_empty(*self.batch_shape, self.size, self.size)
        for start, stop, rows in self.blocks():
            matrix[..., start:stop, start:stop] = symmetric(rows[..., start:stop])
            both_triangles(matrix, start, stop, rows[..., stop:])
        return matrix

    def planned(self) -> PlannedCovariance:
        """By the size of its half."""
        dense = self.dense(self.half.new_empty(()).expand(*self.batch_shape, self.size, self.size))
        return PlannedStreamed(
            self.batch_shape, self.size, self.half.itemsize, self.half.shape[-2], dense.planned(),
            self.activity is not None, "_written" in self.__dict__,
        )  # fmt: skip

    def push(self, linear: LinearMap) -> Covariance:
        """B Z B^T: each block of rows of Z through B, then the columns of what that gives."""
        narrow = self._gathered(linear)
        return self.dense(complete_congruence(narrow, linear))

    def take(self, index: Tensor) -> Covariance:
        """Write the matrix out, unless nothing moves."""
        if len(index) == self.size and bool((index.diff() == 1).all()):
            return self
        return self.dense(self.matrix()).take(index)

    def scale(self, factor: Tensor) -> Covariance:
        """Scale the linear map; an activation in between has to be written out."""
        if self.activity is not None:
            return self.dense(self.matrix()).scale(factor)
        linear, batch = self.linear, self.batch_shape  # and not self, whose half may go

        def scaled(vector: Tensor) -> Tensor:
            result = linear.function(vector)
            return result * factor.reshape(*batch, *result.shape[len(batch) :])

        half = self.half * factor[..., None, :]
        return replace(
            self,
            half=half,
            linear=LinearMap(scaled, linear.event_shape),
            variance=self.variance * factor.square(),
        )

    def plus(self, variance: Tensor) -> Covariance:
        """By the materialized matrix."""
        return self.dense(self.matrix()).plus(variance)

    def pairwise(
        self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor
    ) -> Covariance:
        """Record the pair function for each block; with autograd, by the materialized matrix."""
        follows = torch.is_grad_enabled() and any(t.requires_grad for t in (*elements, variance))
        if self.activity is not None or follows:
            return self.dense(self.matrix()).pairwise(pair, elements, variance)
        elements = tuple(element.to(self.dtype) for element in elements)
        return replace(self, activity=Activity(pair, elements, variance.to(self.dtype)))

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """A pass over all blocks."""
        largest = 0.0
        for start, stop, rows in self.blocks():
            ends = torch.aminmax(_pairs(pair, elements, start, stop, rows))
            largest = max(largest, -float(ends.min), float(ends.max))
        return largest

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """By the materialized matrix: samples need a factor of it."""
        return self.dense(self.matrix()).noise(count, generator)

    def map(self, function: Callable[[Tensor], Tensor]) -> Covariance:
        """By the materialized matrix."""
        return self.dense(function(self.matrix()))

    def _gathered(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of all blocks of rows, one below the other."""
        result: Tensor | None = None
        for start, stop, rows in self.blocks():
            part = function(rows)
            if result is None:
                result = part.new_empty(*self.batch_shape, self.size, part.shape[-1])
            result[..., start:stop, :] = part
        assert result is not None
        return result

    def blocks(self) -> Iterator[tuple[int, int, Tensor]]:
        """All rows of the covariance: start, stop, rows (*batch, stop - start, n)."""
        count = max(1, ROWS // max(1, self.batch_shape.numel() * self.size))
        for start in range(0, self.size, count):
            stop = min(self.size, start + count)
            rows = self.linear(self.half[..., start:stop].mT)
            if self.activity is not None:
                pair, elements, variance = self.activity
                rows = _pairs(pair, elements, start, stop, rows)
                rows.diagonal(offset=start, dim1=-2, dim2=-1).copy_(variance[..., start:stop])
            yield start, stop, rows


def _pairs(
    pair: PairFunction, elements: Sequence[Tensor], start: int, stop: int, rows: Tensor
) -> Tensor:
    """`pair` of rows [start, stop), their diagonal left out, in pieces that fit into the cache."""
    rows.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
    step = max(1, PAIRS * (stop - start) // max(1, rows.numel()))
    right = tuple(element[..., None, :] for element in elements)
    for first in range(start, stop, step):
        last = min(stop, first + step)
        left = tuple(element[..., first:last, None] for element in elements)
        piece = rows[..., first - start : last - start, :]
        piece.copy_(pair(left, right, piece))
    return rows


@final
@dataclass(frozen=True)
class PlannedStreamed(PlannedCovariance):
    """A `Streamed` covariance from `before` features; dense: its matrix, which may be kept too."""

    before: int
    dense: PlannedCovariance
    active: bool = False
    cached: bool = False

    @property
    def nbytes(self) -> int:
        """The half, and the matrix once it is written out."""
        matrix = self.dense.nbytes if self.cached else 0
        return self.batch * self.itemsize * self.size * self.before + matrix

    @property
    def to_write(self) -> int:
        """The matrix, and a block of rows."""
        return 0 if self.cached else self.dense.nbytes + self.itemsize * ROWS

    @property
    def materialized(self) -> "PlannedStreamed":
        """The same, with its matrix held."""
        return replace(self, cached=True)

    def finished(self) -> Cost:
        """The cost of materializing the matrix."""
        return Cost(self.dense, max(0, self.to_write - self.dense.nbytes))

    def push(self, result: Result) -> Cost:
        """A block of its rows at a time, each through the map."""
        batch, unit = self.batch, self.batch * result.itemsize
        rows = (2 + KERNEL * self.active * PAIRS / ROWS) * self.block(
            ROWS, self.size, result.itemsize
        )
        pieces = PIECES * self.block(congruence.ROWS, max(self.size, result.size), result.itemsize)
        held = unit * self.size * result.size + int(rows) + pieces
        held += ELEMENTS * batch * self.size * self.active
        work = 2.0 * batch * result.fan_in * result.size * (self.size + result.size)
        made = replace(self.dense, size=result.size, itemsize=result.itemsize)
        return Cost(made, held, work)

    def take(self, index: Tensor, result: Result) -> Cost:
        """By the materialized matrix."""
        return self.by_matrix(self.dense.take(index, result))

    def scale(self, result: Result) -> Cost:
        """Of the linear map; an activation in between has to be written out."""
        if self.active:
            return self.by_matrix(self.dense.scale(result))
        made = replace(self, itemsize=result.itemsize, cached=False)
        return Cost(made, work=2.0 * self.batch * self.size**2)

    def plus(self, result: Result) -> Cost:
        """By the materialized matrix."""
        return self.by_matrix(self.dense.plus(result))

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """One activation is recorded; with autograd, the matrix is materialized."""
        if self.active or result.needs_grad:
            by_torch = result._replace(compiled=False)
            return self.by_matrix(self.dense.pairwise(by_torch, vectors, grid))
        kernel = KERNEL * self.block(PAIRS, self.size, result.itemsize)
        made = replace(self, itemsize=result.itemsize, active=True, cached=False)
        work = PER_PAIR * self.batch * self.size**2 / 2
        return Cost(made, vectors + max(grid, kernel), work, shares=True)

    def map(self, result: Result) -> Cost:
        """By the materialized matrix."""
        return self.by_matrix(self.dense.map(result))
