"""Lengths of vectors, vectors over their lengths, variances and angles.

The elements of an event that have a length together are a group. Within a group the moments are
exact for Gaussian input (`kernels.directions`); between groups, and with all other tensors, the
dependence is that of the expected slope.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import (
    ApproximationWarning,
    OutsideDomain,
    UnsupportedOperation,
    name_of,
    warn_user,
)
from covprop.flow.groups import Groups
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.affine import affine
from covprop.rules.operands import batch_error, check_finite, the_gaussian
from covprop.rules.smooth import delta

FAR = 0.1
"""The share of a variance that may be not linear without a warning."""
WITHIN = "approximate: exact within each group for Gaussian input, linear between groups"


def groups_of(
    function: Callable[..., Any],
    x: GaussianTensor,
    arrange: Callable[[Tensor], Tensor],
    centred: bool = False,
    offset: float = 0.0,
) -> Groups:
    """By what `arrange` makes, (groups, n), of a tensor in the layout that the model sees."""
    batch = [max(1, size) for size in x.batch_shape]
    size = max(1, x.event_shape.numel())
    places = torch.arange(math.prod((*batch, *x.event_shape)), device=x.device)
    places = places.reshape(*batch, *x.event_shape)
    rows = arrange(places.movedim(0, x.batch_at) if x.batch_at else places)
    owner = rows // size
    if bool((owner != owner[:, :1]).any()):
        raise batch_error(function, x)
    return Groups(rows[(owner == 0).all(-1)], centred, offset)


def normalised(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    weight: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
) -> GaussianTensor:
    """weight * z / sqrt(|z|^2 + offset) + bias of every group z, in the shape of x.

    weight, bias: as the model would multiply and add them.
    """
    check_finite(function, x)
    factor, shift = (_of_event(x, value) for value in (weight, bias))
    moments = x.carrier.normalized(groups, x.flat, factor[groups.index])
    _warn(function, moments.extra, moments.variance)
    loc = (groups.put(moments.mean) * factor + shift).to(x.dtype).reshape(x.loc.shape)
    return GaussianTensor(loc, moments.carrier).with_batch_at(x.batch_at)


def lengths(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    shape: torch.Size,
    factor: float = 1.0,
) -> GaussianTensor:
    """factor * |z| of every group z; shape: that of the result's event."""
    check_finite(function, x)
    shape = torch.Size((*x.batch_shape, *shape))
    moments = x.carrier.lengths(x.loc.new_empty(()).expand(shape), groups, x.flat, factor)
    _warn(function, moments.extra[..., None], moments.variance[..., None])
    return GaussianTensor(moments.mean.to(x.dtype).reshape(shape), moments.carrier)


@torch.no_grad()
def _warn(function: Callable[..., Any], extra: Tensor, variance: Tensor) -> None:
    """Warn where too much of the variance of a group, (*batch, G, n) each, is not linear."""
    if bool((extra.sum(-1) > FAR * variance.sum(-1)).any()):
        warn_user(
            f"more than {FAR:.0%} of the variance of {name_of(function)} is not linear in its "
            "input here: its own mean and covariance are good, but its result is far from "
            "Gaussian for what comes next; compare with sampling",
            ApproximationWarning,
        )


def _of_event(x: GaussianTensor, value: Tensor | float) -> Tensor:
    """A number for each element of the flat event, of what the model would broadcast."""
    value = torch.as_tensor(value, dtype=torch.float64, device=x.device).expand(x.shape)
    value = value.movedim(x.batch_at, 0) if x.batch_at else value
    return value[(0,) * len(x.batch_shape)].reshape(-1)


MATRIX = 2
"""Dimensions of a matrix."""
EUCLIDEAN = 2
"""The order of the norm whose moments are known."""
CLEAR = 100.0
"""Times the least length that torch divides by: shorter vectors are refused."""
QUADRATIC = "exact"
COSINE = "approximate: vectors over their lengths, products as if jointly Gaussian"


