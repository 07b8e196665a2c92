"""The integrals over the correlation that every piecewise-linear covariance reduces to.

    K0(a, b, rho) = int_0^rho           phi2(a, b; r) dr = Cov(1(x > -a), 1(y > -b))
    K1(a, b, rho) = int_0^rho (rho - r) phi2(a, b; r) dr
                  = Cov(relu(x + a), relu(y + b)) - rho Phi(a) Phi(b)

for standard normal x, y of correlation rho (Price 1958, Plackett 1954). Moderate correlations use
Gauss-Legendre nodes in arcsin(r) from r = 0; large ones a closed series from the degenerate end
r = 1, which is exact at |rho| = 1.

A ramp of height one over [a - width, a] is the average of steps there: unlike differences of K1
over the width, averages of K0 do not cancel. They are smooth on the scale q = sqrt(1 - rho^2):
  q far above both widths: Gauss-Legendre nodes on both ramps;
  q between them: panels on the wider ramp, which are narrow around a = +-b;
  q below both: the average at |rho| = 1, which is closed but for integrals of Phi over the ramps,
  less that of T0 = int_rho^1 phi2 dr, by T1 = int_rho^1 (r - rho) phi2 dr, which is as small as
  (1 - rho)^(3/2): d2 T1 / da db = (1 - rho) phi(a) delta(a - b) - T0.
`docs/mathematics.md` has the derivations and measured errors.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.normal import (
    SATURATION,
    SQRT_PI,
    cumulative,
    cumulative_difference,
    density,
    partial_expectation,
)
from covprop.kernels.polynomials import Panels, unit_interval
from covprop.kernels.rounding import DEGENERATE as DEGENERATE
from covprop.kernels.rounding import rounding

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
NARROW = 0.05
"""The width, in standard deviations, below which a ramp is an average of steps."""
RAMP_NODES = 4
"""Gauss-Legendre nodes on a narrow ramp: errors are below 1e-15 of its height."""
SHARP = 4.0
"""K0 is smooth over a ramp if q is at least this many of its widths."""
PANEL_EDGES = (-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0)
PANEL_NODES = 10
"""Edges of panels on a ramp around the knee of K0, in units of q; nodes on each."""
BLOCK = 2**13
"""Pairs that are computed at a time."""
REMAINDER_TERMS = 30
"""Terms of the series of T1; far in the tails they fall like (S (1 - rho) / 4)^k / k!."""


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


def _series_from_one(
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
    for taylor, integral, remainder in _series_from_one(*squares, width, TERMS[gap.dtype]):
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


def ramp_nodes(a: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholds on a narrow ramp (nodes, *shape), and their weights (nodes, 1 ...)."""
    rule = torch.tensor(unit_interval(RAMP_NODES), dtype=a.dtype, device=a.device)
    nodes, weights = rule.T.reshape(2, -1, *(1,) * a.dim())
    return a - width * nodes, weights


def ramp_step(a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, rho: Tensor) -> Tensor:
    """K0 averaged over two ramps, of widths from 0 (a step) to NARROW; vectors, in float64."""
    swap = width_b > width_a
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    wide, narrow = torch.where(swap, width_b, width_a), torch.where(swap, width_a, width_b)
    q = (_q(rho) / SHARP).detach()
    sharp = q < narrow
    between = (q < wide) & ~sharp
    cases = [
        (~between & ~sharp, lambda a, w, b, n, r: _step_at(ramp_nodes(a, w), b, n, r)),
        (between, lambda a, w, b, n, r: _step_at(_panel_nodes(a, w, b - n / 2, r), b, n, r)),
        (sharp, _sharp_step),
    ]
    return _by_cases(cases, (a, wide, b, narrow, rho))


