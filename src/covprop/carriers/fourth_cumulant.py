"""Slices of the fourth cumulant, from the factors of the third: trees of two vertices.

With a vertex for each element r that is not linear, x_r its argument in units of its deviation,
e_r[i] the response of y_i to it, w_r[i] = Cov(y_i, x_r) and q_r = f_2(r) w_r,

    K_ijkl = sum over 12 paths of  sum_rs e_r[i] q_r[j] rho_rs e_s[k] q_s[l]
           + sum over 4 stars of   sum_r  f_3(r) e_r[i] w_r[j] w_r[k] w_r[l].

docs/mathematics.md has the derivation, and what of it is left out of K_iijj.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.carriers.origins import Origin, SkewedVector, Vertex, all_origins
from covprop.kernels.edgeworth import Fourth
from covprop.kernels.products import matmul

PRODUCTS = 2**18
"""Numbers of products of factors that are held at a time."""
MANY, NEGLIGIBLE = 768, 0.1
"""Of more vertices than this, the smallest are left out, with this part of the sum of squares."""


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
            total = total + matmul(of_e.mT, other.e[some]) + matmul(of_w.mT, other.w[some])
        return 3 * total

    def twice(self, other: "Vertices") -> Tensor:
        """The part of K(y_i, y_i, x_j, x_j) whose paths have both ends of y at one vertex."""
        return matmul(self.met.mT, other.own)


def shared_vertices(
    one: tuple[SkewedVector, Tensor | None], two: tuple[SkewedVector, Tensor | None]
) -> tuple[Vertices, Vertices] | None:
    """Those of two vectors, each element times a number if any; None if not known, or zero."""
    (y, inverse), (x, others) = one, two
    origins = all_origins(y.origins, x.origins)
    if not origins or y.roots.isdisjoint(x.roots):
        return None
    vertices = [origin.vertex for origin in origins if origin.vertex is not None]
    factors, other = y.factors(origins), x.factors(origins)
    if factors is None or other is None or len(vertices) < len(origins):
        return None
    numbers = [
        torch.cat([rows.to(factors).expand(*factors.shape[:-3], -1) for rows in each], -1)
        for each in ([v.second for v in vertices], [v.third for v in vertices])
    ]
    same = x is y and others is inverse
    ends = [_scaled(factors, inverse)]
    ends += [] if same else [_scaled(other.to(factors.dtype), others)]
    counts = [origin.count for origin in origins]
    columns = _large(ends, numbers)
    if columns is not None:
        index, keep = columns
        numbers = [torch.where(keep, rows, 0).index_select(-1, index) for rows in numbers]
        ends = [(e.index_select(-2, index), w.index_select(-2, index)) for e, w in ends]
        bounds = torch.tensor([0, *counts], device=index.device).cumsum(0)
        places = [
            index[(index >= low) & (index < high)] - low
            for low, high in itertools.pairwise(bounds.tolist())
        ]
        counts = list(map(len, places))
    else:
        places = [None] * len(origins)
    second, third = (rows[..., None] for rows in numbers)
    own = [(2 * second * w).mul(e) for e, w in ends]
    met = _met([o.split(counts, dim=-2) for o in own], origins, vertices, places)
    if met is None:
        return None
    found = [
        Vertices(e, w, second, third, o, m) for (e, w), o, m in zip(ends, own, met, strict=True)
    ]
    return found[0], found[-1]


def _scaled(factors: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor]:
    """e and w, first, as fourth powers of small deviations underflow."""
    e, w, _, _ = factors.unbind(-3)
    if inverse is None:
        return e, w
    over = inverse.to(factors)[..., None, :]
    return over * e, over * w


def _large(
    ends: Sequence[tuple[Tensor, Tensor]], numbers: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Vertices that count in any element of the batch, and in which, (*batch, count); None: all.

    By |e w|^2 (f_2^2 + f_3^2), of either vector.
    """
    if numbers[0].shape[-1] <= MANY:
        return None
    curves = sum(rows.detach().square() for rows in numbers)
    keep = torch.zeros_like(numbers[0], dtype=torch.bool)
    for e, w in ends:
        size = curves * (e.detach() * w.detach()).square().sum(-1)
        ordered, order = size.sort(-1)
        some = ordered.cumsum(-1) > NEGLIGIBLE * ordered.sum(-1, keepdim=True)
        keep |= torch.zeros_like(keep).scatter(-1, order, some)
    return keep.reshape(-1, keep.shape[-1]).any(0).nonzero()[:, 0], keep


def _met(
    owns: Sequence[Sequence[Tensor]],
    origins: Sequence[Origin],
    vertices: Sequence[Vertex],
    places: Sequence[Tensor | None],
) -> list[Tensor] | None:
    """rho own of each vector; None if some origins do not know each other."""
    met = [list[Tensor]() for _ in owns]
    for i, (vertex, place) in enumerate(zip(vertices, places, strict=True)):
        rho = _part(vertex.own, place, place)
        for total, own in zip(met, owns, strict=True):
            total.append(matmul(rho.to(own[i]), own[i]))
    for (i, older), (j, newer) in itertools.combinations(enumerate(vertices), 2):
        if older.roots.isdisjoint(newer.roots):
            continue
        if origins[i] not in newer.older:
            return None
        rho = _part(newer.older[origins[i]], places[i], places[j])
        for total, own in zip(met, owns, strict=True):
            total[i] = total[i] + matmul(rho.to(own[j]), own[j])
            total[j] = total[j] + matmul(rho.to(own[i]).mT, own[i])
    return [torch.cat(total, dim=-2) for total in met]


def _part(matrix: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is None or columns is None:
        return matrix
    return matrix.index_select(-2, rows).index_select(-1, columns)


def fourth_of_pairs(y: Vertices, x: Vertices) -> Fourth:
    """Slices of the fourth cumulant of two vectors, in units of their deviations."""
    left = y.thrice(x)
    return Fourth(left, y.twice(x), left.mT if x is y else x.thrice(y).mT)
