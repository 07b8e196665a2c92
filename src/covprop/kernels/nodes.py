"""Gauss-Legendre nodes: on [0, 1], and on panels with breakpoints of their own per element."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


@lru_cache
def unit_interval(count: int) -> list[tuple[float, float]]:
    """(node, weight) pairs of Gauss-Legendre quadrature on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x), float(w)) for x, w in zip((nodes + 1) / 2, weights / 2, strict=True)]


@lru_cache
def hermite_rule(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss-Hermite quadrature for the standard normal density."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return nodes, weights / weights.sum()


@lru_cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    # Row q integrates the interpolating polynomial from -1 to node q.
    degrees = np.arange(count)
    to_coefficients = np.linalg.inv(np.polynomial.legendre.legvander(nodes, count - 1))
    antiderivatives = np.stack(
        [
            np.polynomial.legendre.legval(
                nodes, np.polynomial.legendre.legint(np.eye(count)[k], lbnd=-1)
            )
            for k in degrees
        ],
        axis=1,
    )
    return nodes, weights, antiderivatives @ to_coefficients


class Panels:
    """Gauss-Legendre quadrature on consecutive panels.

    breakpoints: (*shape, panels + 1), ascending; panels may be empty. Nodes and weights have the
    shape (*shape, panels, count).
    """

    def __init__(self, breakpoints: Tensor, count: int) -> None:
        """Place `count` nodes on every panel."""
        nodes, weights, cumulative = _legendre(count)
        half = breakpoints.diff(dim=-1)[..., None] / 2
        middle = (breakpoints[..., 1:] + breakpoints[..., :-1])[..., None] / 2
        self.nodes = middle + half * torch.as_tensor(nodes).to(breakpoints)
        self.weights = half * torch.as_tensor(weights).to(breakpoints)
        self._half = half
        self._cumulative = torch.as_tensor(cumulative).to(breakpoints)

    def integral_from_zero(self, values: Tensor) -> Tensor:
        """Integral of a function, given by its values at the nodes, from 0 to each node.

        Zero must be a breakpoint. Both sides are summed outwards from zero, so that what happens
        far out does not blur what happens near the centre.
        """
        inside = values @ self._cumulative.T * self._half
        total = (values * self.weights).sum(-1)
        right = self.nodes.sum(-1) > 0
        before = pad(torch.where(right, total, 0).cumsum(-1)[..., :-1], (1, 0))
        after = torch.where(right, 0, total).flip(-1).cumsum(-1).flip(-1)
        return torch.where(right[..., None], before[..., None] + inside, inside - after[..., None])
