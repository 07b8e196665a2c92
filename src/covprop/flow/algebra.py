"""Arguments of the algebra of carriers: sums of products, and groups that have a length.

A `Contraction` is what torch.einsum writes of two vectors. With u = E u + du and v = E v + dv,
f(u, v) = f(E u, E v) + f(du, E v) + f(E u, dv) + f(du, dv). The last part has the covariance
(Isserlis 1918)  Cov(f(du, dv), g(dw, dz)) = (f x g) of Cov(u, w) Cov(v, z) + Cov(u, z) Cov(v, w).

`Groups` are what norms of all kinds are made of. Within a group the moments are exact for Gaussian
input (`kernels.directions`); between groups, and with all other tensors, the dependence is that of
the expected slope.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap
from covprop.kernels.directions import DiagonalGaussian, Direction, diagonalised

Labels: TypeAlias = tuple[int, ...]
"""The dimensions of a tensor as torch.einsum numbers them."""
SPANNED = 1e-12
"""The share of a mean that is rounding, if all of it but so much is in the span of the noise."""
Slope: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map of the groups of vectors, (*batch, G, count, n)."""


class Sized(Protocol):
    """A random vector."""

    @property
    def size(self) -> int:
        """The number of its elements."""


@final
@dataclass(frozen=True)
class Contraction:
    """Which elements of two tensors are multiplied, and over which dimensions they are summed.

    Args:
        batch: The shape that leads both tensors and the result.
        first: Labels of the dimensions of the first tensor behind the batch, from 0.
        second: Those of the second.
        out: Those of the result.
        shapes: The sizes of the dimensions of the two tensors behind the batch.

    Example:
        shapes = torch.Size((2, 3)), torch.Size((3,))
        product = cp.extending.Contraction(torch.Size(), (0, 1), (1,), (0,), shapes)
        product(torch.ones(2, 3), torch.ones(3))  # a matrix and a vector
    """

    batch: torch.Size
    first: Labels
    second: Labels
    out: Labels
    shapes: tuple[torch.Size, torch.Size]

    @classmethod
    def elementwise(cls, batch: torch.Size, size: int) -> "Contraction":
        """The product of two vectors (*batch, size), element by element: nothing is summed."""
        return cls(batch, (0,), (0,), (0,), (torch.Size((size,)), torch.Size((size,))))

    @property
    def is_elementwise(self) -> bool:
        """Whether vectors are multiplied element by element."""
        return self.first == self.second == self.out == (0,)

    def __call__(self, u: Tensor, v: Tensor) -> Tensor:
        """f(u, v) of tensors (*batch, *shape)."""
        lead = self._lead
        return torch.einsum(
            u, lead + self._at(self.first), v, lead + self._at(self.second),
            lead + self._at(self.out),
        )  # fmt: skip

    def expectation(self, cross: Tensor) -> Tensor:
        """E f(du, dv), given Cov(u, v) (*batch, n, m)."""
        lead = self._lead
        block = cross.reshape(*self.batch, *self.shapes[0], *self.shapes[1])
        labels = lead + self._at(self.first) + self._at(self.second)
        return torch.einsum(block, labels, lead + self._at(self.out))

    def covariance(
        self, other: "Contraction", crosses: Sequence[Sequence[Tensor | None]]
    ) -> Tensor | None:
        """Cov(f(du, dv), g(dw, dz)) as (*batch, n, m), None if it is zero.

        crosses: Cov(u, w), Cov(u, z) and Cov(v, w), Cov(v, z), each None if it is zero.
        """
        shift = 1 + max((0, *self.first, *self.second))
        mine = [self._at(labels) for labels in (self.first, self.second)]
        theirs = [self._at(labels, shift) for labels in (other.first, other.second)]
        lead, total = self._lead, None
        result = lead + self._at(self.out) + self._at(other.out, shift)
        for i, j in ((0, 1), (1, 0)):
            left, right = crosses[0][i], crosses[1][j]
            if left is None or right is None:
                continue
            dtype = torch.promote_types(left.dtype, right.dtype)
            left, right = left.to(dtype), right.to(dtype)
            term = torch.einsum(
                left.reshape(*self.batch, *self.shapes[0], *other.shapes[i]),
                lead + mine[0] + theirs[i],
                right.reshape(*self.batch, *self.shapes[1], *other.shapes[j]),
                lead + mine[1] + theirs[j],
                result,
            )
            total = term if total is None else total + term
        if total is None:
            return None
        return total.reshape(*self.batch, self._size, other._size)

    def linear_terms(
        self, u: "Sized", v: "Sized", mean: Tensor, other_mean: Tensor
    ) -> list[tuple[Any, LinearMap]]:
        """The linear part f(du, m_v) + f(m_u, dv), one term for each random vector."""

        def of_first(vector: Tensor) -> Tensor:
            return self(vector.reshape(mean.shape), other_mean)

        def of_second(vector: Tensor) -> Tensor:
            return self(mean, vector.reshape(other_mean.shape))

        def of_both(vector: Tensor) -> Tensor:
            return of_first(vector) + of_second(vector)

        parts = [(u, of_both)] if u is v else [(u, of_first), (v, of_second)]
        return [(one, LinearMap(part, torch.Size((one.size,)))) for one, part in parts]

    @property
    def _lead(self) -> list[int]:
        return list(range(len(self.batch)))

    def _at(self, labels: Labels, shift: int = 0) -> list[int]:
        """Labels behind those of the batch."""
        return [len(self.batch) + shift + label for label in labels]

    @property
    def _size(self) -> int:
        """Elements of the result, without the batch."""
        sizes = dict(zip(self.first, self.shapes[0], strict=True))
        sizes.update(zip(self.second, self.shapes[1], strict=True))
        return torch.Size(sizes[label] for label in self.out).numel()


