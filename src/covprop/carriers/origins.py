"""Operations that make third cumulants, and what other vectors share with them.

A block belongs to the operation that made it. A vector that came of it has its factors along the
edges. One that did not, but varies with the argument y of the operation, has factors as well: a
skip connection x of z = g(y) shares kappa(z_i, z_i, x_j) and kappa(z_i, x_j, x_k) with it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor

from covprop.activations.powers import ExpectedDerivatives
from covprop.kernels.edgeworth import Marginals


class SkewedVector(Protocol):
    """A random vector with third cumulants."""

    roots: frozenset[int]

    @property
    def size(self) -> int:
        """The number of elements."""

    def cross(self, other: Any) -> Tensor | None:
        """Cov(this, other), None if it is zero."""

    def slices(self, other: Any) -> Tensor | None:
        """T(x_i, x_i, z_j) of this x and another z, None if it is zero."""


class Origin(ABC):
    """An operation that made a block, and what other vectors have in it."""

    base: SkewedVector | None
    """What it came of, None once no other vector can ask for it."""

    @abstractmethod
    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """The factors of a vector x that did not come of it, given its argument y."""


@dataclass(frozen=True)
class Nonlinearity:
    """The numbers of an activation of a nearly Gaussian vector, (*batch, n) in float64.

    slope: E[g'], with what the skewness adds.
    """

    derivatives: ExpectedDerivatives
    inverse: Tensor
    skewness: Tensor
    slope: Tensor
    marginals: Marginals

    def take(self, columns: Tensor) -> "Nonlinearity":
        """Those of some elements."""
        return Nonlinearity(
            ExpectedDerivatives(*(rows[..., columns] for rows in self.derivatives)),
            self.inverse[..., columns],
            self.skewness[..., columns],
            self.slope[..., columns],
            Marginals(*(moment[..., columns] for moment in self.marginals)),
        )


@final
@dataclass(eq=False)
class ActivationOrigin(Origin):
    """An activation; columns: the elements that have one; tree: their w_ii and q_ii."""

    base: SkewedVector | None
    columns: Tensor
    known: Nonlinearity
    tree: tuple[Tensor, Tensor]

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Of z = g(y): kappa(z_i, z_i, x_j) = Cov(f_i^2, x_j) - 2 E[f_i] Cov(z_i, x_j)."""
        cross = y.cross(x)
        if cross is None:
            return None
        slices, known = y.slices(x), self.known

        def column(values: Tensor) -> Tensor:
            return values.to(cross)[..., None]

        inverse, t = column(known.inverse), column(known.skewness)
        w = inverse * cross.index_select(-2, self.columns)
        raw = torch.zeros_like(w) if slices is None else slices.index_select(-2, self.columns)
        third = inverse * (inverse * raw)
        f, square = ([column(row) for row in rows] for rows in known.derivatives[:2])
        q = (f[2] + t * f[5] / 6) * w + f[3] * third
        first = (f[1] + t * f[4] / 6) * w + f[2] / 2 * third
        kappa = (square[1] + t * square[4] / 6) * w + square[2] / 2 * third
        kappa = kappa - 2 * column(known.marginals.shift) * first
        have = column(known.slope).square() * raw
        have = have + column(self.tree[0]) * q + column(self.tree[1]) * w
        return torch.cat([part.mT for part in (torch.zeros_like(w), w, q, kappa - have)], dim=-1)


@final
@dataclass(eq=False)
class ProductOrigin(Origin):
    """A product of two vectors, element by element: w = Cov(x, u_i), q = 2 Cov(x, v_i)."""

    base: SkewedVector | None
    other: SkewedVector

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Its covariances with both arguments."""
        return product_factors(y.cross(x), self.other.cross(x))


@final
@dataclass(eq=False)
class DropoutOrigin(Origin):
    """Noise of single elements whose variance is ratio times y^2."""

    base: SkewedVector | None
    mean: Tensor
    ratio: float

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Nothing but slices."""
        rest = self.slices(y, x).mT
        nothing = torch.zeros_like(rest)
        return torch.cat([nothing, nothing, nothing, rest], dim=-1)

    def slices(self, y: SkewedVector, x: SkewedVector) -> Tensor:
        """ratio Cov(y_i^2, x_j)."""
        cross, slices = y.cross(x), y.slices(x)
        if cross is None:
            return self.mean.new_zeros(*self.mean.shape, x.size)
        first = 2 * self.mean[..., :, None] * cross
        return self.ratio * (first if slices is None else first + slices)


@final
class InputOrigin(Origin):
    """An input with independent skewed elements, of which no other vector has a share."""

    base = None

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Nothing."""
        del y, x
        return None


def product_factors(
    w: Tensor | None, q: Tensor | None, rest: Tensor | None = None, unit: Tensor | None = None
) -> Tensor | None:
    """The block of a product, of rows Cov(u_i, x_j) and Cov(v_i, x_j)."""
    known = w if w is not None else q
    if known is None:
        return None
    nothing = torch.zeros_like(known.mT)
    return torch.cat(
        [
            nothing if unit is None else unit,
            nothing if w is None else w.mT,
            nothing if q is None else 2 * q.mT,
            nothing if rest is None else rest,
        ],
        dim=-1,
    )
