"""Slices of the fourth cumulant, from the factors of the third: trees of two vertices.

With a vertex for each element r that is not linear, x_r its argument in units of its deviation,
e_r[i] the response of y_i to it, w_r[i] = Cov(y_i, x_r) and q_r = f_2(r) w_r,

    K_ijkl = sum over 12 paths of  sum_rs e_r[i] q_r[j] rho_rs e_s[k] q_s[l]
           + sum over 4 stars of   sum_r  f_3(r) e_r[i] w_r[j] w_r[k] w_r[l].

docs/mathematics.md has the derivation, and what of it is left out of K_iijj.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from covprop.carriers.origins import Origin


class Vertices(NamedTuple):
    """Factors (*batch, count, n) of a vector at all vertices.

    own: 2 e q, the path that ends twice in it; met: rho own; star: f_3 w^2.
    """

    e: Tensor
    w: Tensor
    q: Tensor
    own: Tensor
    met: Tensor
    star: Tensor

    @classmethod
    def of(cls, factors: Tensor, origins: Sequence[Origin]) -> Self | None:
        """Of its blocks (*batch, 4, count, n); None if vertices do not know all older ones."""
        e, w, _, _ = factors.unbind(-3)
        two, three, starts, start = [], [], [], 0
        for place, origin in enumerate(origins):
            vertex = origin.vertex
            shape = (*e.shape[:-2], origin.count)
            if vertex is not None and vertex.before != tuple(origins[:place]):
                return None
            nothing = e.new_zeros(shape)
            two.append(nothing if vertex is None else vertex.second.to(e).expand(shape))
            three.append(nothing if vertex is None else vertex.third.to(e).expand(shape))
            starts.append(start)
            start += origin.count
        q, star = torch.cat(two, -1)[..., None] * w, torch.cat(three, -1)[..., None] * w.square()
        own = 2 * e * q
        met = torch.zeros_like(own)
        for start, origin in zip(starts, origins, strict=True):
            if origin.vertex is not None:
                rho, stop = origin.vertex.correlation.to(e), start + origin.count
                met[..., :stop, :] += rho @ own[..., start:stop, :]
                met[..., start:stop, :] += rho[..., :start, :].mT @ own[..., :start, :]
        return cls(e, w, q, own, met, star)

    def thrice(self, other: "Vertices") -> Tensor:
        """K(y_i, y_i, y_i, x_j) of this y and another x, (*batch, n, m)."""
        paths = (self.e * self.met).mT @ other.q + (self.q * self.met).mT @ other.e
        stars = (self.e * self.star).mT @ other.w + (self.w * self.star / 3).mT @ other.e
        return 3 * (paths + stars)

    def twice(self, other: "Vertices") -> Tensor:
        """The part of K(y_i, y_i, x_j, x_j) whose paths have both ends of y at one vertex."""
        return self.met.mT @ other.own
