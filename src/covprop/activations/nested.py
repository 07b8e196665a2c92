"""The covariance of a pair by integrating one variable given the other.

For correlations near one, where a Hermite series is long, the second variable hardly varies given
the first. |rho| = 1 is a one-dimensional integral.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.grids import (
    NODES,
    REACH,
    WIDE,
    Scalar,
    breakpoints,
    graded,
    insert,
    panel_count,
    value_and_slope,
)
from covprop.kernels.gradients import first_order
from covprop.kernels.nodes import Panels, hermite_rule
from covprop.kernels.normal import density

INNER_REACH = 9.0
"""Standard deviations covered on either side by the variable that is integrated first."""
SOFTENED = (-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0)
"""Breakpoints around a kink of the second variable, in units of the width that blurs it."""
GENTLE = {0.1: 8, 0.3: 16, 1.0: 40}
"""Gauss-Hermite nodes that suffice up to a standard deviation of the second given the first."""
PART = 2**18
"""Nodes of the first variable, of all pairs together, that are held at a time."""
BUDGET = 2**22
"""Function values held at a time."""


def nested_covariance(
    scalar: Scalar, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> Tensor:
    """Cov[g(y1), g(y2)] for vectors of pairs, in float64, the same for (1, 2) and (2, 1)."""
    swap = (stddev_1 < stddev_2) | ((stddev_1 == stddev_2) & (mean_1 < mean_2))
    ordered = (
        torch.where(swap, mean_2, mean_1),
        torch.where(swap, stddev_2, stddev_1),
        torch.where(swap, mean_1, mean_2),
        torch.where(swap, stddev_1, stddev_2),
    )
    return _Nested.apply(scalar, *ordered, rho)


class _Nested(Function):
    @staticmethod
    def forward(ctx: Any, scalar: Scalar, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        ctx.scalar = scalar
        return torch.cat([_covariance(scalar, *part) for part in _parts(pairs, scalar.fineness)])

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scalar = ctx.scalar
        parts = [_partials(scalar, *p) for p in _parts(ctx.saved_tensors, scalar.fineness)]
        return None, *(gradient * torch.cat(column) for column in zip(*parts, strict=True))


def _parts(pairs: Sequence[Tensor], fineness: int) -> list[list[Tensor]]:
    """Cut vectors of pairs so that the nodes of a part are few."""
    outer = panel_count(torch.maximum(pairs[1], pairs[3])) * NODES * fineness
    size = max(1, PART // outer)
    return [list(part) for part in zip(*(p.split(size) for p in pairs), strict=True)]


def _inner_panels(stddev: Tensor) -> int:
    widest = float(stddev.max())
    return 2 * math.ceil(INNER_REACH / 4 * max(1.0, widest if widest <= WIDE else 1.0)) * 2


def _outer(
    scalar: Scalar, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the first variable: (pairs, nodes)."""
    panels = panel_count(torch.maximum(stddev_1, stddev_2)) * scalar.fineness
    grid = breakpoints(scalar.kinks, mean_1, stddev_1, panels).expand(len(mean_1), -1)
    # Given y1, a kink of g(y2) is blurred over the width sqrt(1 - rho^2).
    slope = torch.where(rho != 0, rho, 1)
    width = _rest(rho) / slope.abs()
    places = [
        (kink - mean_2) / (torch.where(stddev_2 > 0, stddev_2, 1) * slope) + offset * width
        for kink in scalar.kinks
        for offset in SOFTENED
    ]
    if float(stddev_2.max()) > WIDE:  # features of g(y2), seen from y1
        places += graded((), mean_2, stddev_2 * slope, panels / (2 * REACH), REACH)
    quadrature = Panels(insert(grid, places), NODES)
    nodes = quadrature.nodes.flatten(-2)
    return nodes, quadrature.weights.flatten(-2) * density(nodes)


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
        value, slope = value_and_slope(scalar.function, centre[..., None] + spread[..., None] * z)
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
    scalar: Scalar, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> Tensor:
    """E[(g(y1) - E g) (E[g(y2) | y1] - E g)]."""
    x, weight = _outer(scalar, mean_1, stddev_1, mean_2, stddev_2, rho)
    mean, stddev = _conditional(mean_2, stddev_2, rho, x)
    if scalar.conditional_mean is not None:
        second = scalar.conditional_mean(mean, stddev.square())
    else:
        second = _given_first(scalar, mean, stddev, x, _rest(rho))[0]
    first = scalar.function(mean_1[:, None] + stddev_1[:, None] * x)
    first = first - (weight * first).sum(-1, keepdim=True)
    second = second - (weight * second).sum(-1, keepdim=True)
    return (weight * first * second).sum(-1)


def _partials(
    scalar: Scalar, mean_1: Tensor, stddev_1: Tensor, mean_2: Tensor, stddev_2: Tensor, rho: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives by mean_1, stddev_1, mean_2, stddev_2 and rho, from g and g' alone.

    d/drho = sigma_1 sigma_2 E[g'(y1) g'(y2)] (Price); the others move one argument.
    """
    x, weight = _outer(scalar, mean_1, stddev_1, mean_2, stddev_2, rho)
    mean, stddev = _conditional(mean_2, stddev_2, rho, x)
    positions = rho[:, None] * x
    second, second_slope, stretched = _given_first(scalar, mean, stddev, positions, _rest(rho))
    first, first_slope = value_and_slope(scalar.function, mean_1[:, None] + stddev_1[:, None] * x)
    first = first - (weight * first).sum(-1, keepdim=True)
    second = second - (weight * second).sum(-1, keepdim=True)

    def expect(values: Tensor) -> Tensor:
        return (weight * values).sum(-1)

    return (
        expect(first_slope * second),
        expect(x * first_slope * second),
        expect(first * second_slope),
        expect(first * stretched),
        stddev_1 * stddev_2 * expect(first_slope * second_slope),
    )


def _conditional(mean: Tensor, stddev: Tensor, rho: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of y2 given the standardised y1 = x."""
    centre = mean[:, None] + (stddev * rho)[:, None] * x
    return centre, (stddev * _rest(rho))[:, None].expand_as(centre)


def _rest(rho: Tensor) -> Tensor:
    return ((1 - rho) * (1 + rho)).clamp(min=0).sqrt()
