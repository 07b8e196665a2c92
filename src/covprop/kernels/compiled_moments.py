"""The compiled kernels of single elements: moments, coefficients and the numbers of series."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from covprop.kernels import compiled, compiled_pairs
from covprop.kernels.normal import SATURATION
from covprop.kernels.rounding import FLUSH, REMAINDER, rounding

FUNCTIONS = (
    "tanh", "sigmoid", "silu", "softplus", "logsigmoid", "mish", "gelu_tanh", "elu", "squared_relu",
)  # fmt: skip
"""Those that `quadrature` knows, in the order of quadrature.h."""


class _Piecewise(ctypes.Structure):
    """`PiecewiseCall` of moments.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "knots", "order")),
        *((name, ctypes.c_void_p) for name in ("mean", "variance", "values")),
        *((name, ctypes.c_void_p) for name in ("places", "slopes", "jumps")),
        *((name, ctypes.c_double) for name in ("saturation", "narrow")),
        *((name, ctypes.c_void_p) for name in ("centre", "output", "coefficients")),
        *((name, ctypes.c_void_p) for name in ("inverse", "slope", "density")),
        *((name, ctypes.c_void_p) for name in ("positions", "weights", "widths")),
    )


class _SeriesNumbers(ctypes.Structure):
    """`SeriesCall` of moments.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "order")),
        *((name, ctypes.c_void_p) for name in ("coefficients", "output", "variance")),
        *((name, ctypes.c_void_p) for name in ("inverse", "units", "tails", "ladder")),
        *((name, ctypes.c_int64) for name in ("steps", "last")),
        *((name, ctypes.c_double) for name in ("tiny", "large", "flush", "largest", "remainder")),
    )


class SeriesLimits(NamedTuple):
    """How many of the last coefficients bound those beyond, and limits of the dtype of pairs."""

    last: int
    tiny: float
    largest: float
    flush: float

    @classmethod
    def of(cls, dtype: torch.dtype, last: int = 0) -> "SeriesLimits":
        """Those of pairs of a dtype."""
        return _series_limits(dtype, last)


@cache
def _series_limits(dtype: torch.dtype, last: int) -> SeriesLimits:
    finfo = torch.finfo(dtype)
    return SeriesLimits(last, finfo.tiny, finfo.max, FLUSH)


class PiecewiseMoments(NamedTuple):
    """Of a piecewise-linear function of elements (*batch, n): what `Pieces` of knots.py has."""

    mean: Tensor
    variance: Tensor
    coefficients: Tensor
    inverse: Tensor
    slope: Tensor
    density: Tensor
    positions: Tensor
    weights: Tensor
    widths: Tensor


def piecewise(
    mean: Tensor, variance: Tensor, values: Tensor, pieces: Sequence[Sequence[float]],
    order: int, narrow: float,
) -> PiecewiseMoments | None:  # fmt: skip
    """Moments, coefficients and the numbers of elements; None where a segment is narrow.

    values: the function of the means, right of a jump there; pieces: the knots, the slopes and the
    jumps.
    """
    shape, count = mean.shape, len(pieces[0])
    tensors = [tensor.contiguous() for tensor in (mean, variance, values)]
    numbers = [(ctypes.c_double * len(row))(*row) for row in pieces]
    # One piece of memory for all results, row by row.
    rows = (1, 1, order, 1, 1, 1, count, count, max(0, count - 1))
    results = torch.empty((sum(rows), *shape), dtype=mean.dtype).split(rows)
    pointers = [result.data_ptr() for result in results]
    call = _Piecewise(
        mean.numel(), count, order, *(tensor.data_ptr() for tensor in tensors),
        *(ctypes.addressof(row) for row in numbers), SATURATION, narrow, *pointers,
    )  # fmt: skip
    if compiled.loaded().piecewise_moments(ctypes.byref(call)):
        return None
    single = (0, 1, 3, 4, 5)
    return PiecewiseMoments(*(t[0] if i in single else t for i, t in enumerate(results)))


class SeriesNumbers(NamedTuple):
    """1 / sigma, the tail after each order, coefficients in their units, the units."""

    inverse: Tensor
    tails: Tensor
    coefficients: Tensor
    units: Tensor


def series_numbers(
    coefficients: Tensor,
    output: Tensor,
    variance: Tensor,
    bound: compiled_pairs.Bound,
    limits: SeriesLimits,
) -> SeriesNumbers:
    """What the series of pairs reads of elements (*batch, n); tails for the orders of the bound."""
    order, steps, shape = coefficients.shape[0], len(bound.orders), output.shape
    output, variance = output.contiguous(), variance.contiguous()
    # One piece of memory for all results, row by row.
    rows = (1, steps, order, 1)
    inverse, tails, own, units = torch.empty((sum(rows), *shape), dtype=output.dtype).split(rows)
    own.copy_(coefficients)
    ladder = (ctypes.c_int64 * steps)(*bound.orders)
    tensors = (own, output, variance, inverse, units, tails)
    call = _SeriesNumbers(
        output.numel(), order, *(t.data_ptr() for t in tensors), ctypes.addressof(ladder),
        steps, *limits, bound.accuracy ** (1 / (order + 1)), rounding(REMAINDER, output.dtype),
    )  # fmt: skip
    compiled.loaded().series_numbers(ctypes.byref(call))
    return SeriesNumbers(inverse[0], tails, own, units[0])


class _Quadrature(ctypes.Structure):
    """`QuadratureCall` of quadrature.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "order", "panels", "function", "kinks")),
        *((name, ctypes.c_void_p) for name in ("mean", "stddev", "centre", "parameters", "places")),
        *((name, ctypes.c_void_p) for name in ("node", "weight", "cumulative")),
        *((name, ctypes.c_double) for name in ("reach", "rounding", "tiny")),
        *((name, ctypes.c_void_p) for name in ("mean_of", "variance", "mismatch", "floor")),
        *((name, ctypes.c_void_p) for name in ("by_mean", "by_variance", "coefficients", "slopes")),
    )


