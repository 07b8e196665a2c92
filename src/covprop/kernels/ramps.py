"""K0 and dK1/da averaged over ramps that are narrow against the standard deviation.

A ramp of height one that rises while its threshold runs over [a - width, a] is the average of steps
there. Differences of K1 would be divided by the widths, and rounding with them; averages of K0 have
the size of the result. K0 is smooth on the scale q = sqrt(1 - rho^2) around a = +-b:
  q far above both widths: Gauss-Legendre nodes on both ramps;
  q between them: panels on the wider ramp, which are narrow around the other;
  q below both: the average at |rho| = 1, which is closed but for integrals of Phi over the ramps,
  less that of T0 = int_rho^1 phi2 dr, by T1 = int_rho^1 (r - rho) phi2 dr, which is as small as
  (1 - rho)^(3/2): d2 T1 / da db = (1 - rho) phi(a) delta(a - b) - T0.
`docs/mathematics.md` has the derivation.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.nodes import Panels, unit_interval
from covprop.kernels.normal import SATURATION, SQRT_PI, cumulative, density
from covprop.kernels.plackett import gap_to_one, plackett, plackett_mixed

NARROW = 0.05
"""The width, in standard deviations, below which a ramp is an average of steps."""
NODES = 4
"""Gauss-Legendre nodes on a narrow ramp: errors are below 1e-15 of its height."""
SHARP = 4.0
"""K0 is smooth over a ramp if q is so many of its widths."""
EDGES = (-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0)
"""Ends of panels on a ramp around what bends K0 there, in units of q."""
PANEL_NODES = 10
PART = 2**13
"""Pairs that are treated at a time."""
TERMS = 30
"""Terms of the series of T1; far in the tails they fall like (S (1 - rho) / 4)^k / k!."""


def nodes_of(a: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholds on a narrow ramp (nodes, *shape), and their weights (nodes, 1 ...)."""
    rule = torch.tensor(unit_interval(NODES), dtype=a.dtype, device=a.device)
    nodes, weights = rule.T.reshape(2, -1, *(1,) * a.dim())
    return a - width * nodes, weights


def ramp_step(a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, rho: Tensor) -> Tensor:
    """K0 averaged over [a - width_a, a] x [b - width_b, b]; vectors of pairs, in float64.

    The widths are at most NARROW, and 0 for a step.
    """
    swap = width_b > width_a
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    wide, narrow = torch.where(swap, width_b, width_a), torch.where(swap, width_a, width_b)
    blur = (_blur(rho) / SHARP).detach()
    sharp = blur < narrow
    between = (blur < wide) & ~sharp

    def of_nodes(nodes: tuple[Tensor, Tensor], b: Tensor, narrow: Tensor, rho: Tensor) -> Tensor:
        x, weights = nodes
        y, others = nodes_of(b, narrow)
        return _averaged(plackett(x[:, None], y, rho)[0], weights[:, None] * others)

    def smooth(a: Tensor, wide: Tensor, b: Tensor, narrow: Tensor, rho: Tensor) -> Tensor:
        return of_nodes(nodes_of(a, wide), b, narrow, rho)

    def half(a: Tensor, wide: Tensor, b: Tensor, narrow: Tensor, rho: Tensor) -> Tensor:
        return of_nodes(_panelled(a, wide, b - narrow / 2, rho), b, narrow, rho)

    ways = [(~between & ~sharp, smooth), (between, half), (sharp, _sharp)]
    return _chosen(ways, (a, wide, b, narrow, rho))


