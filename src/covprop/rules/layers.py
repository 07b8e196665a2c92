"""Layers with a weight, and means over windows: rules, and what is known of their maps A.

Short ways to diag(A H), to only some of the outputs, and to the squares of the entries. Where
torch has no fast kernel, convolutions of many images are few large matrix products.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import LinearMap
from covprop.covariance.congruence import TOGETHER
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, is_plain
from covprop.kernels import compiled
from covprop.kernels.gradients import followed
from covprop.kernels.products import matmul
from covprop.rules.affine import (
    EXACT,
    affine,
    entries_of_mean,
    keeps_last_dims,
    register_linear,
    without_argument,
)
from covprop.rules.operands import gaussians

COMPILED = 128
"""Features from which two products by torch are as fast."""
IMAGE = 3
"""Channels, rows and columns."""


class Convolver:
    """A convolution without bias, with memory for the patches of some images.

    The images come last while it works, so that a place of all images is one piece of memory, and
    patches are made along the rows of the kernel only: the row below sees the same ones, one place
    further down. widths: the zeros left, right, above and below, as `F.pad` has them.
    """

    def __init__(
        self,
        weight: Tensor,
        image: torch.Size,
        stride: tuple[int, int],
        widths: tuple[int, int, int, int],
    ) -> None:
        (down, right), (left, before, above, below) = stride, widths
        channels, height, width = image
        kernel = weight.shape[-2:]
        self.image = image
        self.rows = (height + above + below - kernel[0]) // down + 1
        self.columns = (width + left + before - kernel[1]) // right + 1
        # kernel row, output channel, (kernel column, input channel)
        self.taps = weight.permute(2, 0, 3, 1).flatten(2).contiguous()
        across = [
            _inside(range(shift - left, shift - left + right * self.columns, right), width)
            for shift in range(kernel[1])
        ]
        seen = [range(i - above, i - above + down * self.rows, down) for i in range(kernel[0])]
        if down == 1:  # what the rows of the kernel see overlaps
            seen = [range(-above, height + below)]
        self.views = [(_inside(rows, height), across) for rows in seen]
        # Zeros stay zeros: what is outside of the images is never written.
        self._patches = [
            weight.new_zeros(kernel[1], channels, len(rows), self.columns, TOGETHER)
            for rows in seen
        ]

    def __call__(self, vectors: Tensor, channel: int = 0) -> Tensor:
        """Flat images (count, inputs) to their outputs from a channel on, (count, outputs)."""
        taps = self.taps[:, channel:]
        places = taps.shape[1] * self.rows * self.columns
        result = vectors.new_empty(places, len(vectors))
        products = vectors.new_empty(taps.shape[1], self.rows * self.columns * TOGETHER)
        for start in range(0, len(vectors), TOGETHER):
            part = vectors[start : start + TOGETHER]
            self._load(part.mT.contiguous().unflatten(0, self.image), len(part))
            for i, tap in enumerate(taps):
                if i == 0:
                    torch.mm(tap, self._under(i), out=products)
                else:
                    products.addmm_(tap, self._under(i))
            outputs = products.reshape(places, TOGETHER)
            result[:, start : start + TOGETHER] = outputs[:, : len(part)]
        return result.mT

    def _load(self, images: Tensor, count: int) -> None:
        """Put images (channels, rows, columns, count) under each column of the kernel."""
        for patches, ((rows, there), across) in zip(self._patches, self.views, strict=True):
            for shift, (columns, where) in enumerate(across):
                patches[shift, :, rows, columns, :count] = images[:, there, where]

    def _under(self, row: int) -> Tensor:
        """What a row of the kernel sees: (its columns * channels, places * images)."""
        patches = self._patches[0][:, :, row : row + self.rows]
        if len(self._patches) > 1:
            patches = self._patches[row]
        return patches.flatten(0, 1).flatten(1)


def _inside(seen: range, size: int) -> tuple[slice, slice]:
    """Which of the places seen are in [0, size): as a slice of them, and as one of the places."""
    kept = [i for i, place in enumerate(seen) if 0 <= place < size]
    if not kept:
        return slice(0, 0), slice(0, 0)
    first, last = kept[0], kept[-1]
    return slice(first, last + 1), slice(seen[first], seen[last] + 1, seen.step)


@final
@dataclass(frozen=True)
class Linear:
    """W of `F.linear`, for events whose last dimension it takes."""

    weight: Tensor

    def rows(self, vectors: Tensor, start: int = 0) -> tuple[int, Tensor]:
        """A v from output `start` on, or an earlier one: the first output, (*any, outputs)."""
        if vectors.shape[-1] == self.weight.shape[1]:
            return start, F.linear(vectors, self.weight[start:] if start else self.weight)
        several = vectors.unflatten(-1, (-1, self.weight.shape[1]))
        return 0, F.linear(several, self.weight).flatten(-2)

    def product(self, vectors: Tensor) -> Tensor | None:
        """V W^T."""
        if vectors.shape[-1] != self.weight.shape[1]:
            return None
        return matmul(vectors, self.weight.mT)

    def diagonal(self, half: Tensor) -> Tensor | None:
        """sum_k W_nk H_kn."""
        if half.shape[-2] != self.weight.shape[1]:
            return None
        return (self.weight * half.mT).sum(-1)

    def transposed(self, rows: Tensor) -> Tensor:
        """Rows times W."""
        if rows.shape[-1] == self.weight.shape[0]:
            return rows @ self.weight
        return (rows.unflatten(-1, (-1, self.weight.shape[0])) @ self.weight).flatten(-2)

    def outputs(self, size: int) -> int:
        """Outputs for an event of this size."""
        return size // self.weight.shape[1] * len(self.weight)

    def congruence(self, values: Tensor) -> tuple[Tensor, float] | None:
        """A S A^T of small matrices, for which two products by torch would be slower."""
        fits = values.shape[-1] == self.weight.shape[1] and self.weight.numel() > 0
        if not fits or max(self.weight.shape) > COMPILED:
            return None
        if not compiled.usable(values, self.weight):
            return None
        return compiled.congruence(values, self.weight)

    def without_buffers(self) -> "Linear":
        """It needs no buffers."""
        return self


@final
@dataclass(frozen=True)
class Convolution:
    """The weight of `F.conv2d`, for images of this shape."""

    weight: Tensor
    image: torch.Size
    stride: tuple[int, int]
    padding: tuple[int, int] | str
    dilation: tuple[int, int]
    groups: int

    def rows(self, vectors: Tensor, start: int = 0) -> tuple[int, Tensor]:
        """A v from the channel of output `start` on: its first output, (*any, outputs)."""
        first = 0
        if self.groups == 1 and vectors.shape[-1] == self.image.numel():
            first = start // self.places
        weight = self.weight[first:] if first else self.weight
        if self._by_products and not followed(vectors, weight):
            mapped = self._convolver(vectors.reshape(-1, self.image.numel()), first)
        else:
            mapped = F.conv2d(
                vectors.reshape(-1, *self.image), weight, None,
                self.stride, self.padding, self.dilation, self.groups,
            )  # fmt: skip
        return first * self.places, mapped.reshape(*vectors.shape[:-1], -1)

    def product(self, vectors: Tensor) -> None:
        """A convolution is none."""

    def outputs(self, size: int) -> int:
        """Outputs for an event of this size."""
        return size // self.image.numel() * len(self.weight) * self.places

    def congruence(self, values: Tensor) -> tuple[Tensor, float] | None:
        """A S A^T for one image, where every output sees all channels."""
        if values.shape[-1] != self.image.numel() or not self._simple:
            return None
        if not compiled.usable(values, self.weight):
            return None
        left, _, above, _ = self._widths
        layer = compiled.Convolution(self.image, self.stride, above, left, self._sides)
        return compiled.convolved(values, self.weight, layer)

    def transposed(self, rows: Tensor) -> Tensor | None:
        """A transposed convolution; one sided padding has no torch function for it."""
        left, right, above, below = self._widths
        if left != right or above != below:
            return None
        images = rows.reshape(-1, len(self.weight), *self._sides)
        kernel = zip(self.dilation, self.weight.shape[-2:], strict=True)
        reach = [gap * (size - 1) for gap, size in kernel]
        if self.stride == (1, 1) and self.groups == 1:  # which torch has a faster kernel for
            turned = self.weight.flip(-2, -1).transpose(0, 1)
            widths = reach[0] - above, reach[1] - left
            if min(widths) >= 0:
                mapped = F.conv2d(images, turned, None, 1, widths, self.dilation)
                return mapped.reshape(*rows.shape[:-1], -1)
        sides = zip(self.image[-2:], (above, left), reach, self.stride, strict=True)
        missing = tuple((side + 2 * around - r - 1) % step for side, around, r, step in sides)
        mapped = F.conv_transpose2d(
            images, self.weight, None, self.stride, (above, left), missing, self.groups,
            self.dilation,
        )  # fmt: skip
        return mapped.reshape(*rows.shape[:-1], -1)

    def without_buffers(self) -> "Convolution":
        """The same without memory for patches."""
        return replace(self)

    @cached_property
    def _convolver(self) -> Convolver:
        return Convolver(self.weight.detach(), self.image, self.stride, self._widths)

    @property
    def _by_products(self) -> bool:
        """Whether torch's own convolution is slower: it has a fast one for float32 on the CPU."""
        place = self.weight.device.type
        return self._simple and self.weight.dtype == torch.float64 and place == "cpu"

    @property
    def _simple(self) -> bool:
        return self.groups == 1 and self.dilation == (1, 1)

    def diagonal(self, half: Tensor) -> Tensor | None:
        """Each output sees the patch of its own place: gather that instead of multiplying."""
        if half.shape[-2] != self.image.numel():
            return None
        inside, index = self.taps > 0, (self.taps - 1).clamp(min=0)
        rows, each = len(index) // self.groups, len(self.weight) // self.groups
        results = []
        for channel, columns in enumerate(half.split(index.shape[1], dim=-1)):
            part = slice(channel // each * rows, (channel // each + 1) * rows)
            patch = columns.gather(-2, index[part].expand(*columns.shape[:-2], -1, -1))
            kept = self.weight[channel].reshape(-1, 1) * inside[part]
            results.append((patch * kept).sum(-2))
        return torch.cat(results, dim=-1)

    @cached_property
    def taps(self) -> Tensor:
        """The inputs under each output, numbered from 1, 0 for padding: (taps, places)."""
        device = self.weight.device
        places = torch.arange(1, self.image.numel() + 1, dtype=torch.float64, device=device)
        places = F.pad(places.reshape(1, *self.image), self._widths)
        kernel = tuple(self.weight.shape[-2:])
        return F.unfold(places, kernel, self.dilation, 0, self.stride)[0].long()

    @cached_property
    def _widths(self) -> tuple[int, int, int, int]:
        """Zeros left, right, above and below."""
        if not isinstance(self.padding, str):
            above, left = self.padding
            return left, left, above, above
        widths: list[int] = []
        for size, gap in zip(reversed(self.weight.shape), reversed(self.dilation), strict=False):
            whole = gap * (size - 1) if self.padding == "same" else 0
            widths += [whole // 2, whole - whole // 2]
        left, right, above, below = widths
        return left, right, above, below

    @property
    def places(self) -> int:
        """Places of one channel of the output."""
        return math.prod(self._sides)

    @cached_property
    def _sides(self) -> tuple[int, ...]:
        """Rows and columns of one channel of the output."""
        left, right, above, below = self._widths
        sides = zip(
            (self.image[-2] + above + below, self.image[-1] + left + right),
            self.weight.shape[-2:], self.dilation, self.stride, strict=True,
        )  # fmt: skip
        return tuple((side - gap * (k - 1) - 1) // step + 1 for side, k, gap, step in sides)


def convolution(
    x: GaussianTensor,
    input: Any,
    weight: Tensor,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Convolution | None:
    """The layer of a call of `F.conv2d`."""
    if len(x.event_shape) < IMAGE:
        return None
    around = padding if isinstance(padding, str) else _pair(padding)
    image = x.event_shape[-IMAGE:]
    return Convolution(weight, image, _pair(stride), around, _pair(dilation), groups)


def entries_of_windows(
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


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, *others = value
    return first, others[0] if others else first


def no_layer(*args: Any, **kwargs: Any) -> None:
    """No `Layer`, for functions with a weight of which nothing more is known."""


def linear_layer(x: GaussianTensor, input: Any, weight: Tensor, bias: Any = None) -> Linear | None:
    """The `Layer` of a call of `F.linear`, None where its weight is a vector."""
    return Linear(weight) if weight.dim() > 1 and x.event_shape else None


def _is_constant(argument: Any) -> bool:
    return argument is None or is_plain(argument)


@rule(*spellings("linear"), kind=Kind.LINEAR, treatment=EXACT, name="linear", batch=Batch.ANYWHERE)
def linear(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """W x + b, directly for a tensor with its batch first."""
    if hasattr(function, "batch_at") and keeps_last_dims(1, function, *gaussians(args, kwargs)):
        function = inspect.unwrap(function)
    plain = not kwargs and len(args) in (2, 3) and all(map(_is_constant, args[1:]))
    if function is F.linear and plain:
        x, weight, bias = (*args, None)[:3]
        layer = linear_layer(x, x, weight)
        if layer is not None:
            mapped = LinearMap(
                partial(F.linear, weight=weight), x.event_shape, layer=layer,
                squared=lambda vector: F.linear(vector, weight.square()),
            )  # fmt: skip
            return x.through(F.linear(x.loc, weight, bias), mapped)
    return affine(function, *args, strip=without_argument(2, "bias"), layer=linear_layer, **kwargs)


register_linear("conv1d", strip=without_argument(2, "bias"), layer=no_layer)
register_linear("conv2d", strip=without_argument(2, "bias"), layer=convolution)
register_linear("conv3d", strip=without_argument(2, "bias"), layer=no_layer)
register_linear("conv_transpose1d", strip=without_argument(2, "bias"), layer=no_layer)
register_linear("conv_transpose2d", strip=without_argument(2, "bias"), layer=no_layer)
register_linear("conv_transpose3d", strip=without_argument(2, "bias"), layer=no_layer)
register_linear("avg_pool1d", entries=entries_of_windows)
register_linear("avg_pool2d", entries=entries_of_windows)
register_linear("avg_pool3d", entries=entries_of_windows)
register_linear("adaptive_avg_pool1d", entries=entries_of_mean)
register_linear("adaptive_avg_pool2d", entries=entries_of_mean)
register_linear("adaptive_avg_pool3d", entries=entries_of_mean)
