"""A few directions of noise, and independent noise of every feature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, Normal

from covprop.covariance import base
from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    symmetric,
)
from covprop.covariance.dense import Dense, PlannedDense
from covprop.covariance.planned import Cost, PlannedCovariance, Result
from covprop.covariance.semidefinite import (
    ConcatenatedRoot,
    DiagonalRoot,
    FactorRoot,
    Root,
    checked_positive,
    square_root,
)
from covprop.kernels.normal import standard_deviation
from covprop.kernels.rounding import BESIDE_FACTOR


@final
@dataclass(frozen=True)
class LowRank(Covariance):
    """F F^T + diag(v), few directions and independent noise.

    Without independent noise it stays a factor through linear maps. With it, and in activations, it
    becomes a matrix of all pairs, a `Dense` one, in `to_dense`.

    Args:
        factor: F, (*batch, n, k).
        values: v, (*batch, n), or None for the factor only.

    Example:
        factor = torch.randn(100, 2)
        cp.Gaussian(torch.zeros(100), cp.covariance.LowRank(factor, torch.full((100,), 0.01)))
    """

    factor: Tensor
    values: Tensor | None = None

    factored: ClassVar[bool] = True

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.factor.shape[:-2]

    @property
    def rank(self) -> int:
        """The number of directions k."""
        return self.factor.shape[-1]

    def factor_and_noise(self) -> tuple[Tensor, Tensor | None]:
        """The factor and the noise."""
        return self.factor, self.values

    def to_torch(self, mean: Tensor) -> Distribution:
        """The low-rank kind, over the flattened event."""
        if self.values is None:
            return super().to_torch(mean)
        flat = mean.reshape(*self.batch_shape, self.size)
        rounding = BESIDE_FACTOR * torch.finfo(self.dtype).eps
        own = checked_positive(self.values, rounding * self.diagonal().detach())
        if self.rank == 0:  # which torch's low-rank kind does not take
            return Independent(Normal(flat, own.sqrt()), 1)
        return LowRankMultivariateNormal(flat, self.factor, own)

    def matrix_rows(self, features: int) -> int:
        """0 without independent noise, as the result is a factor."""
        return 0 if self.values is None else max(self.size, features)

    def flaw(self, rounding: float) -> str | None:
        """Independent noise with a negative variance."""
        del rounding
        if self.values is None or bool((self.values >= 0).all()):
            return None
        return f"independent noise has a negative variance ({self.values.min():.3g})"

    def diagonal(self) -> Tensor:
        """sum_k F_ik^2 + v_i."""
        variance = self.factor.square().sum(-1)
        return variance if self.values is None else variance + self.values

    def matrix(self) -> Tensor:
        """The full matrix (*batch, n, n)."""
        matrix = symmetric(self.factor @ self.factor.mT)
        return matrix if self.values is None else matrix + torch.diag_embed(self.values)

    def planned(self) -> "PlannedLowRank":
        """The factor, and the noise beside it."""
        sizes = self.batch_shape, self.size, self.factor.itemsize
        return PlannedLowRank(*sizes, self.rank, self.values is not None)

    def push(self, linear: LinearMap) -> Covariance:
        """(A F) (A F)^T, or a matrix where independent noise is beside it."""
        if self.values is not None:
            return self.to_dense().push(linear)
        factor = linear(self.factor.mT).mT
        result = LowRank(factor)
        return result if self.rank < factor.shape[-2] else result.to_dense()

    def take(self, index: Tensor) -> Covariance:
        """Rows of the factor; independent noise that appears twice makes the result dense."""
        if self.values is None:
            return LowRank(self.factor.index_select(-2, index))
        if len(index.unique()) < len(index):
            return self.to_dense().take(index)
        return LowRank(self.factor.index_select(-2, index), self.values.index_select(-1, index))

    def scale(self, factor: Tensor) -> "LowRank":
        """f_i F_ik, and f_i^2 v_i."""
        values = None if self.values is None else self.values * factor.square()
        return LowRank(self.factor * factor[..., None], values)

    def plus(self, variance: Tensor) -> "LowRank":
        """Independent noise beside the factor."""
        return LowRank(self.factor, variance if self.values is None else self.values + variance)

    def pairwise(self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor) -> Dense:
        """By the materialized matrix: the result has no low rank."""
        return self.to_dense().pairwise(pair, elements, variance)

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """By the materialized matrix."""
        return self.to_dense().largest(pair, elements)

    def root(self) -> Root:
        """The factor, and the deviations of independent noise beside it."""
        factor = FactorRoot(self.factor)
        if self.values is None:
            return factor
        return ConcatenatedRoot(factor, DiagonalRoot(standard_deviation(self.values)))

    @property
    def directions(self) -> int:
        """Those of the factor: independent noise beside it stays."""
        return self.rank

    def without(self, units: Tensor, vectors: Tensor) -> "LowRank":
        """F (1 - U^T U), which has the rank of the factor or less."""
        return replace(self, factor=self.factor - vectors.mT @ units)

    def map(self, function: Callable[[Tensor], Tensor]) -> "LowRank":
        """Apply a function to factor and variances."""
        values = None if self.values is None else function(self.values)
        return LowRank(function(self.factor), values)

    def quadratic(self, rows: Tensor) -> Tensor:
        """(A F) (A F)^T + A diag(v) A^T."""
        seen = rows @ self.factor  # (*batch, m, k)
        result = seen @ seen.mT
        if self.values is not None:
            result = result + (rows * self.values[..., None, :]) @ rows.mT
        return symmetric(result)

    def conditioned(
        self, seen: Tensor, hidden: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Covariance]:
        """The directions that are left: F_h (1 - F_s^T O^+ F_s) F_h^T + v_h, O what is observed."""
        rows, rest = self.take(seen), self.take(hidden)
        observed = rows.matrix() if noise is None else rows.matrix() + noise
        factor = self.factor.index_select(-2, seen)
        solved = torch.linalg.pinv(observed, hermitian=True) @ factor  # (*batch, m, k)
        assert isinstance(rest, LowRank)
        identity = torch.eye(self.rank, dtype=self.dtype, device=self.device)
        left = square_root(symmetric(identity - factor.mT @ solved))
        return rest.factor @ solved.mT, replace(rest, factor=rest.factor @ left)

    def to_dense(self) -> Dense:
        """The materialized matrix."""
        return Dense(self.matrix())


@final
@dataclass(frozen=True)
class PlannedLowRank(PlannedCovariance):
    """A factor of this rank, and independent noise beside it or not."""

    rank: int
    noisy: bool = False

    @property
    def nbytes(self) -> int:
        """The columns of the factor, and the noise."""
        return self.batch * self.itemsize * self.size * (self.rank + self.noisy)

    @property
    def to_write(self) -> int:
        """The matrix, and strips of a large one."""
        large = self.batch * self.size**2 > base.SMALL
        strips = 2 * base.STRIP * large
        return self.batch * self.itemsize * self.size * (self.size + strips)

    def _like(self, result: Result, noisy: bool) -> Cost:
        made = replace(self, size=result.size, itemsize=result.itemsize, noisy=noisy)
        return Cost(made, work=2.0 * self.batch * result.fan_in * self.rank * result.size)

    def _dense(self, size: int, itemsize: int) -> PlannedDense:
        return PlannedDense(self.batch_shape, size, itemsize)

    def push(self, result: Result) -> Cost:
        """A map of the factor, or of the matrix where there is independent noise."""
        if self.noisy:
            return self.by_matrix(self._dense(self.size, self.itemsize).push(result))
        cost = self._like(result, noisy=False)
        if self.rank < result.size:
            return cost
        made = self._dense(result.size, result.itemsize)
        return cost._replace(structure=made, temporary=cost.structure.nbytes + 2 * made.nbytes)

    def take(self, index: Tensor, result: Result) -> Cost:
        """Independent noise that appears twice makes the result dense."""
        if self.noisy and len(index.unique()) < len(index):
            return self.by_matrix(self._dense(self.size, self.itemsize).take(index, result))
        return self._like(result, self.noisy)

    def scale(self, result: Result) -> Cost:
        """Operations on the factor and the noise."""
        return self._like(result, self.noisy)

    def plus(self, result: Result) -> Cost:
        """Noise beside the factor."""
        return self._like(result, noisy=True)

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """By the materialized matrix."""
        dense = self._dense(self.size, self.itemsize)
        by_torch = result._replace(compiled=False)
        return self.by_matrix(dense.pairwise(by_torch, vectors, grid))

    def map(self, result: Result) -> Cost:
        """Operations on the factor and the noise."""
        return self._like(result, self.noisy)
