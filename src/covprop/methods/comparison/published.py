"""Published approximations: those of deterministic variational inference, and a sigmoid.

Wu et al. (2019) take a Gaussian bump of the two standardised means a and b in place of the
integrals K0 and K1 (`plackett`). Its height and curvature are those of the integral at a = b = 0,
where it is exact:

    K1 ~ rho^2 G / (2 pi) exp(-(a^2 + b^2) / (2 G (1 + q)) + rho A3 / G  a b)
    K0 ~ theta   / (2 pi) exp(-rho / (theta q) [(a^2 + b^2) / 2 - rho / (1 + q)  a b])

with theta = asin rho, q = sqrt(1 - rho^2), A1 = theta / rho, A3 = (theta - rho) / rho^3 and
G = A1 - 1 / (1 + q). All four are even in rho and regular at rho = 0.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.activations.base import Elements, Segments
from covprop.activations.piecewise import RELU
from covprop.activations.quadrature import Quadrature
from covprop.covariance import Covariance
from covprop.errors import UnsupportedOperation
from covprop.flow.lineage import Replacements
from covprop.kernels.normal import correlation, standard_deviation
from covprop.kernels.plackett import gap_to_one
from covprop.kernels.rounding import DEGENERATE
from covprop.methods.layerwise import LayerwiseMethod

FITTED = 0.368
"""Daunizeau's alpha (2017); pi / 8 comes from matching tanh to erf."""
HEAVISIDE = Segments((0.0,), (0.0, 0.0), 0.0, (1.0,))

Bump = Callable[[Tensor, Tensor, Tensor], Tensor]

NEAR_ZERO = 0.25
"""The |rho| below which A1 and A3 are taken from their series."""
TERMS = 14
"""Terms of it: the first left out is below 1e-17 at NEAR_ZERO."""
ARCSINE = [
    math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(TERMS + 1)
]  # asin x = sum_k ARCSINE[k] x^(2k+1)


