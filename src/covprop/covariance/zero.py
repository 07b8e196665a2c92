"""What does not vary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.covariance.base import Covariance, LinearMap, PairFunction
from covprop.covariance.diagonal import Diagonal, PlannedDiagonal
from covprop.covariance.planned import Cost, PlannedCovariance, Result
from covprop.covariance.roots import Deviations, Root


@final
@dataclass(frozen=True)
class Zero(Covariance):
    """The covariance of a constant: values (*batch, n) are zeros, and no matrix is ever written.

    Every function of a constant is one; randomness of the model's own (weights, dropout) turns it
    into another structure.
    """

    values: Tensor

    independent: ClassVar[bool] = True
    constant: ClassVar[bool] = True

    @classmethod
    def like(cls, mean: Tensor, batch_dims: int) -> "Zero":
        """Of a tensor whose leading dimensions are a batch."""
        shape = (*mean.shape[:batch_dims], mean.shape[batch_dims:].numel())
        return cls(mean.new_zeros(()).expand(shape))

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-1]

    def planned(self) -> "PlannedZero":
        """Nothing."""
        return PlannedZero(self.batch_shape, self.size, self.values.itemsize)

    def written(self, features: int) -> int:
        """Zeros stay zeros."""
        del features
        return 0

    def root(self) -> Root:
        """Zeros."""
        return Deviations(self.values)

    def without(self, units: Tensor, vectors: Tensor) -> "Zero":
        """There is nothing to take."""
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
        """Independent noise alone."""
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
        """Independent noise alone."""
        made = PlannedDiagonal(self.batch_shape, result.size, result.itemsize)
        return self._like(result)._replace(structure=made)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """Zeros."""
        del vectors, grid
        return self._like(result)

    def map(self, result: Result) -> Cost:
        """Zeros."""
        return self._like(result)
