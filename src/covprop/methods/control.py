"""Samples that only have to tell what a linear function of the input does not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from covprop.dispatch import leaves
from covprop.gaussian import Gaussian
from covprop.methods.base import Advance, Method, Propagation, WrappingMethod
from covprop.methods.exact import Exact
from covprop.methods.network import Network
from covprop.methods.outputs import check_outputs
from covprop.methods.regressed import Group, Tally, completed
from covprop.methods.roots import Root

FEWEST = 128
"""Samples, at least, also of a group: of fewer, standard errors come out too small."""
HELD = 2**21
"""Numbers of all outputs of a group, about, which are held at a time."""
MATRICES = 12
"""In float64, of the size of a covariance, that are held at a time."""


@final
@dataclass(frozen=True)
class ControlVariate(WrappingMethod):
    """Moments by sampling, with the base's linearisation as control variate where that helps.

    With g = E[J] (x - m), whose moments are known, of the same samples:

        mean = mean(f - b g),  covariance = Cov(f) - c (Cov(g) - E[J] S E[J]^T)

    where mean and Cov are those of the samples, and b and c, of each output and each pair of them,
    are the coefficients of least variance: zero where g tells nothing of f, and the moments are
    those of the samples alone. Whatever the base takes for E[J], both are right but for their
    standard errors, which the result has as that of `cp.MonteCarlo`; the better it is, the less is
    left to chance. An output that is the same for all samples, and that the base knows to vary, has
    the moments of the base. The covariance is positive semi-definite. No gradients.

    samples: how many, rounded up to equal groups where outputs are many; base: where E[J] is from;
    generator: where randomness comes from, torch's global one by default.
    """

    samples: int = 1024
    base: Method = field(default_factory=Exact)
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.samples) is not int or self.samples < FEWEST:
            raise ValueError(f"samples is a whole number from {FEWEST}, not {self.samples!r}")
        if not isinstance(self.base, Method):
            raise TypeError(f"base is a method such as cp.Exact(), not {self.base!r}")

    @torch.no_grad()
    def around(self, propagation: Propagation, advance: Advance) -> Any:
        """Groups of samples, one after another."""
        network = propagation.network()
        roots = [Root.of(x) for x in propagation.inputs]
        width = sum(root.width for root in roots)
        check_outputs(network, lambda _: MATRICES * torch.float64.itemsize, beside=width)
        gains = propagation.gains(self.base)
        # An output that the base found constant has no gain: plain sampling.
        known = [_in_float64(gains.get(output.leaf)) for output in network.outputs]
        tallies = [Tally(_covariance(rows)) for rows in known]
        groups, each = _groups(network, self.samples)
        for _ in range(groups):
            collected = [Group() for _ in network.outputs]
            for start in range(0, each, network.step):
                count = min(network.step, each - start)
                numbers = [_normal(root, count, self.generator) for root in roots]
                points = [r.x.mean + r.times(z) for r, z in zip(roots, numbers, strict=True)]
                values = network.at(points)
                for group, value, rows in zip(collected, values, known, strict=True):
                    group.add(value.double(), _linear(rows, numbers, value))
                advance(count, groups * each)
            for tally, group in zip(tallies, collected, strict=True):
                tally.add(group)
        estimates = [
            tally.estimate(groups * each, output.dtype)
            for tally, output in zip(tallies, network.outputs, strict=True)
        ]
        unseen = [tally.unseen() for tally in tallies]
        if any(bool(some.any()) for some in unseen):
            results = list(leaves(propagation.run(propagation.inputs, self.base)))
            for i, output in enumerate(network.outputs):
                y = results[output.leaf]
                if isinstance(y, Gaussian) and y.mean.numel() == unseen[i].numel():
                    mean = y.mean.reshape(unseen[i].shape)
                    estimates[i] = completed(estimates[i], unseen[i], mean, y.covariance_matrix)
        return propagation.nest(network, estimates, self)


def _groups(network: Network, samples: int) -> tuple[int, int]:
    """How many groups, and of how many samples."""
    sizes = [output.event_shape.numel() for output in network.outputs]
    numbers = samples * network.batch_shape.numel() * sum(sizes)
    groups = max(1, min(samples // FEWEST, numbers // HELD))
    return groups, -(-samples // groups)


def _normal(root: Root, count: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers (count, *batch, n) behind an input."""
    shape = count, *root.x.batch_shape, root.width
    return torch.randn(shape, dtype=root.x.dtype, device=root.x.device, generator=generator)


def _in_float64(rows: Sequence[Tensor] | None) -> list[Tensor] | None:
    return None if rows is None else [gain.double() for gain in rows]


def _linear(rows: list[Tensor] | None, numbers: list[Tensor], like: Tensor) -> Tensor:
    """g (count, *batch, m) for the standard normal numbers behind each input."""
    if rows is None:
        return torch.zeros_like(like, dtype=torch.float64)
    parts = [
        torch.einsum("...mn,k...n->k...m", gain, z.double())
        for gain, z in zip(rows, numbers, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _covariance(rows: list[Tensor] | None) -> Tensor | float:
    """E[J] S E[J]^T."""
    return 0.0 if rows is None else torch.stack([gain @ gain.mT for gain in rows]).sum(0)
