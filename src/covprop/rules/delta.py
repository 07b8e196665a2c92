"""Smooth functions of several elements, by the delta method.

Mean to second order, E f(x) ~ f(mu) + 1/2 sum_kl d_k d_l f(mu) Cov_kl, covariance to first order,
J Cov J^T with the Jacobian at the mean. An approximation for small noise; docs/operations.md has
measured errors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import LinearMap
from covprop.dispatch import rule
from covprop.rules.affine import check_batch_is_separate
from covprop.rules.operands import check_batch_shape, of_tensor, the_gaussian
from covprop.tensor import GaussianTensor

APPROXIMATE = "approximate: second-order mean, first-order covariance"


def delta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Carry a Gaussian through a smooth function."""
    x = the_gaussian(function, args, kwargs)
    call = of_tensor(function, args, kwargs)
    value = call(x.loc)
    check_batch_shape(function, x, value.shape)

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(call, (x.loc,), (direction,))[1]
        return result

    check_batch_is_separate(function, tangent, x)

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


def _smooth(*names: str) -> None:
    rule(*spellings(*names), kind="several elements", treatment=APPROXIMATE, name=names[0])(delta)


_smooth("softmax")
_smooth("log_softmax")
_smooth("logsumexp")
_smooth("layer_norm")
_smooth("group_norm")
_smooth("rms_norm")
_smooth("normalize")
_smooth("var")
_smooth("std")
_smooth("norm")
