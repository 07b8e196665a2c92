"""Orthogonal polynomials: Gauss nodes and grids, Hermite functions and the paper's series."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from covprop.kernels import compiled, compiled_pairs
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import density
from covprop.kernels.rounding import FLUSH

GROWTH = 1.25
"""Ratio of the distances from zero, or a kink, of neighbouring points of a graded grid."""


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
def legendre(count: int) -> tuple[list[float], list[float], list[float]]:
    """Nodes, weights and the integrating matrix of `_legendre`, row by row, as plain numbers."""
    nodes, weights, integrals = _legendre(count)
    return nodes.tolist(), weights.tolist(), integrals.flatten().tolist()


@lru_cache
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, weights, and the matrix that integrates the interpolant from -1 to each node."""
    legendre = np.polynomial.legendre
    nodes, weights = legendre.leggauss(count)
    to_coefficients = np.linalg.inv(legendre.legvander(nodes, count - 1))
    antiderivatives = [legendre.legval(nodes, legendre.legint(e, lbnd=-1)) for e in np.eye(count)]
    return nodes, weights, np.stack(antiderivatives, axis=1) @ to_coefficients


class Panels:
    """Gauss-Legendre quadrature on consecutive panels.

    breakpoints: (*shape, panels + 1), ascending; panels may be empty. Nodes and weights have the
    shape (*shape, panels, count).
    """

    def __init__(self, breakpoints: Tensor, count: int) -> None:
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


def hermite_functions(x: Tensor) -> Iterator[Tensor]:
    """Yield h_k = He_k(x) phi(x) / sqrt(k!) for k = 0, 1, 2 ...

    Weighted and normalised, the recurrence stays bounded at every order. Its derivatives by
    autograd would not: they are taken from h_k' = -sqrt(k + 1) h_{k+1}.
    """
    point = x.detach()
    previous, current = torch.zeros_like(point), density(point)
    for k in range(2**31):
        following = (point * current - math.sqrt(k) * previous) / math.sqrt(k + 1)
        if x.requires_grad and torch.is_grad_enabled():
            yield _WithSlope.apply(x, current, -math.sqrt(k + 1) * following)
        else:
            yield current
        previous, current = current, following


def hermite_weights(x: Tensor, weights: Tensor, count: int) -> Tensor:
    """Weights of quadrature for E[g He_k], w He_k(x) phi(x), k < count; (*shape, count, nodes).

    In place, one row of all nodes after another; for the low orders that need no normalisation.
    """
    rows = x.new_empty(*x.shape[:-1], count, x.shape[-1])
    torch.mul(weights, density(x), out=rows[..., 0, :])
    for k in range(count - 1):
        torch.mul(x, rows[..., k, :], out=rows[..., k + 1, :])
        if k:
            rows[..., k + 1, :].sub_(rows[..., k - 1, :], alpha=k)
    return rows


class _WithSlope(Function):
    """A value and its derivative, both known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        del x
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None, None


def power_series(correlation: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sum_k rho^k left_k right_k; left (order, ..., rows, 1), right (order, ..., 1, columns).

    With left_k = a_{k+1}(i) / sigma_i, the covariance of two activated Gaussians is
    c_ij times this sum (Wright et al. 2024, Theorem 1, with one factor rho taken out so that the
    gradient is right where sigma = 0).
    """
    return _PowerSeries.apply(correlation, left, right)


