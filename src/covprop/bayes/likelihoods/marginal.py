"""One-dimensional integrals of positive functions, known by their logarithm."""

from collections.abc import Callable

import torch
from torch import Tensor

GRID = 33
"""Points of the search."""
ROUNDS = 8
"""Each narrows the interval to what matters of it, sixteenfold at most."""
DEPTH = 45.0
"""Below exp(-45) of its largest value a function adds nothing in float64."""
PEAK = 1.0
"""How far, in its logarithm, the function is below its maximum where its peak is said to end."""
NODES = 257
"""Of the trapezoidal rule, which is spectrally accurate for what vanishes at both ends."""
TAIL = 10.0
"""Standard deviations, from the centre of a Gaussian factor, that hold all of its mass."""


def log_integral(log_function: Callable[[Tensor], Tensor], reach: Tensor, centre: Tensor) -> Tensor:
    """log of the integral of exp(h(z)) over z in [-reach, reach], element by element.

    h takes points (nodes, *shape) and is unimodal, or has modes that a grid of 33 points sees;
    centre is a point where it is known not to be too small. Nodes are dense at the peak,
    z = p + w sinh(u), as it may be far narrower than what else matters. The search for both sends
    no gradient: the integral does not depend on it.
    """
    with torch.no_grad():
        half = reach + centre.abs()
        low, high, best = _narrowed(log_function, centre - half, centre + half, centre, DEPTH)
        left, right, peak = _narrowed(log_function, low, high, best, PEAK)
        scale = (right - left) / 2
        first, last = torch.asinh((low - peak) / scale), torch.asinh((high - peak) / scale)
        u = first + (last - first) * _unit(NODES, reach)
        nodes = peak + scale * torch.sinh(u)
        log_weight = (scale * torch.cosh(u) * (last - first) / (NODES - 1)).log()
    return (log_function(nodes) + log_weight).logsumexp(0)


def _narrowed(
    log_function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, best: Tensor, depth: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of an interval where h is not further than depth below its maximum, and where.

    best: a point in it. A grid may miss a narrow peak that an earlier one saw, which is why the
    best point of all is kept.
    """
    grid, most = _unit(GRID, low), log_function(best[None])[0]
    for _ in range(ROUNDS):
        step = (high - low) / (GRID - 1)
        points = low + (high - low) * grid
        values = log_function(points)
        value, place = values.max(0)
        best = torch.where(value > most, points.gather(0, place[None])[0], best)
        most = torch.maximum(value, most)
        matters = values >= most - depth
        first = torch.where(matters, points, best).amin(0)
        last = torch.where(matters, points, best).amax(0)
        # A cell more on either side: the edge is in it.
        low, high = torch.maximum(low, first - step), torch.minimum(high, last + step)
    return low, high, best


def _unit(count: int, like: Tensor) -> Tensor:
    """Even points of [0, 1], in front of the shape of a tensor."""
    points = torch.linspace(0, 1, count, dtype=like.dtype, device=like.device)
    return points.reshape(-1, *[1] * like.dim())
