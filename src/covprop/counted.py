"""Covariances of which only the size is known: what a plan is made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, LinearMap


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
