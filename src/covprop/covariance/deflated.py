"""Independent noise that a few directions have been taken from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.covariance import congruence
from covprop.covariance.base import (
    Covariance,
    LinearMap,
    PairFunction,
    symmetric,
)
from covprop.covariance.congruence import congruence_by_root
from covprop.covariance.dense import Dense, PlannedDense
from covprop.covariance.planned import Cost, PlannedCovariance, Result
from covprop.covariance.semidefinite import Root, square_root
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.kernels.rounding import NEGATIVE_VARIANCE


def remainder(left: Tensor, whole: Tensor) -> Tensor:
    """A difference of variances (*batch, n), zero where it is rounding."""
    least = max(NEGATIVE_VARIANCE, float(whole.shape[-1])) * torch.finfo(whole.dtype).eps
    return torch.where(left <= least * whole, 0, left)  # NaN stays


def where_varies(matrix: Tensor, variance: Tensor) -> Tensor:
    """A matrix with these variances, and zeros for the covariances of what does not vary.

    Where only rounding is left of variances, that of covariances would be correlations of any size.
    """
    still = variance == 0
    matrix = torch.where(still[..., :, None] | still[..., None, :], 0, matrix)
    return torch.diagonal_scatter(matrix, variance, dim1=-2, dim2=-1)


@final
@dataclass(frozen=True)
class Deflated(Covariance):
    """L (1 - U U^T) L with L = diag(sqrt(v)): values v (*batch, n), units U (*batch, n, d).

    U^T U <= 1, with equality where whole directions are taken, as `cp.Split` does. In O(n d). What
    is a function of every pair turns it `Dense`, in `to_dense`; so does a linear map to as many
    features or more.
    """

    values: Tensor
    units: Tensor

    factored: ClassVar[bool] = True

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-1]

    @property
    def taken(self) -> Tensor:
        """V = L U (*batch, n, d), of which V V^T is missing."""
        return self.units * standard_deviation(self.values)[..., None]

    def diagonal(self) -> Tensor:
        """v_i (1 - sum_k U_ik^2), and zero where that is rounding."""
        return remainder(self.values * (1 - self.units.square().sum(-1)), self.values)

    def matrix(self) -> Tensor:
        """The full matrix (*batch, n, n)."""
        return where_varies(symmetric(-self.taken @ self.taken.mT), self.diagonal())

    def planned(self) -> "PlannedDeflated":
        """Vectors."""
        taken = self.units.shape[-1]
        return PlannedDeflated(self.batch_shape, self.size, self.values.itemsize, taken)

    def push(self, linear: LinearMap) -> Covariance:
        """(A R) (A R)^T for the root R, a few columns at a time, or the map of the matrix."""
        pushed = congruence_by_root(self, linear)
        return self.to_dense().push(linear) if pushed is None else Dense(pushed)

    def matrix_rows(self, features: int) -> int:
        """Rows of the result's matrix alone."""
        return features

    def take(self, index: Tensor) -> Covariance:
        """Rows of variances and units; a feature that appears twice makes the result dense."""
        if len(index.unique()) < len(index):
            return self.to_dense().take(index)
        return Deflated(self.values.index_select(-1, index), self.units.index_select(-2, index))

    def scale(self, factor: Tensor) -> "Deflated":
        """f_i^2 v_i, and the signs of f_i in the units."""
        return Deflated(self.values * factor.square(), self.units * factor.sign()[..., None])

    def plus(self, variance: Tensor) -> "Deflated":
        """Larger variances, less the same V V^T."""
        values = self.values + variance
        return Deflated(values, self.taken * inverse_deviation(values)[..., None])

    def pairwise(self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor) -> Dense:
        """By the materialized matrix."""
        return self.to_dense().pairwise(pair, elements, variance)

    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """By the materialized matrix."""
        return self.to_dense().largest(pair, elements)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Deflated":
        """Apply a function to variances and units."""
        return Deflated(function(self.values), function(self.units))

    def quadratic(self, rows: Tensor) -> Tensor:
        """(A R) (A R)^T, of which no rounding makes a negative variance."""
        seen = self.root().after(rows)
        return symmetric(seen @ seen.mT)

    def root(self) -> "ProjectedRoot":
        """L P, a projected diagonal root."""
        return ProjectedRoot(standard_deviation(self.values), self.units)

    def without(self, units: Tensor, vectors: Tensor) -> "Deflated":
        """More directions taken: R (1 - W W^T) R^T with R = L P is L (1 - U U^T - P W W^T P) L."""
        del vectors
        more = self.root().projected(units)  # (*batch, d, n)
        return replace(self, units=torch.cat([self.units, more.mT], dim=-1))

    def conditioned(
        self, seen: Tensor, hidden: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Covariance]:
        """V_h (1 + V_s^T O^+ V_s) V_h^T is missing of the hidden ones, O what is observed."""
        rows, rest = self.take(seen), self.take(hidden)
        assert isinstance(rows, Deflated)
        assert isinstance(rest, Deflated)
        observed = rows.matrix() if noise is None else rows.matrix() + noise
        solved = torch.linalg.pinv(observed, hermitian=True) @ rows.taken  # (*batch, m, d)
        identity = torch.eye(self.units.shape[-1], dtype=self.dtype, device=self.device)
        more = square_root(symmetric(identity + rows.taken.mT @ solved))
        return -rest.taken @ solved.mT, replace(rest, units=rest.units @ more)

    def flaw(self, rounding: float) -> str | None:
        """Directions with more variance than there is."""
        if bool((self.values < 0).any()):
            return f"independent noise has a negative variance ({self.values.min():.3g})"
        sizes = torch.linalg.eigvalsh(_gram(self.units))
        if bool((sizes <= 1 + rounding).all()):
            return None
        return f"units take {sizes.max():.3g} of the variance of a direction, and 1 is all of it"

    def to_dense(self) -> Dense:
        """The materialized matrix."""
        return Dense(self.matrix())


