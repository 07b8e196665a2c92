"""Averages over a Gaussian vector by a few points that are always the same."""

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.kernels.normal import standard_deviation
from covprop.methods.montecarlo import HALF_CELL

SEED = 0
"""Of the scrambling of Sobol's points; any other does as well."""
SPARE = 4
"""Points for each dimension, at least, so that their covariance can be made the identity."""


@final
@dataclass(frozen=True)
class Cubature:
    """Points with equal weights for the standard normal density: Sobol's, and their negatives.

    A linear map gives them the identity as covariance, so that polynomials of degree 3 are averaged
    exactly: for narrow Gaussians they are as good as the delta method of second order or better,
    for wide ones they do not go astray as rules of higher degree do. `docs/bayes.md` has errors.
    """

    points: int = 128

    def __post_init__(self) -> None:
        if self.points < SPARE or self.points % 2:
            raise ValueError(f"points come in pairs, and from {SPARE}; not {self.points}")

    def nodes(self, size: int) -> Tensor:
        """(count, size) in float64; count is `points`, or 4 for each dimension if that is more."""
        return _nodes(size, max(self.points, SPARE * size))

    def around(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Points (count, *batch, n) of the Gaussian with these moments, (*batch, n) and more.

        By the symmetric root of the covariance, which is unique and continuous; no gradient.
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


def with_gradient(
    value: Tensor, mean: Tensor, covariance: Tensor, slope: Tensor, curvature: Tensor
) -> Tensor:
    """A value E[g(f)] (*batch,) that has the gradient of the average, not of the points.

    dE/dmu = E[grad g] and dE/dS = E[hess g] / 2 (Price), which are right where S is singular too.
    """
    first = (slope * (mean - mean.detach())).sum(-1)
    second = (curvature * (covariance - covariance.detach())).sum((-2, -1))
    return value.to(mean) + first.to(mean) + second.to(mean) / 2
