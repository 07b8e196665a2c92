"""Smooth functions of several elements, by the delta method.

Mean to second order, E f(x) ~ f(mu) + 1/2 sum_kl d_k d_l f(mu) Cov_kl, covariance to first order,
J Cov J^T with the Jacobian at the mean. An approximation for small noise; docs/operations.md has
measured errors.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import LinearMap
from covprop.dispatch import rule
from covprop.errors import UnsupportedOperation
from covprop.rules.operands import (
    check_batch_is_separate,
    check_batch_shape,
    of_tensor,
    the_gaussian,
)
from covprop.tensor import GaussianTensor

AWAY_FROM_ZERO = 5.0
"""Standard deviations between a divisor and zero."""
APPROXIMATE = "approximate: second-order mean, first-order covariance"


def delta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Carry a Gaussian through a smooth function."""
    _prepare_forward_mode()
    x = the_gaussian(function, args, kwargs)
    call = of_tensor(function, args, kwargs)
    value = call(x.loc)
    check_batch_shape(function, x, value.shape)

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(call, (x.loc,), (direction,))[1]
        return result

    check_batch_is_separate(function, tangent, x, x.shape)

    def bend(direction: Tensor, row: Tensor) -> Tensor:
        def slope(y: Tensor) -> Tensor:
            inner: Tensor = torch.func.jvp(call, (y,), (direction,))[1]
            return inner

        result: Tensor = torch.func.jvp(slope, (x.loc,), (row,))[1]
        return result

    size = x.event_shape.numel()
    unit = torch.eye(size, dtype=x.dtype, device=x.device)
    units = unit.reshape(size, *(1,) * len(x.batch_shape), *x.event_shape).expand(size, *x.shape)
    rows = x.covariance.matrix().movedim(-2, 0).reshape(size, *x.shape)
    curvature = torch.func.vmap(bend)(units, rows).sum(0)
    return x.through(value + curvature / 2, LinearMap(tangent, x.event_shape))


@cache
def _prepare_forward_mode() -> None:
    """Let torch import its forward mode once, without the warnings that this gives."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _normalised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Written out: torch's fused kernel has wrong second derivatives in forward mode."""
    result = _normalised(x, list(range(-len(shape), 0)), eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


@rule(*spellings("layer_norm"), kind="several elements", treatment=APPROXIMATE, name="layer_norm")
def layer_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> GaussianTensor:
    """Over the last dimensions."""
    return delta(_layer_norm, input, tuple(normalized_shape), weight, bias, eps)


@rule(F.instance_norm, kind="several elements", treatment=APPROXIMATE, name="instance_norm")
def instance_norm(
    function: Callable[..., Any],
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Over the positions of each channel, or batch norm where it keeps running statistics."""
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)

    def instance(x: Tensor) -> Tensor:
        channel = (-1, *(1,) * (x.dim() - 2))
        result = _normalised(x, list(range(2, x.dim())), eps)
        result = result if weight is None else result * weight.reshape(channel)
        return result if bias is None else result + bias.reshape(channel)

    return delta(instance, input)


@rule(*spellings("reciprocal"), kind="several elements", treatment=APPROXIMATE, name="reciprocal")
def reciprocal(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """1 / x for x that stays away from zero: elsewhere it has no moments."""
    mean = input.loc.reshape(*input.batch_shape, input.event_shape.numel())
    if bool((mean.square() < AWAY_FROM_ZERO**2 * input.covariance.diagonal()).any()):
        raise UnsupportedOperation(
            "division by a Gaussian has no finite moments where it may be zero, and here its mean "
            f"is within {AWAY_FROM_ZERO:g} standard deviations of it; bound the divisor first"
        )
    return delta(torch.reciprocal, input)


def _smooth(*names: str) -> None:
    rule(*spellings(*names), kind="several elements", treatment=APPROXIMATE, name=names[0])(delta)


_smooth("softmax")
_smooth("log_softmax")
_smooth("logsumexp")
_smooth("group_norm")
_smooth("rms_norm")
_smooth("normalize")
_smooth("var")
_smooth("std")
_smooth("norm")
