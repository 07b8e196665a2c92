"""Operations that only move, repeat or leave out elements.

Run on a tensor of indices, the operation tells which element goes where; the covariance follows
without arithmetic, and stays as it is where the order does not change.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.dispatch import Batch, in_place, rule
from covprop.errors import UnsupportedOperation
from covprop.rules.affine import affine
from covprop.rules.operands import (
    at_means,
    batch_error,
    check_batch_shape,
    of_tensor,
    the_gaussian,
)
from covprop.tensor import GaussianTensor
from covprop.transfers import Taken


def movement(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Move the mean, and the rows and columns of the covariance with it."""
    x = the_gaussian(function, args, kwargs)
    moved_argument = args[0] if args else kwargs.get("input")
    if moved_argument is not x:  # constant.expand_as(x): only the shape of x matters
        return at_means(function, args, kwargs)
    move = of_tensor(function, args, kwargs)
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
        return x.moved(loc, view=True)
    x.expect(loc)
    covariance = x.covariance.take(index)
    result = x.replace(loc, covariance, transfer=Taken(index, size))
    return GaussianTensor(loc, result.node, x.lineage, view_of=x)


def _movement(*names: str) -> None:
    functions = spellings(*names)
    rule(*functions, kind="shape", treatment="exact", name=names[0], batch=Batch.ANYWHERE)(movement)
    for name in names:
        for function in spellings(f"{name}_"):
            in_place(function, of=getattr(torch.Tensor, name))


@rule(F.interpolate, kind="linear", treatment="exact", name="interpolate")
def interpolate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Nearest neighbours move elements; the other modes are linear."""
    options = dict(zip(("input", "size", "scale_factor", "mode"), args, strict=False)) | kwargs
    nearest = options.get("mode", "nearest").startswith("nearest")
    return (movement if nearest else affine)(function, *args, **kwargs)


@rule(F.grid_sample, torch.grid_sampler, kind="linear", treatment="exact", name="grid_sample")
def grid_sample(
    function: Callable[..., Any], input: Any, grid: Any, *args: Any, **kwargs: Any
) -> Any:
    """Linear in the image, at fixed places."""
    if isinstance(grid, GaussianTensor):
        raise UnsupportedOperation("sampling an image at random places has no rule")
    return affine(function, input, grid, *args, **kwargs)


@rule(Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, kind="shape", treatment="exact",
      name="expand_as, view_as, reshape_as", batch=Batch.ANYWHERE)  # fmt: skip
def shaped_as(function: Callable[..., Any], x: Any, other: Any) -> Any:
    """Of the other tensor only the shape matters."""
    like = other.loc if isinstance(other, GaussianTensor) else other
    return movement(function, x, like) if isinstance(x, GaussianTensor) else function(x, like)


@rule(torch.atleast_1d, torch.atleast_2d, torch.atleast_3d, kind="shape", treatment="exact",
      name="atleast_1d, atleast_2d, atleast_3d")  # fmt: skip
def at_least(function: Callable[..., Any], *tensors: Any) -> Any:
    """Each of the tensors with as many dimensions."""
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


@rule(torch.broadcast_tensors, kind="shape", treatment="exact", name="broadcast_tensors",
      batch=Batch.STEPWISE)  # fmt: skip
def broadcast_tensors(function: Callable[..., Any], *tensors: Any) -> tuple[Any, ...]:
    """Each expanded to the shape of all."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return tuple(tensor.expand(shape) for tensor in tensors)
