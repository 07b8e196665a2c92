"""The compiled kernels of pairs: covariances in one pass over memory and one parallel region."""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.kernels.compiled import function, matrices, threads
from covprop.kernels.rounding import DEGENERATE, rounding

FORMULAS = ("", "knots", "probit", "gelu")
"""Direct formulas for pairs that the series does not reach."""


class Series(NamedTuple):
    """The series of one side of the pairs: tensors (*orders, *batch, n).

    inverse: 1 / sigma; tails: what is left of the series after each order that it may have;
    coefficients: a_k / sigma in their units.
    """

    inverse: Tensor
    tails: Tensor | None
    coefficients: Tensor
    units: Tensor | None


class Bound(NamedTuple):
    """Orders that the series may have, and what its error may be."""

    orders: Sequence[int]
    accuracy: float


class Direct(NamedTuple):
    """A formula for pairs that the series does not reach, and its numbers (rows, *batch, n).

    cost: of a pair, in terms of the series; knots: of the functions, of a piecewise-linear one.
    """

    name: str
    left: Tensor
    right: Tensor
    cost: float
    knots: tuple[int, int] = (0, 0)
    height: float = 0.0


class _Side(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*Series._fields, "numbers")),
        *((name, ctypes.c_int64) for name in ("knots", "size", "all")),
    )


class _Pairs(ctypes.Structure):
    """`Pairs` of kernels.cpp."""

    _fields_ = (
        ("left", _Side),
        ("right", _Side),
        ("batch", ctypes.c_int64),
        ("covariance", ctypes.c_void_p),
        ("covariance_batch", ctypes.c_int64),
        ("covariance_row", ctypes.c_int64),
        ("result", ctypes.c_void_p),
        ("diagonal", ctypes.c_void_p),
        ("order", ctypes.c_int64),
        ("ladder", ctypes.c_void_p),
        ("steps", ctypes.c_int64),
        ("direct", ctypes.c_int64),
        ("accuracy", ctypes.c_double),
        ("direct_cost", ctypes.c_double),
        ("height", ctypes.c_double),
        ("degenerate", ctypes.c_double),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


class _PowerSeries(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "different", "rows", "columns", "orders")),
        *((name, ctypes.c_void_p) for name in ("rho", "left", "right", "result")),
    )


class _SeriesBackward(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "rows", "columns", "order")),
        *((name, ctypes.c_void_p) for name in ("rho", "left", "right", "gradient")),
        *((name, ctypes.c_void_p) for name in ("by_rho", "by_left", "by_right")),
    )


