"""Linear maps of layers as functions of their weights, for one network or for several at once.

Members are networks that are computed together: weights (members, ...), inputs (members, ...).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.covariance import LinearMap
from covprop.rules.layers import Convolution, Linear

PLANE = 2
"""Places of a convolution are points of a plane; a line is a plane of one row."""


class Geometry(Protocol):
    """How the outputs of a layer see its inputs through its weights."""

    @property
    def event_dims(self) -> int:
        """Dimensions of the smallest event that it takes."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, members: bool) -> Tensor:
        """The layer on tensors with any dimensions before the event."""

    def linear(self, weight: Tensor, event_shape: torch.Size) -> LinearMap:
        """What is known of the map of one network."""

    def positions(self, weight: Tensor, event_shape: torch.Size) -> int:
        """In how many places of the event the weights are used."""

    def taps(self, weight: Tensor, event_shape: torch.Size) -> Tensor:
        """The inputs that each weight of an output meets, from 1, 0 for padding: (t, places)."""

    def blocks(self, shared: Tensor) -> Tensor:
        """Covariances (*batch, out, p, q) within outputs as a matrix (*batch, m, m)."""


@final
@dataclass(frozen=True)
class Dot:
    """`F.linear`: the last dimension of the event, in every position of the others."""

    event_dims = 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, members: bool) -> Tensor:
        """W x + b."""
        if not members:
            return F.linear(x, weight, bias)
        rows = x if x.dim() == weight.dim() else x.reshape(len(x), -1, x.shape[-1])
        turned = weight.mT
        mapped = rows @ turned if bias is None else torch.baddbmm(bias[:, None], rows, turned)
        return mapped if rows is x else mapped.reshape(*x.shape[:-1], mapped.shape[-1])

    def linear(self, weight: Tensor, event_shape: torch.Size) -> LinearMap:
        """The map of one network."""
        return LinearMap(
            lambda x: F.linear(x, weight), event_shape, layer=Linear(weight),
            squared=lambda x: F.linear(x, weight.square()),
        )  # fmt: skip

    def positions(self, weight: Tensor, event_shape: torch.Size) -> int:
        """All but the features."""
        del weight
        return event_shape[:-1].numel()

    def taps(self, weight: Tensor, event_shape: torch.Size) -> Tensor:
        """Feature j of position p."""
        numbers = torch.arange(1, event_shape.numel() + 1, device=weight.device)
        return numbers.reshape(-1, event_shape[-1]).T

    def blocks(self, shared: Tensor) -> Tensor:
        """Positions come first, outputs second."""
        size = shared.shape[-3] * shared.shape[-1]
        full = torch.diag_embed(shared.movedim(-3, -1))  # (*batch, p, q, out, out)
        return full.movedim(-2, -3).reshape(*shared.shape[:-3], size, size)


@final
@dataclass(frozen=True)
class Convolved:
    """`F.conv1d` or `F.conv2d` with zeros around."""

    dims: int
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    @property
    def event_dims(self) -> int:
        """Channels and places."""
        return self.dims + 1

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, members: bool) -> Tensor:
        """The convolution; members are groups of channels."""
        function: Callable[..., Tensor] = F.conv1d if self.dims == 1 else F.conv2d
        options = (self.stride, self.padding, self.dilation)
        event = x.shape[-self.event_dims :]
        if not members:
            mapped = function(x.reshape(-1, *event), weight, bias, *options, self.groups)
            return mapped.reshape(*x.shape[: -self.event_dims], *mapped.shape[1:])
        count = len(weight)
        side = x.reshape(count, -1, *event).transpose(0, 1).flatten(1, 2)
        offset = None if bias is None else bias.flatten()
        mapped = function(side, weight.flatten(0, 1), offset, *options, count * self.groups)
        mapped = mapped.unflatten(1, (count, -1)).transpose(0, 1)
        return mapped.reshape(*x.shape[: -self.event_dims], *mapped.shape[2:])

    def linear(self, weight: Tensor, event_shape: torch.Size) -> LinearMap:
        """The map of one network."""
        return LinearMap(
            lambda x: self.apply(x, weight, None, members=False), event_shape,
            layer=self._layer(weight, event_shape),
            squared=lambda x: self.apply(x, weight.square(), None, members=False),
        )  # fmt: skip

    def positions(self, weight: Tensor, event_shape: torch.Size) -> int:
        """Places of one channel of the output."""
        return self._layer(weight, event_shape).places

    def taps(self, weight: Tensor, event_shape: torch.Size) -> Tensor:
        """Channel by channel, the inputs under the kernel at each place."""
        return self._layer(weight, event_shape).taps

    def blocks(self, shared: Tensor) -> Tensor:
        """Channels come first, places second."""
        size = shared.shape[-3] * shared.shape[-1]
        full = torch.diag_embed(shared.movedim(-3, -1))  # (*batch, p, q, out, out)
        order = full.movedim((-2, -4, -1, -3), (-4, -3, -2, -1))
        return order.reshape(*shared.shape[:-3], size, size)

    def _layer(self, weight: Tensor, event_shape: torch.Size) -> Convolution:
        padding = self.padding if isinstance(self.padding, str) else _plane(self.padding, 0)
        if self.dims < PLANE:
            weight = weight[:, :, None]
            event_shape = torch.Size((event_shape[0], 1, event_shape[1]))
        return Convolution(
            weight, event_shape, _plane(self.stride, 1), padding, _plane(self.dilation, 1),
            self.groups,
        )  # fmt: skip


def _plane(values: Sequence[int], missing: int) -> tuple[int, int]:
    """Of the rows and the columns."""
    return (missing, values[0]) if len(values) < PLANE else (values[0], values[1])
