"""The integrals over the correlation that every piecewise-linear covariance reduces to.

    K0(a, b, rho) = int_0^rho           phi2(a, b; r) dr = Cov(1(x > -a), 1(y > -b))
    K1(a, b, rho) = int_0^rho (rho - r) phi2(a, b; r) dr
                  = Cov(relu(x + a), relu(y + b)) - rho Phi(a) Phi(b)

for standard normal x, y of correlation rho (Price 1958, Plackett 1954). Moderate correlations use
Gauss-Legendre nodes in arcsin(r) from r = 0; large ones a closed series from the degenerate end
r = 1, which is exact at |rho| = 1. `docs/mathematics.md` has the derivations and measured errors.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels import compiled, compiled_pairs
from covprop.kernels.normal import (
    SATURATION,
    SQRT_PI,
    cumulative,
    cumulative_difference,
    density,
    partial_expectation,
)
from covprop.kernels.polynomials import unit_interval
from covprop.kernels.rounding import DEGENERATE, rounding

SWITCH = 0.7
"""The |rho| above which the series from the degenerate end takes over."""
SMALLEST_EXPONENT = {torch.float32: -70.0, torch.float64: -680.0}
"""Exponents below which nothing is added: what follows would be denormal numbers, very slow."""
NODES = {torch.float32: 6, torch.float64: 12}
TERMS = {torch.float32: 7, torch.float64: 14}
"""Nodes below and terms above SWITCH: errors stay below 1e-7 and 1e-13 (see the tests)."""
TAIL = 8.0
"""The (a + b)^2 (1 - rho) above which that series would need more terms."""
TAIL_NODES = {torch.float32: 12, torch.float64: 24}
TAIL_DEPTH = {torch.float32: 18.0, torch.float64: 36.0}
"""Nodes there, and the exponent by which the integrand falls over the interval they cover."""


def plackett(a: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 of broadcastable a, b and rho, with exact gradients."""
    return _Plackett.apply(*torch.broadcast_tensors(a, b, rho))


