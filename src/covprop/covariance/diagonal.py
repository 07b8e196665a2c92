"""Covariances of independent elements: diagonal ones, and that of a constant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from covprop.covariance import congruence
from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    symmetric,
)
from covprop.covariance.congruence import congruence_by_root
from covprop.covariance.deflated import Deflated, PlannedIndependent
from covprop.covariance.dense import Dense
from covprop.covariance.planned import Cost, PlannedCovariance, Result
from covprop.covariance.semidefinite import DiagonalRoot, Root, checked_positive
from covprop.kernels.normal import standard_deviation


@final
@dataclass(frozen=True)
class Diagonal(Covariance):
    """Variances only: everything off the diagonal is zero.

    An operation that makes features depend on each other gives a `Dense` covariance.

    Args:
        values: The variances (*batch, n).

    Example:
        cp.Gaussian(torch.zeros(3), cp.covariance.Diagonal(torch.full((3,), 0.01)))
    """

    values: Tensor

    independent: ClassVar[bool] = True

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-1]

    def diagonal(self) -> Tensor:
        """The variances."""
        return self.values

    def matrix(self) -> Tensor:
        """The full matrix (*batch, n, n)."""
        return torch.diag_embed(self.values)

    def planned(self) -> "PlannedDiagonal":
        """Variances only."""
        return PlannedDiagonal(self.batch_shape, self.size, self.values.itemsize)

    def push(self, linear: LinearMap) -> Covariance:
        """A S A^T, which is dense."""
        wide = self.values.numel() * self.size > congruence.WIDE
        pushed = congruence_by_root(self, linear) if wide else None
        return self.to_dense().push(linear) if pushed is None else Dense(pushed)

    def matrix_rows(self, features: int) -> int:
        """Rows of the result's matrix alone."""
        return features

    def take(self, index: Tensor) -> Covariance:
        """Variances of the index; a feature that appears twice makes the result dense."""
        if len(index.unique()) < len(index):
            return self.to_dense().take(index)
        return Diagonal(self.values.index_select(-1, index))

    def scale(self, factor: Tensor) -> "Diagonal":
        """f_i^2 S_ii."""
        return Diagonal(self.values * factor.square())

    def plus(self, variance: Tensor) -> "Diagonal":
        """Variances of independent noises add."""
        return Diagonal(self.values + variance)

    def pairwise(
        self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor
    ) -> "Diagonal":
        """Functions of independent variables are independent."""
        del pair, elements
        return Diagonal(variance.to(self.dtype))

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """There is nothing off the diagonal."""
        del pair, elements
        return 0.0

    def root(self) -> Root:
        """The deviations."""
        return DiagonalRoot(standard_deviation(self.values))

    def without(self, units: Tensor, vectors: Tensor) -> Covariance:
        """A `Deflated` covariance, in O(n)."""
        del vectors
        return Deflated(self.values, units.mT)

    def to_torch(self, mean: Tensor) -> Distribution:
        """Independent normal distributions, in the shape of the event."""
        stddev = checked_positive(standard_deviation(self.values)).reshape(mean.shape)
        return Independent(Normal(mean, stddev), mean.dim() - len(self.batch_shape))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Diagonal":
        """Apply a function to the variances."""
        return Diagonal(function(self.values))

    def quadratic(self, rows: Tensor) -> Tensor:
        """Sums of A_pi v_i A_qi."""
        return symmetric((rows * self.values[..., None, :]) @ rows.mT)

    def to_dense(self) -> Dense:
        """The materialized matrix."""
        return Dense(self.matrix())


