"""The compiled kernel of a whole layer: all moments of a piecewise-linear function at once."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels import compiled
from covprop.kernels.normal import SATURATION
from covprop.kernels.polynomials import FLUSH
from covprop.kernels.rounding import DEGENERATE, REMAINDER, rounding


class _Settings(ctypes.Structure):
    """`PiecewiseLayer` of layer.h."""

    _fields_ = (
        ("knots", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("places", "slopes", "jumps")),
        *((name, ctypes.c_int64) for name in ("steps", "last")),
        ("ladder", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bounded", "few", "published")),
        *((name, ctypes.c_double) for name in ("saturation", "narrow", "fine", "accuracy")),
        *((name, ctypes.c_double) for name in ("direct_cost", "degenerate")),
        *((name, ctypes.c_double) for name in ("tiny", "large", "flush", "remainder")),
    )


class Pieces(NamedTuple):
    """A continuous piecewise-linear function."""

    knots: tuple[float, ...]
    slopes: tuple[float, ...]


class Terms(NamedTuple):
    """How pairs are computed.

    orders: that of the series, or those that it may have if its error is bounded; accuracy: that
    bound; few: the number of pairs up to which the direct formula has them all; direct_cost: of
    that formula, in terms of the series; last: how many of the last coefficients bound those
    beyond; narrow, fine: widths of segments, in deviations, from which the formulas of single
    elements and the direct one hold.
    """

    orders: tuple[int, ...]
    published: bool = False
    bounded: bool = False
    accuracy: float = 1.0
    few: int = 0
    direct_cost: float = 0.0
    last: int = 0
    narrow: float = 0.0
    fine: float = 0.0


@lru_cache(maxsize=256)
def _prepared(pieces: Pieces, terms: Terms, dtype: torch.dtype) -> tuple[Any, ...]:
    """The structure, and what its pointers point to."""
    rows = (*pieces, (0.0,) * len(pieces.knots))
    numbers = [(ctypes.c_double * len(row))(*row) for row in rows]
    ladder = (ctypes.c_int64 * len(terms.orders))(*terms.orders)
    finfo = torch.finfo(dtype)
    call = _Settings(
        len(pieces.knots), *(ctypes.addressof(row) for row in numbers), len(ladder), terms.last,
        ctypes.addressof(ladder), terms.bounded, terms.few, terms.published, SATURATION,
        terms.narrow, terms.fine, terms.accuracy, terms.direct_cost, rounding(DEGENERATE, dtype),
        finfo.tiny, finfo.max, FLUSH, rounding(REMAINDER, torch.float64),
    )  # fmt: skip
    return ctypes.byref(call), call, numbers, ladder


class _Vectors(ctypes.Structure):
    """`Vectors` of layer.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "n")),
        *((name, ctypes.c_void_p) for name in ("mean", "covariance")),
        *((name, ctypes.c_int64) for name in ("matrix", "row")),
    )


