"""Averages over one and two Gaussian variables on dense grids; nothing here imports covprop."""

import math
from collections.abc import Callable

import numpy as np

from tests.oracles import normal_rule


def average(
    function: Callable[[np.ndarray], np.ndarray], mean: float, variance: float, width: float = 0.25
) -> float:
    """E[g(f)] for f ~ N(mean, variance)."""
    stddev = math.sqrt(variance)
    x, weight = normal_rule(mean, stddev, width=width)
    return float(np.sum(weight * function(mean + stddev * x)))


def average_of_pair(
    function: Callable[[np.ndarray, np.ndarray], np.ndarray],
    mean: np.ndarray,
    covariance: np.ndarray,
    width: float = 0.5,
) -> float:
    """E[g(u, v)] for a Gaussian pair: a grid for v, and for each of its nodes one for u given v."""
    of_v = math.sqrt(covariance[1, 1])
    slope = covariance[0, 1] / of_v if of_v else 0.0
    of_u = math.sqrt(max(0.0, covariance[0, 0] - slope**2))
    x, outer = normal_rule(0.0, of_v, width=width)
    z, inner = normal_rule(0.0, of_u, width=width)
    keep, near = outer > 1e-40, inner > 1e-40
    x, outer, z, inner = x[keep], outer[keep], z[near], inner[near]
    v = mean[1] + of_v * x[:, None]
    u = mean[0] + slope * x[:, None] + of_u * z
    return float(outer @ function(u, v) @ inner)