@final
@dataclass(frozen=True)
class Recurrence:
    """A step that is repeated along sequences: (input, state) -> state.

    step: takes an in-flight tensor (*batch, N, inputs + parts * size) of N sequences and gives the
    parts of the next state, each (*batch, N, size), the output first; index (T, inputs): what each
    step reads of a sequence; initial: the state (N, parts * size), or (*batch, parts * size) of one
    sequence each, at the beginning, None where it is the end of each sequence.
    """

    step: Callable[[Any], tuple[Any, ...]]
    index: Tensor
    size: int
    parts: int
    initial: Tensor | None


@final
@dataclass(frozen=True)
class Groups:
    """Which elements of a flat event have a length together.

    Args:
        index: Places of the n elements of each of G groups, (G, n).
        centred: Whether the mean of a group is subtracted first.
        offset: What is added to the square of the length.

    Example:
        groups = cp.extending.Groups(torch.arange(6).reshape(2, 3))
        groups.take(torch.ones(6)).norm(dim=-1)
    """

    index: Tensor
    centred: bool = False
    offset: float = 0.0

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the blocks of a matrix."""
        return self.index[:, :, None], self.index[:, None, :]

    def take(self, vectors: Tensor) -> Tensor:
        """The groups of vectors (*any, N): (*any, G, n)."""
        return self.less_mean(vectors[..., self.index])

    def put(self, values: Tensor) -> Tensor:
        """Groups (*any, G, n) as vectors (*any, N)."""
        flat = values.flatten(-2)
        return torch.zeros_like(flat).index_copy(-1, self.index.flatten(), flat)

    def blocks(self, covariance: Covariance) -> Tensor:
        """The covariances of the groups, (*batch, G, n, n)."""
        if covariance.independent:
            blocks = torch.diag_embed(covariance.diagonal().double()[..., self.index])
        else:
            blocks = covariance.matrix()[(..., *self.pairs)].double()
        return self.less_mean(self.less_mean(blocks).mT)

    def normalizing_map(self, slope: Slope, weight: Tensor) -> LinearMap:
        """The expected slope of normalised groups, as a map of vectors (*batch, count, N)."""

        def linear(vectors: Tensor) -> Tensor:
            taken = self.take(vectors).movedim(-3, -2)
            return self.put(slope(taken).movedim(-2, -3) * weight.to(vectors.dtype))

        return LinearMap(linear, torch.Size((self.index.numel(),)), leading=True)

    def length_map(self, row: Tensor) -> LinearMap:
        """The expected slope (*batch, G, n) of the lengths of groups, as a map of vectors."""
        rows = row[..., None, :].movedim(-2, -3)

        def linear(vectors: Tensor) -> Tensor:
            return (self.take(vectors) * rows.to(vectors.dtype)).sum(-1)

        return LinearMap(linear, torch.Size((self.index.numel(),)), leading=True)

    def less_mean(self, values: Tensor) -> Tensor:
        """Values (*any, n) of groups, less their mean if these are centred."""
        return values - values.mean(-1, keepdim=True) if self.centred else values


@final
@dataclass(frozen=True)
class GroupBases:
    """Groups as vectors in bases (*batch, G, n, r) in which their covariances are diagonal."""

    vector: DiagonalGaussian
    basis: Tensor
    groups: Groups

    @classmethod
    def of_covariance(cls, groups: Groups, mean: Tensor, covariance: Covariance) -> "GroupBases":
        """Eigenvectors of the blocks; mean (*batch, N)."""
        return cls(*diagonalised(groups.take(mean.double()), groups.blocks(covariance)), groups)

    @classmethod
    def of_rows(cls, groups: Groups, mean: Tensor, rows: Tensor) -> "GroupBases":
        """Singular vectors of rows S (*batch, q, N) with S^T S the covariance."""
        mean = groups.take(mean.double())
        rows = groups.take(rows.double()).movedim(-3, -2)  # (*batch, G, q, n)
        _, values, basis = torch.linalg.svd(rows, full_matrices=False)
        along = (basis @ mean[..., None])[..., 0]
        rest, whole = mean, mean.square().sum(-1, keepdim=True).sqrt()
        for _ in range(2):  # once more, for what rounding has left
            rest = rest - (rest[..., None, :] @ basis.mT @ basis)[..., 0, :]
        size = rest.square().sum(-1, keepdim=True).sqrt()
        beyond = size > SPANNED * whole
        unit = torch.where(beyond, rest / torch.where(beyond, size, 1), 0)
        basis = torch.cat([basis, unit[..., None, :]], -2)
        variance = torch.cat([values.square(), torch.zeros_like(size)], -1)
        mean = torch.cat([along, torch.where(beyond, size, 0)], -1)
        return cls(DiagonalGaussian(mean, variance), basis.mT, groups)

    def whole(self, vectors: Tensor) -> Tensor:
        """(*batch, G, r) as (*batch, G, n)."""
        return (self.basis @ vectors[..., None])[..., 0]

    def slope(self, direction: Direction, dtype: torch.dtype) -> Slope:
        """E[dv/dz] of vectors (*batch, G, count, n), which keeps one matrix for each group."""
        basis = self.basis.to(dtype)
        if basis.shape[-1] >= basis.shape[-2]:
            # Of centred groups without the mean, whose rounding would outweigh what is left of two.
            matrix = self.basis @ direction.slope @ self.basis.mT
            matrix = self.groups.less_mean(self.groups.less_mean(matrix).mT).mT.to(dtype)
            return lambda vectors: vectors @ matrix.to(vectors.dtype)
        inside, rest = direction.slope.to(dtype), direction.idle.to(dtype)[..., None, None]

        def along(vectors: Tensor) -> Tensor:
            turned, kind = basis.to(vectors.dtype), vectors.dtype
            seen = vectors @ turned
            beyond = rest.to(kind) * (vectors - seen @ turned.mT)
            return seen @ inside.to(kind) @ turned.mT + beyond

        return along
