"""Norms, variances and angles of vectors, and layers that normalise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import (
    OutsideDomain,
    UnsupportedOperation,
    name_of,
)
from covprop.flow.batch_position import FIRST
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.affine import affine, scaling
from covprop.rules.operands import batch_error, single_gaussian
from covprop.rules.smooth import WITHIN, delta, groups_of, lengths, normalised

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
    """The variance over dimensions: a sum of squared deviations from the mean."""
    _, dims, keepdim, count = _deviations(input, dim, unbiased, keepdim, correction)
    squares = (input - input.mean(dims, keepdim=True)).square()
    return squares.sum(dims, keepdim=keepdim) * (1 / max(count, 0) if count > 0 else math.nan)


@rule(*spellings("std"), kind=Kind.SMOOTH, treatment=WITHIN, name="std",
      batch=Batch.STEPWISE)  # fmt: skip
def std(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """The standard deviation over dimensions: the scaled length of the deviations."""
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
    dims = dimensions(input, dim)
    less = (1.0 if correction is None else correction) if unbiased in (None, True) else 0.0
    return input, dims, keepdim, math.prod(input.shape[d] for d in dims) - less


def dimensions(x: Any, dim: Any) -> list[int]:
    """Dimensions, all if none are named, from 0 on."""
    if dim is None or (isinstance(dim, list | tuple) and not dim) or not x.dim():
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
    x.materialize()
    groups = groups_of(function, x, arranged(dims), centred)
    kept = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return lengths(function, x, groups, torch.Size(kept), [] if keepdim else dims, scale)


def arranged(dims: list[int]) -> Callable[[Tensor], Tensor]:
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
    x.materialize()
    if bool((written(x.loc) == 0).any()) and bool(x.variances.any()):
        raise OutsideDomain(
            f"{name_of(function)} is zero at the mean, where it is not smooth: the delta method "
            "does not hold there"
        )
    return _written(function, written, x)


def _written(
    function: Callable[..., Any], written: Callable[..., Any], x: GaussianTensor
) -> GaussianTensor:
    """A function by the delta method, of a tensor whose batch comes first."""
    if x.batch_at != FIRST:
        raise batch_error(function, x)
    return delta(wraps(function)(written), x)


def _length(x: Tensor, order: float, dims: Any, keepdim: bool) -> Tensor:
    dims = list(range(x.dim())) if dims is None else dims
    return _power(x.abs().pow(order).sum(dims, keepdim=keepdim), 1 / order)


def _power(total: Tensor, exponent: float) -> Tensor:
    """A root that is zero at zero, with the slope zero: it is used there only without noise."""
    positive = total > 0
    return torch.where(positive, torch.where(positive, total, 1).pow(exponent), 0)


@rule(*spellings("norm"), torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm,
      kind=Kind.SMOOTH, treatment=WITHIN, name="norm, linalg.norm",
      batch=Batch.STEPWISE)  # fmt: skip
def norm(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Euclidean and Frobenius norms, and the other smooth ones of vectors."""
    x = single_gaussian(function, args, kwargs)
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
        return _euclidean(function, x, dimensions(x, dim), keepdim)
    return _root(function, lambda y: _length(y, power, dim, keepdim), x)


@rule(F.normalize, kind=Kind.SMOOTH, treatment=WITHIN, name="normalize", batch=Batch.STEPWISE)
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
        return _unit(function, input, dimensions(input, dim), eps)

    def written(x: Tensor) -> Tensor:
        return x / _length(x, p, dim, keepdim=True).clamp(min=eps)

    return _written(function, written, input)


def _unit(
    function: Callable[..., Any], x: GaussianTensor, dims: list[int], eps: float
) -> GaussianTensor:
    """Divide by the length, which must be far above torch's lower limit of it."""
    x.materialize()
    groups = groups_of(function, x, arranged(dims))
    squares = x.loc.detach().square() + x.variances.detach().reshape(x.loc.shape)
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


