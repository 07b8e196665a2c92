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
from collections.abc import Callable
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
"""The logarithm of the smallest contribution of a node that counts."""
SEARCH_STEP = 8
"""Steps between the places where the last node is searched."""
SMALL_NOISE = 1e-4
"""Noise, as a share of |m|^2 + c, below which the nonlinear part is taken to second order: the
difference of averages would be rounding, and the third order is smaller by as much again."""


class DiagonalGaussian(NamedTuple):
    """A Gaussian vector in a basis: mean (*any, r), variances (*any, r).

    nudge: zeros (*any, r, r) through which the gradient of the covariance flows, or None.
    """

    mean: Tensor
    variance: Tensor
    nudge: Tensor | None = None

    @property
    def covariance(self) -> Tensor:
        """The covariance matrix, (*any, r, r)."""
        matrix = torch.diag_embed(self.variance)
        return matrix if self.nudge is None else matrix + self.nudge


class _Nudge(Function):
    """Zeros with the gradient of a matrix: its change to first order, in a fixed basis."""

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


def diagonalised(mean: Tensor, covariance: Tensor) -> tuple[DiagonalGaussian, Tensor]:
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
    return DiagonalGaussian(mean, values.clamp(min=0), nudge), basis


class _Averages(NamedTuple):
    """Nodes t (*any, T), D (*any, T, r), a (*any, T, r), weights of t^-1/2 and of 1 (*any, T)."""

    node: Tensor
    damping: Tensor
    rows: Tensor
    half: Tensor
    whole: Tensor

    @classmethod
    def of(cls, z: DiagonalGaussian, offset: float) -> "_Averages":
        total = z.mean.square().sum(-1) + z.variance.sum(-1) + offset
        total = total.detach()[..., None]
        nonzero = total > 0  # else v is zero, and so is its slope
        total = torch.where(nonzero, total, 1)
        steps = STEP * torch.arange(FIRST, _last(z, offset, total, nonzero) + 1).to(total)
        inner = torch.exp(-steps)
        node = torch.exp(steps - inner) / total
        damping = _damping(z, node)
        rows, height = damping * z.mean[..., None, :], _height(z, offset, node, damping)
        if z.nudge is not None:
            pushed = rows @ z.nudge
            trace = (damping * z.nudge.diagonal(dim1=-2, dim2=-1)[..., None, :]).sum(-1)
            height = height - node * trace + 2 * node.square() * (pushed * rows).sum(-1)
            rows = rows - 2 * node[..., None] * damping * pushed
        whole = torch.where(nonzero, STEP * (1 + inner) * node * height.exp(), 0)
        return cls(node, damping, rows, whole / (math.pi * node).sqrt(), whole)

    def slope_weights(self) -> Tensor:
        """Weights of the a a^T that are subtracted in E[dv/dz]."""
        return 2 * self.node * self.half


def _over_nodes(weights: Tensor, values: Tensor) -> Tensor:
    """sum_t w_t x_t of values (*any, T, r)."""
    return (weights[..., None, :] @ values)[..., 0, :]


