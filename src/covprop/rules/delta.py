"""Smooth functions of several elements, by the delta method.

Mean to second order, E f(x) ~ f(mu) + 1/2 sum_kl d_k d_l f(mu) Cov_kl, covariance to first order,
J Cov J^T with the Jacobian at the mean. An approximation for small noise; docs/operations.md has
measured errors.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import Diagonal, LinearMap, Sketch
from covprop.dispatch import Batch, rule
from covprop.errors import ApproximationWarning, UnsupportedOperation, name_of, warn_user
from covprop.kernels.forward import jvp
from covprop.rules.operands import (
    check_batch_is_separate,
    check_batch_shape,
    of_tensor,
    the_gaussian,
)
from covprop.tensor import GaussianTensor

AWAY_FROM_ZERO = 5.0
"""Standard deviations between a divisor and zero."""
BENT = 0.25
"""The share of a slope that may be wrong a standard deviation away without a warning."""
CHUNK = 2**24
"""Entries of directions that are differentiated along at a time."""
APPROXIMATE = "approximate: second-order mean, first-order covariance"


def delta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Carry a Gaussian through a smooth function."""
    x = the_gaussian(function, args, kwargs)
    call = of_tensor(function, args, kwargs)
    point = x.loc  # and not x, which what outlives this operation must not hold
    value = call(point)
    check_batch_shape(function, x, value.shape)

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = jvp(call, point, direction)
        return result

    check_batch_is_separate(function, tangent, x, x.shape)

    def bend(direction: Tensor, row: Tensor) -> Tensor:
        def slope(y: Tensor) -> Tensor:
            inner: Tensor = jvp(call, y, direction)
            return inner

        result: Tensor = jvp(slope, point, row)
        return result

    curvature = _summed(bend, x)
    _check_linear(function, call, x, tangent)
    return x.through(value + curvature / 2, LinearMap(tangent, x.event_shape))


def _summed(bend: Callable[[Tensor, Tensor], Tensor], x: GaussianTensor) -> Tensor:
    """sum_k bend(unit vector k, row k of the covariance), some k at a time."""
    size = x.event_shape.numel()
    step = max(1, CHUNK // max(1, x.numel()))
    total: Tensor | float = 0.0
    if isinstance(x.covariance, Sketch):  # sum_c bend(S_c, S_c) has the same expectation
        for part in x.covariance.rows().split(step, dim=-2):
            rows = part.movedim(-2, 0).reshape(-1, *x.shape)
            total = total + torch.func.vmap(bend)(rows, rows).sum(0)
        return torch.as_tensor(total)
    for start in range(0, size, step):
        index = torch.arange(start, min(size, start + step), device=x.device)
        units = torch.zeros(len(index), size, dtype=x.dtype, device=x.device)
        units[torch.arange(len(index), device=x.device), index] = 1
        units = units.reshape(len(index), *(1,) * len(x.batch_shape), *x.event_shape)
        units = units.expand(len(index), *x.shape)
        if isinstance(x.covariance, Diagonal):
            scale = x.covariance.values[..., index].movedim(-1, 0)
            rows = units * scale.reshape(*scale.shape, *(1,) * len(x.event_shape))
        else:
            rows = x.covariance.matrix()[..., index, :].movedim(-2, 0)
            rows = rows.reshape(len(index), *x.shape)
        total = total + torch.func.vmap(bend)(units, rows).sum(0)
    return total if isinstance(total, Tensor) else torch.zeros_like(x.loc)


@torch.no_grad()
def _check_linear(
    function: Callable[..., Any],
    call: Callable[[Tensor], Tensor],
    x: GaussianTensor,
    tangent: Callable[[Tensor], Tensor],
) -> None:
    """Warn where one standard deviation is too far for the slope at the mean."""
    point = x.loc.detach()
    stddev = x.covariance.diagonal().detach().clamp(min=0).sqrt().reshape(x.shape)
    signs = torch.cos(2.0 * torch.arange(x.event_shape.numel(), device=x.device)).sign()
    step = stddev * signs.reshape(x.event_shape).to(stddev)
    along = tangent(step)
    rise = (call(point + step) - call(point - step)) / 2
    dims = tuple(range(len(x.batch_shape), along.dim()))
    size, error = along.square().sum(dims), (rise - along).square().sum(dims)
    if bool((error > BENT**2 * size).any()):
        warn_user(
            f"{name_of(function)} bends over less than a standard deviation of its input here, so "
            "its first-order covariance may be far off; compare with sampling",
            ApproximationWarning,
        )


@rule(*spellings("reciprocal"), kind="several elements", treatment=APPROXIMATE, name="reciprocal")
def reciprocal(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """1 / x for x that stays away from zero: elsewhere it has no moments."""
    if bool((_distance(input) < AWAY_FROM_ZERO).any()):
        raise UnsupportedOperation(
            "division by a Gaussian has no finite moments where it may be zero, and here its mean "
            f"is within {AWAY_FROM_ZERO:g} standard deviations of it; bound the divisor first"
        )
    return delta(torch.reciprocal, input)


@rule(*spellings("sqrt", "rsqrt", "log"), kind="several elements", treatment=APPROXIMATE,
      name="sqrt, rsqrt, log")  # fmt: skip
def of_positive(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Functions of positive numbers, for x that stays away from zero."""
    if bool(((_distance(input) < AWAY_FROM_ZERO).reshape(input.shape) | (input.loc < 0)).any()):
        raise UnsupportedOperation(
            f"{name_of(function)} is defined for positive numbers, and here a mean is within "
            f"{AWAY_FROM_ZERO:g} standard deviations of zero or below; bound its argument first"
        )
    return delta(function, input)


def _distance(x: GaussianTensor) -> Tensor:
    """Standard deviations between each mean and zero, (*batch, n)."""
    mean = x.loc.detach().reshape(*x.batch_shape, x.event_shape.numel()).abs()
    stddev = x.covariance.diagonal().detach().clamp(min=0).sqrt()
    return torch.where(stddev > 0, mean / torch.where(stddev > 0, stddev, 1), math.inf)


def _smooth(*names: str) -> None:
    rule(*spellings(*names), kind="several elements", treatment=APPROXIMATE, name=names[0],
         batch=Batch.ANYWHERE)(delta)  # fmt: skip


_smooth("softmax")
_smooth("log_softmax")
_smooth("logsumexp")