def _norm(
    function: Callable[..., Any],
    x: GaussianTensor,
    arrange: Callable[[Tensor], Tensor],
    affine: tuple[Tensor | None, Tensor | None],
    eps: float,
    centred: bool = True,
) -> GaussianTensor:
    """z / sqrt(mean z^2 + eps) of groups of elements, and a weight and bias for each element."""
    x.materialize()
    if not x.loc.numel():
        return x
    groups = groups_of(function, x, arrange, centred)
    count = groups.index.shape[-1]
    weight, bias = affine
    return normalised(
        function,
        x,
        replace(groups, offset=count * eps),
        math.sqrt(count) * (1.0 if weight is None else weight),
        0.0 if bias is None else bias,
    )


@rule(*spellings("layer_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="layer_norm",
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
    """Layer norm over the last dimensions."""
    arrange = _last(function, input, normalized_shape)
    return _norm(function, input, arrange, (weight, bias), eps)


@rule(*spellings("rms_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="rms_norm",
      batch=Batch.STEPWISE)  # fmt: skip
def rms_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> GaussianTensor:
    """RMS norm over the last dimensions, which does not subtract the mean."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    arrange = _last(function, input, normalized_shape)
    return _norm(function, input, arrange, (weight, None), eps, centred=False)


def _last(
    function: Callable[..., Any], x: GaussianTensor, shape: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """The last dimensions as groups, which have to be of this shape."""
    if not shape or tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(
            f"{name_of(function)} over a shape of {tuple(shape)} has an input of {tuple(x.shape)}"
        )
    return lambda places: places.reshape(-1, math.prod(shape))


@rule(*spellings("group_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="group_norm",
      batch=Batch.STEPWISE)  # fmt: skip
def group_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> GaussianTensor:
    """Over groups of channels and all their positions."""
    if input.shape[1] % num_groups:
        raise ValueError(f"{input.shape[1]} channels are no {num_groups} groups of one size")
    affine = _of_channels(input, weight), _of_channels(input, bias)
    return _norm(
        function,
        input,
        lambda t: t.unflatten(1, (num_groups, -1)).flatten(2).flatten(0, 1),
        affine,
        eps,
    )


@rule(F.instance_norm, kind=Kind.SMOOTH, treatment=WITHIN, name="instance_norm",
      batch=Batch.STEPWISE)  # fmt: skip
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
    affine = _of_channels(input, weight), _of_channels(input, bias)
    return _norm(function, input, lambda t: t.flatten(2).flatten(0, 1), affine, eps)


def _of_channels(x: GaussianTensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.reshape(-1, *(1,) * (x.dim() - 2))


def _batch_norm(*names: str) -> Callable[..., GaussianTensor]:
    """The rule of batch norm with these arguments: an affine map of each channel.

    In training mode it would need the moments of the batch.
    """

    def centred(name: str, value: Any) -> Any:
        if name == "running_mean":
            return torch.zeros_like(value)
        return None if name == "bias" else value

    def strip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = tuple(centred(*pair) for pair in zip(names, args, strict=False))
        return kept, {name: centred(name, value) for name, value in kwargs.items()}

    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        statistics = given.get("running_mean"), given.get("running_var")
        if given.get("training", False) or any(one is None for one in statistics):
            raise UnsupportedOperation(
                "batch norm in training mode would use the statistics of the batch; call "
                "model.eval(), and keep its running statistics"
            )
        return scaling(function, *args, strip=strip, **kwargs)

    return body


_BATCH_NORMS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
}
for _function, _names in _BATCH_NORMS.items():
    rule(
        _function,
        kind=Kind.LINEAR,
        treatment="exact (evaluation mode)",
        name="batch_norm",
        batch=Batch.ANYWHERE,
    )(_batch_norm(*_names, "momentum", "eps", "cudnn_enabled"))
