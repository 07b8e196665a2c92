"""Covariances of which only the size is known, and operations on them: what a plan is made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap
from covprop.dispatch import leaves
from covprop.errors import name_of


class NeedsNumbers(Exception):
    """A rule asked a counted covariance for its numbers."""


@final
@dataclass(frozen=True)
class Counted(Covariance):
    """A covariance of which only the size is known.

    half: what a streamed one came from; active: an activation has been there since; cached: it has
    been written out as well; alone: variances are all that there ever is; apart: they are all that
    there is so far; constant: there are none yet; bare: an input without a matrix; rank: columns of
    a factor in place of one; columns: of a sketch, which is remembered where something `enters`, if
    it `remembers`; ranks: processes that share it; followed: by autograd.
    """

    batch: torch.Size
    count: int
    itemsize: int
    half: int = 0
    active: bool = False
    cached: bool = False
    alone: bool = False
    apart: bool = False
    constant: bool = False
    bare: bool = False
    rank: int = 0
    columns: int = 0
    enters: bool = False
    remembers: bool = True
    ranks: int = 1
    followed: bool = False

    @property
    def nbytes(self) -> int:
        """What it takes in the memory of a process."""
        if self.constant or self.bare:
            return 0
        width = 1 if self.alone or self.apart else self.columns or self.rank or self.half
        width = width + self.count if self.cached or not width else width
        return self.batch.numel() * self.itemsize * -(-self.count // self.ranks) * width

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.batch

    @property
    def size(self) -> int:
        """The number of features."""
        return self.count

    def at_rest(self) -> "Counted":
        """Of a sketch, what nonlinearities remember."""
        return self if self.enters and self.remembers else replace(self, constant=True)

    def _refuse(self, *_: Any) -> NoReturn:
        raise NeedsNumbers

    def diagonal(self) -> Tensor:
        """It has no numbers."""
        self._refuse()

    def matrix(self) -> Tensor:
        """It has no numbers."""
        self._refuse()

    def push(self, linear: LinearMap) -> Covariance:
        """It has no numbers."""
        self._refuse(linear)

    def take(self, index: Tensor) -> Covariance:
        """It has no numbers."""
        self._refuse(index)

    def scale(self, factor: Tensor) -> Covariance:
        """It has no numbers."""
        self._refuse(factor)

    def plus(self, variance: Tensor) -> Covariance:
        """It has no numbers."""
        self._refuse(variance)

    def pairwise(self, pair: Any, elements: Any, variance: Tensor) -> Covariance:
        """It has no numbers."""
        self._refuse(pair, elements, variance)

    def largest(self, pair: Any, elements: Any) -> float:
        """It has no numbers."""
        self._refuse(pair, elements)

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """It has no numbers."""
        self._refuse(count, generator)

    def map(self, function: Callable[[Tensor], Tensor]) -> Covariance:
        """It has no numbers."""
        self._refuse(function)


@dataclass(frozen=True)
class Operation:
    """A function, the covariances of its random arguments, what it is given and its result.

    crossed: bytes of the covariances between its arguments; meanwhile: of those on the way to the
    two that have the most; kept: on the way to all pairs of them, which autograd keeps; together:
    how many random tensors there are; order: which elements of the first a movement takes, None if
    all in order.
    """

    function: Callable[..., Any]
    parents: tuple[Counted, ...]
    given: Any
    out: Tensor
    crossed: int = 0
    meanwhile: int = 0
    kept: int = 0
    together: int = 1
    order: Tensor | None = None

    @property
    def parent(self) -> Counted:
        """The first that varies."""
        return next((one for one in self.parents if not one.constant), self.parents[0])

    @property
    def features(self) -> int:
        """Of the result."""
        return self.out.numel() // max(1, self.parent.batch.numel())

    @property
    def unit(self) -> int:
        """Bytes of one entry of a covariance, for the whole batch."""
        return self.parent.batch.numel() * self.out.itemsize

    @property
    def weights(self) -> list[Tensor]:
        """Constants with more than one dimension."""
        return [t for t in leaves(self.given) if isinstance(t, Tensor) and t.dim() > 1]

    @property
    def taps(self) -> float:
        """Products for each feature of the result."""
        return self.weights[0].numel() / self.weights[0].shape[0] if self.weights else 1.0

    @property
    def name(self) -> str:
        """Of the function, without where it is from."""
        return name_of(self.function).rpartition(".")[2]

    def counted(self, **options: Any) -> Counted:
        """A covariance of the size of the result, followed by autograd if any argument is."""
        followed = any(one.followed for one in self.parents)
        options = {"ranks": self.parent.ranks, "followed": followed, **options}
        return Counted(self.parent.batch, self.features, self.out.itemsize, **options)

    def block(self, entries: int, width: int) -> int:
        """Bytes of a block of so many entries of a covariance of this width."""
        return self.out.itemsize * min(entries, self.parent.batch.numel() * width**2)