def ramp_relu(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """dK1/da averaged over [a - width, a], for width <= NARROW; vectors of pairs, in float64."""
    sharp = _q(rho).detach() / SHARP < width
    cases = [
        (~sharp, lambda a, w, b, r: _relu_at(ramp_nodes(a, w), b, r)),
        (sharp, lambda a, w, b, r: _relu_at(_panel_nodes(a, w, b, r), b, r)),
    ]
    return _by_cases(cases, (a, width, b, rho))


def _step_at(nodes: tuple[Tensor, Tensor], b: Tensor, width: Tensor, rho: Tensor) -> Tensor:
    x, weights = nodes
    y, others = ramp_nodes(b, width)
    return _averaged(plackett(x[:, None], y, rho)[0], weights[:, None] * others)


def _relu_at(nodes: tuple[Tensor, Tensor], b: Tensor, rho: Tensor) -> Tensor:
    x, weights = nodes
    return _averaged(plackett_mixed(x, b, rho, plackett(x, b, rho)[0]), weights)


def ramp_excess(a: Tensor, width: Tensor) -> Tensor:
    """What Phi(min) Phi(-max), averaged over a ramp and itself, exceeds its average over nodes."""
    shape, a, width = a.shape, a.flatten(), width.flatten()
    x, weights = ramp_nodes(a, width)
    share, _ = ramp_nodes(torch.zeros_like(a), -torch.ones_like(a))
    above, others = ramp_nodes(a.expand_as(x), width * share)  # on the part of the ramp above x
    exact = _averaged(cumulative(x) * share * (others * cumulative(-above)).sum(0), 2 * weights)
    stepped = cumulative(torch.minimum(x[:, None], x)) * cumulative(-torch.maximum(x[:, None], x))
    return (exact - _averaged(stepped, weights[:, None] * weights)).reshape(shape)


def _by_cases(
    cases: list[tuple[Tensor, Callable[..., Tensor]]], arguments: tuple[Tensor, ...]
) -> Tensor:
    """Each pair by the formula of its case, a bounded number of pairs at a time."""
    result = torch.zeros_like(arguments[-1])
    for mask, formula in cases:
        for index in mask.nonzero()[:, 0].split(BLOCK):
            if len(index) == len(result):
                return formula(*arguments)
            if len(index):
                result = result.index_put((index,), formula(*(t[index] for t in arguments)))
    return result


def _averaged(values: Tensor, weights: Tensor) -> Tensor:
    return (weights * values).sum(tuple(range(values.dim() - 1)))


def _q(rho: Tensor) -> Tensor:
    gap = gap_to_one(rho)
    return (gap * (2 - gap)).sqrt()


def _panel_nodes(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes on [a - width, a] that resolve what happens within a few q of +-b, their weights."""
    with torch.no_grad():  # shares of the ramp, so that it may move
        centre = (a - torch.where(rho < 0, -b, b)) / width
        offsets = a.new_tensor(PANEL_EDGES)[:, None] * (_q(rho) / width)
        ends = [torch.zeros_like(a)[None], (centre + offsets).clamp(0, 1), torch.ones_like(a)[None]]
        panels = Panels(torch.cat(ends).mT, PANEL_NODES)
        shares, weights = panels.nodes.flatten(-2).mT, panels.weights.flatten(-2).mT
    return a - width * shares, weights


def _sharp_step(a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, rho: Tensor) -> Tensor:
    """K0 averaged over two ramps for q below both widths."""
    # K0(a, b, -rho) = -K0(a, -b, rho): the ramp of b turns round.
    negative = rho < 0
    b = torch.where(negative, width_b - b, b)
    sign = torch.where(negative, -1.0, 1.0).to(rho)
    exact = 1 - sign * rho
    gap = exact - (exact - gap_to_one(rho)).detach()  # 0 up to rounding, and its gradient
    shift = a - b
    # Shares of the first ramp where the second begins and ends.
    start, stop = _share(shift / width_a), _share((shift + width_b) / width_a)
    at_one = _averaged_at_one(a, width_a, b, width_b, shift, start, stop)
    x, weights = ramp_nodes(a - width_a * start, width_a * (stop - start))
    overlap = (stop - start) * _averaged(density(x), weights)
    middle, half = (a + b) / 2, shift / 2
    corners = torch.zeros_like(a)
    for end_a, side in ((torch.zeros_like(a), 1.0), (width_a / 2, -1.0)):
        for end_b, other in ((torch.zeros_like(b), side), (width_b / 2, -side)):
            value = _Remainder.apply(middle - end_a - end_b, half - end_a + end_b, gap)
            corners = corners + other * value
    return sign * (at_one - (gap * overlap - corners / width_a) / width_b)


def _averaged_at_one(
    a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, shift: Tensor,
    start: Tensor, stop: Tensor,
) -> Tensor:  # fmt: skip
    """Phi(min) Phi(-max) averaged over two ramps; shift = a - b."""
    total = torch.zeros_like(a)
    for low, high in ((torch.zeros_like(a), start), (start, stop), (stop, torch.ones_like(a))):
        share, weights = ramp_nodes(low, low - high)  # from low to high
        x = a - width_a * share
        other = _share((width_a * share - shift) / width_b)  # that share of the second ramp
        y, others = ramp_nodes(b.expand_as(other), width_b * other)
        above = other * (others * cumulative(-y)).sum(0)
        y, others = ramp_nodes(b - width_b * other, width_b * (1 - other))
        below = (1 - other) * (others * cumulative(y)).sum(0)
        term = cumulative(-x) * below + cumulative(x) * above
        total = total + (high - low) * _averaged(term, weights)
    return total


def _share(x: Tensor) -> Tensor:
    """Between 0 and 1; at either the mean of both derivatives, which `clamp` does not take."""
    return torch.minimum(torch.maximum(x, torch.zeros_like(x)), torch.ones_like(x))


class _Remainder(Function):
    """T1 by its series from the degenerate end, as of v = (a + b) / 2, u = (a - b) / 2, 1 - rho.

    Derivatives term by term: dJ_k/du = -2 u J_{k-1}, u J_{-1} = sqrt(pi) sign(u) erfc(|u| /
    sqrt(gap)), and df_k/dv = -2 v g_k with g_k = (f_k + g_{k-1}) / 2.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, u: Tensor, gap: Tensor) -> Tensor:
        inside = gap > 0
        width = torch.where(inside, gap, 1)
        difference, total = u.square(), v.square()
        z = (difference / width).clamp(max=SATURATION**2).sqrt()
        before = SQRT_PI * torch.sign(u) * torch.erfc(z)  # u J_{k-1}
        g = torch.zeros_like(gap)
        first, second, by_v, by_u = (torch.zeros_like(gap) for _ in range(4))
        terms = _series_from_one(difference, total, width, REMAINDER_TERMS)
        for taylor, integral, remainder in terms:
            g = (taylor + g) / 2
            first += taylor * integral
            second += taylor * remainder
            by_v -= 2 * v * g * remainder
            by_u -= 2 * taylor * (width * before - u * integral)
            before = u * integral
        scaled = [torch.where(inside, t / (2 * math.pi), 0) for t in (by_v, by_u, first, second)]
        ctx.save_for_backward(*scaled[:3])
        return scaled[3]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient * partial for partial in ctx.saved_tensors)
