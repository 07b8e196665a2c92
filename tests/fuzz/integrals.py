"""Moments of a scalar function of a Gaussian by panels in the function's own argument.

Shares nothing with covprop: Gauss-Legendre on panels that are fine where the function has features
(near zero and its kinks, at every power of two from there) and where the Gaussian has mass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tests.oracles import evaluate, panels

REACH = 14.0
SMALL = 1e-6
"""A standard deviation from which a function looks straight, or like its kink, to its mean."""
EPS = np.finfo(np.float64).eps


@dataclass(frozen=True)
class Moments:
    """Mean and variance with bounds of the errors that the integral itself has."""

    mean: float
    variance: float
    mean_error: float
    variance_error: float


@cache
def features(kinks: tuple[float, ...], every: bool) -> np.ndarray:
    """Where panels end: around zero in steps of a half, at powers of two around each kink."""
    powers = 2.0 ** np.arange(-12, 40)
    edges = [np.linspace(-40.0, 40.0, 161 if every else 41)]
    for place in {0.0, *kinks}:
        edges += [place + powers, place - powers, np.array([place])]
    return np.sort(np.concatenate(edges))


def rule(
    mean: float, stddev: float, kinks: Sequence[float], count: int, step: float, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes y and probability weights."""
    even = mean + stddev * np.arange(-reach, reach + step / 2, step)
    own = features(tuple(kinks), True)
    edges = np.concatenate([even, own[(own > even[0]) & (own < even[-1])]])
    y, weight = panels(np.sort(edges), count)
    x = (y - mean) / stddev
    return y, weight * np.exp(-x * x / 2) / np.sqrt(2 * np.pi) / stddev


def marginal(
    function: Callable[[Tensor], Tensor],
    mean: float,
    stddev: float,
    kinks: Sequence[float] = (),
    jumps: Sequence[float] = (),
    cancels: bool = False,
) -> Moments:
    """E g(y) and Var g(y) for y ~ N(mean, stddev^2).

    cancels: g is y less something near it, and rounded as y is.
    """
    centre = float(evaluate(function, np.array([mean]))[0])
    if stddev == 0.0:
        return Moments(centre, 0.0, 4 * EPS * abs(centre), 0.0)
    small = SMALL * max(abs(mean), abs(centre))
    if stddev < small:
        bends = tuple(kinks), tuple(jumps)
        return _shrunk(function, mean, stddev, 2 * small, bends, cancels)
    y, weight = rule(mean, stddev, kinks, 20, 0.5, REACH)
    with np.errstate(over="ignore", invalid="ignore"):
        value = evaluate(function, y) - centre
        shift = float(np.sum(weight * value))
        variance = float(np.sum(weight * (value - shift) ** 2))
    largest = float(np.max(np.abs(value) * (weight > 0)))
    rounded = np.max(np.abs(y)) if cancels else abs(centre)
    blur = 4 * EPS * (rounded + largest * abs(mean) / stddev + abs(shift))
    # what a tail beyond the window holds is of the order of its probability
    size = 1 + abs(mean) + REACH * stddev
    tail = 1e-40 * size
    return Moments(centre + shift, variance, blur + 1e-12 * variance**0.5 + tail,
                   8 * blur * variance**0.5 + blur**2 + 1e-11 * variance + tail * size)  # fmt: skip


def _shrunk(
    function: Callable[[Tensor], Tensor],
    mean: float,
    stddev: float,
    wide: float,
    bends: tuple[tuple[float, ...], tuple[float, ...]],
    cancels: bool,
) -> Moments:
    """From those of a wider Gaussian, where the function is straight, or at a kink or jump."""
    centre = float(evaluate(function, np.array([mean]))[0])
    unknown = Moments(centre, 0.0, np.inf, np.inf)
    if any(0 < abs(mean - place) < 2 * REACH * wide for place in (*bends[0], *bends[1])):
        return unknown
    near, far = (marginal(function, mean, width, *bends, cancels) for width in (wide, 2 * wide))
    part = stddev / wide
    if mean in bends[1]:
        bound = 100 * wide * (1 + abs(mean))
        return Moments(near.mean, near.variance, bound, bound)
    if not abs(far.variance - 4 * near.variance) <= 1e-3 * far.variance + far.variance_error:
        return unknown  # it is curved there
    shift, variance = part * (near.mean - centre), part**2 * near.variance
    error = 1e-3 * variance**0.5 + abs(shift) + part * near.mean_error + 10 * EPS * abs(centre)
    least = 1e-3 * variance + part**2 * 4 * near.variance_error
    return Moments(centre + shift, variance, error, least)


def pair(
    function: Callable[[Tensor], Tensor],
    means: Sequence[float],
    stddevs: Sequence[float],
    rho: float,
    kinks: Sequence[float] = (),
) -> float:
    """Cov[g(y1), g(y2)]: panels in y1, and for each node panels in y2 given y1; |rho| < 1.

    Of the distances from g at the means: the weights are off by roundings of y over the deviation,
    which a constant would be multiplied with.
    """
    q = np.sqrt((1 - rho) * (1 + rho))
    width = stddevs[1] * q
    y, outer = _outer(means, stddevs, rho, kinks)
    level = evaluate(function, np.array(means))
    first = evaluate(function, y) - level[0]
    centre = means[1] + rho * stddevs[1] * (y - means[0]) / stddevs[0]
    own = features(tuple(kinks), False)
    own = own[(own > (centre - 9 * width).min()) & (own < (centre + 9 * width).max())]
    even = np.arange(-9.0, 9.5, 1.0)
    edges = np.sort(np.concatenate([
        centre[:, None] + width * even,
        np.clip(own, (centre - 9 * width)[:, None], (centre + 9 * width)[:, None]),
    ], axis=-1))  # fmt: skip
    z, inner = panels(edges, 10)
    inner = inner * np.exp(-(((z - centre[:, None]) / width) ** 2) / 2)
    second = (inner * (evaluate(function, z) - level[1])).sum(-1) / (width * np.sqrt(2 * np.pi))
    first, second = first - np.sum(outer * first), second - np.sum(outer * second)
    return float(np.sum(outer * first * second))


def _outer(
    means: Sequence[float], stddevs: Sequence[float], rho: float, kinks: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes y1 and weights, with edges where y2 given y1 passes a kink."""
    reach = 9.0
    edges = [
        means[0] + stddevs[0] * np.arange(-reach, reach + 0.5, 0.5),
        features(tuple(kinks), False),
    ]
    if rho != 0:
        blur = stddevs[0] * np.sqrt((1 - rho) * (1 + rho)) / abs(rho)
        steps = np.array([-8.0, -4, -2, -1, -0.5, 0, 0.5, 1, 2, 4, 8])
        for kink in {0.0, *kinks}:
            edges.append(
                means[0] + stddevs[0] * (kink - means[1]) / (rho * stddevs[1]) + blur * steps
            )
    low, high = edges[0][0], edges[0][-1]
    y, weight = panels(np.unique(np.clip(np.concatenate(edges), low, high)), 10)
    x = (y - means[0]) / stddevs[0]
    weight = weight * np.exp(-x * x / 2) / np.sqrt(2 * np.pi) / stddevs[0]
    keep = weight > 1e-25
    return y[keep], weight[keep]


def log_normal(mean: float, stddev: float) -> tuple[float, float]:
    """E exp(y) and Var exp(y), infinite where they overflow."""
    variance = torch.tensor(stddev, dtype=torch.float64).square()
    level = torch.exp(mean + variance / 2)
    return float(level), float(level.square() * torch.expm1(variance))
