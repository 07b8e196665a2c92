"""Operations that only move, repeat or leave out elements, or leave the distribution as it is.

Run on a tensor of indices, a movement tells which element goes where; the covariance follows
without arithmetic, and stays as it is where the order does not change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.activations.expression import OperationKind
from covprop.errors import ApproximationWarning, UnsupportedOperation, name_of, warn_user
from covprop.flow.batch_position import FIRST
from covprop.flow.table import Batch, Kind, register_composer, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.rules.affine import affine
from covprop.rules.composition import cast_pending
from covprop.rules.operands import (
    as_unary,
    at_means,
    batch_error,
    check_batch_shape,
    single_gaussian,
)
from covprop.rules.radius import follow

BY_MEANS = "approximate: in the order of the means, with a warning where it may be another"
SURE = 5.0
"""Standard deviations between neighbours that keep their order."""


def movement(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Move the mean, and the rows and columns of the covariance with it.

    Args:
        function: A torch function whose result consists of elements of its argument.
        args: Its arguments, one of them a `GaussianTensor`.
        kwargs: Its arguments by name.

    Example:
        cp.rule(torch.take)(cp.extending.movement)
        cp.propagate(lambda x: torch.take(x, torch.tensor([2, 0])), x, cp.GaussianLayers())
    """
    x = single_gaussian(function, args, kwargs)
    moved_argument = args[0] if args else kwargs.get("input")
    if moved_argument is not x:  # constant.expand_as(x): only the shape of x matters
        return at_means(function, args, kwargs)
    move = as_unary(function, args, kwargs)
    moved = move(x.loc)
    size = x.event_shape.numel()
    numbers = torch.arange(x.numel(), dtype=torch.float64, device=x.device).reshape(x.shape)
    origins = move(numbers)
    if isinstance(moved, Tensor):
        return _moved(function, x, moved, origins, size)
    results = [
        _moved(function, x, loc, origin, size) for loc, origin in zip(moved, origins, strict=True)
    ]
    return type(moved)(results)


def _moved(
    function: Callable[..., Any], x: GaussianTensor, loc: Tensor, origin: Tensor, size: int
) -> GaussianTensor:
    check_batch_shape(function, x, loc.shape)
    batch = x.batch_shape.numel()
    size_now = loc.shape[len(x.batch_shape) :].numel()
    rows = (
        origin.long().reshape(batch, size_now)
        - torch.arange(batch, device=x.device)[:, None] * size
    )
    index = rows[0] if batch else rows.new_zeros(size_now)
    if bool((rows != index).any()) or bool(((index < 0) | (index >= size)).any()):
        raise batch_error(function, x)
    if len(index) == size and bool((index.diff() == 1).all()):
        return follow(x, x.moved(loc, view=True), in_order=True)
    taken = GaussianTensor(loc, x.carrier.select(loc, index), view_of=x)
    return follow(x, taken, in_order=False)


def _movement(*names: str) -> None:
    rule(*spellings(*names), kind=Kind.MOVEMENT, treatment="exact", name=names[0],
         batch=Batch.ANYWHERE, in_place=in_place_spellings(*names))(movement)  # fmt: skip


def _getters(*names: str) -> list[Callable[..., Any]]:
    """What torch calls attributes."""
    return [getattr(Tensor, name).__get__ for name in names]


@rule(F.interpolate, kind=Kind.LINEAR, treatment="exact", name="interpolate",
      batch=Batch.ANYWHERE)  # fmt: skip
