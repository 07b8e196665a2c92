"""The library of compiled kernels, and its kernels of whole layers.

A congruence `A S A^T`, that of a convolution, and all moments of a piecewise-linear function.

A library for each instruction set is built with the package from `covprop/native`, where there is
a compiler; `library` is the one for this processor, or None. What it computes is what the torch
code of its callers computes, to rounding: that code is the reference, and runs on other devices.
"""

import ctypes
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import Function, forward_ad

from covprop.kernels.normal import SATURATION
from covprop.kernels.rounding import DEGENERATE, FLUSH, REMAINDER, rounding
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


def matrices(covariance: Tensor) -> Tensor:
    """The batch as one dimension, and rows without gaps."""
    matrix = covariance.reshape(-1, *covariance.shape[-2:])
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


class Convolution(NamedTuple):
    """What `F.conv2d` is given beside its weight, and the places of its result.

    image: channels, rows, columns; above, left: zeros around them.
    """

    image: tuple[int, ...]
    stride: tuple[int, ...]
    above: int
    left: int
    sides: tuple[int, ...]


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
    if not usable(covariance) or not usable(mean):
        return None
    point = mean.double().contiguous()
    values = layer.function(point)
    centre = torch.empty_like(point)
    result = torch.empty(covariance.shape, dtype=covariance.dtype)
    matrix, vectors = _vectors(point, covariance)
    refused = function("piecewise_layer", result)(
        _prepared(layer.pieces, layer.terms, matrix.dtype)[0], ctypes.byref(vectors),
        values.data_ptr(), centre.data_ptr(), result.data_ptr(),
        threads(result.numel()),
    )  # fmt: skip
    return None if refused else (centre.to(mean.dtype), result)


def _vectors(mean: Tensor, covariance: Tensor) -> tuple[Tensor, _Vectors]:
    """The structure, and the matrix that it points to."""
    matrix = covariance
    if matrix.dim() != 2 or matrix.stride(1) != 1:  # noqa: PLR2004
        matrix = matrices(covariance)
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
        taken = all(usable(*both) for both in zip(given, gradients, strict=True))
        made = ctx.compiled(ctx.layer, given, gradients) if taken else None
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
    refused = function("piecewise_layer_backward", matrix)(
        _prepared(layer.pieces, layer.terms, matrix.dtype)[0], ctypes.byref(vectors),
        by_mean.data_ptr(), by_covariance.data_ptr(), to_mean.data_ptr(),
        to_covariance.data_ptr(), threads(to_covariance.numel()),
    )  # fmt: skip
    return None if refused else (to_mean.to(mean.dtype), to_covariance)


def _marginals_backward(layer: Layer, given: Pair, gradients: Pair) -> Pair | None:
    tensors = [tensor.contiguous() for tensor in (*given, *gradients)]
    made = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
    refused = loaded().piecewise_marginals_backward(
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
