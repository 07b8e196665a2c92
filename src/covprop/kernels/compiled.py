"""The compiled kernels: covariances of pairs in one pass over memory and one parallel region.

A library for each instruction set is built with the package from `covprop/native`, where there is
a compiler; `library` is the one for this processor, or None. What it computes is what the torch
code of its callers computes, to rounding: that code is the reference, and runs on other devices.
"""

import ctypes
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from covprop.kernels.rounding import DEGENERATE, rounding
from covprop.native.build import library_path

LIBRARIES = {"AVX512": ("avx512", "avx2", "portable"), "AVX2": ("avx2", "portable")}
"""Libraries that the instructions which torch uses can run, the fastest first."""
VARIABLE = "COVPROP_COMPILED"
"""Of the environment: 0 leaves the compiled kernels unused."""
NAMES = {torch.float32: "float32", torch.float64: "float64"}
PLAIN = (Tensor, torch.nn.Parameter)
PARALLEL = 2**15
"""Pairs from which threads are worth starting."""
PANEL = 32
"""Rows that a kernel may take together at most."""
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


class Convolution(NamedTuple):
    """What `F.conv2d` is given beside its weight, and the places of its result.

    image: channels, rows, columns; above, left: zeros around them.
    """

    image: tuple[int, ...]
    stride: tuple[int, ...]
    above: int
    left: int
    sides: tuple[int, ...]


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


def load(path: Path) -> ctypes.CDLL:
    """A library, with the types of what its functions return."""
    found = ctypes.CDLL(str(path))
    for name in NAMES.values():
        getattr(found, f"pairs_{name}").restype = ctypes.c_int64
        largest, congruence = (getattr(found, f"{f}_{name}") for f in ("largest", "congruence"))
        count, pointer, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        largest.argtypes = (count, count, pointer, count, count, threads)
        congruence.argtypes = (*(count,) * 3, pointer, pointer, pointer, threads)
        largest.restype = congruence.restype = ctypes.c_double
        convolved = getattr(found, f"convolved_{name}")
        convolved.argtypes = (pointer, count, *(pointer,) * 4, threads)
        convolved.restype = ctypes.c_double
        for layer, given in (("piecewise_layer", 5), ("piecewise_layer_backward", 6)):
            getattr(found, f"{layer}_{name}").argtypes = (*(pointer,) * given, threads)
            getattr(found, f"{layer}_{name}").restype = count
        for function in (
            "plackett",
            "plackett_backward",
            "series_backward",
            "product",
            "slices",
            "power_series",
        ):
            getattr(found, f"{function}_{name}").restype = None
    found.piecewise_moments.restype = found.piecewise_marginals_backward.restype = count
    found.piecewise_marginals_backward.argtypes = (pointer, count, *(pointer,) * 6)
    found.series_numbers.restype = found.quadrature_moments.restype = None
    found.kinked_powers.restype = None
    return found


@cache
def library() -> ctypes.CDLL | None:
    """The library for the instructions that torch uses on this machine, if there is one."""
    if os.environ.get(VARIABLE) == "0":
        return None
    for instructions in LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ("portable",)):
        with suppress(OSError):  # not built, or built for another system
            return load(library_path(instructions))
    return None


def description() -> str:
    """What is used: the instruction set of the compiled kernels, or the torch code and why."""
    found = library()
    if found is not None:
        return f"compiled ({Path(found._name).name.split('_')[1]})"
    if os.environ.get(VARIABLE) == "0":
        return f"torch code ({VARIABLE}=0)"
    return "torch code: no compiled library; install with a C++ compiler for speed"


def usable(*tensors: Tensor) -> bool:
    """Whether the library is there and takes these tensors, none of which is differentiated."""
    first, differentiated = tensors[0], torch.is_grad_enabled()
    dtype = first.dtype
    for tensor in tensors:  # numbers in the memory of the CPU: no transform's, no fake
        if type(tensor) not in PLAIN or tensor.dtype is not dtype or not tensor.is_cpu:
            return False
        if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
            return False
        if differentiated and tensor.requires_grad:
            return False
    return (
        dtype in NAMES
        and first.numel() > 0
        and forward_ad._current_level < 0  # whose tangents would be lost
        and not torch.compiler.is_compiling()
        and library() is not None
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


def matrices(covariance: Tensor) -> Tensor:
    """The batch as one dimension, and rows without gaps."""
    matrix = covariance.reshape(-1, *covariance.shape[-2:])
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def largest_correlation(covariance: Tensor) -> float:
    """The largest |rho| of two elements, from Cov (*batch, n, n)."""
    matrix = matrices(covariance)
    count, size = matrix.shape[:2]
    found: float = function("largest", matrix)(
        count, size, matrix.data_ptr(), matrix.stride(0), matrix.stride(1),
        threads(matrix.numel()),
    )  # fmt: skip
    return found


def congruence(covariance: Tensor, weight: Tensor) -> tuple[Tensor, float]:
    """A S A^T of S (*batch, n, n) and A (m, n); the smallest of its variances, NaN if one is."""
    (m, n), batch = weight.shape, covariance.shape[:-2]
    result = torch.empty((*batch, m, m), dtype=weight.dtype)
    covariance, weight = covariance.contiguous(), weight.contiguous()
    least: float = function("congruence", result)(
        batch.numel(), m, n, weight.data_ptr(), covariance.data_ptr(), result.data_ptr(),
        threads(covariance.numel()),
    )  # fmt: skip
    return result, least


def convolved(covariance: Tensor, weight: Tensor, layer: Convolution) -> tuple[Tensor, float]:
    """A S A^T of a convolution A and S (*batch, n, n); the smallest variance, NaN if one is."""
    batch, (outputs, _, *kernel) = covariance.shape[:-2], weight.shape
    size, features = covariance.shape[-1], outputs * math.prod(layer.sides)
    result = torch.empty((*batch, features, features), dtype=weight.dtype)
    covariance, weight = covariance.contiguous(), weight.contiguous()
    half = torch.empty((batch.numel() * (size + PANEL) * features,), dtype=weight.dtype)
    numbers = *layer.image, outputs, *kernel, *layer.stride, layer.above, layer.left, *layer.sides
    least: float = function("convolved", result)(
        (ctypes.c_int64 * len(numbers))(*numbers), batch.numel(), weight.data_ptr(),
        covariance.data_ptr(), half.data_ptr(), result.data_ptr(), threads(covariance.numel()),
    )  # fmt: skip
    return result, least


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


def loaded() -> ctypes.CDLL:
    """The library, once `usable` has said that there is one."""
    found = library()
    assert found is not None
    return found


def function(name: str, like: Tensor) -> "ctypes._FuncPointer":
    """The function of this name for numbers of this dtype."""
    found: ctypes._FuncPointer = getattr(loaded(), f"{name}_{NAMES[like.dtype]}")
    return found


def threads(count: int) -> int:
    """How many threads so many pairs are worth."""
    return torch.get_num_threads() if count >= PARALLEL else 1
