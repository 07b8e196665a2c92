"""Independent features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    checked_positive,
    symmetric,
)
from covprop.covariance.congruence import gathered
from covprop.covariance.deflated import Deflated, PlannedIndependent
from covprop.covariance.dense import Dense
from covprop.covariance.planned import Cost, Result
from covprop.covariance.roots import Deviations, Root
from covprop.kernels.normal import standard_deviation


@final
@dataclass(frozen=True)
class Diagonal(Covariance):
    """Variances alone: values (*batch, n), everything off the diagonal zero.

    An operation that makes features depend on each other gives a `Dense` covariance.
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
        """Variances alone."""
        return PlannedDiagonal(self.batch_shape, self.size, self.values.itemsize)

    def push(self, linear: LinearMap) -> Covariance:
        """A S A^T, which is dense."""
        found = gathered(self, linear)
        return self.to_dense().push(linear) if found is None else Dense(found)

    def written(self, features: int) -> int:
        """The matrix of the result alone, unless that is the larger one."""
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
        return Deviations(standard_deviation(self.values))

    def without(self, units: Tensor, vectors: Tensor) -> Covariance:
        """Some directions taken from it, in O(n)."""
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
        """Write the zeros out."""
        return Dense(self.matrix())


@final
@dataclass(frozen=True)
class PlannedDiagonal(PlannedIndependent):
    """Variances alone."""

    @property
    def nbytes(self) -> int:
        """A vector."""
        return self.batch * self.itemsize * self.size

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Functions of independent variables are independent."""
        return Cost(self.like(result), vectors + grid, 2.0 * self.batch * self.size)
