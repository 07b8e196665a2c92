"""Narrow ramps: pieces of a function that rise by one over less than a twentieth of a deviation.

A ramp over [a - width, a] is the average of steps there: unlike differences of K1 over the width,
averages of K0 do not cancel. They are smooth on the scale q = sqrt(1 - rho^2):
  q far above both widths: Gauss-Legendre nodes on both ramps;
  q between them: panels on the wider ramp, which are narrow around a = +-b;
  q below both: the average at |rho| = 1, which is closed but for integrals of Phi over the ramps,
  less that of T0 = int_rho^1 phi2 dr, by T1 = int_rho^1 (r - rho) phi2 dr, which is as small as
  (1 - rho)^(3/2): d2 T1 / da db = (1 - rho) phi(a) delta(a - b) - T0.
`docs/mathematics.md` has the derivations and measured errors.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.normal import SATURATION, SQRT_PI, cumulative, density
from covprop.kernels.plackett import gap_to_one, plackett, plackett_mixed, series_from_one
from covprop.kernels.polynomials import Panels, unit_interval

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
        terms = series_from_one(difference, total, width, REMAINDER_TERMS)
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
