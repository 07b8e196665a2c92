"""The covariance of one wide pair: the second variable given the first, on a grid of its own.

E[g(y2) | y1] is g blurred by s = sigma_2 sqrt(1 - rho^2): close to zero and to the kinks of g, an
integral over places y that all y1 share; elsewhere g is smooth on the scale s.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covprop.activations.grids import (
    NODES,
    REACH,
    SOFTENED,
    Scalar,
    Two,
    graded,
    rest_of,
    value_and_slope,
)
from covprop.kernels.nodes import Panels, hermite_rule
from covprop.kernels.normal import SQRT_2PI, density

NEAR = 12
"""Distance from zero and the kinks, in units of s, up to which g is not smooth on that scale."""
BLUR = 9
"""Distance, in the same units, at which the density has fallen below rounding."""
SMOOTH = 40
"""Gauss-Hermite nodes that suffice where g is smooth."""
HELD = 2**18
"""Values that are held at a time."""


def outer_rule(two: Two, mean: Tensor, stddev: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights for the standardised first variable; mean and stddev of both, (2,)."""
    fineness, even = two.fineness, 1 / two.fineness
    grid = torch.linspace(-REACH, REACH, int(2 * REACH * fineness) + 1, dtype=mean.dtype)
    places = [
        grid.to(mean.device),
        (_points(two.first.kinks, 1, fineness, even * stddev[0]) - mean[0]) / stddev[0],
    ]
    slope = stddev[1] * rho
    if float(slope) != 0:
        # What h(y2) has to show is blurred by s; two panels for what s leaves.
        unit = max(1.0, float(stddev[1] * rest_of(rho)))
        seen = _points(two.second.kinks, unit / 2, fineness, even * slope.abs())
        places.append((seen - mean[1]) / slope)
        if two.second.kinks:
            places.append(_blurred(two.second.kinks, stddev[1] * rest_of(rho), slope, mean[1]))
    points = torch.cat(places).clamp(-REACH, REACH).unique()
    rule = Panels(points, NODES)
    nodes = rule.nodes.flatten()
    return nodes, rule.weights.flatten() * density(nodes)


def given_first(scalar: Scalar, centre: Tensor, spread: Tensor, slopes: bool) -> Tensor:
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
    z, weight = (torch.as_tensor(part).to(centre) for part in hermite_rule(SMOOTH))
    y = centre[:, None] + spread * z
    if not slopes:
        return (scalar(y) @ weight)[None]
    value, slope = value_and_slope(scalar, y)
    return torch.stack([value @ weight, slope @ weight, slope @ (z * weight)])


def _near(scalar: Scalar, centre: Tensor, spread: Tensor, slopes: bool) -> Tensor:
    ticks = spread * torch.arange(-NEAR - BLUR, NEAR + BLUR + 1).to(centre)
    places = [place + ticks for place in {0.0, *scalar.kinks}]
    places.append(_points(scalar.kinks, 1, scalar.fineness, spread))
    rule = Panels(torch.cat(places).unique(), NODES)
    y = rule.nodes.flatten()
    weight = rule.weights.flatten() / (spread * SQRT_2PI)
    value, slope = (weight * part for part in value_and_slope(scalar, y))
    rows = []
    for some in centre.split(max(1, HELD // len(y))):
        z = (y - some[:, None]) / spread
        bell = torch.square(z).mul_(-0.5).exp_()
        row = [bell @ value]
        rows.append([*row, bell @ slope, bell.mul_(z) @ slope] if slopes else row)
    return torch.stack([torch.cat(row) for row in zip(*rows, strict=True)])


def _points(kinks: Sequence[float | Tensor], unit: float, fineness: int, even: Tensor) -> Tensor:
    return even.new_tensor(graded(kinks, unit / fineness, fineness, float(even)))


def _blurred(kinks: Sequence[float | Tensor], blur: Tensor, slope: Tensor, mean: Tensor) -> Tensor:
    """Places around the kinks of the second variable, in units of the width that blurs them."""
    places = mean.new_tensor(kinks)[:, None] + blur * mean.new_tensor(SOFTENED)
    return (places.flatten() - mean) / slope
