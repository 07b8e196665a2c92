"""Moments of functions of nearly Gaussian vectors, to first order in the third cumulant.

For y of mean mu, covariance C and third cumulant T the Edgeworth expansion has

    E[F(y)] = E_G[F] + 1/6 sum_ijk T_ijk E_G[d_i d_j d_k F],

and for functions of one element each E_G[f^(a)(y_i) g^(b)(y_j)] = sum_m C_ij^m / m! f_{a+m} g_{b+m}
with f_k = E_G[f^(k)(y_i)]. Numbers are in units of standard deviations: f_k has the factor
sigma_i^k, slices are s_ij = T_iij / (sigma_i^2 sigma_j), and t_i = s_ii is the skewness.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.kernels.polynomials import flushed, power_series


def pair_sum(rho: Tensor, left: Tensor, right: Tensor, a: int, b: int, start: int = 0) -> Tensor:
    """sum_{m >= start} rho^m / m! f_{a+m}(i) g_{b+m}(j), for as many m as both have.

    left (orders, *batch, n), right (orders, *batch, m); rho (*batch, n, m).
    """
    count = min(len(left) - a, len(right) - b) - start
    rows, high = _divided(left[a + start : a + start + count], start, rho)
    columns, wide = _divided(right[b + start : b + start + count], start, rho)
    total = power_series(rho, rows[..., :, None], columns[..., None, :])
    total = high[..., :, None] * total * wide[..., None, :]
    return total * rho if start else total


def _divided(coefficients: Tensor, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Each divided by the square root of the factorial of its power of the correlation.

    In units of the largest of each element, the second result, so that small ones stay.
    """
    factors = [1 / math.sqrt(math.factorial(m)) for m in range(start, start + len(coefficients))]
    weights = coefficients.new_tensor(factors).reshape(-1, *(1,) * (coefficients.dim() - 1))
    scaled = coefficients * weights
    largest = scaled.detach().abs().amax(0)
    unit = torch.where(largest > 0, largest, 1)
    return flushed(scaled / unit, like.dtype).to(like), unit.to(like)


class Slices(NamedTuple):
    """Third cumulants of pairs in units of standard deviations, (*batch, n, m).

    left: T(y_i, y_i, w_j); right: T(y_i, w_j, w_j); skewness of y (*batch, n) and of w (*batch, m).
    """

    left: Tensor
    right: Tensor
    skewness: tuple[Tensor, Tensor]

    def correction(self, rho: Tensor, f: Tensor, g: Tensor) -> Tensor:
        """What third cumulants add to Cov(f(y_i), g(w_j)), to first order."""
        of_left, of_right = (t.to(rho) / 6 for t in self.skewness)
        total = self.left / 2 * pair_sum(rho, f, g, 2, 1)
        total = total + self.right / 2 * pair_sum(rho, f, g, 1, 2)
        total = total + of_left[..., :, None] * pair_sum(rho, f, g, 3, 0, start=1)
        return total + of_right[..., None, :] * pair_sum(rho, f, g, 0, 3, start=1)


class Marginals(NamedTuple):
    """Moments of f(y_i) to first order in the skewness t_i, (*batch, n); f is centred under G.

    shift: E[f]; variance; third: its third central moment.
    """

    shift: Tensor
    variance: Tensor
    third: Tensor

    @classmethod
    def of(cls, f: Tensor, square: Tensor, cube: Tensor, skewness: Tensor) -> "Marginals":
        """From the expected derivatives of f, f^2 and f^3."""
        shift = skewness * f[3] / 6
        second = square[0] + skewness * square[3] / 6
        third = cube[0] + skewness * cube[3] / 6 - 3 * shift * second + 2 * shift**3
        return cls(shift, second - shift.square(), third)


class Tree(NamedTuple):
    """Third cumulants of z = f(y) that are centred at i, as factors of e_i (column i, row j).

    w_i = D C e_i / sigma_i, q_i = sigma_i (f_2(i) w_i + f_3(i) u_i + f_2(i) v_i) with
    u_i = D_j T_iij and v_i = f_2(j) T_ijj: docs/mathematics.md.
    """

    w: Tensor
    q: Tensor

    @classmethod
    def of(
        cls,
        f: Tensor,
        slope: Tensor,
        inverse: Tensor,
        covariance: Tensor,
        slices: Tensor | None,
        skewness: Tensor,
    ) -> "Tree":
        """slope: D; inverse: 1 / sigma; slices: T_iij, rows i and columns j."""
        d, over = (t.to(covariance) for t in (slope, inverse))
        rows = d[..., :, None]
        w = rows * covariance * over[..., None, :]
        q = w * (f[2] + skewness * f[5] / 6).to(covariance)[..., None, :]
        if slices is None:
            return cls(w, q)
        two, three = f[2].to(covariance), f[3].to(covariance)
        slices = slices * over.square()[..., :, None]
        q = q + rows * (three[..., :, None] * slices).mT
        return cls(w, q + two[..., :, None] * (two * over)[..., None, :] * slices)

    def slices(self) -> Tensor:
        """T_iij that the trees of all i have, rows i and columns j."""
        w, q = (factor.diagonal(dim1=-2, dim2=-1)[..., :, None] for factor in self)
        return w * self.q.mT + q * self.w.mT + self.w * self.q


def with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """The matrix with another diagonal."""
    return torch.diagonal_scatter(matrix, diagonal.to(matrix), dim1=-2, dim2=-1)


def product_loops(u: Tensor, v: Tensor, cross: Tensor) -> Tensor:
    """kappa(z_i, z_i, z_j) of z = du dv for Gaussian du, dv, rows i and columns j.

    u, v: their covariances; cross: Cov(u, v). Each of three products has two legs, and the legs of
    neighbours in the loop i - i - j are joined: sum over a, b, c of Cov(a_i, b_i) Cov(b'_i, c_j)
    Cov(a'_i, c'_j), where a' is the other factor than a.
    """
    blocks = {(0, 0): u, (0, 1): cross, (1, 0): cross.mT, (1, 1): v}
    total = torch.zeros_like(u)
    for a in range(2):
        for b in range(2):
            own = blocks[a, b].diagonal(dim1=-2, dim2=-1)[..., :, None]
            for c in range(2):
                total = total + own * blocks[1 - b, c] * blocks[1 - a, 1 - c]
    return total
