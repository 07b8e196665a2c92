"""The compiled kernel of a whole layer: all moments of a piecewise-linear function at once."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covprop.kernels import compiled
from covprop.kernels.normal import SATURATION
from covprop.kernels.polynomials import FLUSH
from covprop.kernels.rounding import DEGENERATE, REMAINDER, rounding


class _PiecewiseLayer(ctypes.Structure):
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
    call = _PiecewiseLayer(
        len(pieces.knots), *(ctypes.addressof(row) for row in numbers), len(ladder), terms.last,
        ctypes.addressof(ladder), terms.bounded, terms.few, terms.published, SATURATION,
        terms.narrow, terms.fine, terms.accuracy, terms.direct_cost, rounding(DEGENERATE, dtype),
        finfo.tiny, finfo.max, FLUSH, rounding(REMAINDER, torch.float64),
    )  # fmt: skip
    return ctypes.byref(call), call, numbers, ladder


def piecewise_layer(
    function: Callable[[Tensor], Tensor], pieces: Pieces, mean: Tensor, covariance: Tensor,
    terms: Terms,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Mean (*batch, n) and covariance (*batch, n, n), None where the formulas do not hold.

    As where a segment is narrow, or with tensors that the library does not take.
    """
    if not compiled.usable(covariance) or not compiled.usable(mean):
        return None
    point = mean.double().contiguous()
    values = function(point)
    matrix = covariance
    if matrix.dim() != 2 or matrix.stride(1) != 1:  # noqa: PLR2004
        matrix = compiled.matrices(covariance)
    count, size = mean.numel(), mean.shape[-1]
    centre = torch.empty_like(point)
    result = torch.empty(covariance.shape, dtype=covariance.dtype)
    row = matrix.stride(-2)
    refused = compiled.function("piecewise_layer", result)(
        _prepared(pieces, terms, covariance.dtype)[0], count // size, size, point.data_ptr(),
        values.data_ptr(), matrix.data_ptr(), matrix.stride(0), row, centre.data_ptr(),
        result.data_ptr(), compiled.threads(count * size),
    )  # fmt: skip
    return None if refused else (centre.to(mean.dtype), result)
