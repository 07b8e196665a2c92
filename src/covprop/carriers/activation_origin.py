"""What an activation makes of third cumulants, and what vectors beside it share with that.

A vector beside `z = g(y)` is the other half of a layer: an activation of the same depth has its own
curves, and what is less deep goes through the identity. The formulas are those of one joint layer.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from covprop.carriers.cross_covariance import at_same_depth
from covprop.carriers.origins import (
    Nonlinearity,
    Origin,
    SkewedVector,
    Vertex,
    block_of,
    next_serial,
)
from covprop.kernels.edgeworth import Coefficients, PairTerm, Slices, Tree, in_units, pair_sums
from covprop.kernels.normal import correlation


@final
@dataclass(eq=False)
class ActivationOrigin(Origin):
    """An activation; columns: the elements that have one; tree: their w_ii and q_ii.

    result: a weak reference to what it made.
    """

    base: SkewedVector | None
    columns: Tensor
    known: Nonlinearity
    tree: tuple[Tensor, Tensor]
    vertex: Vertex | None
    depth: int
    result: "weakref.ref[Any] | None" = None
    serial: int = field(default_factory=next_serial)

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
        return self.known.inverse.to(cross)[..., None] * self._rows(cross)

    def beside(self, y: SkewedVector, x: SkewedVector) -> Tensor | None:
        """Of z = g(y): w and q of its trees, and what slices kappa(z_i, z_i, x_j) miss."""
        cross = y.cross(x)
        if cross is None:
            return None
        z = None if self.result is None else self.result()
        if z is not None and x.known is not None and at_same_depth(z, x):
            return self._of_one_layer(z, y, x, x.known)
        return self._beside_identity(y, x, cross)

    def _rows(self, matrix: Tensor) -> Tensor:
        return matrix.index_select(-2, self.columns)

    def _of_all(self, y: SkewedVector) -> Tensor:
        """1 / sigma of its columns, for all elements of its argument."""
        every = self.known.inverse.new_zeros(*self.known.inverse.shape[:-1], y.size)
        return every.index_copy(-1, self.columns, self.known.inverse)

    def _beside_identity(self, y: SkewedVector, x: SkewedVector, cross: Tensor) -> Tensor | None:
        """kappa(z_i, z_i, x_j) = Cov(f_i^2, x_j) - 2 E[f_i] Cov(z_i, x_j)."""
        slices, known = y.slices(x), self.known

        def column(values: Tensor) -> Tensor:
            return values.to(cross)[..., None]

        inverse, t = column(known.inverse), column(known.skewness)
        w = inverse * self._rows(cross)
        raw = torch.zeros_like(w) if slices is None else self._rows(slices)
        raw = torch.where(known.trusted[..., None], raw, 0)
        third = inverse * (inverse * raw)
        f, square = ([column(row) for row in rows] for rows in known.derivatives[:2])
        q = (f[2] + t * f[5] / 6) * w + f[3] * third
        k = column(known.kurtosis)
        first = (f[1] + t * f[4] / 6 + k * f[5] / 24) * w + f[2] / 2 * third
        kappa = (square[1] + t * square[4] / 6 + k * square[5] / 24) * w + square[2] / 2 * third
        fourth = y.thrice(self._of_all(y), x)
        if fourth is not None:
            weight = column(known.weight)
            fourth = torch.where(weight > 0, weight * self._rows(fourth), 0)
            first, kappa = first + f[3] / 6 * fourth, kappa + square[3] / 6 * fourth
        kappa = kappa - 2 * column(known.marginals.shift) * first
        have = column(known.slope).square() * raw
        have = have + column(self.tree[0]) * q + column(self.tree[1]) * w
        return block_of(None, w, q, kappa - have)

    def _of_one_layer(
        self, z: Any, y: SkewedVector, x: SkewedVector, other: Nonlinearity
    ) -> Tensor | None:
        """The same with all orders of both, as in a layer that has all elements of z and x."""
        base, known = x.edges[0][0], self.known
        cross, result = y.cross(base), z.cross(x)
        if cross is None or result is None:
            return None
        cross, result = self._rows(cross), self._rows(result)
        rows, columns = known.inverse.to(cross)[..., :, None], other.inverse.to(cross)[..., None, :]
        rho = correlation(cross, rows, columns)
        both = known.trusted[..., :, None] & other.trusted[..., None, :]
        left, right = y.slices(base), base.slices(y)
        left = torch.zeros_like(cross) if left is None else self._rows(left)
        right = torch.zeros_like(cross) if right is None else self._rows(right.mT)
        left, right = (torch.where(both, slices, 0) for slices in (left, right))
        fourth = y.fourth(self._of_all(y), base, other.inverse)
        if fourth is not None:
            fourth = type(fourth)(*map(self._rows, fourth)).weighted(known.weight, other.weight)
        pairs = Slices(
            left * rows * rows * columns,
            right * rows * columns * columns,
            fourth,
            (known.marginal, other.marginal),
        )
        square, f = (
            Coefficients.of(values, rho)
            for values in (known.derivatives.second, other.derivatives.first)
        )
        (gaussian,) = pair_sums(rho, PairTerm(square, f, 0, 0, start=1))
        kappa = in_units(gaussian, square, f) + pairs.correction(rho, square, f)
        kappa = kappa - 2 * known.marginals.shift.to(cross)[..., :, None] * result
        own = Tree.of(known.bent, other.bent, cross, left, right)
        its = Tree.of(other.bent, known.bent, cross.mT, right.mT, left.mT)
        w, q = (numbers.to(cross)[..., :, None] for numbers in self.tree)
        slopes = known.slope.to(cross).square()[..., :, None] * other.slope.to(cross)[..., None, :]
        have = slopes * left + w * own.q + q * own.w + (its.w * its.q).mT
        return block_of(None, own.w, own.q, kappa - have)
