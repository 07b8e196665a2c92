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
NODES = 257
"""Of the trapezoidal rule, which is spectrally accurate for what vanishes at both ends."""
TAIL = 10.0
"""Standard deviations, from the centre of a Gaussian factor, that hold all of its mass."""


def log_integral(log_function: Callable[[Tensor], Tensor], reach: Tensor, centre: Tensor) -> Tensor:
    """log of the integral of exp(h(z)) over z in [-reach, reach], element by element.

    h takes points (nodes, *shape) and is unimodal, or has modes that a grid of 33 points sees;
    centre is a point of that grid, where h is known not to be too small. The search for where
    exp(h) is not negligible sends no gradient: the integral does not depend on it.
    """
    grid = torch.linspace(0, 1, GRID, dtype=reach.dtype, device=reach.device)
    fine = torch.linspace(0, 1, NODES, dtype=reach.dtype, device=reach.device)
    shape = (-1, *[1] * reach.dim())
    with torch.no_grad():
        half = reach + centre.abs()
        low, width = centre - half, 2 * half
        for _ in range(ROUNDS):
            values = log_function(low + width * grid.reshape(shape))
            matters = (values >= values.amax(0) - DEPTH).int()
            first = matters.argmax(0) - 1  # a cell more on either side
            last = GRID - matters.flip(0).argmax(0)
            step = width / (GRID - 1)
            low = low + first.clamp(min=0) * step
            width = (last.clamp(max=GRID - 1) - first.clamp(min=0)) * step
        nodes = low + width * fine.reshape(shape)
    return log_function(nodes).logsumexp(0) + (width / (NODES - 1)).log()
