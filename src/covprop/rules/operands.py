"""Arguments of torch functions: which of them are Gaussian, and the function of those."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from covprop.covariance.base import is_finite
from covprop.errors import BatchDimensionError, MomentOverflow, UnsupportedOperation, name_of
from covprop.flow.carrier import Carrier
from covprop.flow.nests import instances, map_leaves
from covprop.flow.tensor import GaussianTensor, dispatch, is_plain
from covprop.kernels.rounding import SUMMATION_ORDER

PROBE_SCALES = 31
"""Powers of two that scale a float32 without overflow or rounding."""


def gaussians(args: Any, kwargs: Any) -> list[GaussianTensor]:
    """The in-flight Gaussians among the arguments, in order."""
    return instances(GaussianTensor, args, kwargs)


def check_finite(function: Callable[..., Any], x: GaussianTensor) -> None:
    """Raise if the input of a function is not finite, so that the function is not blamed."""
    if not (is_finite(x.loc) and is_finite(x.variances)):
        raise MomentOverflow(
            f"the input of {name_of(function)} has a mean or variance that is NaN or infinite; "
            "what came before it made it so"
        )


def promoted(*tensors: GaussianTensor) -> tuple[GaussianTensor, ...]:
    """Tensors that an operation joins, in the dtype that torch promotes them to."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return in_dtype(tensors, dtype)


def in_dtype(nest: Any, dtype: torch.dtype) -> Any:
    """A copy of the arguments with every in-flight Gaussian in this dtype."""
    return _replace(
        nest,
        GaussianTensor,
        lambda x: x if x.dtype == dtype else dispatch(Tensor.to, (x, dtype), {}),
    )


def single_gaussian(function: Callable[..., Any], args: Any, kwargs: Any) -> GaussianTensor:
    """The one in-flight Gaussian among the arguments."""
    tensors = gaussians(args, kwargs)
    if len(tensors) > 1:
        raise UnsupportedOperation(
            f"{name_of(function)} has a rule for one argument that depends on the input, and here "
            f"{len(tensors)} do"
        )
    return tensors[0]


@dataclass(frozen=True)
class Slot:
    """The place of an in-flight Gaussian in a list of arguments.

    What outlives an operation holds slots: holding the tensor would keep its covariance alive.
    """

    shape: torch.Size
    carrier: Carrier


def with_slots(nest: Any) -> Any:
    """A copy of the arguments with a slot for each in-flight Gaussian."""
    return _replace(nest, GaussianTensor, lambda x: Slot(x.shape, x.carrier))


def fill(nest: Any, value: Callable[[Slot], Any]) -> Any:
    """A copy of the arguments with a value in each slot."""
    return _replace(nest, Slot, value)


def without_constants(nest: Any) -> Any:
    """A copy of the arguments with every plain tensor at zero."""
    return map_leaves(nest, lambda leaf: torch.zeros_like(leaf) if is_plain(leaf) else leaf)


def _replace(nest: Any, kind: type, value: Callable[[Any], Any]) -> Any:
    return map_leaves(nest, lambda leaf: value(leaf) if isinstance(leaf, kind) else leaf)


def at_means(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The torch function at the means of all Gaussians; of pending ones, of what they come from."""
    args, kwargs = _replace((args, kwargs), GaussianTensor, lambda x: x.base.shown)
    return function(*args, **kwargs)


def as_unary(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[Tensor], Any]:
    """The torch function as a function of the one argument that is Gaussian.

    It does not hold the Gaussian, which would keep its covariance alive.
    """
    for place, argument in enumerate(args):
        if isinstance(argument, GaussianTensor):
            before, after = args[:place], args[place + 1 :]
            return lambda value: function(*before, value, *after, **kwargs)
    return unary_of_slots(function, *with_slots((args, kwargs)))


def unary_of_slots(function: Callable[..., Any], slots: Any, named: Any) -> Callable[[Tensor], Any]:
    """The same, for arguments with a slot in place of the Gaussian."""
    return lambda value: function(*fill(slots, lambda _: value), **fill(named, lambda _: value))


def check_batch_shape(function: Callable[..., Any], x: GaussianTensor, shape: torch.Size) -> None:
    """The batch must lead the result as it leads the argument."""
    if shape[: len(x.batch_shape)] != x.batch_shape:
        raise batch_error(function, x)


def batch_error(function: Callable[..., Any], x: GaussianTensor) -> BatchDimensionError:
    """The error for an operation that mixes, moves or drops the batch."""
    count = len(x.batch_shape)
    which = "the first dimension is" if count == 1 else f"the first {count} dimensions are"
    return BatchDimensionError(
        f"{name_of(function)} mixes, moves or drops the batch of shape {tuple(x.batch_shape)} in a "
        f"tensor of shape {tuple(x.shape)}; {which} the batch, whose Gaussians are separate"
    )


def check_batch_is_separate(
    function: Callable[..., Any],
    linear: Callable[[Tensor], Tensor],
    x: GaussianTensor,
    shape: torch.Size,
) -> None:
    """Check by probes that scaling an element of the batch scales its result and nothing else."""
    count, divisor = x.batch_shape.numel(), 1
    if count <= 1:
        return
    index = torch.arange(count, device=x.device)
    while divisor < count:  # the digits of its index tell every element from every other
        # Powers of two scale without rounding; any vector without structure will do.
        scale = 2.0 ** (index // divisor % PROBE_SCALES)
        scale = scale.to(x.dtype).reshape(x.batch_shape)
        probe = torch.cos(torch.arange(shape.numel(), device=x.device, dtype=x.dtype)) + 2
        probe = probe.reshape(shape)
        with torch.no_grad():
            scaled_after = linear(probe)
            scaled_after = scaled_after * _trailing(scale, scaled_after.dim())
            scaled_before = linear(probe * _trailing(scale, len(shape)))
        # What is mixed differs by factors of two; what is not, by rounding and denormals.
        limits = torch.finfo(x.dtype)
        allowed = SUMMATION_ORDER * (
            limits.eps * scaled_after.abs() + limits.tiny * 2.0**PROBE_SCALES
        )
        differs = (scaled_after - scaled_before).abs() > allowed
        if bool(differs.any()):  # NaN, from a broken weight, is none
            raise batch_error(function, x)
        divisor *= PROBE_SCALES


def _trailing(values: Tensor, dims: int) -> Tensor:
    return values.reshape(*values.shape, *(1,) * (dims - values.dim()))
