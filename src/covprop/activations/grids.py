"""Where to evaluate a function around a Gaussian, and its value and derivative there."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from covprop.errors import QuadratureError, name_of
from covprop.kernels.hermite import hermite_functions
from covprop.kernels.nodes import Panels

REACH = 12.0
"""Quadrature covers this many standard deviations on either side."""
NODES = 10
"""Gauss-Legendre nodes on each panel."""
WIDE = 8.0
"""Standard deviation above which an even grid would need too many panels."""
GROWTH = 1.25
"""Ratio of the distances from zero, or a kink, of neighbouring points for wide elements."""
SOFTENED = (-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0)
"""Breakpoints around a kink of the second variable, in units of the width that blurs it."""


@dataclass(frozen=True)
class Scalar:
    """A function: its code, its kinks, its mean in closed form if it has one.

    fineness: the multiple of the usual number of panels that its moments needed; jumps: those of
    its kinks where it jumps, and by how much; parameters: numbers of each element that the function
    takes after y. Parameters, and kinks that are tensors, have the shape of the elements.
    """

    function: Callable[..., Tensor]
    kinks: Sequence[float | Tensor] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    fineness: int = 1
    jumps: Sequence[tuple[float, float]] = ()
    parameters: tuple[Tensor, ...] = ()

    def __call__(self, y: Tensor) -> Tensor:
        """g(y), for y (*elements, *any)."""
        return self.function(y, *(leading(parameter, y) for parameter in self.parameters))

    @property
    def of_elements(self) -> tuple[Tensor, ...]:
        """What is a number of each element: kinks, then parameters."""
        return (*(kink for kink in self.kinks if isinstance(kink, Tensor)), *self.parameters)

    def having(self, tensors: Sequence[Tensor]) -> "Scalar":
        """The same with other numbers for each element; kinks of a single one are plain numbers."""
        if not tensors:
            return self
        rest = iter(tensors)
        kinks = [next(rest) if isinstance(kink, Tensor) else kink for kink in self.kinks]
        if tensors[0].numel() == 1:
            kinks = [float(kink) for kink in kinks]
        return replace(self, kinks=kinks, parameters=tuple(rest))

    def take(self, index: Any) -> "Scalar":
        """The function of some of the elements."""
        return self.having([tensor[index] for tensor in self.of_elements])


@dataclass(frozen=True)
class Two:
    """The functions of a pair; the second is integrated given the variable of the first."""

    first: Scalar
    second: Scalar

    @property
    def fineness(self) -> int:
        """That of the finer one."""
        return max(self.first.fineness, self.second.fineness)

    def take(self, index: Any) -> "Two":
        """The functions of some of the pairs."""
        return Two(self.first.take(index), self.second.take(index))


def breakpoints(
    kinks: Sequence[float | Tensor],
    mean: Tensor,
    stddev: Tensor,
    panels: int,
    reach: float = REACH,
    fineness: float = 1.0,
) -> Tensor:
    """An even grid over `reach` standard deviations, the kinks of each element sorted in.

    Where the standard deviation is wide against features of unit size, panels that grow with the
    distance from zero and from the kinks are sorted in too, as many as the fineness asks for. Shape
    (*shape of mean, breakpoints), or (breakpoints,) if the grid is the same for all elements.
    """
    grid = torch.linspace(-reach, reach, panels + 1, dtype=mean.dtype, device=mean.device)
    grid[panels // 2] = 0
    widest = float(stddev.max()) if stddev.numel() else 0.0
    points = list(kinks)
    if widest > WIDE:
        points = graded(kinks, 1 / fineness, fineness, widest * 2 * reach / panels)
    scale = torch.where(stddev > 0, stddev, 1)
    places = [(leading(point, mean) - mean) / scale for point in points]
    return insert(grid.expand(*mean.shape, panels + 1), places) if places else grid


def leading(number: Any, like: Tensor) -> Any:
    """A number of each element (*elements), to be broadcast to (*elements, *any)."""
    if not isinstance(number, Tensor):
        return number
    return number.reshape(*number.shape, *(1,) * (like.dim() - number.dim()))


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
    points = {
        centre + side * distance
        for centre, low, high in zip(centres, edges, edges[1:], strict=False)
        for distance in distances
        for side in (-1, 1)
        if low <= centre + side * distance <= high
    }
    moving = [kink for kink in kinks if isinstance(kink, Tensor)]
    around = [
        kink + side * distance for kink in moving for distance in distances for side in (-1, 1)
    ]
    return [*sorted(points), *around]


def insert(grid: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Sort further breakpoints into an ascending grid, held within its ends."""
    if not places:
        return grid
    inside = torch.stack(list(places), dim=-1)
    inside = inside.maximum(grid[..., :1]).minimum(grid[..., -1:])
    return torch.cat([grid, inside], dim=-1).sort(dim=-1).values


def panel_count(stddev: Tensor, order: int = 1) -> int:
    """A multiple of 4; narrow enough for features of unit size and for the waves of He_order.

    In powers of two, so that few different grids are ever made.
    """
    widest = float(stddev.max()) if stddev.numel() else 0.0
    needed = max(1.0, min(widest, WIDE) / 2, math.sqrt(order) / 8)
    if widest > WIDE:  # the graded points see to the function, the even ones to the density
        needed = max(1.0, math.sqrt(order) / 8)
    return 2 * math.ceil(REACH) * 2 ** math.ceil(math.log2(needed))


@lru_cache(maxsize=8)
def hermite_basis(panels: int, order: int) -> Tensor:
    """What turns g' at the nodes of an even grid into a_k / sigma, k = 1 ... order.

    Shape (order, panels * NODES), float64: weights times He_{k-1} phi / sqrt(k!).
    """
    zero = torch.zeros((), dtype=torch.float64)
    grid = Panels(breakpoints((), zero, zero, panels), NODES)
    rows = zip(range(1, order + 1), hermite_functions(grid.nodes), strict=False)
    return torch.stack([(grid.weights * h / math.sqrt(k)).flatten() for k, h in rows])


def value_and_slope(scalar: Scalar, y: Tensor) -> tuple[Tensor, Tensor]:
    """g(y) and g'(y), the latter by autograd, whatever the caller's mode of it."""
    with torch.inference_mode(False), torch.enable_grad():
        point = y.detach().clone().requires_grad_()  # a clone: y may be an inference tensor
        value = scalar(point)
        if not isinstance(value, Tensor) or value.shape != y.shape:
            raise QuadratureError(
                f"{name_of(scalar.function)} does not map a tensor to one of the same shape, so it "
                "is not element-wise; write a rule for it with @cp.rule"
            )
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value.sum(), point)
        else:
            slope = torch.zeros_like(y)
    return value.detach(), slope


def rest_of(rho: Tensor) -> Tensor:
    """sqrt(1 - rho^2): the share of a standard deviation that the other variable leaves."""
    return ((1 - rho) * (1 + rho)).clamp(min=0).sqrt()
