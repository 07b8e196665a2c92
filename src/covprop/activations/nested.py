"""The covariance of a pair by integrating one variable given the other.

For correlations near one, where a Hermite series is long, the second variable hardly varies given
the first. |rho| = 1 is a one-dimensional integral.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.grids import (
    NODES,
    SOFTENED,
    WIDE,
    Scalar,
    Two,
    breakpoints,
    insert,
    panel_count,
    rest_of,
    value_and_slope,
)
from covprop.activations.wide import given_first, outer_rule
from covprop.kernels.gradients import first_order
from covprop.kernels.nodes import Panels, hermite_rule
from covprop.kernels.normal import density

INNER_REACH = 9.0
"""Standard deviations covered on either side by the variable that is integrated first."""
GENTLE = {0.1: 8, 0.3: 16, 1.0: 40}
"""Gauss-Hermite nodes that suffice up to a standard deviation of the second given the first."""
PART = 2**16
"""Nodes of the first variable, of all pairs together, that are held at a time."""
BUDGET = 2**19
"""Function values held at a time."""


def nested_covariance(
    two: Two, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> Tensor:
    """Cov[g(y1), g(y2)] for vectors of pairs, in float64, the same for (1, 2) and (2, 1).

    two: the same function, of the elements of either side.
    """
    swap = (stddev_1 < stddev_2) | ((stddev_1 == stddev_2) & (mean_1 < mean_2))
    ordered = (
        torch.where(swap, mean_2, mean_1),
        torch.where(swap, stddev_2, stddev_1),
        torch.where(swap, mean_1, mean_2),
        torch.where(swap, stddev_1, stddev_2),
    )
    sides = list(zip(two.first.of_elements, two.second.of_elements, strict=True))
    first = two.first.having([torch.where(swap, other, one) for one, other in sides])
    second = two.second.having([torch.where(swap, one, other) for one, other in sides])
    return _Nested.apply(Two(first, second), *ordered, rho)


def nested_cross(
    one: Scalar,
    other: Scalar,
    mean_1: Tensor,
    stddev_1: Tensor,
    mean_2: Tensor,
    stddev_2: Tensor,
    rho: Tensor,
) -> Tensor:
    """Cov[g(y1), h(y2)] for vectors of pairs, in float64; one of the two may jump."""
    # The slope of what jumps is integrated over its own variable; a closed mean is used for the
    # other one.
    closed = one.conditional_mean is not None and other.conditional_mean is None
    if other.jumps or (closed and not one.jumps):
        return _Nested.apply(Two(other, one), mean_2, stddev_2, mean_1, stddev_1, rho)
    return _Nested.apply(Two(one, other), mean_1, stddev_1, mean_2, stddev_2, rho)


class _Nested(Function):
    @staticmethod
    def forward(ctx: Any, two: Two, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        ctx.two = two
        return _in_parts(two, pairs, lambda *part: (_covariance(*part),))[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Any:
        partials = _in_parts(ctx.two, ctx.saved_tensors, _partials)
        return None, *(gradient * partial for partial in partials)


def _in_parts(
    two: Two, pairs: Sequence[Tensor], function: Callable[..., tuple[Tensor, ...]]
) -> list[Tensor]:
    """Vectors of pairs, in parts whose nodes may be held: wide ones singly, others by width."""
    width = pairs[1]
    wide = pairs[3] > WIDE
    singly = [indices.reshape(1) for indices in wide.nonzero().flatten()]
    rest = (~wide).nonzero().flatten()
    rest = rest[width[rest].argsort(stable=True)]
    parts = [*singly]
    while len(rest):
        widest = rest[-1:]
        count = _outer_count(two.take(widest), [p[widest] for p in pairs])
        size = min(len(rest), PART // count + 1)
        parts.append(rest[-size:])
        rest = rest[:-size]
    columns = zip(
        *(function(two.take(part), *(p[part] for p in pairs)) for part in parts), strict=True
    )
    back = torch.cat(parts).argsort() if parts else torch.zeros(0, dtype=torch.long)
    return [torch.cat(column)[back] for column in columns]


def _outer_count(two: Two, pair: Sequence[Tensor]) -> int:
    return _outer(two, *pair)[0].shape[-1]


def _inner_panels(stddev: Tensor) -> int:
    return 2 * math.ceil(INNER_REACH / 4 * max(1.0, float(stddev.max()))) * 2


def _outer(
    two: Two, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the first variable: (pairs, nodes)."""
    if _is_wide(stddev_2):
        moments = torch.cat([mean_1, mean_2]), torch.cat([stddev_1, stddev_2])
        nodes, weights = outer_rule(two, *moments, rho[0])
        return nodes[None], weights[None]
    fineness = two.fineness
    panels = panel_count(torch.maximum(stddev_1, stddev_2)) * fineness
    grid = breakpoints(two.first.kinks, mean_1, stddev_1, panels, fineness=fineness)
    # Given y1, a kink of h(y2) is blurred over the width sqrt(1 - rho^2).
    slope = torch.where(rho != 0, rho, 1)
    width = rest_of(rho) / slope.abs()
    places = [
        (kink - mean_2) / (torch.where(stddev_2 > 0, stddev_2, 1) * slope) + offset * width
        for kink in two.second.kinks
        for offset in SOFTENED
    ]
    quadrature = Panels(insert(grid.expand(len(mean_1), -1), places), NODES)
    nodes = quadrature.nodes.flatten(-2)
    return nodes, quadrature.weights.flatten(-2) * density(nodes)


