"""Covariances of piecewise-linear functions of inputs of any width, by an integral over one.

Nothing here imports covprop. Given y1, the mean of the other function is a sum over its segments:
slope times the integral of Phi over each, by quadrature if it is finite, so that nothing cancels.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr
from torch import Tensor

from tests.oracles import evaluate, panels

REACH = 12.0
OFFSETS = np.array([-9.0, -5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0, 9.0])


class Linear(NamedTuple):
    """A piecewise-linear function: its code, knots, slopes, jumps, and the value before all."""

    function: Callable[[Tensor], Tensor]
    knots: tuple[float, ...]
    slopes: tuple[float, ...]
    jumps: tuple[float, ...]
    start: float


def rectified(z: np.ndarray) -> np.ndarray:
    """z Phi(z) + phi(z)."""
    return z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def given(linear: Linear, centre: np.ndarray, spread: float) -> np.ndarray:
    """E[h(y)] for y ~ N(centre, spread^2)."""
    total = np.full_like(centre, linear.start)
    if linear.slopes[0]:
        total = total - linear.slopes[0] * spread * rectified((linear.knots[0] - centre) / spread)
    if linear.slopes[-1]:
        total = total + linear.slopes[-1] * spread * rectified((centre - linear.knots[-1]) / spread)
    for knot, jump in zip(linear.knots, linear.jumps, strict=True):
        total = total + jump * ndtr((centre - knot) / spread)
    segments = zip(linear.knots, linear.knots[1:], linear.slopes[1:-1], strict=False)
    for low, high, slope in segments:
        cuts = np.clip((centre[:, None] + OFFSETS * spread - low) / (high - low), 0, 1)
        ends = np.zeros((len(centre), 1)), np.ones((len(centre), 1))
        share, weight = panels(np.concatenate([ends[0], cuts, ends[1]], axis=-1))
        distance = (centre[:, None] - low) - share * (high - low)
        total = total + slope * (high - low) * (weight * ndtr(distance / spread)).sum(-1)
    return total


@cache  # each is asked for by the tests of two kernels
def covariance(
    one: Linear,
    other: Linear,
    means: tuple[float, float],
    stddevs: tuple[float, float],
    rho: float,
) -> float:
    """Cov[g(y1), h(y2)] = E[(g(y1) - E g) (E[h(y2) | y1] - E h)]."""
    q = math.sqrt((1 - rho) * (1 + rho))
    edges = [np.linspace(-REACH, REACH, 25), (np.array(one.knots) - means[0]) / stddevs[0]]
    for knot in other.knots if rho else ():
        edges.append(((knot - means[1]) / stddevs[1] + OFFSETS * q) / rho)
    x, weight = panels(np.sort(np.concatenate(edges).clip(-REACH, REACH)))
    weight = weight * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    first = evaluate(one.function, means[0] + stddevs[0] * x)
    centre = means[1] + stddevs[1] * rho * x
    second = given(other, centre, stddevs[1] * q) if q else evaluate(other.function, centre)
    mean_1, mean_2 = (float(np.sum(weight * values)) for values in (first, second))
    return float(np.sum(weight * (first - mean_1) * (second - mean_2)))
