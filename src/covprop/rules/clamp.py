"""Bounds that are tensors: constants by functions of one tensor, others by maxima."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.flow.table import TABLE, composes
from covprop.flow.tensor import GaussianTensor
from covprop.rules.operands import gaussians


def _bounded(compose: Callable[..., Any] | None) -> Callable[..., Any]:
    """Bounds that are tensors: constants by functions of one tensor, others by maxima."""

    def composer(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        given = dict(zip(("input", "min", "max"), args, strict=False)) | kwargs
        if function.__name__ == "clamp_max" and len(args) > 1:
            given["max"] = given.pop("min")
        bounds = given.get("min"), given.get("max")
        if not any(_is_tensor(bound) for bound in bounds):
            return compose(function, args, kwargs, tensors) if compose else None
        return _between(given["input"], *bounds)

    return composer


def _is_tensor(bound: Any) -> bool:
    """Whether a bound is more than a number."""
    if isinstance(bound, GaussianTensor):
        return True
    return isinstance(bound, Tensor) and (bound.numel() != 1 or bound.requires_grad)


def _between(x: Any, low: Any, high: Any) -> Any:
    """x between bounds that are numbers or tensors, either of which may be missing."""
    like = {"dtype": x.dtype, "device": x.device}
    low, high = (
        bound if bound is None or isinstance(bound, Tensor) else torch.tensor(float(bound), **like)
        for bound in (low, high)
    )
    if low is None:
        return torch.minimum(x, high)
    if high is None:
        return torch.maximum(x, low)
    if gaussians((low, high), {}):
        return torch.minimum(torch.maximum(x, low), high)
    low = torch.minimum(low, high)  # torch: min > max makes all max
    return x + torch.relu(low - x) - torch.relu(x - high)


def register_bounds() -> None:
    """Once clamp has its reading."""
    for function in spellings("clamp", "clip", "clamp_min", "clamp_max"):
        composes([function], _bounded(TABLE[function].compose))
