"""Roots of many functions at once, each within a bracket of its own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 100
"""Evaluations; bisection alone needs no more in float64."""


class End(NamedTuple):
    """One end of every bracket: where it is, and the function there."""

    place: Tensor
    value: Tensor

    def where(self, condition: Tensor, other: "End") -> "End":
        """These where the condition holds, else the others."""
        return End(*(torch.where(condition, *pair) for pair in zip(self, other, strict=True)))


def narrowed(
    function: Callable[[Tensor, Tensor], Tensor],
    first: End,
    second: End,
    active: Tensor,
    tolerance: float,
) -> End:
    """The end with a value from 0 of brackets that are narrowed to a relative tolerance.

    Inverse quadratic interpolation where its three points say that the inverse is a function, else
    bisection (Chandrupatla 1997). first, second: ends with values of opposite sign; active: where
    there is a bracket at all; function: of places and of a mask of those that are still sought.
    """
    share = torch.full_like(first.place, 0.5)
    for _ in range(MOST):
        width = (second.place - first.place).abs()
        near = torch.where(first.value.abs() < second.value.abs(), first.place, second.place)
        least = tolerance * near.abs() / torch.where(width > 0, width, 1)
        active = active & (width > 0) & (least < 1) & (first.value != 0) & (second.value != 0)
        if not bool(active.any()):
            break
        share = torch.maximum(torch.minimum(share, 1 - least / 2), least / 2)
        place = first.place + share * (second.place - first.place)
        new = End(place, function(place, active))
        same = torch.sign(new.value) == torch.sign(first.value)
        third = first.where(same, second)
        other = second.where(same, first)
        first, second = new.where(active, first), other.where(active, second)
        share = _interpolated(first, second, third)
    return first.where(first.value >= 0, second)


def _interpolated(a: End, b: End, c: End) -> Tensor:
    """Where between a and b the next place is, as a share of their distance."""
    place = (a.place - b.place) / _divisor(c.place - b.place)
    value = (a.value - b.value) / _divisor(c.value - b.value)
    smooth = (value.square() < place) & ((1 - value).square() < 1 - place)
    share = a.value / _divisor(b.value - a.value) * (c.value / _divisor(b.value - c.value))
    outer = (c.place - a.place) / _divisor(b.place - a.place)
    share = share + outer * (a.value / _divisor(c.value - a.value)) * (
        b.value / _divisor(c.value - b.value)
    )
    return torch.where(smooth, share, 0.5)


def _divisor(difference: Tensor) -> Tensor:
    return torch.where(difference != 0, difference, 1)
