"""Independent features."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.covariance.base import Covariance, LinearMap, PairFunction, symmetric
from covprop.covariance.congruence import gathered
from covprop.covariance.deflated import Deflated
from covprop.covariance.dense import Dense
from covprop.covariance.roots import Deviations, Root
from covprop.kernels.normal import standard_deviation


@final
@dataclass(frozen=True)
class Diagonal(Covariance):
    """Variances alone: values (*batch, n), everything off the diagonal zero.

    An operation that makes features depend on each other gives a `Dense` covariance, unless the
    dependence is to be left out: assumed, as `cp.AssumedDensity` does, keeps it diagonal, in O(n).
    """

    values: Tensor
    assumed: bool = False

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

    def push(self, linear: LinearMap) -> Covariance:
        """A S A^T, which is dense, or its diagonal alone."""
        if self.assumed:
            return replace(self, values=linear.variances(self.values))
        found = gathered(self, linear)
        return self.to_dense().push(linear) if found is None else Dense(found)

    def written(self, features: int) -> int:
        """The matrix of the result alone, unless that is the larger one."""
        return 0 if self.assumed else features

    def take(self, index: Tensor) -> Covariance:
        """Variances of the index; a feature that appears twice makes the result dense."""
        if not self.assumed and len(index.unique()) < len(index):
            return self.to_dense().take(index)
        return replace(self, values=self.values.index_select(-1, index))

    def scale(self, factor: Tensor) -> "Diagonal":
        """f_i^2 S_ii."""
        return replace(self, values=self.values * factor.square())

    def plus(self, variance: Tensor) -> "Diagonal":
        """Variances of independent noises add."""
        return replace(self, values=self.values + variance)

    def pairwise(
        self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor
    ) -> "Diagonal":
        """Functions of independent variables are independent."""
        del pair, elements
        return replace(self, values=variance.to(self.dtype))

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

    def map(self, function: Callable[[Tensor], Tensor]) -> "Diagonal":
        """Apply a function to the variances."""
        return replace(self, values=function(self.values))

    def quadratic(self, rows: Tensor) -> Tensor:
        """Sums of A_pi v_i A_qi."""
        return symmetric((rows * self.values[..., None, :]) @ rows.mT)

    def to_dense(self) -> Dense:
        """Write the zeros out."""
        return Dense(self.matrix())
