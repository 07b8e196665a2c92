"""The rival closed forms for pairs of ReLUs and of steps: Wu et al. (2019), deterministic VI.

In place of the integrals K0 and K1 (`plackett`) they take a Gaussian bump of the two standardised
means a and b. Its height and curvature are those of the integral at a = b = 0, where it is exact:

    K1 ~ rho^2 G / (2 pi) exp(-(a^2 + b^2) / (2 G (1 + q)) + rho A3 / G  a b)
    K0 ~ theta   / (2 pi) exp(-rho / (theta q) [(a^2 + b^2) / 2 - rho / (1 + q)  a b])

with theta = asin rho, q = sqrt(1 - rho^2), A1 = theta / rho, A3 = (theta - rho) / rho^3 and
G = A1 - 1 / (1 + q). All four are even in rho and regular at rho = 0.
"""

import math

import torch
from torch import Tensor

from covprop.kernels.normal import standard_deviation
from covprop.kernels.plackett import DEGENERATE, gap_to_one

NEAR_ZERO = 0.25
"""The |rho| below which A1 and A3 are taken from their series."""
TERMS = 14
"""Terms of it: the first left out is below 1e-17 at NEAR_ZERO."""
ARCSINE = [
    math.comb(2 * k, k) / (4**k * (2 * k + 1)) for k in range(TERMS + 1)
]  # asin x = sum_k ARCSINE[k] x^(2k+1)


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