class Compiled(NamedTuple):
    """A function that `quadrature` knows, and its parameters."""

    name: str
    parameters: tuple[float, ...] = ()

    @property
    def bounded(self) -> bool:
        """Whether its derivative is."""
        return self.name != "squared_relu"


class Rule(NamedTuple):
    """Even panels over `reach` standard deviations on either side.

    nodes, weights and cumulative are those of one panel, on [-1, 1]; rounding: of a deviation.
    """

    panels: int
    reach: float
    rounding: float
    nodes: Sequence[float]
    weights: Sequence[float]
    cumulative: Sequence[float]


def quadrature(
    function: Compiled, kinks: Sequence[float], mean: Tensor, stddev: Tensor, centre: Tensor,
    order: int, rule: Rule, basis: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The fields of `_Estimate` in activations/moments.py; centre: the function of the means.

    basis: what turns the slopes at the nodes into coefficients, (order, nodes), if it is known.
    """
    tensors = [tensor.contiguous() for tensor in (mean, stddev, centre)]
    rows = [function.parameters, kinks, rule.nodes, rule.weights, rule.cumulative]
    numbers = [(ctypes.c_double * len(row))(*row) for row in rows]
    results = torch.empty(6, len(mean), dtype=mean.dtype)
    coefficients = torch.empty(order, len(mean), dtype=mean.dtype)
    slopes = None if basis is None else torch.empty(len(mean), basis.shape[1], dtype=mean.dtype)
    call = _Quadrature(
        len(mean), order, rule.panels, FUNCTIONS.index(function.name), len(kinks),
        *(tensor.data_ptr() for tensor in tensors), *(ctypes.addressof(row) for row in numbers),
        rule.reach, rule.rounding, torch.finfo(mean.dtype).tiny,
        *(row.data_ptr() for row in results), coefficients.data_ptr(),
        None if slopes is None else slopes.data_ptr(),
    )  # fmt: skip
    work = len(mean) * rule.panels * (order + len(rule.nodes))
    compiled.loaded().quadrature_moments(ctypes.byref(call), compiled.threads(work))
    if basis is not None and slopes is not None:
        torch.mm(basis, slopes.mT, out=coefficients)
    return *results, coefficients
