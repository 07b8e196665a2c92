"""Covariances of pairs by integrating one variable given the other.

For correlations near one, where a Hermite series is long, the second variable hardly varies given
the first. |rho| = 1 is a one-dimensional integral. Where the second variable is wide, E[g(y2) | y1]
is g blurred by s = sigma_2 sqrt(1 - rho^2): close to zero and to the kinks of g, an integral over
places y that all y1 share; elsewhere g is smooth on the scale s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.activations.moments import (
    NODES,
    REACH,
    WIDE,
    Scalar,
    breakpoints,
    panel_count,
    value_and_slope,
)
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import SQRT_2, SQRT_2PI, density
from covprop.kernels.polynomials import Panels, graded, hermite_rule, insert

INNER_REACH = 9.0
"""Standard deviations covered on either side by the variable that is integrated first."""
HERMITE_NODES = {0.1: 8, 0.3: 16, 1.0: 40}
"""Gauss-Hermite nodes that suffice up to a standard deviation of the second given the first."""
SOFTENED = (-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0)
"""Breakpoints around a kink of the second variable, in units of the width that blurs it."""
NEAR, BLUR = 12, 9
"""Distance from zero and the kinks, in units of s, up to which g is not smooth on that scale; and
at which the density has fallen below rounding."""
SMOOTH_NODES = 40
"""Gauss-Hermite nodes that suffice where g is smooth."""
SHARP = 1e-7
"""The share of the second deviation, as the first variable leaves it, below which it is known: of
one that follows from the first, rounding of the correlation leaves a fourth of this."""
HELD_NODES, HELD_VALUES, HELD_WIDE = 2**16, 2**19, 2**18
"""Numbers in memory at a time: nodes of the first variable, of all pairs together; values of
functions; and values for one wide pair."""


@dataclass(frozen=True)
class ScalarPair:
    """The functions of a pair; the second is integrated given the variable of the first."""

    first: Scalar
    second: Scalar

    @property
    def fineness(self) -> int:
        """That of the finer one."""
        return max(self.first.fineness, self.second.fineness)

    def take(self, index: Any) -> "ScalarPair":
        """The functions of some of the pairs."""
        return ScalarPair(self.first.take(index), self.second.take(index))


class _Gaussians(NamedTuple):
    """Vectors of bivariate Gaussians."""

    mean_1: Tensor
    stddev_1: Tensor
    mean_2: Tensor
    stddev_2: Tensor
    rho: Tensor

    def take(self, index: Tensor) -> "_Gaussians":
        return _Gaussians(*(tensor[index] for tensor in self))

    @property
    def rest(self) -> Tensor:
        """sqrt(1 - rho^2): the share of the second deviation that the first variable leaves."""
        return _rest(self.rho)

    @property
    def wide(self) -> bool:
        """Whether this is one of the wide pairs, which come singly."""
        return len(self.rho) == 1 and float(self.stddev_2) > WIDE

    def given_first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of y2 given the standardised y1 = x, (pairs, nodes)."""
        centre = self.mean_2[:, None] + (self.stddev_2 * self.rho)[:, None] * x
        return centre, (self.stddev_2 * self.rest)[:, None].expand_as(centre)


def _rest(rho: Tensor) -> Tensor:
    return ((1 - rho) * (1 + rho)).clamp(min=0).sqrt()


def nested_covariance(
    scalar: Scalar,
    numbers_1: Sequence[Tensor],
    numbers_2: Sequence[Tensor],
    mean_1: Tensor,
    stddev_1: Tensor,
    mean_2: Tensor,
    stddev_2: Tensor,
    rho: Tensor,
) -> Tensor:
    """Cov[g(y1), g(y2)] for vectors of pairs, in float64, the same for (1, 2) and (2, 1).

    numbers_1, numbers_2: what the function has of the elements of either side.
    """
    swap = (stddev_1 < stddev_2) | ((stddev_1 == stddev_2) & (mean_1 < mean_2))
    ordered = (
        torch.where(swap, mean_2, mean_1),
        torch.where(swap, stddev_2, stddev_1),
        torch.where(swap, mean_1, mean_2),
        torch.where(swap, stddev_1, stddev_2),
    )
    sides = list(zip(numbers_1, numbers_2, strict=True))
    first = scalar.having([torch.where(swap, other, one) for one, other in sides])
    second = scalar.having([torch.where(swap, one, other) for one, other in sides])
    return pair_covariance(ScalarPair(first, second), *ordered, rho)


