"""Sums of products of two Gaussian vectors, as torch.einsum writes them.

With u = E u + du and v = E v + dv,  f(u, v) = f(E u, E v) + f(du, E v) + f(E u, dv) + f(du, dv).
The last part has the covariance (Isserlis 1918)
Cov(f(du, dv), g(dw, dz)) = (f x g) of  Cov(u, w) Cov(v, z) + Cov(u, z) Cov(v, w).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance import LinearMap

Labels: TypeAlias = tuple[int, ...]
"""The dimensions of a tensor as torch.einsum numbers them."""


class Sized(Protocol):
    """A random vector."""

    @property
    def size(self) -> int:
        """The number of its elements."""


@final
@dataclass(frozen=True)
class Contraction:
    """Which elements of two tensors are multiplied, and over which dimensions they are summed.

    batch: the shape that leads both tensors and the result; first, second, out: labels of the
    dimensions behind it, from 0; shapes: the sizes of those of the two tensors.
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