def ramp_relu(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """dK1/da averaged over [a - width, a], for width <= NARROW; vectors of pairs, in float64."""
    sharp = _blur(rho).detach() / SHARP < width

    def of_nodes(nodes: tuple[Tensor, Tensor], b: Tensor, rho: Tensor) -> Tensor:
        x, weights = nodes
        return _averaged(plackett_mixed(x, b, rho, plackett(x, b, rho)[0]), weights)

    def smooth(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> Tensor:
        return of_nodes(nodes_of(a, width), b, rho)

    def panelled(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> Tensor:
        return of_nodes(_panelled(a, width, b, rho), b, rho)

    return _chosen([(~sharp, smooth), (sharp, panelled)], (a, width, b, rho))


def ramp_excess(a: Tensor, width: Tensor) -> Tensor:
    """What Phi(min) Phi(-max), averaged over a ramp and itself, exceeds its average over nodes."""
    shape, a, width = a.shape, a.flatten(), width.flatten()
    x, weights = nodes_of(a, width)
    share, _ = nodes_of(torch.zeros_like(a), -torch.ones_like(a))
    above, others = nodes_of(a.expand_as(x), width * share)  # on the part of the ramp above x
    exact = _averaged(cumulative(x) * share * (others * cumulative(-above)).sum(0), 2 * weights)
    stepped = cumulative(torch.minimum(x[:, None], x)) * cumulative(-torch.maximum(x[:, None], x))
    return (exact - _averaged(stepped, weights[:, None] * weights)).reshape(shape)


def _chosen(
    ways: list[tuple[Tensor, Callable[..., Tensor]]], arguments: tuple[Tensor, ...]
) -> Tensor:
    """Each pair in its own way, a bounded number of them at a time."""
    result = torch.zeros_like(arguments[-1])
    for mask, way in ways:
        for index in mask.nonzero()[:, 0].split(PART):
            if len(index) == len(result):
                return way(*arguments)
            if len(index):
                result = result.index_put((index,), way(*(t[index] for t in arguments)))
    return result


def _averaged(values: Tensor, weights: Tensor) -> Tensor:
    """Over all nodes, which are in front."""
    return (weights * values).sum(tuple(range(values.dim() - 1)))


def _blur(rho: Tensor) -> Tensor:
    """sqrt(1 - rho^2)."""
    gap = gap_to_one(rho)
    return (gap * (2 - gap)).sqrt()


def _panelled(a: Tensor, width: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes on [a - width, a] that resolve what happens within a few q of +-b, their weights."""
    with torch.no_grad():  # shares of the ramp, so that it may move
        centre = (a - torch.where(rho < 0, -b, b)) / width
        offsets = a.new_tensor(EDGES)[:, None] * (_blur(rho) / width)
        ends = [torch.zeros_like(a)[None], (centre + offsets).clamp(0, 1), torch.ones_like(a)[None]]
        panels = Panels(torch.cat(ends).mT, PANEL_NODES)
        shares, weights = panels.nodes.flatten(-2).mT, panels.weights.flatten(-2).mT
    return a - width * shares, weights


def _sharp(a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, rho: Tensor) -> Tensor:
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
    x, weights = nodes_of(a - width_a * start, width_a * (stop - start))
    overlap = (stop - start) * _averaged(density(x), weights)
    middle, half = (a + b) / 2, shift / 2
    corners = torch.zeros_like(a)
    for end_a, side in ((torch.zeros_like(a), 1.0), (width_a / 2, -1.0)):
        for end_b, other in ((torch.zeros_like(b), side), (width_b / 2, -side)):
            value = _Remainder.apply(middle - end_a - end_b, half - end_a + end_b, gap)
            corners = corners + other * value
    return sign * (at_one - (gap * overlap - corners / width_a) / width_b)


def _averaged_at_one(
    a: Tensor, width_a: Tensor, b: Tensor, width_b: Tensor, shift: Tensor, start: Tensor,
    stop: Tensor,
) -> Tensor:  # fmt: skip
    """Phi(min) Phi(-max) averaged over two ramps."""
    total = torch.zeros_like(a)
    for low, high in ((torch.zeros_like(a), start), (start, stop), (stop, torch.ones_like(a))):
        share, weights = nodes_of(low, low - high)  # from low to high
        x = a - width_a * share
        other = _share((width_a * share - shift) / width_b)  # that share of the second ramp
        y, others = nodes_of(b.expand_as(other), width_b * other)
        above = other * (others * cumulative(-y)).sum(0)
        y, others = nodes_of(b - width_b * other, width_b * (1 - other))
        below = (1 - other) * (others * cumulative(y)).sum(0)
        term = cumulative(-x) * below + cumulative(x) * above
        total = total + (high - low) * _averaged(term, weights)
    return total


def _share(x: Tensor) -> Tensor:
    """Between 0 and 1; at either the mean of both derivatives, which `clamp` does not take."""
    return torch.minimum(torch.maximum(x, torch.zeros_like(x)), torch.ones_like(x))


class _Remainder(Function):
    """T1 by its series from the degenerate end, as of (a + b) / 2, (a - b) / 2 and 1 - rho.

    `plackett` has the series of T0 and T1; here also the derivatives, term by term. With D = u^2
    and S = v^2: dJ_k/du = -2 u J_{k-1}, u J_{-1} = sqrt(pi) sign(u) erfc(|u| / sqrt(gap)), and
    df_k/dv = -2 v g_k with g_k = (f_k + g_{k-1}) / 2.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, u: Tensor, gap: Tensor) -> Tensor:
        inside = gap > 0
        width = torch.where(inside, gap, 1)
        difference, total = u.square(), v.square()
        ratio = (difference / width).clamp(max=SATURATION**2)
        z, decay, root = ratio.sqrt(), torch.exp(-ratio), width.sqrt()
        before = SQRT_PI * torch.sign(u) * torch.erfc(z)  # u J_{k-1}
        integral = 2 * root * decay * (1 - SQRT_PI * z * torch.special.erfcx(z))
        power = root * width * decay
        taylor, last = torch.exp(-total / 2) / math.sqrt(2), torch.zeros_like(gap)
        bend = torch.zeros_like(gap)
        first, second, by_v, by_u = (torch.zeros_like(gap) for _ in range(4))
        for k in range(TERMS):
            following = (power - difference * integral) / (k + 1.5)
            remainder = width * integral - following
            bend = (taylor + bend) / 2
            first += taylor * integral
            second += taylor * remainder
            by_v -= 2 * v * bend * remainder
            by_u -= 2 * taylor * (width * before - u * integral)
            before, integral, power = u * integral, following, power * width
            step = ((4 * k + 1 - total) * taylor - (k - 0.5) * last) / (4 * (k + 1))
            last, taylor = taylor, step
        results = (torch.where(inside, t / (2 * math.pi), 0) for t in (first, second, by_v, by_u))
        first, second, by_v, by_u = results
        ctx.save_for_backward(by_v, by_u, first)
        return second

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient * partial for partial in ctx.saved_tensors)
