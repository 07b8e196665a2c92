"""What a model may ask of a tensor beside its numbers, and what it may not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.table import Batch, Kind, rule
from covprop.rules.operands import at_means

_METADATA = spellings(
    "numel", "nelement", "ndimension", "is_contiguous", "stride", "get_device", "is_floating_point",
    "is_complex", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_tensor", "result_type",
)  # fmt: skip


@rule(*_METADATA, kind=Kind.CONSTANT, treatment="a constant",
      name="zeros_like, ones_like, full_like", batch=Batch.STEPWISE)  # fmt: skip
def metadata(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What depends on the shape, dtype and device alone is no Gaussian."""
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
    """Refuse what would make a decision of a random value."""
    raise UnsupportedOperation(
        f"{name_of(function)} asks for the value of a Gaussian, which is random; control flow and "
        "indices cannot depend on it"
    )
