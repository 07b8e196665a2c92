"""Memory and work of covariances: for each structure a planned one, with sizes and no numbers.

Its methods are those of `Covariance`; each returns the bytes and the work of the real one. Counts
of matrices follow the code: tensors of the size of a covariance that are alive at once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

PIECES = 4
"""Pieces of a block that a linear map holds at a time."""
KERNEL = 16
"""Pieces of a block that the kernel of an activation holds at a time."""
PER_PAIR = 40.0
"""Operations on one entry of a covariance by an activation, about."""


class Result(NamedTuple):
    """What is known of the result of an operation.

    size: its features; itemsize: bytes of a number; fan_in: products for each feature, of a linear
    map; needs_grad: whether autograd follows it; compiled: of an activation, whether one compiled
    call makes the matrix, and another one its gradients.
    """

    size: int
    itemsize: int
    fan_in: float = 1.0
    needs_grad: bool = False
    compiled: bool = False


class Cost(NamedTuple):
    """The result of an operation, and the memory and work that the operation takes.

    temporary: bytes that are held beside the result; graph: those that autograd keeps beside it;
    shares: the result holds the memory of its argument; writes: the matrix of the argument is
    written out, and stays so.
    """

    structure: "PlannedCovariance"
    temporary: int = 0
    work: float = 0.0
    graph: int = 0
    shares: bool = False
    writes: bool = False


@dataclass(frozen=True)
class PlannedCovariance(ABC):
    """A covariance of which only the size is known."""

    batch_shape: torch.Size
    size: int
    itemsize: int

    constant: ClassVar[bool] = False

    @property
    def batch(self) -> int:
        """How many there are."""
        return self.batch_shape.numel()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it holds."""

    @property
    def processes(self) -> int:
        """How many have a share of it."""
        return 1

    @property
    def to_write(self) -> int:
        """Bytes that it takes to materialize its matrix, 0 where the matrix is held."""
        return 0

    @property
    def materialized(self) -> "PlannedCovariance":
        """The same once its matrix has been asked for."""
        return self

    @property
    def released(self) -> "PlannedCovariance | None":
        """The structure that stays for a backward pass once no tensor has it, if one follows."""
        return None

    @property
    def backward_share(self) -> float:
        """The work of a backward pass relative to the work so far, 0 where none follows."""
        return 0.0

    def finished(self) -> Cost | None:
        """The cost of the covariance that the caller gets, if it is made at the end."""
        return None

    def joined(self, result: Result, nonlinear: bool = False) -> Cost | None:
        """The cost of any operation for a carrier without covariances, else None."""
        del result, nonlinear
        return None

    @abstractmethod
    def push(self, result: Result) -> Cost:
        """A S A^T."""

    @abstractmethod
    def take(self, index: Tensor, result: Result) -> Cost:
        """The covariance of y[index]."""

    @abstractmethod
    def scale(self, result: Result) -> Cost:
        """The covariance of factor * y."""

    @abstractmethod
    def plus(self, result: Result) -> Cost:
        """With independent noise."""

    @abstractmethod
    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """A function of each entry; bytes of vectors that it holds, and of a grid for these."""

    @abstractmethod
    def map(self, result: Result) -> Cost:
        """Another dtype."""

    def block(self, entries: int, width: int, itemsize: int) -> int:
        """Bytes of a block of so many entries of a covariance of this width."""
        return itemsize * min(entries, self.batch * width**2)

    def by_matrix(self, cost: Cost) -> Cost:
        """The cost of an operation on its matrix, and of writing that."""
        return cost._replace(
            temporary=cost.temporary + self.to_write, graph=cost.graph + self.to_write, writes=True
        )


@dataclass(frozen=True)
class PlannedRows(PlannedCovariance):
    """`width` numbers for each feature, for carriers without covariances."""

    width: int

    @property
    def nbytes(self) -> int:
        """Every number."""
        return self.batch * self.itemsize * self.size * self.width

    def joined(self, result: Result, nonlinear: bool = False) -> Cost:
        """As many numbers for each feature of the result."""
        del nonlinear
        made = replace(self, size=result.size, itemsize=result.itemsize)
        return Cost(made, work=2.0 * result.fan_in * self.batch * self.width * result.size)

    def push(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def take(self, index: Tensor, result: Result) -> Cost:
        """Rows."""
        del index
        return self.joined(result)

    def scale(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def plus(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Rows."""
        del vectors, grid
        return self.joined(result, nonlinear=True)

    def map(self, result: Result) -> Cost:
        """Rows."""
        return self.joined(result)
