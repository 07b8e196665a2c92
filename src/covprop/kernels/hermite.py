"""Normalised Hermite functions and the paper's series."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.normal import density

FLUSH = 0.3
"""The power of the smallest normal number below which a coefficient counts as zero."""


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
    """Units of the coefficients of each element: their size where it is near that of `flushed`.

    So it is of a bounded function of a wide input, of one of little height, and of a unit far in
    its saturation, whose correlations are those of any other. Else 1, and also where the square of
    the size would be a denormal number, and the variance with it.
    """
    size = torch.linalg.vector_norm(coefficients.detach(), dim=0)
    tiny = torch.finfo(dtype).tiny
    small = (size > tiny**0.5) & (size < tiny ** (FLUSH / 2))
    return torch.where(small, size, 1)


def in_units(covariance: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The covariance times the units of the coefficients of its rows and columns."""
    if bool((left != 1).any()) or bool((right != 1).any()):
        return covariance * left * right
    return covariance


def flushed(coefficients: Tensor, dtype: torch.dtype, largest: float = 1.0) -> Tensor:
    """Coefficients without those whose terms would be denormal numbers, which are very slow.

    They belong to elements of which the function hardly shows any variation. largest: the largest
    |rho| whose powers the terms have.
    """
    if largest == 1:
        return torch.where(coefficients.abs() < torch.finfo(dtype).tiny ** FLUSH, 0, coefficients)
    steps = torch.arange(len(coefficients), dtype=coefficients.dtype, device=coefficients.device)
    least = torch.finfo(dtype).tiny ** FLUSH * max(largest, 0.01) ** (-steps / 2)
    least = least.reshape(-1, *(1,) * (coefficients.dim() - 1))
    return torch.where(coefficients.abs() < least, 0, coefficients)


class _PowerSeries(Function):
    """Horner's rule, whose backward pass stores none of its steps."""

    @staticmethod
    def forward(ctx: Any, correlation: Tensor, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(correlation, left, right)
        total = torch.empty_like(correlation)
        torch.mul(left[-1], right[-1], out=total)
        for k in reversed(range(len(left) - 1)):
            total.mul_(correlation).addcmul_(left[k], right[k])
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        correlation, left, right = ctx.saved_tensors
        order = len(left)
        slope = torch.zeros_like(correlation)
        for k in reversed(range(1, order)):
            slope.mul_(correlation).addcmul_(left[k], right[k], value=k)
        grad_left, grad_right = torch.empty_like(left), torch.empty_like(right)
        limits = torch.finfo(gradient.dtype)
        # Gradients may be of any size: terms are flushed next to the others of their block.
        size = torch.linalg.vector_norm(gradient, 1, (-2, -1), keepdim=True)
        size = size.clamp(limits.tiny, limits.max)
        power, least = gradient / size, limits.tiny ** (1 - FLUSH)
        for k in range(order):
            grad_left[k] = power @ right[k].mT
            grad_right[k] = left[k].mT @ power
            torch.hardshrink(power.mul_(correlation), least, out=power)  # or denormal, as above
        return slope.mul_(gradient), grad_left.mul_(size), grad_right.mul_(size)