def _outer(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_t w_t x_t x_t^T."""
    return (rows * weights[..., None]).mT @ rows


def _damping(z: DiagonalGaussian, node: Tensor) -> Tensor:
    return 1 / (1 + 2 * node[..., None] * z.variance[..., None, :])


def _height(z: DiagonalGaussian, offset: float, node: Tensor, damping: Tensor) -> Tensor:
    """The logarithm of e^-tc C(t)."""
    exponent = offset + (damping * z.mean.square()[..., None, :]).sum(-1)
    return damping.log().sum(-1) / 2 - node * exponent


@torch.no_grad()
def _last(z: DiagonalGaussian, offset: float, total: Tensor, nonzero: Tensor) -> int:
    """The last node, in steps, that contributes to any vector."""
    for place in range(SEARCH_STEP, LAST + 1, SEARCH_STEP):
        u = torch.tensor(STEP * place).to(total)
        node = torch.exp(u - torch.exp(-u)) / total
        largest = _height(z, offset, node, _damping(z, node)) + u / 2
        if not bool(((largest > NEGLIGIBLE) & nonzero).any()):
            return place
    return LAST


class Direction(NamedTuple):
    """Mean of v, expected slope E[dv/dz], and the covariance beyond that of the slope.

    (*any, r), (*any, r, r) and (*any, r, r), in the basis of z; idle (*any,): the slope of
    directions that are orthogonal to the basis.
    """

    mean: Tensor
    slope: Tensor
    extra: Tensor
    idle: Tensor


def direction(z: DiagonalGaussian, offset: float = 0.0) -> Direction:
    """The moments of z / sqrt(|z|^2 + offset)."""
    averages = _Averages.of(z, offset)
    mean, damping = _over_nodes(averages.half, averages.rows), averages.damping
    weights, whole = averages.slope_weights(), averages.whole
    slope = torch.diag_embed(_over_nodes(averages.half, damping)) - _outer(weights, averages.rows)
    spread = _over_nodes(whole, damping) * z.variance
    second = torch.diag_embed(spread) + _outer(whole, averages.rows)
    if z.nudge is not None:
        slope = slope - z.nudge * _outer(weights, damping)
        second = second + z.nudge * _outer(whole, damping)
    covariance = z.covariance
    beyond = second - mean[..., :, None] * mean[..., None, :] - slope @ covariance @ slope
    carried = (covariance @ z.mean[..., None])[..., 0]
    twice = (covariance @ carried[..., None])[..., 0]
    small, size = _small_noise(z, offset)
    squares = covariance.square().sum((-2, -1))
    expand = _second_order(z.mean, carried, twice, squares, size)
    expanded = expand(lambda a, b: a[..., :, None] * b[..., None, :], covariance)
    extra = torch.where(small[..., None, None], expanded, beyond)
    return Direction(mean, slope, (extra + extra.mT) / 2, averages.half.sum(-1))


class Elements(NamedTuple):
    """Independent elements (*any, n), centred by their average or not.

    mean is that after centring, variance that before. Centred elements count as independent in
    nonlinear parts.
    """

    mean: Tensor
    variance: Tensor
    centred: bool = False

    @property
    def vector(self) -> DiagonalGaussian:
        """The elements that are divided by their length."""
        if not self.centred:
            return DiagonalGaussian(self.mean, self.variance)
        count = self.mean.shape[-1]
        shared = self.variance.mean(-1, keepdim=True) / count
        return DiagonalGaussian(self.mean, (1 - 2 / count) * self.variance + shared)


class Marginal(NamedTuple):
    """Mean and variance of v, and the nonlinear part of the variance, for independent elements.

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


def marginal(elements: Elements, offset: float = 0.0) -> Marginal:
    """The same for independent elements, without a matrix of their size."""
    z = elements.vector
    averages = _Averages.of(z, offset)
    rows, whole = averages.rows, averages.whole
    mean, gain = _over_nodes(averages.half, rows), _over_nodes(averages.half, averages.damping)
    left, right = rows * averages.slope_weights()[..., None], rows
    second = _over_nodes(whole, averages.damping) * z.variance
    second = second + _over_nodes(whole, rows.square())
    carried = z.variance * z.mean
    small, size = _small_noise(z, offset)
    squares = z.variance.square().sum(-1)
    expand = _second_order(z.mean, carried, z.variance * carried, squares, size)
    beyond = second - mean.square() - _linear(gain, left, right, z.variance)
    extra = torch.where(small[..., None], expand(torch.mul, z.variance), beyond).clamp(min=0)
    if elements.centred:  # the linear part is C diag(g) C - (A C)^T W (A C), C = 1 - 11^T / n
        mean, left, right = (t - t.mean(-1, keepdim=True) for t in (mean, left, right))
        one, rest = torch.ones_like(gain), gain - gain.mean(-1, keepdim=True)
        share = 1 / gain.shape[-1]
        left = torch.cat([left, (share * torch.stack([gain, one], -2))], -2)
        right = torch.cat([right, torch.stack([one, rest], -2)], -2)
    variance = _linear(gain, left, right, elements.variance) + extra
    return Marginal(mean, variance, extra, gain, left, right)


def _linear(gain: Tensor, left: Tensor, right: Tensor, variance: Tensor) -> Tensor:
    """The diagonal of G diag(variance) G^T, G = diag(gain) - left^T right."""
    between = (right * variance[..., None, :]) @ right.mT
    total = gain.square() * variance + ((between @ left) * left).sum(-2)
    return (total - 2 * gain * variance * (left * right).sum(-2)).clamp(min=0)


def _small_noise(z: DiagonalGaussian, offset: float) -> tuple[Tensor, Tensor]:
    """Whether the noise is small, and |m|^2 + c where it is."""
    size = z.mean.square().sum(-1) + offset
    small = z.variance.sum(-1) <= SMALL_NOISE * size
    return small, torch.where(small & (size > 0), size, 1)


def _second_order(
    mean: Tensor, carried: Tensor, twice: Tensor, squares: Tensor, size: Tensor
) -> Callable[[Callable[[Tensor, Tensor], Tensor], Tensor], Tensor]:
    """E[H H^T] / 2 for the second derivatives H of v along two independent noises.

    p S + q s s^T + x m m^T + (w m^T + m w^T) from m, s = S m, S s, tr S^2 and |m|^2 + c, where
    v = m g(|m|^2), g(q) = (q + c)^-1/2. Call the result with the product of two vectors, and S.
    """
    first, second = -size.pow(-1.5), 3 * size.pow(-2.5)  # 2 g' and 4 g''
    along, length = (mean * carried).sum(-1), carried.square().sum(-1)
    mixed = first.square()[..., None] * twice + (first * second * along)[..., None] * carried
    of_mean = first.square() * squares / 2 + first * second * length
    of_mean = of_mean + (second * along).square() / 2
    scalars = first.square() * along, first.square(), of_mean

    def expand(outer: Callable[[Tensor, Tensor], Tensor], covariance: Tensor) -> Tensor:
        p, q, x = (t[(..., *(None,) * (covariance.dim() - t.dim()))] for t in scalars)
        crossed = outer(mixed, mean) + outer(mean, mixed)
        total = p * covariance + q * outer(carried, carried)
        return total + x * outer(mean, mean) + crossed

    return expand


class Length(NamedTuple):
    """Mean, variance, and the nonlinear part of the variance, of |z|, (*any,) each."""

    mean: Tensor
    variance: Tensor
    extra: Tensor


def length(z: DiagonalGaussian, of: Direction) -> Length:
    """By Stein, E|z| = E[z . v] = m . E[v] + tr(S E[dv/dz]); its slope is E[v]."""
    covariance = z.covariance
    between = of.slope @ covariance
    mean = (z.mean * of.mean).sum(-1) + between.diagonal(dim1=-2, dim2=-1).sum(-1)
    linear = ((covariance @ of.mean[..., None])[..., 0] * of.mean).sum(-1)
    squares = z.mean.square().sum(-1) + covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _length(z, mean, squares, linear, (between * between.mT).sum((-2, -1)) / 2)


def independent_length(elements: Elements, of: Marginal) -> Length:
    """The same for independent elements."""
    z = elements.vector
    slope = of.gain - (of.left * of.right).sum(-2)
    mean = (z.mean * of.mean + elements.variance * slope).sum(-1)
    linear = (elements.variance * of.mean.square()).sum(-1)
    squares = (z.mean.square() + z.variance).sum(-1)
    expanded = (elements.variance * (of.variance - of.extra)).sum(-1) / 2
    return _length(z, mean, squares, linear, expanded)


def _length(
    z: DiagonalGaussian, mean: Tensor, squares: Tensor, linear: Tensor, expanded: Tensor
) -> Length:
    """The nonlinear part is E|z|^2 less the rest of it, or tr(S H S H) / 2 where noise is small."""
    beyond = squares - mean.square() - linear
    extra = torch.where(_small_noise(z, 0.0)[0], expanded, beyond).clamp(min=0)
    return Length(mean, linear + extra, extra)