@final
@dataclass(frozen=True)
class Wu2019(LayerwiseMethod):
    """Closed approximations of the covariances of ReLU and Heaviside (Wu et al. 2019).

    Means and variances are exact, and so are covariances where both means are zero. Elsewhere a
    Gaussian function of the means replaces an integral (the error is at most 1.3e-4 for ReLUs of
    unit variance and correlation 0.5). The matrix need not be positive semi-definite. Other
    activations are refused.

    Args:
        activations: As for `GaussianLayers`.
        independent_maxima: As for `GaussianLayers`.

    Example:
        cp.propagate(torch.relu, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1), cp.Wu2019())
    """

    activations: Replacements = field(default_factory=dict, hash=False)
    independent_maxima: bool = False

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Exact moments of each element, their approximation of each pair."""
        pair = _pair_of(activation)
        point, variance = mean.double(), covariance.diagonal().double()
        if covariance.independent:
            centre, output = activation.marginals(point, variance)
            return centre.to(mean.dtype), covariance.pairwise(pair, (), output)
        elements = activation.elements(point, variance)
        result = covariance.pairwise(pair, elements, activation.variance(point, variance))
        return activation.mean(point, variance).to(mean.dtype), result

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """The same formula for two ReLUs, or two steps, of different tensors."""
        pair, other = _pair_of(left.activation), _pair_of(right.activation)
        if pair.args != other.args:
            raise UnsupportedOperation(
                "Wu et al. (2019) have no formula for the covariance of a ReLU and a step, which "
                "meet here; use cp.GaussianLayers()"
            )

        def elements(side: Activated) -> Elements:
            own = side.activation.elements(side.mean, side.variance)
            return tuple(element.to(covariance) for element in own)

        rows = tuple(element[..., :, None] for element in elements(left))
        columns = tuple(element[..., None, :] for element in elements(right))
        return pair(rows, columns, covariance)


def _pair_of(activation: Activation) -> partial[Tensor]:
    """Their formula for an activation, where there is one."""
    segments = activation.segments
    if segments == RELU:
        return partial(_pair, bump_second)
    if segments == HEAVISIDE:
        return partial(_pair, bump_first)
    raise UnsupportedOperation(
        "Wu et al. (2019) have formulas for ReLU and Heaviside alone; use cp.GaussianLayers() "
        "or cp.Series()"
    )


def _pair(bump: Bump, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
    """Of c, 1 / sigma, E[g'], (phi), a and the height sigma: c E[g'] E[g'] + bump of (a, b, rho).

    A step has no slope and the height one.
    """
    inverse_i, slope_i, _, (a,), (height_i,) = left[:5]
    inverse_j, slope_j, _, (b,), (height_j,) = right[:5]
    rho = correlation(covariance, inverse_i, inverse_j)
    if bump is bump_first:
        return bump(a, b, rho)
    return covariance * (slope_i * slope_j) + height_i * height_j * bump(a, b, rho)


def bump_second(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """K1(a, b, rho) as approximated: Cov(relu, relu) - rho Phi(a) Phi(b) of unit variances."""
    _, root, _ = _gap(rho)
    ratio, cubic = _arcsine(rho, root)
    g = ratio - 1 / (1 + root)
    exponent = rho * cubic * a * b - (a.square() + b.square()) / (2 * (1 + root))
    return rho.square() * g / (2 * math.pi) * torch.exp(exponent / g)


def bump_first(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """K0(a, b, rho) as approximated: Cov(1(x > -a), 1(y > -b)).

    The exponent is rearranged around a = sign(rho) b, where it stays finite as q goes to zero;
    elsewhere the bump vanishes there, and the integral does not.
    """
    gap, root, sign = _gap(rho)
    ratio, _ = _arcsine(rho, root)
    smallest = 2 * DEGENERATE * torch.finfo(rho.dtype).eps  # q^2 at the closest that is not one
    width = torch.where(gap > 0, root, math.sqrt(smallest))
    across = (a - sign * b).square() / (2 * width)
    along = sign * a * b * (1 + standard_deviation(gap / (2 - gap))) / (1 + root)
    return torch.atan2(rho, root) / (2 * math.pi) * torch.exp(-(across + along) / ratio)


def _gap(rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 - |rho|, sqrt(1 - rho^2) and the sign of rho, where rounding may have made |rho| > 1."""
    gap = gap_to_one(rho)
    return gap, standard_deviation(gap * (2 - gap)), torch.where(rho < 0, -1, 1).to(rho.dtype)


def _arcsine(rho: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """A1 = asin(rho) / rho and A3 = (asin(rho) - rho) / rho^3."""
    near = rho.abs() < NEAR_ZERO
    square = torch.where(near, rho, 0).square()
    cubic = torch.zeros_like(rho)
    for coefficient in reversed(ARCSINE[1:]):
        cubic = cubic * square + coefficient
    far = torch.where(near, 1, rho)
    ratio = torch.atan2(far, torch.where(near, 0, root)) / far
    ratio = torch.where(near, 1 + square * cubic, ratio)
    return ratio, torch.where(near, cubic, (ratio - 1) / far.square())


@final
@dataclass(frozen=True)
class DaunizeauSigmoid(Activation):
    """E[sigmoid(y)] ~ sigmoid(mu / beta), beta = sqrt(1 + alpha sigma^2), and its derivatives.

    Its series is asymptotic: use it at the paper's low orders, with `cp.Series`. The variance on
    the diagonal is the accurate one, or the truncated sum where the approximation exceeds it.

    Args:
        alpha: The constant of beta.

    Example:
        series = cp.Series(order=2, activations={torch.sigmoid: cp.DaunizeauSigmoid()})
        cp.propagate(torch.sigmoid, x, series)
    """

    alpha: float = FITTED

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """sigmoid(mu / beta)."""
        return torch.sigmoid(mean / self._beta(variance))

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The variance of the true sigmoid, by quadrature."""
        return Quadrature(torch.sigmoid).variance(mean, variance)

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """a_k = (sigma / beta)^k sigmoid^(k)(mu / beta) / sqrt(k!)."""
        beta = self._beta(variance)
        value = torch.sigmoid(mean / beta)
        ratio, factor = standard_deviation(variance) / beta, 1 / beta
        polynomial, rows = [0.0, 1.0, -1.0], []  # s' = s - s^2, as coefficients of powers of s
        for k in range(1, order + 1):
            factor = factor / math.sqrt(k)
            derivative = torch.zeros_like(value)
            for coefficient in reversed(polynomial):
                derivative = derivative * value + coefficient
            rows.append(factor * derivative)
            factor = factor * ratio
            slopes = [p * c for p, c in enumerate(polynomial)]
            polynomial = [c - d for c, d in zip([*slopes, 0.0], [0.0, *slopes], strict=True)]
        return torch.stack(rows)

    @property
    def key(self) -> Hashable:
        """The constant."""
        return self.alpha

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """There is no exact covariance of an approximation."""
        del mean, variance
        raise UnsupportedOperation(
            "Daunizeau's sigmoid has no exact covariance; use cp.Series(order=...) with it, or the "
            "accurate sigmoid"
        )

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """There is no exact covariance of an approximation."""
        del left, right, covariance
        raise UnsupportedOperation("Daunizeau's sigmoid has no exact covariance; use cp.Series")

    def _beta(self, variance: Tensor) -> Tensor:
        return (1 + self.alpha * variance.clamp(min=0)).sqrt()