@rule(*spellings("var"), kind=Kind.SMOOTH, treatment=QUADRATIC, name="var",
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
    _, dims, keepdim, count = _deviations(input, dim, unbiased, keepdim, correction)
    squares = (input - input.mean(dims, keepdim=True)).square()
    return squares.sum(dims, keepdim=keepdim) * (1 / max(count, 0) if count > 0 else math.nan)


@rule(*spellings("std"), kind=Kind.SMOOTH, treatment=WITHIN, name="std")
def std(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """The length of what is left of the mean, over the root of a number."""
    x, dims, keepdim, count = _deviations(*args, **kwargs)
    scale = count**-0.5 if count > 0 else math.nan
    return _euclidean(function, x, dims, keepdim, centred=True, scale=scale)


def _deviations(
    input: GaussianTensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    correction: float | None = None,
) -> tuple[GaussianTensor, list[int], bool, float]:
    """The arguments of a variance: dimensions, whether they are kept, what to divide by."""
    if isinstance(dim, bool):  # torch.var(input, unbiased)
        dim, unbiased = None, dim
    dims = _dims(input, dim)
    less = (1.0 if correction is None else correction) if unbiased in (None, True) else 0.0
    return input, dims, keepdim, math.prod(input.shape[d] for d in dims) - less


def _dims(x: Any, dim: Any) -> list[int]:
    """Dimensions, all if none are named, from 0 on."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.dim()))
    named = [dim] if isinstance(dim, int) else list(dim)
    return [d % x.dim() if x.dim() else 0 for d in named]


def _euclidean(
    function: Callable[..., Any],
    x: GaussianTensor,
    dims: list[int],
    keepdim: bool,
    centred: bool = False,
    scale: float = 1.0,
) -> GaussianTensor:
    """Lengths along dimensions."""
    groups = groups_of(function, x, _arranged(dims), centred)
    kept = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    shape = torch.Size(kept[len(x.batch_shape) :])
    return lengths(function, x, groups, shape, scale)


def _arranged(dims: list[int]) -> Callable[[Tensor], Tensor]:
    """The elements along these dimensions as groups."""

    def arrange(places: Tensor) -> Tensor:
        size = math.prod(places.shape[d] for d in dims) if places.dim() else 1
        last = list(range(-len(dims), 0))
        moved = places.movedim(dims, last) if places.dim() else places
        return moved.reshape(-1, size)

    return arrange


def _root(
    function: Callable[..., Any], written: Callable[..., Any], x: GaussianTensor
) -> GaussianTensor:
    """A function with a root, which has no slope where it is zero.

    It is written out, because second derivatives of torch's own forbid a backward pass.
    """
    if bool((written(x.loc) == 0).any()) and bool(x.variances.any()):
        raise OutsideDomain(
            f"{name_of(function)} is zero at the mean, where it is not smooth: the delta method "
            "does not hold there"
        )
    return delta(wraps(function)(written), x)


def _length(x: Tensor, order: float, dims: Any, keepdim: bool) -> Tensor:
    dims = list(range(x.dim())) if dims is None else dims
    return _power(x.abs().pow(order).sum(dims, keepdim=keepdim), 1 / order)


def _power(total: Tensor, exponent: float) -> Tensor:
    """A root that is zero at zero, with the slope zero: it is used there only without noise."""
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1).pow(exponent), 0)


@rule(*spellings("norm"), torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
      kind=Kind.SMOOTH, treatment=WITHIN, name="norm, linalg.norm")  # fmt: skip
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
    if power == EUCLIDEAN:
        return _euclidean(function, x, _dims(x, dim), keepdim)
    return _root(function, lambda y: _length(y, power, dim, keepdim), x)


@rule(F.normalize, kind=Kind.SMOOTH, treatment=WITHIN, name="normalize")
def normalize(
    function: Callable[..., Any],
    input: GaussianTensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: None = None,
) -> GaussianTensor:
    """A vector over its length."""
    if p == EUCLIDEAN:
        return _unit(function, input, _dims(input, dim), eps)

    def written(x: Tensor) -> Tensor:
        return x / _length(x, p, dim, keepdim=True).clamp(min=eps)

    return delta(wraps(function)(written), input)


def _unit(
    function: Callable[..., Any], x: GaussianTensor, dims: list[int], eps: float
) -> GaussianTensor:
    """Over its length, which has to be far above what torch takes at least for it."""
    groups = groups_of(function, x, _arranged(dims))
    squares = x.loc.detach().square() + x.variances.detach().reshape(x.shape)
    size = squares.double().flatten(len(x.batch_shape))[..., groups.index].sum(-1)
    if bool(((size > 0) & (size < (CLEAR * eps) ** 2)).any()):
        raise UnsupportedOperation(
            f"{name_of(function)} divides by {eps:g} what is shorter, and here vectors are nearly "
            "that short; scale its argument up, or pass a smaller eps"
        )
    return normalised(function, x, groups)


@rule(torch.var_mean, torch.std_mean, kind=Kind.SMOOTH, treatment=WITHIN,
      name="var_mean, std_mean")  # fmt: skip
def spread_and_mean(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The variance or standard deviation, and the mean, which is linear."""
    variance = function is torch.var_mean

    def mean(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = function(*args, **kwargs)[1]
        return result

    spread = (var if variance else std)(torch.std, *args, **kwargs)
    return spread, affine(mean, *args, **kwargs)


@rule(*spellings("cosine_similarity"), kind=Kind.SMOOTH, treatment=COSINE,
      name="cosine_similarity")  # fmt: skip
def cosine_similarity(
    function: Callable[..., Any], x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8
) -> Any:
    """The sum of the products of both over their lengths."""
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    along = dim - len(shape) if dim >= 0 else dim
    units: list[Any] = []
    for x in (x1, x2):
        if x.dim() < -along or x.shape[along] != shape[along]:
            x = x.expand(shape)
        if isinstance(x, GaussianTensor):
            units.append(_unit(function, x, [along % x.dim()], eps))
        else:
            units.append(F.normalize(x, dim=along, eps=eps))
    return (units[0] * units[1]).sum(along)