class Layer(NamedTuple):
    """A function of vectors, and its moments by torch code: mean and covariance of theirs."""

    function: Callable[[Tensor], Tensor]
    pieces: Pieces
    terms: Terms
    by_torch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def piecewise_layer(layer: Layer, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean (*batch, n) and covariance (*batch, n, n), None where the formulas do not hold.

    As where a segment is narrow, or with tensors that the library does not take.
    """
    if not is_followed(mean, covariance):
        return _forward(layer, mean, covariance)
    if not layer.terms.bounded:
        return None
    found = _forward(layer, mean.detach(), covariance.detach())
    return None if found is None else _Followed.apply(mean, covariance, found, _backward, layer)


def piecewise_marginals(
    layer: Layer, mean: Tensor, variance: Tensor, found: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Moments of elements, found without gradients, with a compiled backward pass."""
    return _Followed.apply(mean, variance, found, _marginals_backward, layer)


def is_followed(*tensors: Tensor) -> bool:
    """Whether autograd follows one of them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _forward(layer: Layer, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor] | None:
    if not compiled.usable(covariance) or not compiled.usable(mean):
        return None
    point = mean.double().contiguous()
    values = layer.function(point)
    centre = torch.empty_like(point)
    result = torch.empty(covariance.shape, dtype=covariance.dtype)
    matrix, vectors = _vectors(point, covariance)
    refused = compiled.function("piecewise_layer", result)(
        _prepared(layer.pieces, layer.terms, matrix.dtype)[0], ctypes.byref(vectors),
        values.data_ptr(), centre.data_ptr(), result.data_ptr(),
        compiled.threads(result.numel()),
    )  # fmt: skip
    return None if refused else (centre.to(mean.dtype), result)


def _vectors(mean: Tensor, covariance: Tensor) -> tuple[Tensor, _Vectors]:
    """The structure, and the matrix that it points to."""
    matrix = covariance
    if matrix.dim() != 2 or matrix.stride(1) != 1:  # noqa: PLR2004
        matrix = compiled.matrices(covariance)
    size = matrix.shape[-1]
    strides = matrix.stride(0), matrix.stride(-2)
    count = mean.numel() // size
    return matrix, _Vectors(count, size, mean.data_ptr(), matrix.data_ptr(), *strides)


Pair: TypeAlias = tuple[Tensor, Tensor]
"""Means, and variances or covariances."""


class _Followed(Function):
    """Results of a compiled kernel, with a compiled backward pass.

    Where that does not do, because its gradients have gradients or a transform runs, torch code
    makes the results once more.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, spread: Tensor, found: Pair,
        backward: Callable[[Layer, Pair, Pair], Pair | None], layer: Layer,
    ) -> Pair:  # fmt: skip
        ctx.compiled, ctx.layer = backward, layer
        ctx.save_for_backward(mean, spread)
        return found

    @staticmethod
    def backward(ctx: Any, by_mean: Tensor, by_spread: Tensor) -> tuple[Tensor | None, ...]:
        given, gradients = ctx.saved_tensors, (by_mean, by_spread)
        usable = all(compiled.usable(*both) for both in zip(given, gradients, strict=True))
        made = ctx.compiled(ctx.layer, given, gradients) if usable else None
        if made is None:
            return *_by_torch(ctx.layer, given, gradients), None, None, None
        return *made, None, None, None


def _backward(layer: Layer, given: Pair, gradients: Pair) -> Pair | None:
    mean, covariance = given
    point, by_mean = (t.double().contiguous() for t in (mean, gradients[0]))
    by_covariance = gradients[1].contiguous()
    to_mean = torch.empty_like(point)
    to_covariance = torch.empty(covariance.shape, dtype=covariance.dtype)
    matrix, vectors = _vectors(point, covariance)
    refused = compiled.function("piecewise_layer_backward", matrix)(
        _prepared(layer.pieces, layer.terms, matrix.dtype)[0], ctypes.byref(vectors),
        by_mean.data_ptr(), by_covariance.data_ptr(), to_mean.data_ptr(),
        to_covariance.data_ptr(), compiled.threads(to_covariance.numel()),
    )  # fmt: skip
    return None if refused else (to_mean.to(mean.dtype), to_covariance)


def _marginals_backward(layer: Layer, given: Pair, gradients: Pair) -> Pair | None:
    tensors = [tensor.contiguous() for tensor in (*given, *gradients)]
    made = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
    refused = compiled.loaded().piecewise_marginals_backward(
        _prepared(layer.pieces, layer.terms, torch.float64)[0], tensors[0].numel(),
        *(tensor.data_ptr() for tensor in (*tensors, *made)),
    )  # fmt: skip
    return None if refused else made


def _by_torch(layer: Layer, given: Pair, gradients: Pair) -> tuple[Tensor | None, ...]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = given if again else [t.detach().requires_grad_(t.requires_grad) for t in given]
        results = layer.by_torch(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again))
    return tuple(next(found) if t.requires_grad else None for t in inputs)
