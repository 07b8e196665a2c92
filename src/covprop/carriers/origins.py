"""Operations that make third cumulants, and what other vectors share with them.

A block belongs to the operation that made it. A vector that came of it has its factors along the
edges. One that did not, but varies with the argument y of the operation, has factors as well: a
skip connection x of z = g(y) shares kappa(z_i, z_i, x_j) and kappa(z_i, x_j, x_k) with it.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from covprop.activations.powers import ExpectedDerivatives
from covprop.kernels.edgeworth import Marginals

FACTORS = 4
"""Tensors of a block: e, w, q and r."""

_serials = itertools.count()


class SkewedVector(Protocol):
    """A random vector with third cumulants."""

    roots: frozenset[int]
    origins: tuple["Origin", ...]

    def factors(self, origins: tuple["Origin", ...]) -> Tensor | None:
        """What it has in the blocks of some origins, None if that is zero."""

    @property
    def size(self) -> int:
        """The number of elements."""

    def cross(self, other: Any) -> Tensor | None:
        """Cov(this, other), None if it is zero."""

    def slices(self, other: Any) -> Tensor | None:
        """T(x_i, x_i, z_j) of this x and another z, None if it is zero."""

    def thrice(self, inverse: Tensor, other: Any) -> Tensor | None:
        """K(x_i, x_i, x_i, z_j) / sigma_i^3 of this x and another z, None if not known."""


class Vertex(NamedTuple):
    """What trees need of the elements of an activation, in units of standard deviations.

    second, third: f_2 and f_3 (*batch, count); own: the correlation of the arguments of its columns
    (*batch, count, count); older: of those of older origins with them (*batch, older, count);
    roots: the inputs that they came of.
    """

    second: Tensor
    third: Tensor
    own: Tensor
    older: "dict[Origin, Tensor]"
    roots: frozenset[int]


class Origin(ABC):
    """An operation that made a block, and what other vectors have in it."""

    base: SkewedVector | None
    """What it came of, None once no other vector can ask for it."""
    vertex: Vertex | None = None
    """What fourth cumulants need of it, None if they leave it out."""
    serial: int
    """Its place in the order in which origins are made."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of its columns."""

    @abstractmethod
    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """The factors (*batch, 4, count, n) of a vector x that did not come of it.

        y: its argument; None if they are zero.
        """


@final
@dataclass(frozen=True)
class Blocks:
    """Factors of a vector, those of all origins one after another: (*batch, 4, count, n)."""

    origins: tuple[Origin, ...] = ()
    tensor: Tensor | None = None

    def parts(self) -> dict[Origin, Tensor]:
        """The factors of each origin."""
        if self.tensor is None:
            return {}
        split = self.tensor.split([origin.count for origin in self.origins], dim=-2)
        return dict(zip(self.origins, split, strict=True))

    def with_block(self, origin: Origin, factors: Tensor) -> "Blocks":
        """Also the block of a newer origin."""
        joined = factors if self.tensor is None else torch.cat([self.tensor, factors], dim=-2)
        return Blocks((*self.origins, origin), joined)

    def extended(self, factor: Tensor, origin: Origin, parts: Sequence[Tensor]) -> "Blocks":
        """Each element scaled, and the block of a newer origin, in one piece of memory."""
        old = self.tensor
        tensors = [factor, *parts] if old is None else [factor, old, *parts]
        if old is None or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            scaled = self if old is None else Blocks(self.origins, factor[..., None, None, :] * old)
            return scaled.with_block(origin, block_of(*parts))
        count = old.shape[-2]
        joined = old.new_empty(*old.shape[:-2], count + parts[0].shape[-2], old.shape[-1])
        torch.mul(old, factor[..., None, None, :], out=joined[..., :count, :])
        for place, part in zip(joined.unbind(-3), parts, strict=True):
            place[..., count:, :] = part
        return Blocks((*self.origins, origin), joined)

    def only(self, good: Tensor) -> "Blocks":
        """Without elements that are not good (*batch, n)."""
        if self.tensor is None:
            return self
        return Blocks(self.origins, torch.where(good[..., None, None, :], self.tensor, 0))


def all_origins(*several: Iterable[Origin]) -> tuple[Origin, ...]:
    """The origins of several blocks, in the order in which they were made."""
    one = {origins: None for origins in map(tuple, several) if origins}
    if len(one) == 1:
        return next(iter(one))
    return tuple(sorted({o for origins in one for o in origins}, key=lambda o: o.serial))