def _is_wide(stddev: Tensor) -> bool:
    """Whether this is one of the pairs that come singly."""
    return len(stddev) == 1 and float(stddev) > WIDE


def _is_blurred(scalar: Scalar, stddev: Tensor) -> bool:
    """Whether a few Gauss-Hermite nodes do not suffice for the second variable given the first."""
    return bool(scalar.kinks) or float(stddev.max()) * scalar.fineness > max(GENTLE)


def _given_first(
    scalar: Scalar, mean: Tensor, stddev: Tensor, positions: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E[g(y2) | y1], E[g'(y2) | y1] and E[x2 g'(y2) | y1], x2 the standardised y2.

    mean and stddev (pairs, nodes) of y2 given y1; x2 = positions + rest z for standard normal z.
    A few nodes of the first variable at a time, as many as fit into the budget.
    """
    nodes, _ = _inner_rule(scalar, mean[:, :1], stddev[:, :1])
    size = max(1, BUDGET // (len(mean) * nodes.shape[-1]))
    columns: list[tuple[Tensor, ...]] = []
    for centre, spread, place in zip(
        mean.split(size, -1), stddev.split(size, -1), positions.split(size, -1), strict=True
    ):
        z, weight = _inner_rule(scalar, centre, spread)
        value, slope = value_and_slope(scalar, centre[..., None] + spread[..., None] * z)
        x2 = place[..., None] + rest[:, None, None] * z
        columns.append(tuple((weight * t).sum(-1) for t in (value, slope, slope * x2)))
    first, second, third = (torch.cat(column, dim=-1) for column in zip(*columns, strict=True))
    return first, second, third


def _inner_rule(scalar: Scalar, mean: Tensor, stddev: Tensor) -> tuple[Tensor, Tensor]:
    """A few Gauss-Hermite nodes where a smooth function hardly bends, panels elsewhere."""
    spread = float(stddev.max()) * scalar.fineness
    for limit, count in GENTLE.items():
        if spread <= limit and not scalar.kinks:
            rule = hermite_rule(count)
            return torch.as_tensor(rule[0]).to(mean), torch.as_tensor(rule[1]).to(mean)
    panels = _inner_panels(stddev) * scalar.fineness
    quadrature = Panels(breakpoints(scalar.kinks, mean, stddev, panels, INNER_REACH), NODES)
    nodes = quadrature.nodes.flatten(-2)
    return nodes, quadrature.weights.flatten(-2) * density(nodes)


def _covariance(
    two: Two, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> Tensor:
    """E[(g(y1) - E g) (E[h(y2) | y1] - E h)]."""
    x, weight = _outer(two, mean_1, stddev_1, mean_2, stddev_2, rho)
    mean, stddev = _conditional(mean_2, stddev_2, rho, x)
    if two.second.conditional_mean is not None:
        second = two.second.conditional_mean(mean, stddev.square())
    elif _is_wide(stddev_2) and _is_blurred(two.second, stddev):
        second = given_first(two.second, mean[0], stddev[0, 0], slopes=False)
    else:
        second = _given_first(two.second, mean, stddev, x, rest_of(rho))[0]
    first = two.first(mean_1[:, None] + stddev_1[:, None] * x)
    first = first - (weight * first).sum(-1, keepdim=True)
    second = second - (weight * second).sum(-1, keepdim=True)
    return (weight * first * second).sum(-1)


def _partials(
    two: Two, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives by mean_1, stddev_1, mean_2, stddev_2 and rho, from g, h, g' and h' alone.

    d/drho = sigma_1 sigma_2 E[g'(y1) h'(y2)] (Price); the others move one argument.
    """
    x, weight = _outer(two, mean_1, stddev_1, mean_2, stddev_2, rho)
    first, first_slope = value_and_slope(two.first, mean_1[:, None] + stddev_1[:, None] * x)
    # A jump has its slope at one place, where the density is that of y1.
    places = [(kink - mean_1) / stddev_1 for kink, _ in two.first.jumps]
    peaks = [
        jump * density(z) / stddev_1 for z, (_, jump) in zip(places, two.first.jumps, strict=True)
    ]
    x = torch.cat([x, *(place[:, None] for place in places)], dim=-1)
    steep = torch.cat([weight * first_slope, *(peak[:, None] for peak in peaks)], dim=-1)
    nothing = torch.zeros(len(x), len(places), dtype=x.dtype, device=x.device)
    weight, first = torch.cat([weight, nothing], dim=-1), torch.cat([first, nothing], dim=-1)
    mean, stddev = _conditional(mean_2, stddev_2, rho, x)
    positions = rho[:, None] * x
    if _is_wide(stddev_2) and _is_blurred(two.second, stddev):
        found = given_first(two.second, mean[0], stddev[0, 0], slopes=True)
        second, second_slope, turned = found[:, None]
        stretched = positions * second_slope + rest_of(rho)[:, None] * turned
    else:
        second, second_slope, stretched = _given_first(
            two.second, mean, stddev, positions, rest_of(rho)
        )
    first = weight * (first - (weight * first).sum(-1, keepdim=True))
    second = second - (weight * second).sum(-1, keepdim=True)
    return (
        (steep * second).sum(-1),
        (steep * x * second).sum(-1),
        (first * second_slope).sum(-1),
        (first * stretched).sum(-1),
        stddev_1 * stddev_2 * (steep * second_slope).sum(-1),
    )


def _conditional(mean: Tensor, stddev: Tensor, rho: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y2 given the standardised y1 = x."""
    centre = mean[:, None] + (stddev * rho)[:, None] * x
    return centre, (stddev * rest_of(rho))[:, None].expand_as(centre)
