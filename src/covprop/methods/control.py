"""Samples that only have to tell what a linear function of the input does not."""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from covprop.covariance.base import symmetric
from covprop.methods.base import Advance, Estimate, Method, Propagation, WrappingMethod
from covprop.methods.exact import Exact
from covprop.methods.roots import Root
from covprop.sampling import SamplingError

GROUPS = 32
"""Independent parts of the samples; they tell the error."""
FEWEST = 4 * GROUPS
"""Samples, at least."""


@final
@dataclass(frozen=True)
class ControlVariate(WrappingMethod):
    """Unbiased moments by sampling, with the base's linearisation as control variate.

    With g = E[J] (x - m), whose moments are known, of the same samples:

        mean = mean(f - g),  covariance = Cov(f) - Cov(g) + E[J] S E[J]^T

    where mean and Cov are those of the samples. Whatever the base takes for E[J], both are right
    on average; the better it is, the less is left to chance. The result has standard errors, as
    that of `cp.MonteCarlo`. Being a difference, the covariance may have slightly negative
    eigenvalues where samples are few. No gradients.

    samples: how many, rounded up to 32 equal groups; base: where E[J] is from; generator: where
    randomness comes from, torch's global one by default.
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
        gains = propagation.gains(self.base)
        inputs = propagation.inputs
        roots = [Root.of(x) for x in inputs]
        each = -(-self.samples // GROUPS)
        # An output that the base found constant has no gain: plain sampling.
        known = [gains.get(output.leaf) for output in network.outputs]
        tallies = [_Tally() for _ in network.outputs]
        for _ in range(GROUPS):
            groups = [_Group() for _ in network.outputs]
            for start in range(0, each, network.step):
                numbers = [
                    torch.randn(
                        (min(network.step, each - start), *x.batch_shape, root.width),
                        dtype=x.dtype, device=x.device, generator=self.generator,
                    )
                    for x, root in zip(inputs, roots, strict=True)
                ]  # fmt: skip
                noise = [root.times(z) for root, z in zip(roots, numbers, strict=True)]
                values = network.at([x.mean + e for x, e in zip(inputs, noise, strict=True)])
                for group, value, rows in zip(groups, values, known, strict=True):
                    group.add(value.double(), _linear(rows, numbers, value))
                advance(len(numbers[0]), GROUPS * each)
            for tally, group in zip(tallies, groups, strict=True):
                tally.add(*group.moments())
        estimates = [
            tally.estimate(GROUPS * each, _known(rows), output.dtype)
            for tally, rows, output in zip(tallies, known, network.outputs, strict=True)
        ]
        return propagation.nest(network, estimates, self)


def _linear(rows: list[Tensor] | None, numbers: list[Tensor], like: Tensor) -> Tensor:
    """g (count, *batch, m) for the standard normal numbers behind each input."""
    if rows is None:
        return torch.zeros_like(like, dtype=torch.float64)
    parts = [
        torch.einsum("...mn,k...n->k...m", gain.double(), z.double())
        for gain, z in zip(rows, numbers, strict=True)
    ]
    return torch.stack(parts).sum(0)


def _known(rows: list[Tensor] | None) -> Tensor | None:
    """E[J] S E[J]^T."""
    if rows is None:
        return None
    return torch.stack([gain.double() @ gain.double().mT for gain in rows]).sum(0)


class _Group:
    """The values of one group and of their control variate, chunk after chunk."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.linear: list[Tensor] = []

    def add(self, values: Tensor, linear: Tensor) -> None:
        self.values.append(values)
        self.linear.append(linear)

    def moments(self) -> tuple[Tensor, Tensor]:
        """mean(f - g) and Cov(f) - Cov(g) = Cov(f - g, f + g), symmetrised."""
        values, linear = torch.cat(self.values), torch.cat(self.linear)
        rest, total = values - linear, values + linear
        mean = rest.mean(0)
        rest, total = rest - mean, total - total.mean(0)
        products = torch.einsum("k...i,k...j->...ij", rest, total) / (len(values) - 1)
        return mean, (products + products.mT) / 2


class _Tally:
    """Averages over groups, and how far they spread (Welford)."""

    def __init__(self) -> None:
        self.count = 0
        self.averages: list[Tensor] = []
        self.squares: list[Tensor] = []

    def add(self, *found: Tensor) -> None:
        self.count += 1
        if not self.averages:
            self.averages = list(found)
            self.squares = [torch.zeros_like(one) for one in found]
            return
        for i, one in enumerate(found):
            apart = one - self.averages[i]
            self.averages[i] = self.averages[i] + apart / self.count
            self.squares[i] = self.squares[i] + apart * (one - self.averages[i])

    def estimate(self, samples: int, known: Tensor | None, dtype: torch.dtype) -> Estimate:
        mean, covariance = self.averages
        covariance = covariance if known is None else covariance + known
        errors = [(one / (self.count * (self.count - 1))).sqrt().to(dtype) for one in self.squares]
        return mean.to(dtype), symmetric(covariance).to(dtype), SamplingError(samples, *errors)
