"""A covariance seen through a few random directions: rows S with E[S^T S] = Sigma.

Nothing of size n x n exists. What an operation adds beyond its expected linearisation, and what the
inputs bring, is written down as an `Entry`, to be seen from the outputs later.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from covprop.carriers.innovation import Innovation, Layout, Pairs, random_signs
from covprop.covariance import LinearMap

TANGENTS = -1
"""The name of random tangents among rows that are named by their input."""
CACHED = 2**13
"""Features whose tangents are looked at at a time."""


class Entry(Protocol):
    """Noise that enters at a place in the network."""

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T (*batch, p, p), of rows J (*batch, p, n) that lead from there to the outputs."""


@final
@dataclass(frozen=True)
class Sketch:
    """Tangents (*batch, q, n), and directions of the inputs that are carried exactly.

    exact: rows (*batch, k, n) by the input that they came from; kept: how many of the tangents a
    nonlinearity remembers, all if None; entry: what has entered here and nowhere before; depth: how
    many nonlinearities, one after another, lead to it at most. The two halves of the tangents are
    independent of each other.
    """

    tangents: Tensor
    exact: Mapping[int, Tensor] = field(default_factory=dict)
    generator: torch.Generator | None = None
    kept: int | None = None
    entry: Entry | None = None
    depth: int = 0

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.tangents.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tangents."""
        return self.tangents.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tangents."""
        return self.tangents.device

    @property
    def size(self) -> int:
        """The number of features n."""
        return self.tangents.shape[-1]

    @property
    def count(self) -> int:
        """The number of tangents q."""
        return self.tangents.shape[-2]

    def variances(self) -> Tensor:
        """Estimates of the variances (*batch, n)."""
        return self._variance

    @cached_property
    def _variance(self) -> Tensor:
        return self.inner(self)

    def uncertainty(self) -> Tensor:
        """The standard errors of `variances` (*batch, n), by the spread of the squared tangents."""
        return torch.cat([self._error(part) for part in self.tangents.split(CACHED, -1)], -1)

    def _error(self, tangents: Tensor) -> Tensor:
        """v sqrt((q sum p^2 - 1) / (q - 1)) for shares p of v: fourth powers would overflow."""
        shares = tangents.square()
        variance = shares.sum(-2)
        shares = shares.div_(torch.where(variance > 0, variance, 1)[..., None, :]).square_()
        excess = shares.sum(-2).mul_(self.count).sub_(1).clamp_(min=0)
        return variance * excess.div_(self.count - 1).sqrt_()

    def inner(self, other: "Sketch") -> Tensor:
        """Estimates of Cov(u_i, v_i) (*batch, n) with another sketch of as many features."""
        total = (self.tangents * other.tangents).sum(-2)
        for key in sorted(self.exact.keys() & other.exact.keys()):
            total = total + (self.exact[key] * other.exact[key]).sum(-2)
        return total

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A sketch by the tangents [start, stop) alone, exact rows last: (*batch, r, n)."""
        part = self.tangents[..., start:stop, :]
        if part.shape[-2] < self.count:
            part = part * math.sqrt(self.count / part.shape[-2])
        return torch.cat([part, *self.exact.values()], dim=-2) if self.exact else part

    def mixed(self, signs: Tensor, start: int, stop: int) -> Tensor:
        """Combinations of `rows(start, stop)`, computed without materializing these."""
        count = stop - start
        weights = signs[..., :count] * math.sqrt(self.count / count)
        total = weights @ self.tangents[..., start:stop, :]
        for rows in self.exact.values():
            total += signs[..., count : count + rows.shape[-2]] @ rows
            count += rows.shape[-2]
        return total

    def push(self, linear: LinearMap) -> "Sketch":
        """A S."""
        return self._each(linear)

    def take(self, index: Tensor) -> "Sketch":
        """Features of the index."""
        return self._each(lambda rows: rows.index_select(-1, index))

    def scale(self, factor: Tensor) -> "Sketch":
        """f_i S_i."""
        return self._each(lambda rows: rows * factor[..., None, :])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sketch":
        """Apply a function to all rows."""
        return self._each(function)

    def added(self, other: "Sketch") -> "Sketch":
        """The sketch of a sum: dependence is in the tangents, which add."""
        exact = dict(self.exact)
        for key, rows in other.exact.items():
            exact[key] = exact[key] + rows if key in exact else rows
        total, depth = self.tangents + other.tangents, max(self.depth, other.depth)
        return replace(self, tangents=total, exact=exact, entry=None, depth=depth)

    def aligned(self, other: "Sketch") -> "Sketch":
        """The same, with zeros for directions that only the other has, in one order for both."""
        shapes = {key: (*rows.shape[:-1], self.size) for key, rows in other.exact.items()}
        zeros = {key: self.tangents.new_zeros(shape) for key, shape in shapes.items()}
        joined = {**zeros, **self.exact}
        return replace(self, exact={key: joined[key] for key in sorted(joined)})

    def plus(self, variance: Tensor) -> "Sketch":
        """Independent noise of every feature."""
        return self.innovated(Innovation(variance.to(self.dtype)))

    def innovated(self, innovation: Innovation, shared: Tensor | None = None) -> "Sketch":
        """The sketch plus the innovation of an operation: an entry, and random directions of it.

        shared: directions (*batch, q, n) of what has more than variances; those have what is left.
        """
        spread = (innovation.unshared.clamp(min=0) / self.count).sqrt()[..., None, :]
        total = random_signs(self.tangents.shape, spread, self.generator, spread)
        total = total.add_(self.tangents)  # in place: these are large
        total = total if shared is None else total.add_(shared)
        depth = self.depth + innovation.shares
        return replace(self, tangents=total, entry=innovation, depth=depth)

    def released(self) -> "Sketch":
        """The entry alone, without the tangents."""
        empty = self.tangents.new_empty(*self.batch_shape, 0, self.size)
        return replace(self, tangents=empty, exact={})

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Sketch":
        exact = {key: function(rows) for key, rows in self.exact.items()}
        return replace(self, tangents=function(self.tangents), exact=exact, entry=None)


class Product(NamedTuple):
    """w_i u_i v_i', the second-order part of an operation: v' an independent copy of v.

    combine: another bilinear function of rows (*batch, r, n) than the product of their elements.
    """

    weight: Tensor
    first: Sketch
    second: Sketch
    combine: Callable[[Tensor, Tensor], Tensor] = torch.mul

    def pairs(self) -> Pairs:
        """The part for the backward pass: the `kept` tangents of each half."""
        half, kept = self.first.count // 2, self._kept
        sides = self.first.rows(0, kept), self.second.rows(half, half + kept)
        return Pairs(self.weight, *sides)

    def layout(self) -> Layout:
        """The names of the rows of its pairs."""
        return layout(self.first, self._kept)

    @property
    def _kept(self) -> int:
        half = self.first.count // 2
        return half if self.first.kept is None else min(half, self.first.kept // 2)


class SharedSigns:
    """Random signs of one run: nonlinearities of one depth have the same.

    Directions of what they add have its covariance with each other, then, and not only their own.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._drawn: dict[tuple[int, ...], Tensor] = {}

    def draw(self, place: tuple[int, ...], like: Sketch, count: int) -> Tensor:
        """Signs (*batch, q / 2, count and exact rows), of a place; of new rows they are new."""
        widths = dict(layout(like, count))
        new = {name: width for name, width in widths.items() if (*place, name) not in self._drawn}
        if new:
            shape = torch.Size((*like.batch_shape, like.count // 2, sum(new.values())))
            signs = random_signs(shape, like.tangents, like.generator)
            parts = signs.split(list(new.values()), -1)
            self._drawn.update(
                {(*place, name): part for name, part in zip(new, parts, strict=True)}
            )
        drawn = [self._drawn[(*place, name)].to(like.dtype) for name in widths]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn, -1)


def layout(sketch: Sketch, count: int) -> Layout:
    """Names of rows: so many tangents, and the exact ones by the input that they came from."""
    return ((TANGENTS, count), *((key, rows.shape[-2]) for key, rows in sketch.exact.items()))


def random_products(products: Sequence[Product], signs: SharedSigns) -> Tensor:
    """Random directions (*batch, q, m) of the sum of such products.

    Signs r, r' make copies r S, r' S' of the two factors, from independent quarters; those of each
    half of the result are made of that half, so that the halves stay independent.
    """
    like = products[0].first
    depth = 1 + max(max(first.depth, second.depth) for _, first, second, _ in products)
    quarter = like.count // 4
    results = []
    for start in (0, like.count // 2):
        middle, stop = start + quarter, start + 2 * quarter
        sides = [signs.draw((depth, start, side), like, quarter) for side in range(2)]
        total: Tensor | None = None
        for weight, first, second, combine in products:
            pair = first.mixed(sides[0], start, middle), second.mixed(sides[1], middle, stop)
            term = combine(*pair).mul_((weight / math.sqrt(like.count))[..., None, :])
            total = term if total is None else total.add_(term)
        assert total is not None
        results.append(total)
    return torch.cat(results, dim=-2)