@final
@dataclass(frozen=True)
class ProjectedRoot(Root):
    """L P with P = (1 - U U^T)^(1/2): deviations (*batch, n), units U (*batch, n, d).

    With U^T U = Q diag(g) Q^T and columns b of U Q, P = 1 - sum_k w_k b_k b_k^T for
    w = 1 / (1 + s), s = sqrt(1 - g): a projection where g = 1.
    """

    deviations: Tensor
    units: Tensor

    @property
    def width(self) -> int:
        """One column for each feature."""
        return self.deviations.shape[-1]

    def times(self, numbers: Tensor) -> Tensor:
        """L P z."""
        return self.projected(numbers.movedim(0, -2)).movedim(-2, 0) * self.deviations

    def after(self, rows: Tensor) -> Tensor:
        """A L P."""
        return self.projected(rows * self.deviations[..., None, :])

    def columns(self, start: int, stop: int) -> Tensor:
        """L P e_i."""
        basis, left = self._basis
        weights = basis[..., start:stop, :] / (1 + left)[..., None, :]
        columns = -basis @ weights.mT
        columns.diagonal(offset=-start, dim1=-2, dim2=-1).add_(1)
        return columns * self.deviations[..., None]

    def projected(self, rows: Tensor) -> Tensor:
        """Rows (*batch, m, n) times P."""
        basis, left = self._basis
        return rows - ((rows @ basis) / (1 + left)[..., None, :]) @ basis.mT

    @cached_property
    def _basis(self) -> tuple[Tensor, Tensor]:
        """Orthogonal columns b (*batch, n, d), and s (*batch, d)."""
        sizes, turned = torch.linalg.eigh(_gram(self.units))
        least = NEGATIVE_VARIANCE * torch.finfo(self.units.dtype).eps
        left = torch.where(1 - sizes > least, 1 - sizes, 0)
        return self.units @ turned.to(self.units), standard_deviation(left).to(self.units)


def _gram(units: Tensor) -> Tensor:
    """U^T U (*batch, d, d) in float64: in float32 a long sum is off by more than the units are."""
    wide = units.double()
    return symmetric(wide.mT @ wide)


@dataclass(frozen=True)
class PlannedIndependent(PlannedCovariance):
    """Independent features; the matrix is made where features come to depend on each other."""

    @property
    def to_write(self) -> int:
        """The matrix."""
        return self.batch * self.itemsize * self.size**2

    def like(self, result: Result) -> "PlannedIndependent":
        """The same structure of another size."""
        return replace(self, size=result.size, itemsize=result.itemsize)

    def dense(self) -> PlannedDense:
        """The matrix."""
        return PlannedDense(self.batch_shape, self.size, self.itemsize)

    def push(self, result: Result) -> Cost:
        """A few columns of its root at a time, or its matrix."""
        if not congruence.skips_matrix(self.size, result.size, self.batch_shape):
            return self.by_matrix(self.dense().push(result))
        made = PlannedDense(self.batch_shape, result.size, result.itemsize)
        columns = 2 * self.block(congruence.COLUMNS, self.size, result.itemsize)
        work = 2.0 * self.batch * result.fan_in * result.size * (self.size + result.size)
        graph = self.batch * result.itemsize * self.size * result.size
        return Cost(made, 2 * made.nbytes + columns, work, graph)

    def take(self, index: Tensor, result: Result) -> Cost:
        """A feature that appears twice makes the result dense."""
        if len(index.unique()) < len(index):
            return self.by_matrix(self.dense().take(index, result))
        return self._vectors(result)

    def scale(self, result: Result) -> Cost:
        """Operations on vectors."""
        return self._vectors(result)

    def plus(self, result: Result) -> Cost:
        """Operations on vectors."""
        return self._vectors(result)

    def map(self, result: Result) -> Cost:
        """Operations on vectors."""
        return self._vectors(result)

    def _vectors(self, result: Result) -> Cost:
        return Cost(self.like(result), work=2.0 * self.batch * result.size)


@final
@dataclass(frozen=True)
class PlannedDeflated(PlannedIndependent):
    """Independent features less some directions."""

    taken: int

    @property
    def nbytes(self) -> int:
        """Vectors: the variances, and one for each direction."""
        return self.batch * self.itemsize * self.size * (1 + self.taken)

    @property
    def to_write(self) -> int:
        """The matrix, and what is taken from it as another."""
        return 2 * super().to_write

    def pairwise(self, result: Result, vectors: int, grid: int) -> Cost:
        """By the materialized matrix."""
        by_torch = result._replace(compiled=False)
        return self.by_matrix(self.dense().pairwise(by_torch, vectors, grid))
