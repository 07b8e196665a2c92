"""Covariances of a function of two Gaussians by numerical integration; nothing of covprop in it.

Both are integrated panel by panel with Gauss-Legendre nodes, cut where the function is not smooth:
the outer variable first, the other one given it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

NODES = 14
REACH = 9.0
"""Standard deviations on either side; 2e-19 of the mass is beyond."""
BLUR = np.arange(-8.0, 9.0, 2.0)
"""Cuts around the kink of a conditional mean, in units of its width."""
CHUNK = 2000


def covariance_map(
    function: Callable[[Tensor], Tensor], kinks: Sequence[float], axis: np.ndarray, rho: float
) -> np.ndarray:
    """Cov(g(y1), g(y2)) for unit variances and all means on the axis, (len(axis), len(axis)).

    Both variables use the same nodes for every mean, so that a kink is always between panels.
    """
    edges = np.arange(math.floor(axis[0] - REACH), math.ceil(axis[-1] + REACH) + 1.0)
    inside = [kink for kink in kinks if edges[0] < kink < edges[-1]]
    nodes, weights = _panels(np.unique(np.concatenate([edges, inside])))
    values = function(torch.from_numpy(nodes)).numpy()
    q = math.sqrt((1 - rho) * (1 + rho))
    mean = (weights * _density(nodes - axis[:, None])) @ values
    result = np.empty((len(axis), len(axis)))
    for i, first in enumerate(axis):
        near = np.abs(nodes - first) < REACH
        x = nodes[near] - first
        others = axis[: i + 1]
        given = others[:, None] + rho * x  # (others, nodes): the mean of y2 given y1
        density = _density((nodes - given[..., None]) / q) / q
        inner = density @ (weights * values) - mean[: i + 1, None]
        outer = weights[near] * _density(x) * (values[near] - mean[i])
        result[i, : i + 1] = result[: i + 1, i] = inner @ outer
    return result


def relu_covariance(a: np.ndarray, b: np.ndarray, rho: float) -> np.ndarray:
    """Cov(relu(a + x), relu(b + y)) for standard normal x, y of correlation 0 < rho < 1.

    y given x is Gaussian, so that its rectified mean is known; its kink at x = -b / rho is blurred
    over q / rho, and the panels are as narrow as that.
    """
    parts = [slice(start, start + CHUNK) for start in range(0, len(a), CHUNK)]
    return np.concatenate([_relu_chunk(a[part], b[part], rho) for part in parts])


def _relu_chunk(a: np.ndarray, b: np.ndarray, rho: float) -> np.ndarray:
    q = math.sqrt((1 - rho) * (1 + rho))
    even = np.broadcast_to(np.arange(-REACH, REACH + 1), (len(a), int(2 * REACH) + 1))
    blurred = (-b[:, None] + q * BLUR) / rho
    cuts = np.concatenate([-a[:, None], blurred], axis=1).clip(-REACH, REACH)
    x, weights = _panels(np.sort(np.concatenate([even, cuts], axis=1), axis=1))
    weights = weights * _density(x)
    shift = (b[:, None] + rho * x) / q
    first = np.maximum(a[:, None] + x, 0)
    second = q * (shift * ndtr(shift) + _density(shift))
    first = first - (weights * first).sum(1, keepdims=True)
    second = second - (weights * second).sum(1, keepdims=True)
    return (weights * first * second).sum(1)


def _panels(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on consecutive panels, (..., edges) -> (..., nodes)."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    half = np.diff(edges, axis=-1)[..., None] / 2
    middle = (edges[..., 1:] + edges[..., :-1])[..., None] / 2
    shape = (*edges.shape[:-1], -1)
    return (middle + half * nodes).reshape(shape), (half * weights).reshape(shape)


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
