"""Moments of functions of nearly Gaussian vectors, to first order in the third cumulant.

For y of mean mu, covariance C and third cumulant T the Edgeworth expansion has

    E[F(y)] = E_G[F] + 1/6 sum_ijk T_ijk E_G[d_i d_j d_k F],

and for functions of one element each E_G[f^(a)(y_i) g^(b)(y_j)] = sum_m C_ij^m / m! f_{a+m} g_{b+m}
with f_k = E_G[f^(k)(y_i)]. Numbers are in units of standard deviations: f_k has the factor
sigma_i^k, slices are s_ij = T_iij / (sigma_i^2 sigma_j), and t_i = s_ii is the skewness.
"""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

from covprop.kernels.polynomials import flushed, power_series


class Coefficients(NamedTuple):
    """Expected derivatives in units of the largest of each element, so that small ones stay.

    rows (orders, *batch, n); unit (*batch, n).
    """

    rows: Tensor
    unit: Tensor

    @classmethod
    def of(cls, derivatives: Tensor, like: Tensor) -> "Coefficients":
        """In the dtype of matrices like this."""
        largest = derivatives.detach().abs().amax(0)
        unit = torch.where(largest > 0, largest, 1)
        return cls(flushed(derivatives / unit, like.dtype).to(like), unit.to(like))

    @property
    def orders(self) -> int:
        """How many derivatives there are."""
        return self.rows.shape[0]

    def beyond(self, marginal: "Marginal") -> "Coefficients":
        """What skewness t and kurtosis k add to them: t f_{k+3} / 6 + k f_{k+4} / 24."""
        count = self.orders
        rows = _padded(self.rows, count + 4)
        third, fourth = rows[3 : 3 + count], rows[4 : 4 + count]
        t, k = (numbers.to(rows) for numbers in marginal)
        return Coefficients(t / 6 * third + k / 24 * fourth, self.unit)

    def expected(self, marginal: "Marginal") -> "Coefficients":
        """With that."""
        return Coefficients(self.rows + self.beyond(marginal).rows, self.unit)


class Marginal(NamedTuple):
    """Cumulants of single elements in units of standard deviations, (*batch, n)."""

    skewness: Tensor
    kurtosis: Tensor


class PairTerm(NamedTuple):
    """sum_{m >= start} rho^m / m! f_{a+m}(i) g_{b+m}(j), for as many m as both have."""

    left: Coefficients
    right: Coefficients
    a: int
    b: int
    start: int = 0


def pair_sums(rho: Tensor, *terms: PairTerm) -> tuple[Tensor, ...]:
    """Several such sums in one go, in units of both; rho (*batch, n, m)."""
    count = max(min(t.left.orders - t.a, t.right.orders - t.b) for t in terms)
    factorials = [1 / math.factorial(m) for m in range(count)]
    weights = rho.new_tensor([[w * (m >= t.start) for t in terms]
                              for m, w in enumerate(factorials)])  # fmt: skip
    beyond = max(max(t.a, t.b) for t in terms)
    tables = {id(c): c for t in terms for c in (t.left, t.right)}
    padded = {key: _padded(c.rows, count + beyond) for key, c in tables.items()}
    left = torch.stack([padded[id(t.left)][t.a : t.a + count] for t in terms], dim=1)
    right = torch.stack([padded[id(t.right)][t.b : t.b + count] for t in terms], dim=1)
    left = left * weights.reshape(*weights.shape, *(1,) * (left.dim() - 2))
    sums = power_series(rho.expand(len(terms), *rho.shape), left[..., :, None],
                        right[..., None, :])  # fmt: skip
    return sums.unbind()


def _padded(rows: Tensor, count: int) -> Tensor:
    """At least so many rows, with zeros for those that there are not."""
    missing = count - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def in_units(total: Tensor, left: Coefficients, right: Coefficients) -> Tensor:
    """A sum of pairs, times the units of both."""
    return left.unit[..., :, None] * total * right.unit[..., None, :]


class Fourth(NamedTuple):
    """Fourth cumulants of pairs in units of standard deviations, (*batch, n, m).

    left: K(y_i, y_i, y_i, w_j); middle: K(y_i, y_i, w_j, w_j); right: K(y_i, w_j, w_j, w_j).
    """

    left: Tensor
    middle: Tensor
    right: Tensor

    def kurtosis(self) -> Tensor:
        """K_iiii, of one vector."""
        return self.left.diagonal(dim1=-2, dim2=-1)

    def weighted(self, left: Tensor, right: Tensor) -> "Fourth":
        """Each pair times the weights of both, which are zero where nothing counts."""
        rows, columns = left.to(self.left)[..., :, None], right.to(self.left)[..., None, :]
        counts = (rows > 0) & (columns > 0)
        return Fourth(*(torch.where(counts, part * rows * columns, 0) for part in self))

    @staticmethod
    def terms(f: Coefficients, g: Coefficients, *, half: bool = False) -> tuple[PairTerm, ...]:
        """Sums that they are multiplied with; half: those of one vector, which is symmetric."""
        three, two = PairTerm(f, g, 3, 1), PairTerm(f, g, 2, 2)
        return (three, two) if half else (three, two, PairTerm(f, g, 1, 3))

    def total(self, three: Tensor, two: Tensor, one: Tensor) -> Tensor:
        """With these sums."""
        return self.left / 6 * three + self.middle / 4 * two + self.right / 6 * one