def series_units(coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """Units of the coefficients of each element: their norm where `flushed` might drop them, or 1.

    A saturated unit, or a bounded function of a wide input, has small coefficients and ordinary
    correlations. Also 1 where the square of the norm, and so the variance, would be denormal. Those
    of a jump, over a small deviation, are large: their largest where a product might overflow.
    """
    coefficients = coefficients.detach()
    size = torch.linalg.vector_norm(coefficients, dim=0)
    limits = torch.finfo(dtype)
    small = (size > limits.tiny**0.5) & (size < limits.tiny ** (FLUSH / 2))
    units = torch.where(small, size, 1)
    large = size > limits.max**0.25
    return torch.where(large, coefficients.abs().amax(0), units) if bool(large.any()) else units


def in_units(covariance: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The covariance times the units of the coefficients of its rows and columns."""
    if bool((left != 1).any()) or bool((right != 1).any()):
        return covariance * left * right
    return covariance


def flushed(coefficients: Tensor, dtype: torch.dtype, largest: float = 1.0) -> Tensor:
    """Set coefficients to zero whose terms would be denormal numbers, which are very slow.

    largest: the largest |rho| whose powers the terms have. Their gradients stay: a coefficient that
    is zero, as the first of an even function at mean zero, may have any.
    """
    least: Tensor | float = torch.finfo(dtype).tiny ** FLUSH
    if largest != 1:
        steps = torch.arange(
            len(coefficients), dtype=coefficients.dtype, device=coefficients.device
        )
        least = least * max(largest, 0.01) ** (-steps / 2)
        least = least.reshape(-1, *(1,) * (coefficients.dim() - 1))
    dropped = coefficients.detach().abs() < least  # not what is no number
    if not coefficients.requires_grad:
        return torch.where(dropped, 0, coefficients)
    return torch.where(dropped, coefficients - coefficients.detach(), coefficients)


class _PowerSeries(Function):
    """Horner's rule, whose backward pass stores none of its steps."""

    @staticmethod
    def forward(ctx: Any, correlation: Tensor, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(correlation, left, right)
        if correlation.dim() > 1 and compiled.usable(correlation, left, right):
            return compiled_pairs.power_series(correlation, left, right)
        total = torch.empty_like(correlation)
        torch.mul(left[-1], right[-1], out=total)
        for k in reversed(range(len(left) - 1)):
            total.mul_(correlation).addcmul_(left[k], right[k])
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        correlation, left, right = ctx.saved_tensors
        limits = torch.finfo(gradient.dtype)
        # Gradients may be of any size: terms are flushed next to the others of their block.
        size = torch.linalg.vector_norm(gradient, 1, (-2, -1), keepdim=True)
        size = size.clamp(limits.tiny, limits.max)
        power, least = gradient / size, limits.tiny ** (1 - FLUSH)
        if compiled.usable(correlation, left, right, power):
            found = compiled_pairs.series_backward(correlation, left, right, power)
            return found[0].mul_(size), found[1].mul_(size), found[2].mul_(size)
        order = len(left)
        slope = torch.zeros_like(correlation)
        for k in reversed(range(1, order)):
            slope.mul_(correlation).addcmul_(left[k], right[k], value=k)
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        for k in range(order):
            grad_left[k] = power @ right[k].mT
            grad_right[k] = left[k].mT @ power
            torch.hardshrink(power.mul_(correlation), least, out=power)  # or denormal, as above
        return slope.mul_(gradient), grad_left.mul_(size), grad_right.mul_(size)


def graded(
    kinks: Sequence[float | Tensor], unit: float, fineness: float, even: float
) -> list[float | Tensor]:
    """Points around zero and the kinks whose distances grow with that from the nearest of them.

    unit: the size of what there is to see close by, of which a panel takes two; even: the width of
    the panels that there are anyway, which suffice from some distance on.
    """
    growth = GROWTH ** (1 / fineness)
    distances = [0.0]
    while distances[-1] * (growth - 1) < even:
        distances.append(max(distances[-1] + 2 * unit, distances[-1] * growth))
    centres = sorted({0.0, *(kink for kink in kinks if not isinstance(kink, Tensor))})
    edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(centres)), math.inf]
    offsets = [side * distance for distance in distances for side in (-1, 1)]
    points = {
        centre + offset
        for centre, low, high in zip(centres, edges, edges[1:], strict=False)
        for offset in offsets
        if low <= centre + offset <= high
    }
    moving = [kink for kink in kinks if isinstance(kink, Tensor)]
    return [*sorted(points), *(kink + offset for kink in moving for offset in offsets)]


def insert(grid: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Sort further breakpoints into an ascending grid, clamped to its ends."""
    if not places:
        return grid
    inside = torch.stack(list(places), dim=-1)
    inside = inside.maximum(grid[..., :1]).minimum(grid[..., -1:])
    return torch.cat([grid, inside], dim=-1).sort(dim=-1).values
