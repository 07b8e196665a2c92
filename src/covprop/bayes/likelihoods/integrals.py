"""Averages over Gaussian outputs: quadrature in one dimension, cubature in several."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.kernels.normal import standard_deviation
from covprop.methods.montecarlo import HALF_CELL

GRID = 33
"""Points of the search."""
ROUNDS = 8
"""Each narrows the interval to what matters of it, sixteenfold at most."""
DEPTH = 45.0
"""Below exp(-45) of its largest value a function adds nothing in float64."""
PEAK = 1.0
"""How far, in its logarithm, the function is below its maximum where its peak ends."""
NODES = 257
"""Of the trapezoidal rule, which is spectrally accurate for what vanishes at both ends."""
TAIL = 10.0
"""Standard deviations, from the centre of a Gaussian factor, that hold all of its mass."""
SEED = 0
"""Of the scrambling of Sobol's points; any other does as well."""
SPARE = 4
"""Points for each dimension, at least, so that their covariance can be made the identity."""


def log_integral(log_function: Callable[[Tensor], Tensor], reach: Tensor, centre: Tensor) -> Tensor:
    """log of the integral of exp(h(z)) over z in [-reach, reach], element by element.

    h takes points (nodes, *shape) and is unimodal, or has modes that a grid of 33 points sees;
    centre is a point where it is known not to be too small. Nodes are dense at the peak,
    z = p + w sinh(u), as it may be far narrower than what else matters. The search for both has
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
        relevant = torch.where(values >= most - depth, points, best)
        # A cell more on either side: the edge is in it.
        low = torch.maximum(low, relevant.amin(0) - step)
        high = torch.minimum(high, relevant.amax(0) + step)
    return low, high, best


def _unit(count: int, like: Tensor) -> Tensor:
    """Even points of [0, 1], in front of the shape of a tensor."""
    points = torch.linspace(0, 1, count, dtype=like.dtype, device=like.device)
    return points.reshape(-1, *[1] * like.dim())


@final
@dataclass(frozen=True)
class Cubature:
    """Points with equal weights for the standard normal density: Sobol's, and their negatives.

    A linear map gives them the identity as covariance, so that polynomials of degree 3 are averaged
    exactly: for narrow Gaussians they are as good as the delta method of second order or better,
    for wide ones they do not go astray as rules of higher degree do. `docs/bayes.md` has errors.

    Args:
        points: How many, an even number; 4 for each dimension if that is more.

    Example:
        bayes.Categorical(expectation=bayes.Cubature(points=256))
    """

    points: int = 128

    def __post_init__(self) -> None:
        if self.points < SPARE or self.points % 2:
            raise ValueError(f"points come in pairs, and from {SPARE}; not {self.points}")

    def nodes(self, size: int) -> Tensor:
        """Return the points (count, size) of so many dimensions, in float64."""
        return _nodes(size, max(self.points, SPARE * size))

    def around(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return points (count, *batch, n) of the Gaussian with these moments, without gradient.

        By the symmetric root of the covariance, which is unique and continuous.
        """
        with torch.no_grad():
            eigenvalues, vectors = torch.linalg.eigh(covariance.double())
            root = (vectors * standard_deviation(eigenvalues)[..., None, :]) @ vectors.mT
            nodes = self.nodes(mean.shape[-1]).to(mean.device)
            return mean.double() + (nodes @ root).movedim(-2, 0)


@lru_cache
def _nodes(size: int, count: int) -> Tensor:
    uniform = SobolEngine(size, scramble=True, seed=SEED).draw(count // 2, dtype=torch.float64)
    half = torch.special.ndtri(uniform + HALF_CELL)
    points = torch.cat([half, -half])
    factor = torch.linalg.cholesky(points.mT @ points / len(points))
    return torch.linalg.solve_triangular(factor, points.mT, upper=False).mT.contiguous()