def interpolate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Nearest neighbours move elements; the other modes are linear."""
    options = dict(zip(("input", "size", "scale_factor", "mode"), args, strict=False)) | kwargs
    nearest = options.get("mode", "nearest").startswith("nearest")
    return (movement if nearest else affine)(function, *args, **kwargs)


@rule(F.grid_sample, torch.grid_sampler, kind=Kind.LINEAR, treatment="exact", name="grid_sample",
      batch=Batch.ANYWHERE)  # fmt: skip
def grid_sample(
    function: Callable[..., Any], input: Any, grid: Any, *args: Any, **kwargs: Any
) -> Any:
    """Linear in the image, at fixed places."""
    if isinstance(grid, GaussianTensor):
        raise UnsupportedOperation("sampling an image at random places has no rule")
    return affine(function, input, grid, *args, **kwargs)


@rule(Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, kind=Kind.MOVEMENT, treatment="exact",
      name="expand_as, view_as, reshape_as", batch=Batch.STEPWISE)  # fmt: skip
def shaped_as(function: Callable[..., Any], x: Any, other: Any) -> Any:
    """A reshape to the shape of another tensor."""
    shape = tuple(other.shape)
    return x.expand(shape) if function is Tensor.expand_as else x.reshape(shape)


@rule(torch.atleast_1d, torch.atleast_2d, torch.atleast_3d, kind=Kind.MOVEMENT, treatment="exact",
      name="atleast_1d, atleast_2d, atleast_3d")  # fmt: skip
def at_least(function: Callable[..., Any], *tensors: Any) -> Any:
    """Tensors with at least this many dimensions."""
    results = tuple(movement(function, x) if isinstance(x, GaussianTensor) else function(x)
                    for x in tensors)  # fmt: skip
    return results if len(results) > 1 else results[0]


_movement("flatten")
_movement("ravel")
_movement("reshape")
_movement("view")
_movement("unflatten")
_movement("squeeze")
_movement("unsqueeze")
_movement("permute")
_movement("transpose", "swapaxes", "swapdims")
_movement("t")
rule(*_getters("T", "mT", "H", "mH"), kind=Kind.MOVEMENT, treatment="exact", name="t",
     batch=Batch.ANYWHERE)(movement)  # fmt: skip
_movement("movedim", "moveaxis")
_movement("flip")
_movement("fliplr")
_movement("flipud")
_movement("rot90")
_movement("diagonal")
_movement("roll")
_movement("expand", "broadcast_to")
_movement("repeat")
_movement("repeat_interleave")
_movement("tile")
_movement("narrow")
_movement("select")
_movement("index_select")
_movement("masked_select")
_movement("__getitem__")
_movement("chunk", "unsafe_chunk")
_movement("split", "unsafe_split")
_movement("split_with_sizes", "unsafe_split_with_sizes")
_movement("tensor_split")
_movement("hsplit")
_movement("vsplit")
_movement("dsplit")
_movement("unbind")
_movement("pixel_shuffle")
_movement("pixel_unshuffle")
_movement("channel_shuffle")


@rule(torch.broadcast_tensors, kind=Kind.MOVEMENT, treatment="exact", name="broadcast_tensors",
      batch=Batch.STEPWISE)  # fmt: skip
def broadcast_tensors(function: Callable[..., Any], *tensors: Any) -> tuple[Any, ...]:
    """Each expanded to the shape of all."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(tensor.expand(shape) for tensor in tensors)


_COPIES = spellings("clone", "contiguous", "positive")
_CONVERSIONS = (
    Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16,
    Tensor.cpu, Tensor.cuda,
)  # fmt: skip


@rule(*_COPIES, kind=Kind.MOVEMENT, treatment="exact",
      batch=Batch.ANYWHERE,
      name="clone, contiguous, positive")  # fmt: skip
def copy(function: Callable[..., Any], input: GaussianTensor, **kwargs: Any) -> GaussianTensor:
    """Covariances are never changed in place, so a copy may share them."""
    loc = function(input.loc, **kwargs)
    return input if loc is input.loc else input.moved(loc)


_DETACH = [*spellings("detach"), *_getters("data")]


