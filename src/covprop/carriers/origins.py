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
from covprop.kernels.edgeworth import Bent, Fourth, Marginal, Marginals
from covprop.kernels.products import FACTORS

_serials = itertools.count()


def next_serial() -> int:
    """A place in the order in which origins are made."""
    return next(_serials)


class SkewedVector(Protocol):
    """A random vector with third cumulants."""

    roots: frozenset[int]
    origins: tuple["Origin", ...]
    edges: tuple[tuple[Any, Any], ...]
    known: "Nonlinearity | None"

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

    def fourth(self, inverse: Tensor, other: Any, others: Tensor) -> Fourth | None:
        """Fourth cumulants of pairs, given 1 / sigma of both, None if not known."""


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
    depth: int | None = None
    """That of its result, if what is deeper has the share of what it came of, along the edges."""

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

    trusted: elements for which third cumulants count, the others are Gaussian; weight: by which
    fourth cumulants of pairs count, times that of the other; kurtosis: K_iiii / sigma^4, times the
    square of it; slope: E[g'], with what they add.
    """

    derivatives: ExpectedDerivatives
    inverse: Tensor
    trusted: Tensor
    skewness: Tensor
    weight: Tensor
    kurtosis: Tensor
    slope: Tensor
    marginals: Marginals

    @property
    def marginal(self) -> Marginal:
        """Of single elements of the argument."""
        return Marginal(self.skewness, self.kurtosis)

    @property
    def bent(self) -> Bent:
        """What its trees need."""
        return Bent(self.derivatives.first, self.inverse, self.slope, self.skewness)

    def take(self, columns: Tensor) -> "Nonlinearity":
        """Those of some elements."""
        return Nonlinearity(
            ExpectedDerivatives(*(rows[..., columns] for rows in self.derivatives)),
            self.inverse[..., columns],
            self.trusted[..., columns],
            self.skewness[..., columns],
            self.weight[..., columns],
            self.kurtosis[..., columns],
            self.slope[..., columns],
            Marginals(*(moment[..., columns] for moment in self.marginals)),
        )


@final
@dataclass(eq=False)
class ProductOrigin(Origin):
    """A product of two vectors, element by element: w = Cov(x, u_i), q = 2 Cov(x, v_i)."""

    base: SkewedVector | None
    other: SkewedVector
    depth: int
    serial: int = field(default_factory=next_serial)

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
    serial: int = field(default_factory=next_serial)

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
    serial: int = field(default_factory=next_serial)

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
