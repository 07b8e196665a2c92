"""The moments of v = z / sqrt(|z|^2 + c) and of |z| for a Gaussian vector z, exact at any noise.

By (|z|^2 + c)^-s = 1 / Gamma(s) int_0^inf t^(s-1) exp(-t |z|^2 - t c) dt, what is averaged is
Gaussian: exp(-t |z|^2) tilts N(m, S) into C(t) N(D m, S D), D = (1 + 2 t S)^-1,
C(t) = det(D)^(1/2) exp(-t m^T D m). With a(t) = D m, all by the same nodes t:

E[v]     = pi^-1/2 int t^-1/2 e^-tc C(t) a dt,
E[v v^T] =         int        e^-tc C(t) (S D + a a^T) dt,
E[dv/dz] = pi^-1/2 int t^-1/2 e^-tc C(t) (D - 2 t a a^T) dt.

The trapezoidal rule in u, t = exp(u - exp(-u)), has these to rounding with about thirty nodes
(Takahasi & Mori 1974). Everything is in a basis in which S is diagonal.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order

STEP = 0.25
"""Of the trapezoidal rule: its error is below 1e-15."""
FIRST, LAST = -16, 296
"""Nodes in steps: t from exp(-58) to exp(74), beyond which even t^-1/2 is below rounding."""
NEGLIGIBLE = -40.0
"""The logarithm of what a node has to contribute at least."""
SEARCHED = 8
"""Steps between the places where the last node is looked for."""
LITTLE = 1e-4
"""Noise, as a share of |m|^2 + c, below which the second order of what is not linear is all of it.

