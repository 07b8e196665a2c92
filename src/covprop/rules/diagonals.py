"""Short ways to diag(A H) for the linear maps of layers, which wide covariances start from."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.tensor import GaussianTensor

Diagonal: TypeAlias = Callable[[Tensor], Tensor]

IMAGE = 3
"""Channels, rows and columns."""


def of_linear(x: GaussianTensor, input: Any, weight: Tensor, bias: Any = None) -> Diagonal | None:
    """sum_k W_nk H_kn."""
    if len(x.event_shape) != 1:
        return None
    return lambda half: (weight * half.mT).sum(-1)


def of_conv2d(
    x: GaussianTensor,
    input: Any,
    weight: Tensor,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Diagonal | None:
    """Each output sees the patch of its own place: gather that instead of multiplying."""
    if x.event_shape[:-IMAGE].numel() != 1 or len(x.event_shape) < IMAGE:
        return None
    image = x.event_shape[-IMAGE:]
    kernel = weight.shape[-2:]
    # Numbered from 1, so that 0 is padding.
    places = torch.arange(1, image.numel() + 1, dtype=torch.float64, device=x.device)
    places = places.reshape(1, *image)
    if padding == "same":
        widths = []
        for size, gap in zip(reversed(kernel), reversed(_pair(dilation)), strict=True):
            whole = gap * (size - 1)
            widths += [whole // 2, whole - whole // 2]
        places, padding = F.pad(places, widths), 0
    around = (0, 0) if isinstance(padding, str) else _pair(padding)
    taps = F.unfold(places, tuple(kernel), _pair(dilation), around, _pair(stride))[0].long()
    # taps (channels of the input * places of the kernel, places of the output)
    inside, index = taps > 0, (taps - 1).clamp(min=0)
    rows = len(index) // groups
    each = weight.shape[0] // groups

    def diagonal(half: Tensor) -> Tensor:
        results = []
        for channel, columns in enumerate(half.split(index.shape[1], dim=-1)):
            part = slice(channel // each * rows, (channel // each + 1) * rows)
            patch = columns.gather(-2, index[part].expand(*columns.shape[:-2], -1, -1))
            kept = weight[channel].reshape(-1, 1) * inside[part]
            results.append((patch * kept).sum(-2))
        return torch.cat(results, dim=-1)

    return diagonal


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
