"""Slices of the fourth cumulant, from the factors of the third: trees of two vertices.

With a vertex for each element r that is not linear, x_r its argument in units of its deviation,
e_r[i] the response of y_i to it, w_r[i] = Cov(y_i, x_r) and q_r = f_2(r) w_r,

    K_ijkl = sum over 12 paths of  sum_rs e_r[i] q_r[j] rho_rs e_s[k] q_s[l]
           + sum over 4 stars of   sum_r  f_3(r) e_r[i] w_r[j] w_r[k] w_r[l].

docs/mathematics.md has the derivation, and what of it is left out of K_iijj.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from covprop.carriers.origins import Origin, SkewedVector, all_origins
from covprop.kernels.edgeworth import Fourth

PRODUCTS = 2**18
"""Numbers of products of factors that are held at a time."""


class Vertices(NamedTuple):
    """Factors e, w (*batch, count, n) of a vector at all vertices, in units of its deviations.

    second, third: f_2 and f_3 (*batch, count, 1); own: 2 e q, of paths that end twice in it; met:
    rho own.
    """

    e: Tensor
    w: Tensor
    second: Tensor
    third: Tensor
    own: Tensor
    met: Tensor

    @classmethod
    def of(
        cls, factors: Tensor, origins: Sequence[Origin], inverse: Tensor | None = None
    ) -> Self | None:
        """Of its blocks (*batch, 4, count, n), each element times a number (*batch, n).

        None if there are others than activations, or some do not know each other.
        """
        vertices = [origin.vertex for origin in origins if origin.vertex is not None]
        if len(vertices) < len(origins):
            return None
        e, w, _, _ = factors.unbind(-3)
        if inverse is not None:  # first, as fourth powers of small deviations underflow
            e, w = (inverse.to(t)[..., None, :] * t for t in (e, w))
        second, third = (
            torch.cat([numbers.to(w).expand(*w.shape[:-2], -1) for numbers in each], -1)[..., None]
            for each in ([v.second for v in vertices], [v.third for v in vertices])
        )
        own = (2 * second * w).mul(e)
        parts = own.split([origin.count for origin in origins], dim=-2)
        met = [vertex.own.to(own) @ part for vertex, part in zip(vertices, parts, strict=True)]
        for (i, older), (j, newer) in itertools.combinations(enumerate(vertices), 2):
            if older.roots.isdisjoint(newer.roots):
                continue
            if origins[i] not in newer.older:
                return None
            rho = newer.older[origins[i]].to(own)
            met[i] = met[i] + rho @ parts[j]
            met[j] = met[j] + rho.mT @ parts[i]
        return cls(e, w, second, third, own, torch.cat(met, dim=-2))

    def thrice(self, other: "Vertices") -> Tensor:
        """K(y_i, y_i, y_i, x_j) of this y and another x, (*batch, n, m); some columns at a time."""
        total = torch.zeros((), dtype=self.e.dtype, device=self.e.device)
        step = max(1, PRODUCTS // max(1, self.e[..., 0, :].numel()))
        for start in range(0, self.e.shape[-2], step):
            some = (..., slice(start, start + step), slice(None))
            e, w, met, second, third = (
                t[some] for t in (self.e, self.w, self.met, self.second, self.third)
            )
            path, star = second * met, third * w.square()
            of_e, of_w = torch.add(path, star, alpha=1 / 3) * w, (path + star) * e
            total = total + of_e.mT @ other.e[some] + of_w.mT @ other.w[some]
        return 3 * total

    def twice(self, other: "Vertices") -> Tensor:
        """The part of K(y_i, y_i, x_j, x_j) whose paths have both ends of y at one vertex."""
        return self.met.mT @ other.own


def shared_vertices(
    one: tuple[SkewedVector, Tensor | None], two: tuple[SkewedVector, Tensor | None]
) -> tuple[Vertices, Vertices] | None:
    """Those of two vectors, each element times a number if any; None if not known, or zero."""
    (y, inverse), (x, others) = one, two
    origins = all_origins(y.origins, x.origins)
    if not origins or y.roots.isdisjoint(x.roots):
        return None
    factors, other = y.factors(origins), x.factors(origins)
    if factors is None or other is None:
        return None
    left = Vertices.of(factors, origins, inverse)
    if left is None or (x is y and others is inverse):
        return None if left is None else (left, left)
    right = Vertices.of(other.to(factors.dtype), origins, others)
    return None if right is None else (left, right)


def fourth_of_pairs(y: Vertices, x: Vertices) -> Fourth:
    """Slices of the fourth cumulant of two vectors, in units of their deviations."""
    left = y.thrice(x)
    return Fourth(left, y.twice(x), left.mT if x is y else x.thrice(y).mT)