def pair_covariance(two: ScalarPair, *pairs: Tensor) -> Tensor:
    """Cov[g(y1), h(y2)] for vectors of pairs: mean_1, stddev_1, mean_2, stddev_2 and rho."""
    return _Nested.apply(two, *pairs)


class _Nested(Function):
    """Cov[g(y1), h(y2)] for vectors of pairs; one of the two may jump."""

    @staticmethod
    def forward(ctx: Any, two: ScalarPair, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(*pairs)
        ctx.two = two
        return _in_parts(two, _Gaussians(*pairs), lambda *part: (_covariance(*part),))[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Any:
        partials = _in_parts(ctx.two, _Gaussians(*ctx.saved_tensors), _partials)
        return None, *(gradient * partial for partial in partials)


def _in_parts(
    two: ScalarPair, pairs: _Gaussians, function: Callable[..., tuple[Tensor, ...]]
) -> list[Tensor]:
    """Vectors of pairs, in parts whose nodes fit into memory: wide ones singly, others by width."""
    wide, sharp = pairs.stddev_2 > WIDE, pairs.rest <= SHARP
    parts = [indices.reshape(1) for indices in wide.nonzero().flatten()]
    for group in (~wide & sharp, ~wide & ~sharp):
        rest = group.nonzero().flatten()
        rest = rest[pairs.stddev_1[rest].argsort(stable=True)]
        while len(rest):
            widest = rest[-1:]
            count = _outer(two.take(widest), pairs.take(widest))[0].shape[-1]
            size = min(len(rest), HELD_NODES // count + 1)
            parts.append(rest[-size:])
            rest = rest[:-size]
    columns = zip(*(function(two.take(part), pairs.take(part)) for part in parts), strict=True)
    back = torch.cat(parts).argsort() if parts else torch.zeros(0, dtype=torch.long)
    return [torch.cat(column)[back] for column in columns]


def _covariance(two: ScalarPair, pairs: _Gaussians) -> Tensor:
    """E[(g(y1) - E g) (E[h(y2) | y1] - E h)]."""
    x, weight = _outer(two, pairs)
    mean, stddev = pairs.given_first(x)
    if two.second.conditional_mean is not None:
        second = two.second.conditional_mean(mean, stddev.square())
    elif pairs.wide and _is_blurred(two.second, stddev):
        second = _wide_given_first(two.second, mean[0], stddev[0, 0], slopes=False)
    else:
        second = _given_first(two.second, mean, stddev, x, pairs.rest)[0]
    first = two.first(pairs.mean_1[:, None] + pairs.stddev_1[:, None] * x)
    first = first - (weight * first).sum(-1, keepdim=True)
    second = second - (weight * second).sum(-1, keepdim=True)
    return (weight * first * second).sum(-1)


def _partials(two: ScalarPair, pairs: _Gaussians) -> tuple[Tensor, ...]:
    """Derivatives by mean_1, stddev_1, mean_2, stddev_2 and rho, only from g, h, g' and h'.

    d/drho = sigma_1 sigma_2 E[g'(y1) h'(y2)] (Price); the others move one argument.
    """
    mean_1, stddev_1 = pairs.mean_1, pairs.stddev_1
    x, weight = _outer(two, pairs)
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
    mean, stddev = pairs.given_first(x)
    positions = pairs.rho[:, None] * x
    if two.second.conditional_mean is not None and two.second.conditional_slopes is not None:
        second = two.second.conditional_mean(mean, stddev.square())
        second_slope, curve = two.second.conditional_slopes(mean, stddev.square())
        stretched = positions * second_slope + pairs.rest[:, None] * SQRT_2 * curve
    elif pairs.wide and _is_blurred(two.second, stddev):
        rows = _wide_given_first(two.second, mean[0], stddev[0, 0], slopes=True)
        second, second_slope, turned = rows[:, None]
        stretched = positions * second_slope + pairs.rest[:, None] * turned
    else:
        second, second_slope, stretched = _given_first(
            two.second, mean, stddev, positions, pairs.rest
        )
    first = weight * (first - (weight * first).sum(-1, keepdim=True))
    second = second - (weight * second).sum(-1, keepdim=True)
    return (
        (steep * second).sum(-1),
        (steep * x * second).sum(-1),
        (first * second_slope).sum(-1),
        (first * stretched).sum(-1),
        stddev_1 * pairs.stddev_2 * (steep * second_slope).sum(-1),
    )


def _outer(two: ScalarPair, pairs: _Gaussians) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the first variable: (pairs, nodes)."""
    if pairs.wide:
        return _wide_outer(two, pairs)
    mean_2, stddev_2, rho, fineness = pairs.mean_2, pairs.stddev_2, pairs.rho, two.fineness
    panels = _even_panels(two, pairs)
    grid = breakpoints(two.first.kinks, pairs.mean_1, pairs.stddev_1, panels, fineness=fineness)
    # Given y1, a kink of h(y2) is blurred over the width sqrt(1 - rho^2).
    slope = torch.where(rho != 0, rho, 1)
    width = pairs.rest / slope.abs()
    places = [
        (kink - mean_2) / (torch.where(stddev_2 > 0, stddev_2, 1) * slope) + offset * width
        for kink in two.second.kinks
        for offset in SOFTENED
    ]
    return _weighted(Panels(insert(grid.expand(len(mean_2), -1), places), NODES))


def _even_panels(two: ScalarPair, pairs: _Gaussians) -> int:
    """Panels of the first variable that are the same for all pairs."""
    panels = panel_count(torch.maximum(pairs.stddev_1, pairs.stddev_2))
    # Of a periodic function nothing is left where the second variable varies more than this.
    visible = pairs.stddev_2 * pairs.rest < BLUR
    widths = pairs.stddev_1, torch.where(visible, pairs.stddev_2 * pairs.rho.abs(), 0)
    for scalar, width in zip((two.first, two.second), widths, strict=True):
        if scalar.periodic:
            panels = max(panels, panel_count(width, periodic=True))
    return panels * two.fineness


def _weighted(quadrature: Panels) -> tuple[Tensor, Tensor]:
    """Nodes and weights, with the density, of all panels."""
    nodes = quadrature.nodes.flatten(-2)
    return nodes, quadrature.weights.flatten(-2) * density(nodes)


def _is_blurred(scalar: Scalar, stddev: Tensor) -> bool:
    """Whether Gauss-Hermite nodes do not suffice for the second variable given the first."""
    return bool(scalar.kinks) or float(stddev.max()) * scalar.fineness > max(HERMITE_NODES)


def _given_first(
    scalar: Scalar, mean: Tensor, stddev: Tensor, positions: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """E[g(y2) | y1], E[g'(y2) | y1] and E[x2 g'(y2) | y1], x2 the standardised y2.

    mean and stddev (pairs, nodes) of y2 given y1; x2 = positions + rest z for standard normal z.
    A few nodes of the first variable at a time, as many as fit into memory.
    """
    known = float(rest.max()) <= SHARP
    rule = (lambda _, mean, __: _hermite_nodes(1, mean)) if known else _inner_rule
    nodes, _ = rule(scalar, mean[:, :1], stddev[:, :1])
    size = max(1, HELD_VALUES // (len(mean) * nodes.shape[-1]))
    columns: list[tuple[Tensor, ...]] = []
    for centre, spread, place in zip(
        mean.split(size, -1), stddev.split(size, -1), positions.split(size, -1), strict=True
    ):
        z, weight = rule(scalar, centre, spread)
        value, slope = value_and_slope(scalar, centre[..., None] + spread[..., None] * z)
        x2 = place[..., None] + rest[:, None, None] * z
        columns.append(tuple((weight * t).sum(-1) for t in (value, slope, slope * x2)))
    first, second, third = (torch.cat(column, dim=-1) for column in zip(*columns, strict=True))
    return first, second, third


def _inner_rule(scalar: Scalar, mean: Tensor, stddev: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Hermite nodes where a smooth function is nearly a polynomial, panels elsewhere."""
    widest = float(stddev.max())
    for limit, count in HERMITE_NODES.items():
        if widest * scalar.fineness <= limit and not scalar.kinks:
            return _hermite_nodes(count, mean)
    panels = 4 * math.ceil(INNER_REACH / 4 * max(1.0, widest)) * scalar.fineness
    return _weighted(Panels(breakpoints(scalar.kinks, mean, stddev, panels, INNER_REACH), NODES))


def _hermite_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    nodes, weights = hermite_rule(count)
    return torch.as_tensor(nodes).to(like), torch.as_tensor(weights).to(like)


def _wide_outer(two: ScalarPair, pair: _Gaussians) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standardised first variable of one wide pair, (1, nodes)."""
    mean_1, stddev_1, mean_2, stddev_2, rho = (tensor[0] for tensor in pair)
    fineness, even = two.fineness, 1 / two.fineness
    grid = torch.linspace(-REACH, REACH, _even_panels(two, pair) + 1, dtype=mean_1.dtype)
    places = [
        grid.to(mean_1.device),
        (_graded(two.first.kinks, 1, fineness, even * stddev_1) - mean_1) / stddev_1,
    ]
    slope = stddev_2 * rho
    if float(slope) != 0:
        # What h(y2) has to show is blurred by s; two panels for what s leaves.
        blur = stddev_2 * _rest(rho)
        unit = max(1.0, float(blur))
        visible = _graded(two.second.kinks, unit / 2, fineness, even * slope.abs())
        places.append((visible - mean_2) / slope)
        if two.second.kinks:
            around = mean_2.new_tensor(two.second.kinks)[:, None] + blur * mean_2.new_tensor(
                SOFTENED
            )
            places.append((around.flatten() - mean_2) / slope)
    points = torch.cat(places).clamp(-REACH, REACH).unique()
    nodes, weights = _weighted(Panels(points, NODES))
    return nodes[None], weights[None]


def _wide_given_first(scalar: Scalar, centre: Tensor, spread: Tensor, slopes: bool) -> Tensor:
    """E[g(y2) | y1], and with slopes E[g' | y1] and E[z g' | y1], z the standardised y2 given y1.

    centre: the means of y2 given y1, (nodes,); spread: their standard deviation, a number. The
    result has a row for each of the three, (1 or 3, nodes).
    """
    distance = torch.full_like(centre, torch.inf)
    for place in {0.0, *scalar.kinks}:
        distance = torch.minimum(distance, (centre - place).abs())
    near = distance < NEAR * spread
    results = centre.new_zeros(3 if slopes else 1, len(centre))
    for inside, integrate in ((near, _near), (~near, _far)):
        if bool(inside.any()):
            results[:, inside] = integrate(scalar, centre[inside], spread, slopes)
    return results


def _far(scalar: Scalar, centre: Tensor, spread: Tensor, slopes: bool) -> Tensor:
    z, weight = _hermite_nodes(SMOOTH_NODES, centre)
    y = centre[:, None] + spread * z
    if not slopes:
        return (scalar(y) @ weight)[None]
    value, slope = value_and_slope(scalar, y)
    return torch.stack([value @ weight, slope @ weight, slope @ (z * weight)])


def _near(scalar: Scalar, centre: Tensor, spread: Tensor, slopes: bool) -> Tensor:
    ticks = spread * torch.arange(-NEAR - BLUR, NEAR + BLUR + 1).to(centre)
    places = [place + ticks for place in {0.0, *scalar.kinks}]
    places.append(_graded(scalar.kinks, 1, scalar.fineness, spread))
    rule = Panels(torch.cat(places).unique(), NODES)
    y = rule.nodes.flatten()
    weight = rule.weights.flatten() / (spread * SQRT_2PI)
    value, slope = (weight * part for part in value_and_slope(scalar, y))
    rows = []
    for some in centre.split(max(1, HELD_WIDE // len(y))):
        z = (y - some[:, None]) / spread
        bell = torch.square(z).mul_(-0.5).exp_()
        row = [bell @ value]
        rows.append([*row, bell @ slope, bell.mul_(z) @ slope] if slopes else row)
    return torch.stack([torch.cat(row) for row in zip(*rows, strict=True)])


def _graded(kinks: Sequence[float | Tensor], unit: float, fineness: int, even: Tensor) -> Tensor:
    return even.new_tensor(graded(kinks, unit / fineness, fineness, float(even)))
