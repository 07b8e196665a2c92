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
from covprop.covariance import LinearMap
from covprop.errors import ApproximationWarning, OutsideDomain, name_of, warn_user
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.kernels.gradients import jvp
from covprop.rules.operands import (
    check_batch_is_separate,
    check_batch_shape,
    of_tensor,
    the_gaussian,
)

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
    value = call(x.loc)
    check_batch_shape(function, x, value.shape)
    # In float64, as p (1 - p) of a probability near one cancels. And not x itself, which what
    # outlives this operation must not hold.
    point, dtype = x.loc.double(), value.dtype

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = jvp(call, point, direction.double())
        return result.to(dtype)

    check_batch_is_separate(function, tangent, x, x.shape)

    def bend(direction: Tensor, row: Tensor) -> Tensor:
        def slope(y: Tensor) -> Tensor:
            inner: Tensor = jvp(call, y, direction.double())
            return inner

        result: Tensor = jvp(slope, point, row.double())
        return result.to(dtype)

    curvature = _summed(bend, x)
    _check_linear(function, call, x, tangent)
    return x.through(value + curvature / 2, LinearMap(tangent, x.event_shape))


def _summed(bend: Callable[[Tensor, Tensor], Tensor], x: GaussianTensor) -> Tensor | float:
    """E[bend(dx, dx)], some directions of the covariance at a time."""
    step = max(1, CHUNK // max(1, x.numel()))
    total: Tensor | float = 0.0
    for left, right in x.carrier.directions(step):
        both = (rows.reshape(len(rows), *x.shape) for rows in (left, right))
        total = total + torch.func.vmap(bend)(*both).sum(0)
    return total


@torch.no_grad()
def _check_linear(
    function: Callable[..., Any],
    call: Callable[[Tensor], Tensor],
    x: GaussianTensor,
    tangent: Callable[[Tensor], Tensor],
) -> None:
    """Warn where one standard deviation is too far for the slope at the mean."""
    point = x.loc.detach()
    stddev = x.variances.detach().clamp(min=0).sqrt().reshape(x.shape)
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


@rule(*spellings("reciprocal"), kind=Kind.SMOOTH, treatment=APPROXIMATE, name="reciprocal")
def reciprocal(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """1 / x for x that stays away from zero: elsewhere it has no moments."""
    if bool((_distance(input) < AWAY_FROM_ZERO).any()):
        raise OutsideDomain(
            "division by a Gaussian has no finite moments where it may be zero, and here its mean "
            f"is within {AWAY_FROM_ZERO:g} standard deviations of it; bound the divisor first"
        )
    return delta(torch.reciprocal, input)


@rule(*spellings("sqrt", "rsqrt", "log"), kind=Kind.SMOOTH, treatment=APPROXIMATE,
      name="sqrt, rsqrt, log")  # fmt: skip
def of_positive(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Functions of positive numbers, for x that stays away from zero."""
    if bool(((_distance(input) < AWAY_FROM_ZERO).reshape(input.shape) | (input.loc < 0)).any()):
        raise OutsideDomain(
            f"{name_of(function)} is defined for positive numbers, and here a mean is within "
            f"{AWAY_FROM_ZERO:g} standard deviations of zero or below; bound its argument first"
        )
    return delta(function, input)


def _distance(x: GaussianTensor) -> Tensor:
    """Standard deviations between each mean and zero, (*batch, n)."""
    mean = x.flat.detach().abs()
    stddev = x.variances.detach().clamp(min=0).sqrt()
    return torch.where(stddev > 0, mean / torch.where(stddev > 0, stddev, 1), math.inf)


def _smooth(*names: str) -> None:
    rule(*spellings(*names), kind=Kind.SMOOTH, treatment=APPROXIMATE, name=names[0],
         batch=Batch.ANYWHERE)(delta)  # fmt: skip


_smooth("softmax")
_smooth("log_softmax")
_smooth("logsumexp")
