"""Variances, lengths and angles of vectors: exact where quadratic, else by the delta method."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.dispatch import Batch, rule
from covprop.errors import UnsupportedOperation, name_of
from covprop.rules.affine import affine
from covprop.rules.delta import APPROXIMATE, delta
from covprop.rules.operands import at_means, gaussians, the_gaussian
from covprop.tensor import GaussianTensor

MATRIX = 2
"""Dimensions of a matrix."""
QUADRATIC = "exact"


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