def plackett_degenerate(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 at rho = 1: one variable, two thresholds."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    first = cumulative(low) * cumulative(-high)
    return first, first - partial_expectation(low) * partial_expectation(-high)


def plackett_mixed(a: Tensor, b: Tensor, rho: Tensor, first: Tensor) -> Tensor:
    """Cov(1(x > -a), relu(y + b)) - rho phi(a) Phi(b) = dK1/da, given K0(a, b, rho) as `first`."""
    return b * first + _shift(b, a, rho) + rho * _shift(a, b, rho)


def gap_to_one(rho: Tensor) -> Tensor:
    """1 - |rho|, and exactly 0 where rounding cannot tell it from 0."""
    gap = 1 - rho * _sign(rho)  # not abs, whose gradient at rho = 0 is zero
    return torch.where(gap > rounding(DEGENERATE, rho.dtype), gap, 0)


def _gaps(rho: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1 - |rho|, whether it is positive, it or 1 where it is not, and the sign of rho."""
    gap = gap_to_one(rho)
    return gap, gap > 0, torch.where(gap > 0, gap, 1), _sign(rho)


def _sign(rho: Tensor) -> Tensor:
    return torch.where(rho < 0, -1, 1).to(rho.dtype)


class _Plackett(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
        if compiled.usable(a, b, rho):
            first, second = compiled_pairs.plackett(a, b, rho)
            ctx.save_for_backward(a, b, rho, first)
            return first, second
        # K0(a, b, -rho) = -K0(a, -b, rho) and K1(a, b, -rho) = K1(a, -b, rho).
        sign = _sign(rho)
        flipped, size = b * sign, rho.abs()
        central = size <= SWITCH
        if bool(central.all()):
            first, second = _from_zero(a, flipped, size)
        else:
            first, second = torch.empty_like(size), torch.empty_like(size)
            gap = gap_to_one(rho)
            tail = ~central & ((a + flipped).square() * gap > TAIL)
            regimes = (central, size, _from_zero), (~central & ~tail, gap, _from_one)
            for some, last, formula in (*regimes, (tail, gap, _in_tail)):
                if bool(some.any()):
                    first[some], second[some] = formula(a[some], flipped[some], last[some])
        first = first * sign
        ctx.save_for_backward(a, b, rho, first)
        return first, second

    @staticmethod
    def backward(ctx: Any, grad_first: Tensor, grad_second: Tensor) -> tuple[Tensor, ...]:
        a, b, rho, first = ctx.saved_tensors
        if compiled.usable(a, b, rho, first, grad_first, grad_second):
            return compiled_pairs.plackett_backward(a, b, rho, first, grad_first, grad_second)
        shift_a, shift_b = _shift(a, b, rho), _shift(b, a, rho)
        grad_a = grad_first * shift_a + grad_second * (b * first + shift_b + rho * shift_a)
        grad_b = grad_first * shift_b + grad_second * (a * first + shift_a + rho * shift_b)
        return grad_a, grad_b, grad_first * bivariate_density(a, b, rho) + grad_second * first


def _from_zero(a: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 for 0 <= rho <= SWITCH: Gauss-Legendre in theta = arcsin r."""
    angle = torch.asin(rho)
    halves, product = (a.square() + b.square()).mul_(0.5), a * b
    first, second = torch.zeros_like(rho), torch.zeros_like(rho)
    r, rest, value = torch.empty_like(rho), torch.empty_like(rho), torch.empty_like(rho)
    one = torch.ones((), dtype=rho.dtype, device=rho.device)
    least = SMALLEST_EXPONENT[rho.dtype]
    floor = 1.01 * math.exp(least)
    for node, weight in unit_interval(NODES[rho.dtype]):
        torch.mul(angle, node, out=r).sin_()
        torch.addcmul(one, r, r, value=-1, out=rest)
        torch.mul(product, r, out=value).sub_(halves).div_(rest).clamp_(min=least).exp_()
        torch.threshold_(value, floor, 0.0)
        first.add_(value, alpha=weight)
        second.addcmul_(value, torch.sub(rho, r, out=r), value=weight)
    scale = angle.div_(2 * math.pi)
    return first.mul_(scale), second.mul_(scale)


def series_from_one(
    difference: Tensor, total: Tensor, gap: Tensor, terms: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield f_k, J_k and gap J_k - J_{k+1}, by recurrence.

    With y = 1 - r, D = (a-b)^2/4, S = (a+b)^2/4: phi2 = exp(-D/y - S/(2-y)) / (2 pi sqrt(y(2-y))).
    f_k are the Taylor coefficients of (2-y)^(-1/2) exp(-S/(2-y)), and
    J_k = int_0^gap y^(k-1/2) exp(-D/y) dy.
    """
    ratio = (difference / gap).clamp(max=SATURATION**2)  # exp(-ratio) is zero long before
    z, decay, root = ratio.sqrt(), torch.exp(-ratio), gap.sqrt()
    integral = 2 * root * decay * (1 - SQRT_PI * z * torch.special.erfcx(z))
    power = root * gap * decay  # gap^(k + 3/2) exp(-D / gap)
    before, taylor = torch.zeros_like(gap), torch.exp(-total / 2) / math.sqrt(2)
    for k in range(terms):
        following = (power - difference * integral) / (k + 1.5)
        yield taylor, integral, gap * integral - following
        integral, power = following, power * gap
        before, taylor = taylor, ((4 * k + 1 - total) * taylor - (k - 0.5) * before) / (4 * (k + 1))


def _from_one(a: Tensor, b: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 for rho = 1 - gap near 1: their values at 1 less closed series in the gap."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    at_one = cumulative(low) * cumulative(-high)
    inside = gap > 0
    width = torch.where(inside, gap, 1)
    first, second = torch.zeros_like(gap), torch.zeros_like(gap)
    squares = (a - b).square() / 4, (a + b).square() / 4
    for taylor, integral, remainder in series_from_one(*squares, width, TERMS[gap.dtype]):
        first += taylor * integral
        second += taylor * remainder
    first, second = (torch.where(inside, t / (2 * math.pi), 0) for t in (first, second))
    outer = partial_expectation(low) * partial_expectation(-high)
    # Both are integrals of something positive.
    return (at_one - first).clamp(min=0), ((1 - gap) * at_one - outer + second).clamp(min=0)


def _in_tail(a: Tensor, b: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 for rho = 1 - gap near 1 and both a and b far from zero on the same side.

    Both are tiny, and differences of larger numbers elsewhere. With y = v^2 as above, the
    integrand 2 exp(-D/v^2 - S/(2-v^2)) / (2 pi sqrt(2-v^2)) is smooth and positive from
    v = sqrt(gap) on; beyond its peak at y = 2 / (1 + sqrt(S/D)) it falls like exp(-S/(2-y)).
    """
    difference, total = (a - b).square() / 4, (a + b).square() / 4
    root = difference.sqrt()
    peak = torch.maximum(2 * root / (root + total.sqrt()), gap)
    depth = TAIL_DEPTH[gap.dtype] + difference / peak
    reach = (2 - 1 / (1 / (2 - peak) + depth / total)).clamp(max=1)
    start = gap.sqrt()
    width = reach.sqrt() - start
    first, second = torch.zeros_like(gap), torch.zeros_like(gap)
    for node, weight in unit_interval(TAIL_NODES[gap.dtype]):
        y = (start + width * node).square()
        value = torch.exp(-difference / y - total / (2 - y)) / (2 - y).sqrt() * weight
        first += value
        second += value * (y - gap)
    scale = width / math.pi
    return first * scale, second * scale


def bivariate_density(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """phi2(a, b; rho), taken as 0 where |rho| = 1 and there is no density."""
    _, inside, width, sign = _gaps(rho)
    other = 2 - width
    exponent = (a - sign * b).square() / width + (a + sign * b).square() / other
    return torch.where(inside, torch.exp(-exponent / 4) / (2 * math.pi * (width * other).sqrt()), 0)


def _shift(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """dK0/da = phi(a) [Phi((b - rho a) / sqrt(1 - rho^2)) - Phi(b)]; at |rho| = 1 by its limit."""
    gap, inside, width, sign = _gaps(rho)
    distance = b - sign * a + sign * gap * a  # b - rho a without cancellation near |rho| = 1
    limit = torch.sign(distance) * SATURATION
    conditional = torch.where(inside, distance / (width * (2 - width)).sqrt(), limit)
    return density(a) * cumulative_difference(conditional.clamp(-SATURATION, SATURATION), b)
