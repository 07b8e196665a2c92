"""Short ways for the linear maps A of layers: to diag(A H), and to the squares of their entries.

Wide covariances start from the first, variances alone go through the second.
"""

import math
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


def no_short_way(*args: Any, **kwargs: Any) -> None:
    """Layers with a weight, but without a short way to diag(A H)."""


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


def one(x: GaussianTensor, loc: Tensor, *args: Any, **kwargs: Any) -> float:
    """Sums and copies: every entry is one or zero."""
    return 1.0


def share(x: GaussianTensor, loc: Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Means over windows that divide the input evenly."""
    sizes = zip(reversed(x.event_shape), reversed(loc.shape), strict=False)
    even = loc.dim() != x.dim() or all(size % out == 0 for size, out in sizes)
    return loc.numel() / x.numel() if even else None


def of_windows(
    x: GaussianTensor,
    loc: Tensor,
    input: Any,
    kernel_size: int | Sequence[int],
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> float | None:
    """Means over windows of one size, if all have the same divisor."""
    if ceil_mode or not (count_include_pad or padding in (0, (0,), (0, 0), (0, 0, 0))):
        return None
    if isinstance(kernel_size, int):
        inside = x.loc.dim() - 2 if x.batch_shape else len(x.event_shape) - 1
        kernel_size = (kernel_size,) * min(inside, 3)
    return 1 / (divisor_override or math.prod(kernel_size))


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