There differences of averages of the size of v would be rounding; the third order is smaller by as
much again.
"""


class Vector(NamedTuple):
    """A Gaussian vector in a basis: mean (*any, r), variances (*any, r).

    nudge: zeros (*any, r, r) through which the gradient of the covariance flows, or None.
    """

    mean: Tensor
    variance: Tensor
    nudge: Tensor | None = None

    @property
    def covariance(self) -> Tensor:
        """The matrix."""
        matrix = torch.diag_embed(self.variance)
        return matrix if self.nudge is None else matrix + self.nudge


class _Nudge(Function):
    """Zeros with the gradient of a matrix: a change of it to first order, in a fixed basis."""

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        return torch.zeros_like(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del ctx, inputs, output

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient


def diagonalised(mean: Tensor, covariance: Tensor) -> tuple[Vector, Tensor]:
    """A vector (*any, n) in the eigenvectors of its covariance (*any, n, n), its columns.

    Derivatives of eigenvectors are infinite where eigenvalues are equal; those of the moments are
    not, and are found at a fixed basis.
    """
    known = covariance.detach()
    broken = ~known.isfinite().all(-1).all(-1)[..., None]
    values, basis = torch.linalg.eigh(torch.where(broken[..., None], 0, known))
    mean = torch.where(broken, math.nan, (mean[..., None, :] @ basis)[..., 0, :])
    follows = torch.is_grad_enabled() and covariance.requires_grad
    nudge = _Nudge.apply(basis.mT @ covariance @ basis) if follows else None
    return Vector(mean, values.clamp(min=0), nudge), basis


class _Averages(NamedTuple):
    """Nodes t (*any, T), D (*any, T, r), a (*any, T, r), weights of t^-1/2 and of 1 (*any, T)."""

    node: Tensor
    damping: Tensor
    rows: Tensor
    half: Tensor
    whole: Tensor

    @classmethod
    def of(cls, z: Vector, offset: float) -> "_Averages":
        total = z.mean.square().sum(-1) + z.variance.sum(-1) + offset
        total = total.detach()[..., None]
        something = total > 0  # else v is zero, and so is its slope
        total = torch.where(something, total, 1)
        steps = STEP * torch.arange(FIRST, _last(z, offset, total, something) + 1).to(total)
        inner = torch.exp(-steps)
        node = torch.exp(steps - inner) / total
        damping = 1 / (1 + 2 * node[..., None] * z.variance[..., None, :])
        rows, height = damping * z.mean[..., None, :], _height(z, offset, node, damping)
        if z.nudge is not None:
            pushed = rows @ z.nudge
            trace = (damping * z.nudge.diagonal(dim1=-2, dim2=-1)[..., None, :]).sum(-1)
            height = height - node * trace + 2 * node.square() * (pushed * rows).sum(-1)
            rows = rows - 2 * node[..., None] * damping * pushed
        whole = torch.where(something, STEP * (1 + inner) * node * height.exp(), 0)
        return cls(node, damping, rows, whole / (math.pi * node).sqrt(), whole)

    def mean(self) -> Tensor:
        return (self.half[..., None, :] @ self.rows)[..., 0, :]

    def gain(self) -> Tensor:
        """The part of E[dv/dz] that is diagonal."""
        return (self.half[..., None, :] @ self.damping)[..., 0, :]

    def pulls(self) -> Tensor:
        """Weights of the a a^T that E[dv/dz] has less."""
        return 2 * self.node * self.half

    def outer(self, weights: Tensor, rows: Tensor) -> Tensor:
        return (rows * weights[..., None]).mT @ rows


def _height(z: Vector, offset: float, node: Tensor, damping: Tensor) -> Tensor:
    """The logarithm of e^-tc C(t)."""
    exponent = offset + (damping * z.mean.square()[..., None, :]).sum(-1)
    return damping.log().sum(-1) / 2 - node * exponent


@torch.no_grad()
def _last(z: Vector, offset: float, total: Tensor, something: Tensor) -> int:
    """The last node, in steps, that contributes to any vector."""
    places = list(range(0, LAST + 1, SEARCHED))
    for place in places[1:]:
        u = torch.tensor(STEP * place).to(total)
        node = torch.exp(u - torch.exp(-u)) / total
        damping = 1 / (1 + 2 * node[..., None] * z.variance[..., None, :])
        largest = _height(z, offset, node, damping) + u / 2
        if not bool(((largest > NEGLIGIBLE) & something).any()):
            return place
    return LAST


class Direction(NamedTuple):
    """Of v: its mean, the expected slope E[dv/dz], and what its covariance has beyond the slope's.

    (*any, r), (*any, r, r) and (*any, r, r), in the basis of z; idle (*any,): the slope of
    directions that are orthogonal to the basis.
    """

    mean: Tensor
    slope: Tensor
    extra: Tensor
    idle: Tensor


def direction(z: Vector, offset: float = 0.0) -> Direction:
    """The moments of z / sqrt(|z|^2 + offset)."""
    found = _Averages.of(z, offset)
    mean, pulls, damping = found.mean(), found.pulls(), found.damping
    slope = torch.diag_embed(found.gain()) - found.outer(pulls, found.rows)
    spread = (found.whole[..., None, :] @ damping)[..., 0, :] * z.variance
    second = torch.diag_embed(spread) + found.outer(found.whole, found.rows)
    if z.nudge is not None:
        slope = slope - z.nudge * found.outer(pulls, damping)
        second = second + z.nudge * found.outer(found.whole, damping)
    covariance = z.covariance
    beyond = second - mean[..., :, None] * mean[..., None, :] - slope @ covariance @ slope
    carried = (covariance @ z.mean[..., None])[..., 0]
    twice = (covariance @ carried[..., None])[..., 0]
    little, size = _is_little(z, offset)
    expanded = _second_order(z.mean, carried, twice, covariance.square().sum((-2, -1)), size)
    outer = expanded.of(lambda a, b: a[..., :, None] * b[..., None, :], covariance)
    extra = torch.where(little[..., None, None], outer, beyond)
    return Direction(mean, slope, (extra + extra.mT) / 2, found.half.sum(-1))


class Elements(NamedTuple):
    """Independent elements (*any, n), of which the mean is taken away or not.

    variance is that before; mean is what is left. What is left is taken as independent where that
    is not linear.
    """

    mean: Tensor
    variance: Tensor
    centred: bool = False

    @property
    def vector(self) -> Vector:
        """The elements that are divided by their length."""
        if not self.centred:
            return Vector(self.mean, self.variance)
        count = self.mean.shape[-1]
        shared = self.variance.mean(-1, keepdim=True) / count
        return Vector(self.mean, (1 - 2 / count) * self.variance + shared)


class Marginal(NamedTuple):
    """Of v, for independent elements: mean, variance, and the part of it that is not linear.

    (*any, n) each; the slope is diag(gain) - left^T right.
    """

    mean: Tensor
    variance: Tensor
    extra: Tensor
    gain: Tensor
    left: Tensor
    right: Tensor

    def slope(self, vectors: Tensor) -> Tensor:
        """E[dv/dz] w of vectors (*any, count, n)."""
        return vectors * self.gain[..., None, :] - vectors @ self.right.mT @ self.left


def marginal(given: Elements, offset: float = 0.0) -> Marginal:
    """The same for independent elements, without a matrix of their size."""
    z = given.vector
    found = _Averages.of(z, offset)
    mean, gain, rows = found.mean(), found.gain(), found.rows
    left, right = rows * found.pulls()[..., None], rows
    second = (found.whole[..., None, :] @ found.damping)[..., 0, :] * z.variance
    second = second + (found.whole[..., None, :] @ rows.square())[..., 0, :]
    carried = z.variance * z.mean
    little, size = _is_little(z, offset)
    squares = z.variance.square().sum(-1)
    expanded = _second_order(z.mean, carried, z.variance * carried, squares, size)
    beyond = second - mean.square() - _linear(gain, left, right, z.variance)
    extra = torch.where(little[..., None], expanded.of(torch.mul, z.variance), beyond).clamp(min=0)
    if given.centred:  # what is linear is known: C diag(g) C - (A C)^T W (A C), C = 1 - 11^T / n
        mean, left, right = (t - t.mean(-1, keepdim=True) for t in (mean, left, right))
        one, rest = torch.ones_like(gain), gain - gain.mean(-1, keepdim=True)
        share = 1 / gain.shape[-1]
        left = torch.cat([left, (share * torch.stack([gain, one], -2))], -2)
        right = torch.cat([right, torch.stack([one, rest], -2)], -2)
    variance = _linear(gain, left, right, given.variance) + extra
    return Marginal(mean, variance, extra, gain, left, right)


def _linear(gain: Tensor, left: Tensor, right: Tensor, variance: Tensor) -> Tensor:
    """The diagonal of G diag(variance) G^T, G = diag(gain) - left^T right."""
    between = (right * variance[..., None, :]) @ right.mT
    total = gain.square() * variance + ((between @ left) * left).sum(-2)
    return (total - 2 * gain * variance * (left * right).sum(-2)).clamp(min=0)


def _is_little(z: Vector, offset: float) -> tuple[Tensor, Tensor]:
    """Whether the noise is, and |m|^2 + c where it is."""
    size = z.mean.square().sum(-1) + offset
    little = z.variance.sum(-1) <= LITTLE * size
    return little, torch.where(little & (size > 0), size, 1)


class _SecondOrder(NamedTuple):
    """E[H H^T] / 2 for the second derivatives H of v along two independent noises.

    p S + q s s^T + x m m^T + (w m^T + m w^T),  s = S m.
    """

    of_covariance: Tensor
    of_carried: Tensor
    of_mean: Tensor
    mean: Tensor
    carried: Tensor
    mixed: Tensor

    def of(self, outer: Any, covariance: Tensor) -> Tensor:
        extra = (None,) * (covariance.dim() - self.of_mean.dim())
        p, q, x = (t[(..., *extra)] for t in (self.of_covariance, self.of_carried, self.of_mean))
        crossed = outer(self.mixed, self.mean) + outer(self.mean, self.mixed)
        total = p * covariance + q * outer(self.carried, self.carried)
        return total + x * outer(self.mean, self.mean) + crossed


def _second_order(
    mean: Tensor, carried: Tensor, twice: Tensor, squares: Tensor, size: Tensor
) -> _SecondOrder:
    """By s = S m, S s, tr S^2 and |m|^2 + c: v = m g(|m|^2), g(q) = (q + c)^-1/2."""
    first, second = -size.pow(-1.5), 3 * size.pow(-2.5)  # 2 g' and 4 g''
    along, length = (mean * carried).sum(-1), carried.square().sum(-1)
    mixed = first.square()[..., None] * twice + (first * second * along)[..., None] * carried
    of_mean = first.square() * squares / 2 + first * second * length
    of_mean = of_mean + (second * along).square() / 2
    return _SecondOrder(first.square() * along, first.square(), of_mean, mean, carried, mixed)


class Length(NamedTuple):
    """Of |z|: its mean, its variance, and the part of it that is not linear, (*any,) each."""

    mean: Tensor
    variance: Tensor
    extra: Tensor


def length(z: Vector, of: Direction) -> Length:
    """By Stein, E|z| = E[z . v] = m . E[v] + tr(S E[dv/dz]); its slope is E[v]."""
    covariance = z.covariance
    between = of.slope @ covariance
    mean = (z.mean * of.mean).sum(-1) + between.diagonal(dim1=-2, dim2=-1).sum(-1)
    linear = ((covariance @ of.mean[..., None])[..., 0] * of.mean).sum(-1)
    squares = z.mean.square().sum(-1) + covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _length(z, mean, squares, linear, (between * between.mT).sum((-2, -1)) / 2)


def independent_length(given: Elements, of: Marginal) -> Length:
    """The same for independent elements."""
    z = given.vector
    slope = of.gain - (of.left * of.right).sum(-2)
    mean = (z.mean * of.mean + given.variance * slope).sum(-1)
    linear = (given.variance * of.mean.square()).sum(-1)
    squares = (z.mean.square() + z.variance).sum(-1)
    expanded = (given.variance * (of.variance - of.extra)).sum(-1) / 2
    return _length(z, mean, squares, linear, expanded)


def _length(z: Vector, mean: Tensor, squares: Tensor, linear: Tensor, expanded: Tensor) -> Length:
    """What is not linear: E|z|^2 less the rest of it, or tr(S H S H) / 2 where that is little."""
    beyond = squares - mean.square() - linear
    extra = torch.where(_is_little(z, 0.0)[0], expanded, beyond).clamp(min=0)
    return Length(mean, linear + extra, extra)