def moved(factors: Tensor, transfer: Callable[[Tensor], Tensor]) -> Tensor:
    """Factors along an edge, which takes vectors as columns."""
    return transfer(factors.flatten(-3, -2).mT).mT.unflatten(-2, (FACTORS, -1))


def block_of(e: Tensor | None, w: Tensor | None, q: Tensor | None, r: Tensor | None) -> Tensor:
    """A block of factors (*batch, count, n), of which some are zero."""
    like = next(part for part in (e, w, q, r) if part is not None)
    nothing = torch.zeros_like(like)
    return torch.stack([nothing if part is None else part for part in (e, w, q, r)], dim=-3)


@dataclass(frozen=True)
class Nonlinearity:
    """The numbers of an activation of a nearly Gaussian vector, (*batch, n) in float64.

    trusted: elements for which third cumulants count, the others are Gaussian; kurtosis:
    K_iiii / sigma^4 where fourth cumulants count, else zero; slope: E[g'], with what they add.
    """

    derivatives: ExpectedDerivatives
    inverse: Tensor
    trusted: Tensor
    skewness: Tensor
    kurtosis: Tensor
    slope: Tensor
    marginals: Marginals

    def take(self, columns: Tensor) -> "Nonlinearity":
        """Those of some elements."""
        return Nonlinearity(
            ExpectedDerivatives(*(rows[..., columns] for rows in self.derivatives)),
            self.inverse[..., columns],
            self.trusted[..., columns],
            self.skewness[..., columns],
            self.kurtosis[..., columns],
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
    vertex: Vertex | None
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def count(self) -> int:
        """Elements that are not linear."""
        return len(self.columns)

    def correlation(self, x: SkewedVector) -> Tensor | None:
        """Cov(y_i, x_j) / sigma_i of its argument and a vector beside it, None if it is zero."""
        if self.base is None or self.base.roots.isdisjoint(x.roots):
            return None
        cross = self.base.cross(x)
        if cross is None:
            return None
        return self.known.inverse.to(cross)[..., None] * cross.index_select(-2, self.columns)

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
        raw = torch.where(known.trusted[..., None], raw, 0)
        third = inverse * (inverse * raw)
        f, square = ([column(row) for row in rows] for rows in known.derivatives[:2])
        q = (f[2] + t * f[5] / 6) * w + f[3] * third
        k = column(known.kurtosis)
        first = (f[1] + t * f[4] / 6 + k * f[5] / 24) * w + f[2] / 2 * third
        kappa = (square[1] + t * square[4] / 6 + k * square[5] / 24) * w + square[2] / 2 * third
        every = known.inverse.new_zeros(*known.inverse.shape[:-1], y.size)
        fourth = y.thrice(every.index_copy(-1, self.columns, known.inverse), x)
        if fourth is not None:
            fourth = torch.where(k != 0, fourth.index_select(-2, self.columns), 0)
            first, kappa = first + f[3] / 6 * fourth, kappa + square[3] / 6 * fourth
        kappa = kappa - 2 * column(known.marginals.shift) * first
        have = column(known.slope).square() * raw
        have = have + column(self.tree[0]) * q + column(self.tree[1]) * w
        return block_of(None, w, q, kappa - have)


@final
@dataclass(eq=False)
class ProductOrigin(Origin):
    """A product of two vectors, element by element: w = Cov(x, u_i), q = 2 Cov(x, v_i)."""

    base: SkewedVector | None
    other: SkewedVector
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def count(self) -> int:
        """As many columns as elements."""
        return self.other.size

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
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def count(self) -> int:
        """As many columns as elements."""
        return self.mean.shape[-1]

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Nothing but slices."""
        return block_of(None, None, None, self.slices(y, x))

    def slices(self, y: SkewedVector, x: SkewedVector) -> Tensor:
        """ratio Cov(y_i^2, x_j)."""
        cross, slices = y.cross(x), y.slices(x)
        if cross is None:
            return self.mean.new_zeros(*self.mean.shape, x.size)
        first = 2 * self.mean[..., :, None] * cross
        return self.ratio * (first if slices is None else first + slices)


@final
@dataclass(eq=False)
class InputOrigin(Origin):
    """An input with independent skewed elements, of which no other vector has a share."""

    size: int
    base: None = None
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def count(self) -> int:
        """As many columns as elements."""
        return self.size

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Nothing."""
        del y, x
        return None


def product_factors(
    w: Tensor | None, q: Tensor | None, rest: Tensor | None = None, unit: Tensor | None = None
) -> Tensor | None:
    """The block of a product, of rows Cov(u_i, x_j) and Cov(v_i, x_j)."""
    if w is None and q is None:
        return None
    return block_of(unit, w, None if q is None else 2 * q, rest)
