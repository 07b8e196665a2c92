"""The narrower Gaussians that an input is split into: run, checked, and put together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from covprop.covariance import Covariance
from covprop.dispatch import leaves
from covprop.gaussian import Gaussian
from covprop.mixture import Mixture
from covprop.sampling import SamplingError

NUDGE = 1.0
"""In units of machine epsilon: how far means are moved to see what rounding does."""
LEAST = 4.0
"""In the same units, of the largest mean of an output: what rounding does at least."""
ROUNDINGS = 4.0
"""Nonlinearity of so many errors by rounding, or less, is not told from them."""


@final
@dataclass(frozen=True)
class Components:
    """The inputs of all components."""

    weights: Tensor
    means: list[Tensor]
    """(components, *batch, *event) of every input."""
    covariances: list[Covariance]
    """Of every input, the same for all components."""
    batch_shape: torch.Size

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.weights)

    def alone(self, place: int) -> list[Gaussian]:
        """The inputs of one component."""
        return self._at([mean[place] for mean in self.means])

    def nudged(self) -> list[Gaussian]:
        """Those of the last one, with every element of the means moved by rounding or so."""
        coins = torch.Generator().manual_seed(0)
        means = []
        for last in (mean[-1] for mean in self.means):
            signs = 2 * torch.randint(2, last.shape, generator=coins) - 1
            means.append(last * (1 + NUDGE * torch.finfo(last.dtype).eps * signs.to(last)))
        return self._at(means)

    def together(self) -> list[Gaussian]:
        """All of them, as more of the first dimension of a batch."""
        return [
            Gaussian(
                mean.flatten(0, 1),
                covariance.map(lambda t: t.expand(self.count, *t.shape).flatten(0, 1)),
                validate_args=False,
            )
            for mean, covariance in zip(self.means, self.covariances, strict=True)
        ]

    def divided(self, y: Gaussian) -> Gaussian:
        """A result of all together, by component."""
        return y.reshape_batch((self.count, *self.batch_shape))

    def _at(self, means: Sequence[Tensor]) -> list[Gaussian]:
        both = zip(means, self.covariances, strict=True)
        return [Gaussian(mean, covariance, validate_args=False) for mean, covariance in both]


def stacked(results: Sequence[Gaussian]) -> Gaussian:
    """One result of every component, as a batch (components, *batch)."""
    errors = [y.sampling_error for y in results if y.sampling_error is not None]
    error = None
    if len(errors) == len(results):
        error = SamplingError(
            errors[0].samples,
            torch.stack([one.mean for one in errors]),
            torch.stack([one.covariance for one in errors]),
        )
    return Gaussian(
        torch.stack([y.mean for y in results]),
        torch.stack([y.covariance_matrix for y in results]),
        validate_args=False,
        sampling=error,
    )


def agree(together: Any, alone: Any, parts: Components) -> bool:
    """Whether all components in one batch have in them what the last one is by itself.

    A model may count its axes from the front, or treat elements of a batch by their place. Half of
    the digits have to agree, means in units of themselves and the deviations.
    """
    pairs = list(zip(leaves(together), leaves(alone), strict=False))
    if len(pairs) != len(list(leaves(alone))) or len(pairs) != len(list(leaves(together))):
        return False
    for ours, other in pairs:
        if not isinstance(ours, Gaussian | Tensor) and not isinstance(other, Gaussian | Tensor):
            continue  # that of one alone is taken
        if not isinstance(ours, Gaussian) or not isinstance(other, Gaussian):
            return False
        first, *rest = other.batch_shape
        same_batch = ours.batch_shape == (parts.count * first, *rest)
        if not same_batch or ours.event_shape != other.event_shape:
            return False
        if not _close(parts.divided(ours)[-1], other):
            return False
    return True


@torch.no_grad()
def _close(y: Gaussian, z: Gaussian) -> bool:
    tolerance = torch.finfo(y.dtype).eps ** 0.5
    spread = torch.maximum(y.stddev, z.stddev)
    means = (y.mean - z.mean).abs() <= tolerance * (z.mean.abs() + spread)
    flat = spread.reshape(*y.batch_shape, y.event_shape.numel())
    scale = flat[..., :, None] * flat[..., None, :]
    difference = (y.covariance_matrix - z.covariance_matrix).abs()
    return bool(means.all()) and bool((difference <= tolerance * scale).all())


def mixed(
    weights: Tensor, components: Gaussian, linear: Tensor | None, nudged: Gaussian | None
) -> Mixture:
    """The mixture of a result, with offsets of its components that rounding has no part in.

    linear (components, *batch, n): where the expected Jacobian puts the components; nudged: what
    the last one is with its means moved by rounding. Where components are so close to each other
    that the rest of their offsets is what rounding does, the linear part is all that is known.
    """
    weights = weights.to(components.dtype)  # that of the outputs may be another one
    if linear is None or nudged is None or not linear.numel():
        return Mixture(weights, components)
    means = components.mean.double().reshape(linear.shape)
    chances = weights.double()
    offsets = means - torch.einsum("k,k...->...", chances, means)
    with torch.no_grad():
        size = torch.einsum("k,k...->...", chances, offsets.square()).sqrt()
        moved = (nudged.mean.double().reshape(size.shape) - means[-1]).abs()
        share = torch.where(size > 0, moved / torch.where(size > 0, size, 1), 0)
        typical = share.square().mean(-1, keepdim=True).sqrt() * size
        least = LEAST * torch.finfo(components.dtype).eps * means.abs().amax((0, -1))[..., None]
        rounding = torch.maximum(torch.maximum(moved, typical), least)
        rest = torch.einsum("k,k...->...", chances, (offsets - linear).square()).sqrt()
        drop = rest <= ROUNDINGS * rounding
    # The value of the linear part, and the gradient of the offsets.
    known = linear + (offsets - offsets.detach())
    return Mixture(weights, components, torch.where(drop, known, offsets).to(components.dtype))