@rule(*_DETACH, kind=Kind.MOVEMENT, treatment="exact", name="detach", batch=Batch.ANYWHERE)
def detach(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Leave autograd's graph with mean and covariance."""
    if not torch.is_grad_enabled():
        return input.moved(input.loc, view=True)
    loc = input.loc.detach()
    return GaussianTensor(loc, input.carrier.map(loc, torch.Tensor.detach), view_of=input)


@rule(*_CONVERSIONS, Tensor.type, kind=Kind.MOVEMENT, treatment="exact", batch=Batch.ANYWHERE,
      name="to, type_as, float, double, cpu, cuda")  # fmt: skip
def to(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change dtype or device of mean and covariance."""
    loc = function(x.loc, *args, **kwargs)
    if loc is x.loc:
        return x
    known = _recast(x)
    if known is not None and (known.dtype, known.device) == (loc.dtype, loc.device):
        return known.alias()
    result = GaussianTensor(loc, x.carrier.map(loc, lambda tensor: tensor.to(loc)))
    if (x.dtype, loc.dtype) == (torch.float32, torch.float64):
        result.carrier.recast = ref(x), *_values(x), *_values(result)
        x.carrier.recast = ref(result), *_values(result), *_values(x)
    return result


def _values(x: GaussianTensor) -> tuple[Any, Any]:
    """Weak references to the mean and the carrier, which an operation in place exchanges."""
    return ref(x.loc), ref(x.carrier)


def _recast(x: GaussianTensor) -> GaussianTensor | None:
    """The tensor that this one was cast from or to, if neither has changed since."""
    if x.is_pending or x.carrier.recast is None:
        return None
    other, *known = (reference() for reference in x.carrier.recast)
    if other is None or other.is_pending:
        return None
    now = other.loc, other.carrier, x.loc, x.carrier
    return other if all(a is b for a, b in zip(now, known, strict=True)) else None


def _still_pending(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[GaussianTensor],
) -> Any:
    """A copy of a pending function is the same function, of a cast argument if it casts.

    Of a second tensor only dtype and device matter, so that it stays pending, too.
    """
    x = args[0] if args else kwargs.get("input")
    result = at_means(function, args, kwargs)
    if not isinstance(x, GaussianTensor) or not isinstance(result, Tensor):
        return result  # another tensor as x is, or the name of a dtype
    if x.pending is None:
        return (
            dispatch(Tensor.to, (x, result.device, result.dtype), {}) if len(tensors) > 1 else None
        )
    if function in _DETACH and torch.is_grad_enabled():  # it leaves autograd's graph
        return None
    if (result.dtype, result.device) != (x.dtype, x.device):
        return cast_pending(x, x.pending, result)
    # torch returns the tensor itself where nothing changes, as it does not for comparisons.
    compared = x.pending.expression.kind is OperationKind.COMPARE
    itself = result.is_set_to(x.base.shown) and not compared
    return x if itself else x.alias()


register_composer([*_COPIES, *_CONVERSIONS, Tensor.type, *_DETACH], _still_pending)


_METADATA = spellings(
    "numel", "nelement", "dim", "ndimension", "size", "is_contiguous", "stride", "get_device",
    "is_floating_point", "is_complex", "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "result_type",
)  # fmt: skip
_ATTRIBUTES = _getters(
    "is_cpu", "is_cuda", "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse", "itemsize",
    "layout", "ndim",
)  # fmt: skip


@rule(*_METADATA, *_ATTRIBUTES, kind=Kind.CONSTANT, treatment="a constant",
      name="zeros_like, ones_like, full_like", batch=Batch.STEPWISE)  # fmt: skip
def metadata(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Functions of shape, dtype and device alone, which are constant."""
    return at_means(function, args, kwargs)


_VALUES: tuple[Callable[..., Any], ...] = (
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
    Tensor.__index__, *spellings("lt", "le", "gt", "ge", "eq", "ne", "isnan", "argmax", "argmin"),
)  # fmt: skip


@rule(torch._nested_tensor_from_mask_left_aligned, kind=Kind.OTHER, batch=Batch.STEPWISE)
def no_nested_tensor(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """nn.TransformerEncoder asks whether it may use a nested tensor."""
    return False


@rule(*_VALUES, kind=Kind.OTHER, name="values", batch=Batch.STEPWISE)
def value(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse to turn a random value into a number or a decision."""
    raise UnsupportedOperation(
        f"{name_of(function)} asks for the value of a Gaussian, which is random; control flow and "
        "indices cannot depend on it"
    )


class Ordered(NamedTuple):
    """What torch.sort and torch.topk return; the indices are those of the means."""

    values: Any
    indices: Tensor


def _taken(function: Callable[..., Any], x: Any, dim: int, count: int, descending: bool) -> Ordered:
    """The first elements in the order of the means."""
    x.materialize()
    batch = range(len(x.batch_shape)) if x.batch_at == FIRST else (x.batch_at.dim,)
    if x.dim() and x.batch_shape and dim % x.dim() in batch:
        raise batch_error(function, x)
    means, order = x.shown.detach().sort(dim=dim, descending=descending, stable=True)
    deviations = x.batch_at.shown(x.variances.detach().clamp(min=0).sqrt().reshape(x.loc.shape))
    deviations = deviations.gather(dim, order)
    edges = min(count, means.shape[dim] - 1) if means.dim() else 0
    if edges > 0:
        gaps = means.diff(dim=dim).abs().narrow(dim, 0, edges)
        first, second = deviations.narrow(dim, 0, edges), deviations.narrow(dim, 1, edges)
        # Equal means of constants keep their order.
        if bool(((gaps < SURE * (first + second)) & (first + second > 0)).any()):
            warn_user(
                f"{name_of(function)} takes elements in the order of their means, and here some "
                f"are within {SURE:g} standard deviations of each other, so that their order is "
                "random; compare with sampling",
                ApproximationWarning,
            )
    order = order.narrow(dim, 0, count) if means.dim() else order
    return Ordered(torch.gather(x, dim, order) if means.dim() else x, order)


@rule(*spellings("sort", "msort"), kind=Kind.ORDER, treatment=BY_MEANS, name="sort",
      batch=Batch.STEPWISE)  # fmt: skip
def sort(
    function: Callable[..., Any],
    input: GaussianTensor,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> Any:
    """All elements along a dimension."""
    if function.__name__ == "msort":
        return _taken(function, input, 0, input.shape[0], descending=False).values
    return _taken(function, input, dim, input.shape[dim] if input.dim() else 1, descending)


@rule(*spellings("topk"), kind=Kind.ORDER, treatment=BY_MEANS, name="topk",
      batch=Batch.STEPWISE)  # fmt: skip
def topk(
    function: Callable[..., Any],
    input: GaussianTensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> Ordered:
    """The first few."""
    return _taken(function, input, dim, k, largest)
