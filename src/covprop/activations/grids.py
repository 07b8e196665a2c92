"""Where to evaluate a function around a Gaussian, and its value and derivative there."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.errors import QuadratureError

REACH = 12.0
"""Quadrature covers this many standard deviations on either side."""
NODES = 10
"""Gauss-Legendre nodes on each panel."""


def breakpoints(
    kinks: Sequence[float], mean: Tensor, stddev: Tensor, panels: int, reach: float = REACH
) -> Tensor:
    """An even grid over `reach` standard deviations, the kinks of each element sorted in."""
    grid = torch.linspace(-reach, reach, panels + 1, dtype=mean.dtype, device=mean.device)
    grid[panels // 2] = 0
    grid = grid.expand(*mean.shape, panels + 1)
    return insert(grid, [(kink - mean) / torch.where(stddev > 0, stddev, 1) for kink in kinks])


def insert(grid: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Sort further breakpoints into an ascending grid, held within its ends."""
    if not places:
        return grid
    inside = torch.stack(list(places), dim=-1)
    inside = inside.maximum(grid[..., :1]).minimum(grid[..., -1:])
    return torch.cat([grid, inside], dim=-1).sort(dim=-1).values


def panel_count(stddev: Tensor, order: int = 1) -> int:
    """Even; narrow enough for features of unit size and for the waves of He_order."""
    widest = float(stddev.max()) if stddev.numel() else 0.0
    return 2 * math.ceil(REACH / 2 * max(1.0, widest / 2, math.sqrt(order) / 8)) * 2


def value_and_slope(function: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """g(y) and g'(y), the latter by autograd, without touching the caller's graph."""
    with torch.enable_grad():
        point = y.detach().requires_grad_()
        value = function(point)
        if not isinstance(value, Tensor) or value.shape != y.shape:
            raise QuadratureError(
                f"{name_of(function)} does not map a tensor to one of the same shape, so it is not "
                "element-wise; write a rule for it with @cp.rule"
            )
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value.sum(), point)
        else:
            slope = torch.zeros_like(y)
    return value.detach(), slope


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    return getattr(function, "__name__", None) or repr(function)