def pairs(
    left: Series,
    right: Series,
    covariance: Tensor,
    bound: Bound | None = None,
    direct: Direct | None = None,
    diagonal: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Cov[g(y_i), h(w_j)] from Cov[y_i, w_j] (*batch, rows, columns).

    bound: of the error of the series, which otherwise has all terms; diagonal: of the result, where
    it is symmetric: then the upper triangle is read. Also returns the number of pairs that neither
    the series nor a direct formula reaches.
    """
    *batch, rows, columns = covariance.shape
    matrix = matrices(covariance)
    result = torch.empty(covariance.shape, dtype=covariance.dtype)
    orders, accuracy = bound or ((), 0.0)
    ladder = (ctypes.c_int64 * len(orders))(*orders)
    name, first, second, cost, knots, height = direct or ("", None, None, 0.0, (0, 0), 0.0)
    kept: list[Tensor] = []  # what the pointers point to

    def pointer(tensor: Tensor | None, *shape: int) -> int | None:
        """Of numbers (*shape, *batch, n), which the kernel reads without a look at their count."""
        if tensor is None:
            return None
        kept.append(tensor.expand(*shape).contiguous())
        return kept[-1].data_ptr()

    def side(series: Series, numbers: Tensor | None, knots: int, size: int) -> _Side:
        single = [pointer(t, *batch, size) for t in (series.inverse, series.units)]
        tails, coefficients, own = (
            None if t is None else pointer(t, t.shape[0], *batch, size)
            for t in (series.tails, series.coefficients, numbers)
        )
        pointers = single[0], tails, coefficients, single[1], own
        return _Side(*pointers, knots, size, count * size)

    count, order = matrix.shape[0], left.coefficients.shape[0]
    upper = side(left, first, knots[0], rows)
    alike = left is right and first is second and rows == columns
    call = _Pairs(
        upper, upper if alike else side(right, second, knots[1], columns),
        count, matrix.data_ptr(), matrix.stride(0), matrix.stride(1),
        result.data_ptr(), pointer(diagonal, *batch, rows), order,
        ctypes.addressof(ladder), len(ladder), FORMULAS.index(name),
        accuracy, cost, height, rounding(DEGENERATE, result.dtype),
    )  # fmt: skip
    beyond = function("pairs", result)(ctypes.byref(call), threads(result.numel()))
    return result, beyond


def largest_correlation(covariance: Tensor) -> float:
    """The largest |rho| of two elements, from Cov (*batch, n, n)."""
    matrix = matrices(covariance)
    count, size = matrix.shape[:2]
    found: float = function("largest", matrix)(
        count, size, matrix.data_ptr(), matrix.stride(0), matrix.stride(1),
        threads(matrix.numel()),
    )  # fmt: skip
    return found


def plackett(a: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """K0 and K1 of tensors of one shape."""
    first, second = (torch.empty(rho.shape, dtype=rho.dtype) for _ in range(2))
    _element_wise("plackett", (a, b, rho), first.data_ptr(), second.data_ptr())
    return first, second


def plackett_backward(*arguments: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a, b and rho, from them, K0 and the gradients of K0 and K1."""
    results = tuple(torch.empty(arguments[0].shape, dtype=arguments[0].dtype) for _ in range(3))
    pointers = (ctypes.c_void_p * 3)(*(result.data_ptr() for result in results))
    _element_wise("plackett_backward", arguments, ctypes.addressof(pointers))
    return results


def power_series(rho: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sum_k rho^k a_k b_k of rho (*batch, rows, columns), of one dimension more or expanded."""
    *batch, rows, columns = rho.shape
    order, count = len(left), math.prod(batch)
    left = left.expand(order, *batch, rows, 1).contiguous()
    right = right.expand(order, *batch, 1, columns).contiguous()
    alike = rho.dim() > 2 and rho.stride(0) == 0  # noqa: PLR2004
    rho = (rho[0] if alike else rho).contiguous()
    result = torch.empty((*batch, rows, columns), dtype=rho.dtype)
    different = count // batch[0] if alike else count
    pointers = (t.data_ptr() for t in (rho, left, right, result))
    call = _PowerSeries(count, different, rows, columns, order, *pointers)
    function("power_series", rho)(ctypes.byref(call), threads(result.numel() * order))
    return result


def series_backward(
    rho: Tensor, left: Tensor, right: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum_k rho^k a_k b_k by rho (*batch, rows, columns), a and b."""
    *batch, rows, columns = rho.shape
    order, count = len(left), rho[..., 0, 0].numel()
    left = left.expand(order, *batch, rows, 1)
    right = right.expand(order, *batch, 1, columns)
    given = [t.contiguous() for t in (rho, left, right, gradient)]
    made = [torch.empty(t.shape, dtype=t.dtype) for t in given[:3]]
    pointers = (t.data_ptr() for t in (*given, *made))
    call = _SeriesBackward(count, rows, columns, order, *pointers)
    function("series_backward", rho)(ctypes.byref(call), threads(rho.numel() * order))
    return made[0], made[1], made[2]


def _element_wise(name: str, tensors: Sequence[Tensor], *results: int) -> None:
    """Call a function of tensors of one shape, which may be broadcast."""
    first = tensors[0]
    if first.dim() > 2:  # noqa: PLR2004
        rows, columns = first.shape[-2:]
        tensors = [t.reshape(-1, rows, columns) for t in tensors]
    else:
        tensors = [t.reshape((1,) * (3 - t.dim()) + t.shape) for t in tensors]
    shape = (ctypes.c_int64 * 3)(*tensors[0].shape)
    arguments = (_Argument * len(tensors))(
        *(_Argument(t.data_ptr(), (ctypes.c_int64 * 3)(*t.stride())) for t in tensors)
    )
    limit = ctypes.c_double(rounding(DEGENERATE, first.dtype))
    pointers = (ctypes.c_void_p(result) for result in results)
    function(name, first)(shape, arguments, *pointers, limit, threads(first.numel()))