class Slices(NamedTuple):
    """Third cumulants of pairs in units of standard deviations, (*batch, n, m).

    left: T(y_i, y_i, w_j); right: T(y_i, w_j, w_j); fourth: fourth cumulants, if any; marginal: of
    y and of w.
    """

    left: Tensor
    right: Tensor
    fourth: Fourth | None
    marginal: tuple[Marginal, Marginal]

    def correction(self, rho: Tensor, f: Coefficients, g: Coefficients) -> Tensor:
        """What they add to Cov(f(y_i), g(w_j)), to first order."""
        of_left, of_right = self.marginal
        two, one, *sums = pair_sums(
            rho,
            PairTerm(f, g, 2, 1),
            PairTerm(f, g, 1, 2),
            PairTerm(f.beyond(of_left), g, 0, 0, start=1),
            PairTerm(f, g.beyond(of_right), 0, 0, start=1),
            *(() if self.fourth is None else self.fourth.terms(f, g)),
        )
        total = self.left / 2 * two + self.right / 2 * one + sums[0] + sums[1]
        if self.fourth is not None:
            total = total + self.fourth.total(*sums[2:])
        return in_units(total, f, g)


def of_one_vector(
    rho: Tensor,
    slices: Tensor | None,
    fourth: Fourth | None,
    marginal: Marginal,
    f: Coefficients,
    square: Coefficients,
) -> tuple[Tensor | None, Tensor]:
    """What cumulants add to Cov(f(y_i), f(y_j)), and Cov(f(y_i)^2, f(y_j)), which has it.

    slices: T(y_i, y_i, y_j) in units of standard deviations, None for a Gaussian. The first is
    symmetric, so that one of each two sums of `Slices.correction` does.
    """
    if slices is None:
        (gaussian,) = pair_sums(rho, PairTerm(square, f, 0, 0, start=1))
        return None, in_units(gaussian, square, f)
    beyond = f.beyond(marginal)
    two, single, of_two, of_one, mean, other, *sums = pair_sums(
        rho,
        PairTerm(f, f, 2, 1),
        PairTerm(beyond, f, 0, 0, start=1),
        PairTerm(square, f, 2, 1),
        PairTerm(square, f, 1, 2),
        PairTerm(square.expected(marginal), f, 0, 0, start=1),
        PairTerm(square, beyond, 0, 0, start=1),
        *(() if fourth is None else (*fourth.terms(square, f), *fourth.terms(f, f, half=True))),
    )
    half = slices / 2
    added = half * two + single
    of_square = half * of_two + half.mT * of_one + mean + other
    if fourth is not None:
        of_square = of_square + fourth.total(*sums[:3])
        added = added + fourth.left / 6 * sums[3] + fourth.middle / 8 * sums[4]
    added = in_units(added, f, f)
    return added + added.mT, in_units(of_square, square, f)


class Marginals(NamedTuple):
    """Moments of f(y_i) to first order in the skewness t_i, (*batch, n); f is centred under G.

    shift: E[f]; variance; third: its third central moment.
    """

    shift: Tensor
    variance: Tensor
    third: Tensor

    @classmethod
    def of(
        cls, f: Tensor, square: Tensor, cube: Tensor, skewness: Tensor, kurtosis: Tensor
    ) -> "Marginals":
        """From the expected derivatives of f, f^2 and f^3."""
        three, four = skewness / 6, kurtosis / 24
        shift = three * f[3] + four * f[4]
        second = square[0] + three * square[3] + four * square[4]
        third = cube[0] + three * cube[3] + four * cube[4] - 3 * shift * second + 2 * shift**3
        return cls(shift, second - shift.square(), third)


class Bent(NamedTuple):
    """The numbers of an activation that trees need, (*batch, n); first (orders, *batch, n).

    first: sigma^k E[f^(k)]; inverse: 1 / sigma; slope: E[g']; skewness: of the argument.
    """

    first: Tensor
    inverse: Tensor
    slope: Tensor
    skewness: Tensor


class Tree(NamedTuple):
    """Third cumulants of z = f(y) that are centred at i, as factors of e_i (row i, column j).

    w_i = D C e_i / sigma_i, q_i = sigma_i (f_2(i) w_i + f_3(i) u_i + f_2(i) v_i) with
    u_i = D_j T_iij and v_i = f_2(j) T_ijj: docs/mathematics.md.
    """

    w: Tensor
    q: Tensor

    @classmethod
    def of(
        cls,
        one: Bent,
        other: Bent,
        covariance: Tensor,
        left: Tensor | None,
        right: Tensor | None,
    ) -> Self:
        """Of elements i of one vector and j of another; left: T_iij, right: T_ijj."""
        over, d = (t.to(covariance) for t in (one.inverse[..., :, None], other.slope[..., None, :]))
        f, g = one.first, other.first
        w = over * covariance * d
        q = (f[2] + one.skewness * f[5] / 6).to(covariance)[..., :, None] * w
        if left is not None:
            q = q + f[3].to(covariance)[..., :, None] * (left * over.square()) * d
        if right is not None:
            factor, columns = f[2].to(covariance)[..., :, None] * over, other.inverse.to(covariance)
            q = q + factor * (right * (columns.square() * g[2].to(covariance))[..., None, :])
        return cls(w, q)

    def slices(self) -> Tensor:
        """T_iij that the trees of all i have, rows i and columns j."""
        w, q = (factor.diagonal(dim1=-2, dim2=-1)[..., :, None] for factor in self)
        return w * self.q + q * self.w + (self.w * self.q).mT


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
