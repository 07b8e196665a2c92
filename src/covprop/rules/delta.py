"""Smooth functions of several elements, by the delta method.

Mean to second order, E f(x) ~ f(mu) + 1/2 sum_kl d_k d_l f(mu) Cov_kl, covariance to first order,
J Cov J^T with the Jacobian at the mean. An approximation for small noise; docs/operations.md has
measured errors.
"""

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import Diagonal, LinearMap
from covprop.dispatch import Batch, rule
from covprop.errors import ApproximationWarning, UnsupportedOperation, name_of
from covprop.rules.affine import affine
from covprop.rules.operands import (
    at_means,
    batch_error,
    check_batch_is_separate,
    check_batch_shape,
    gaussians,
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
MATRIX = 2
"""Dimensions of a matrix."""
APPROXIMATE = "approximate: second-order mean, first-order covariance"
QUADRATIC = "exact"


def delta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Carry a Gaussian through a smooth function."""
    _prepare_forward_mode()
    x = the_gaussian(function, args, kwargs)
    call = of_tensor(function, args, kwargs)
    point = x.loc  # and not x, which what outlives this operation must not hold
    value = call(point)
    check_batch_shape(function, x, value.shape)

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(call, (point,), (direction,))[1]
        return result

    check_batch_is_separate(function, tangent, x, x.shape)

    def bend(direction: Tensor, row: Tensor) -> Tensor:
        def slope(y: Tensor) -> Tensor:
            inner: Tensor = torch.func.jvp(call, (y,), (direction,))[1]
            return inner

        result: Tensor = torch.func.jvp(slope, (point,), (row,))[1]
        return result

    curvature = _summed(bend, x)
    _check_linear(function, call, x, tangent)
    return x.through(value + curvature / 2, LinearMap(tangent, x.event_shape))


def _summed(bend: Callable[[Tensor, Tensor], Tensor], x: GaussianTensor) -> Tensor:
    """sum_k bend(unit vector k, row k of the covariance), some k at a time."""
    size = x.event_shape.numel()
    step = max(1, CHUNK // max(1, x.numel()))
    total: Tensor | float = 0.0
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
        warnings.warn(
            f"{name_of(function)} bends over less than a standard deviation of its input here, so "
            "its first-order covariance may be far off; compare with sampling",
            ApproximationWarning,
            stacklevel=2,
        )


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


@rule(*spellings("layer_norm"), kind="several elements", treatment=APPROXIMATE, name="layer_norm",
      batch=Batch.STEPWISE)  # fmt: skip
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
    if input.batch_at >= max(input.dim() - len(normalized_shape), 1):
        raise batch_error(function, input)
    result = delta(_layer_norm, input.laid(0), tuple(normalized_shape), weight, bias, eps)
    return result.laid(input.batch_at)


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
_smooth("group_norm")
_smooth("rms_norm")


@rule(*spellings("var"), kind="several elements", treatment=QUADRATIC, name="var",
      batch=Batch.STEPWISE)  # fmt: skip
def var(
    function: Callable[..., Any],
    input: Any,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> Any:
    """A sum of squares of what is left of the mean."""
    if isinstance(dim, bool):  # torch.var(input, unbiased)
        dim, unbiased = None, dim
    dims = list(range(input.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    less = (1.0 if correction is None else correction) if unbiased in (None, True) else 0.0
    count = math.prod(input.shape[d] for d in dims) - less
    squares = (input - input.mean(dims, keepdim=True)).square()
    return squares.sum(dims, keepdim=keepdim) * (1 / max(count, 0) if count > 0 else math.nan)


@rule(*spellings("std"), kind="several elements", treatment=APPROXIMATE, name="std")
def std(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """The root of the variance."""
    return _root(function, lambda *a, **k: _power(var(torch.var, *a, **k), 0.5), args, kwargs)


def _root(
    function: Callable[..., Any], written: Callable[..., Any], args: Any, kwargs: Any
) -> GaussianTensor:
    """A function with a root, which has no slope where it is zero.

    It is written out, because second derivatives of torch's own forbid a backward pass.
    """
    x = the_gaussian(function, args, kwargs)
    if bool((at_means(written, args, kwargs) == 0).any()) and bool(x.covariance.diagonal().any()):
        raise UnsupportedOperation(
            f"{name_of(function)} is zero at the mean, where it is not smooth: the delta method "
            "does not hold there"
        )
    return delta(wraps(function)(written), *args, **kwargs)


def _length(x: Tensor, order: float, dims: Any, keepdim: bool) -> Tensor:
    dims = list(range(x.dim())) if dims is None else dims
    if order == 2:  # noqa: PLR2004
        return _power(x.square().sum(dims, keepdim=keepdim), 0.5)
    return _power(x.abs().pow(order).sum(dims, keepdim=keepdim), 1 / order)


def _power(total: Tensor, exponent: float) -> Tensor:
    """A root that is zero at zero, with the slope zero: it is used there only without noise."""
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1).pow(exponent), 0)


@rule(*spellings("norm"), torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
      kind="several elements", treatment=APPROXIMATE, name="norm, linalg.norm")  # fmt: skip
def norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Euclidean and Frobenius norms, and the other smooth ones of vectors."""
    x = the_gaussian(function, args, kwargs)
    _, order, dim, keepdim, *_ = *args, *(None,) * 4
    order, dim = kwargs.get("p", kwargs.get("ord", order)), kwargs.get("dim", dim)
    keepdim = bool(kwargs.get("keepdim", keepdim))
    both = isinstance(dim, list | tuple) and len(dim) == MATRIX
    matrix = function.__name__ == "linalg_norm" and (both or (dim is None and x.dim() == MATRIX))
    of_vectors = function.__name__ != "linalg_matrix_norm" and not matrix
    smooth = of_vectors and isinstance(order, int | float) and 1 < order < math.inf
    if not smooth and order not in (None, "fro"):
        raise UnsupportedOperation(
            f"{name_of(function)} of order {order!r} is not smooth and has no rule; of order 1 it "
            "is x.abs().sum(...), of order inf x.abs().amax(...)"
        )
    if function.__name__ == "linalg_matrix_norm" and dim is None:
        dim = (-2, -1)
    power = 2.0 if order in (None, "fro") else float(order)
    return _root(function, lambda y: _length(y, power, dim, keepdim), (x,), {})


@rule(F.normalize, kind="several elements", treatment=APPROXIMATE, name="normalize")
def normalize(
    function: Callable[..., Any],
    input: GaussianTensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: None = None,
) -> GaussianTensor:
    """A vector over its length."""

    def written(x: Tensor) -> Tensor:
        return x / _length(x, p, dim, keepdim=True).clamp(min=eps)

    return delta(wraps(function)(written), input)


@rule(torch.var_mean, torch.std_mean, kind="several elements", treatment=APPROXIMATE,
      name="var_mean, std_mean")  # fmt: skip
def spread_and_mean(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The variance or standard deviation, and the mean, which is linear."""
    variance = function is torch.var_mean

    def mean(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(*args, **kwargs)[1]
        return result

    spread = (var if variance else std)(torch.std, *args, **kwargs)
    return spread, affine(mean, *args, **kwargs)


@rule(*spellings("cosine_similarity"), kind="several elements", treatment=APPROXIMATE,
      name="cosine_similarity")  # fmt: skip
def cosine_similarity(
    function: Callable[..., Any], x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8
) -> Any:
    """Of a tensor and a constant, or of two tensors as one vector."""

    def written(a: Tensor, b: Tensor) -> Tensor:
        lengths = [_length(t, 2, dim, keepdim=False).clamp(min=eps) for t in (a, b)]
        return (a * b).sum(dim) / (lengths[0] * lengths[1])

    pair = gaussians((x1, x2), {})
    if len(pair) == 1:
        return delta(wraps(function)(written), x1, x2)
    shapes, sizes = [x.shape for x in pair], [x.event_shape.numel() for x in pair]
    flat = [x.reshape(*x.batch_shape, n) for x, n in zip(pair, sizes, strict=True)]

    def of_both(vector: Tensor) -> Tensor:
        halves = zip(vector.split(sizes, -1), shapes, strict=True)
        first, second = (half.reshape(shape) for half, shape in halves)
        return written(first, second)

    return delta(of_both, torch.cat(flat, -1))