@final
@dataclass(frozen=True)
class PlannedDiagonal(PlannedIndependent):
    """Variances only."""

    @property
    def nbytes(self) -> int:
        """A vector."""
        return self.batch * self.itemsize * self.size

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Functions of independent variables are independent."""
        return Cost(self.like(result), vectors + grid, 2.0 * self.batch * self.size)


@final
@dataclass(frozen=True)
class Zero(Covariance):
    """The covariance of a constant, of which no matrix is ever written.

    Every function of a constant is one; randomness of the model's own (weights, dropout) turns it
    into another structure.

    Args:
        values: Zeros (*batch, n).

    Example:
        mean = torch.ones(3)
        cp.Gaussian(mean, cp.covariance.Zero.like(mean, batch_dims=0))
    """

    values: Tensor

    independent: ClassVar[bool] = True
    constant: ClassVar[bool] = True

    @classmethod
    def like(cls, mean: Tensor, batch_dims: int) -> "Zero":
        """Zeros for a mean whose leading dimensions are a batch."""
        shape = (*mean.shape[:batch_dims], mean.shape[batch_dims:].numel())
        return cls(mean.new_zeros(()).expand(shape))

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-1]

    def tensors(self) -> dict[str, Tensor]:
        """None: a file needs no zeros."""
        return {}

    @classmethod
    def of_file(cls, tensors: dict[str, Tensor], mean: Tensor, batch_dims: int) -> "Zero":
        """Zeros like the mean."""
        del tensors
        return cls.like(mean, batch_dims)

    def planned(self) -> "PlannedZero":
        """Nothing."""
        return PlannedZero(self.batch_shape, self.size, self.values.itemsize)

    def matrix_rows(self, features: int) -> int:
        """Zeros stay zeros."""
        del features
        return 0

    def root(self) -> Root:
        """Zeros."""
        return DiagonalRoot(self.values)

    def without(self, units: Tensor, vectors: Tensor) -> "Zero":
        """The same: zeros cannot be reduced."""
        del units, vectors
        return self

    def diagonal(self) -> Tensor:
        """Zeros."""
        return self.values

    def matrix(self) -> Tensor:
        """Zeros (*batch, n, n), which take no memory."""
        return self.values[..., None].expand(*self.values.shape, self.size)

    def push(self, linear: LinearMap) -> "Zero":
        """Zeros, as many as the map has outputs."""
        return Zero(linear(self.values[..., None, :])[..., 0, :].detach())

    def take(self, index: Tensor) -> "Zero":
        """As many zeros as the index has entries."""
        return Zero(self.values[..., :1].expand(*self.batch_shape, len(index)))

    def scale(self, factor: Tensor) -> "Zero":
        """The same."""
        del factor
        return self

    def plus(self, variance: Tensor) -> Covariance:
        """Only independent noise."""
        return Diagonal(variance)

    def pairwise(self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor) -> "Zero":
        """Functions of constants are constant."""
        del pair, elements, variance
        return self

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """There is nothing off the diagonal."""
        del pair, elements
        return 0.0

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Zeros; nothing is drawn."""
        del generator
        return self.values.expand(count, *self.values.shape)

    def quadratic(self, rows: Tensor) -> Tensor:
        """Zeros (*batch, m, m)."""
        return rows.new_zeros(*rows.shape[:-1], rows.shape[-2])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Zero":
        """Apply a function to the zeros."""
        return Zero(function(self.values))


@final
@dataclass(frozen=True)
class PlannedZero(PlannedCovariance):
    """A constant, and every function of it."""

    constant: ClassVar[bool] = True

    @property
    def nbytes(self) -> int:
        """None."""
        return 0

    def _like(self, result: Result) -> Cost:
        made = replace(self, size=result.size, itemsize=result.itemsize)
        return Cost(made, work=2.0 * self.batch * result.size)

    def push(self, result: Result) -> Cost:
        """Zeros."""
        return self._like(result)

    def take(self, index: Tensor, result: Result) -> Cost:
        """Zeros."""
        del index
        return self._like(result)

    def scale(self, result: Result) -> Cost:
        """Zeros."""
        return self._like(result)

    def plus(self, result: Result) -> Cost:
        """Only independent noise."""
        made = PlannedDiagonal(self.batch_shape, result.size, result.itemsize)
        return self._like(result)._replace(structure=made)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Zeros."""
        del vectors, grid
        return self._like(result)

    def map(self, result: Result) -> Cost:
        """Zeros."""
        return self._like(result)
