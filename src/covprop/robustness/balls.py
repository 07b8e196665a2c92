"""Where an attack may go: balls around the input."""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

NORMS = (2.0, math.inf)


@final
@dataclass(frozen=True)
class Ball:
    """{mean + shift : |shift| <= radius in the norm, low <= mean + shift <= high}.

    radius: one number, or one for each of a batch; norm: 2 (Euclidean) or math.inf (the largest
    element); bounds: (low, high) of every element, which the centre has to keep.
    """

    radius: float | Tensor
    norm: float = 2.0
    bounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse what is no ball."""
        if self.norm not in NORMS:
            raise ValueError(f"the norm of a ball is 2 or math.inf, not {self.norm!r}")
        radius = torch.as_tensor(self.radius)
        if not bool(((radius >= 0) & torch.isfinite(radius)).all()):
            raise ValueError("the radius of a ball is finite and not negative")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"bounds are (low, high) with low < high, not {self.bounds!r}")

    def check(self, centre: Tensor) -> None:
        """Raise if the centre is out of bounds."""
        if self.bounds is None:
            return
        low, high = self.bounds
        if not bool(((centre >= low) & (centre <= high)).all()):
            raise ValueError(
                f"the input goes from {float(centre.min()):g} to {float(centre.max()):g}, beyond "
                f"the bounds {self.bounds}"
            )

    def direction(self, gradient: Tensor, batch_dims: int) -> Tensor:
        """The step of length 1 in the norm that goes along the gradient most; 0 where it is 0."""
        if self.norm == math.inf:
            return torch.sign(gradient)
        length = _length(gradient, batch_dims)
        return gradient / torch.where(length > 0, length, 1)

    def project(self, point: Tensor, centre: Tensor, batch_dims: int) -> Tensor:
        """The nearest point of the ball, then the nearest within bounds, which is in it too."""
        shift, radius = point - centre, self.at(centre, batch_dims)
        if self.norm == math.inf:
            shift = torch.maximum(torch.minimum(shift, radius), -radius)
        else:
            length = _length(shift, batch_dims)
            shift = shift * torch.where(length > radius, radius / length.clamp(min=_TINY), 1)
        moved = centre + shift
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def random(self, centre: Tensor, batch_dims: int, generator: torch.Generator | None) -> Tensor:
        """A point of the ball: a uniform direction and share of the radius, or a uniform point."""
        radius = self.at(centre, batch_dims)
        options: Any = {"dtype": centre.dtype, "device": centre.device, "generator": generator}
        if self.norm == math.inf:
            shift = radius * (2 * torch.rand(centre.shape, **options) - 1)
        else:
            normal = torch.randn(centre.shape, **options)
            share = torch.rand(radius.shape, **options)
            shift = self.direction(normal, batch_dims) * radius * share
        return self.project(centre + shift, centre, batch_dims)

    def at(self, centre: Tensor, batch_dims: int) -> Tensor:
        """The radius in a shape that goes with inputs (*batch, *event)."""
        radius = torch.as_tensor(self.radius, dtype=centre.dtype, device=centre.device)
        if radius.dim() and radius.shape != centre.shape[:batch_dims]:
            raise ValueError(
                f"the radius has shape {tuple(radius.shape)} and the batch "
                f"{tuple(centre.shape[:batch_dims])}; give one number, or one for each"
            )
        event = (1,) * (centre.dim() - batch_dims)
        return radius.expand(centre.shape[:batch_dims]).reshape(*centre.shape[:batch_dims], *event)


_TINY = torch.finfo(torch.float32).tiny


def _length(vector: Tensor, batch_dims: int) -> Tensor:
    """Euclidean, of each of the batch, in a shape that goes with it."""
    flat = vector.reshape(*vector.shape[:batch_dims], -1)
    event = (1,) * (vector.dim() - batch_dims)
    return flat.norm(dim=-1).reshape(*vector.shape[:batch_dims], *event)
