"""Sampling: what everything else is measured by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.errors import UnsupportedOperation
from covprop.methods.base import Advance, Estimate, FunctionMethod
from covprop.methods.network import Network
from covprop.methods.roots import Root
from covprop.methods.streaming import Moments, Replicates, Result
from covprop.sampling import SamplingError

REPLICATES = 32
"""Independent scramblings of Sobol's sequence; they tell its error."""
DRAWN = 2**20
"""Numbers that are drawn at a time, whatever the chunk."""
HALF_CELL = 2.0**-31
"""Half the distance of neighbours in torch's Sobol sequence: keeps it off 0 and 1."""

Block: TypeAlias = list[Tensor]
"""Standard normal numbers (count, *batch, n) for each input."""


@final
@dataclass(frozen=True)
class MonteCarlo(FunctionMethod):
    """Moments of samples, with their standard errors on the result.

    `mean_stderr`, `covariance_stderr` and `samples` of the resulting Gaussian are set. Any model
    will do. No gradients: nothing is recorded for autograd, whatever its mode.

    samples: how many, rounded up to whole pairs or replicates; generator: where randomness comes
    from (torch's global one by default; what the model draws itself, as dropout does, always comes
    from there); chunk: how many samples go through the model at a time at most, found from the
    size of its tensors if not given, and without influence on the samples; antithetic: in pairs
    mean +- deviation, which is better where the model is nearly linear; sobol: 32 independently
    scrambled Sobol sequences, the same for each Gaussian of a batch, which is better still where
    the model is smooth and the inputs are few.
    """

    samples: int = 75_000
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    chunk: int | None = field(default=None, kw_only=True)
    antithetic: bool = field(default=False, kw_only=True)
    sobol: bool = field(default=False, kw_only=True)

    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.samples) is not int or self.samples < 2:  # noqa: PLR2004
            raise ValueError(f"samples is a whole number from 2, not {self.samples!r}")
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            raise ValueError(f"chunk is a whole number from 1, not {self.chunk!r}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(
                "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
                f"{self.generator!r}"
            )
        if self.antithetic and self.sobol:
            raise ValueError("samples are antithetic or a Sobol sequence, not both")

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Sums of three kinds, of four for groups, in float64 whatever the output."""
        del dtype
        return (4 if self.antithetic or self.sobol else 3) * torch.float64.itemsize

    @torch.no_grad()
    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Streaming moments of all outputs."""
        sampler = _Sampler(self, network, advance)
        if self.sobol:
            results = sampler.replicated()
        else:
            pairs = 2 if self.antithetic else 1
            count = max(2, -(-self.samples // pairs))
            blocks = _normal(sampler.roots, count, sampler.block, self.generator)
            results = sampler.streamed(blocks, count * pairs)
        return [
            _rounded(output.dtype, *result)
            for output, result in zip(network.outputs, results, strict=True)
        ]


class _Sampler:
    """The evaluation of a network on blocks of numbers."""

    def __init__(self, method: MonteCarlo, network: Network, advance: Advance) -> None:
        self.method, self.network, self.advance = method, network, advance
        self.roots = [Root.of(x) for x in network.inputs]
        self.chunk = method.chunk or network.step
        batch = network.batch_shape.numel()
        widths = [root.width for root in self.roots]
        widths += [output.event_shape.numel() for output in network.outputs]
        self.block = max(1, DRAWN // max(1, batch * max(widths)))

    def streamed(self, blocks: Iterator[Block], total: int) -> list[Result]:
        """Moments of every output."""
        moments = [Moments() for _ in self.network.outputs]
        for block in blocks:
            parts = [self.values(block)]
            if self.method.antithetic:
                parts.append(self.values([-numbers for numbers in block]))
            for tally, *both in zip(moments, *parts, strict=True):
                tally.add(*both)
            self.advance(len(block[0]) * len(parts), total)
        return [tally.result() for tally in moments]

    def replicated(self) -> list[Result]:
        """Moments of every output by independent scramblings."""
        each = max(2, -(-self.method.samples // REPLICATES))
        generator = self.method.generator
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**31 - 1, (REPLICATES,), generator=generator, device=device)
        replicates = [Replicates() for _ in self.network.outputs]
        for seed in seeds.tolist():
            for block in _quasi_normal(self.roots, each, self.block, seed):
                for tally, values in zip(replicates, self.values(block), strict=True):
                    tally.add(values)
                self.advance(len(block[0]), REPLICATES * each)
            for tally in replicates:
                tally.close()
        return [tally.result() for tally in replicates]

    def values(self, block: Block) -> list[Tensor]:
        """Every output (count, *batch, m) in float64, a chunk at a time."""
        parts = []
        for start in range(0, len(block[0]), self.chunk):
            points = [
                root.x.mean + root.times(numbers[start : start + self.chunk])
                for root, numbers in zip(self.roots, block, strict=True)
            ]
            parts.append([value.double() for value in self.network.at(points)])
        return [torch.cat(part) for part in zip(*parts, strict=True)]


def _normal(
    roots: Sequence[Root], count: int, block: int, generator: torch.Generator | None
) -> Iterator[Block]:
    for start in range(0, count, block):
        size = min(block, count - start)
        yield [
            torch.randn(
                (size, *root.x.batch_shape, root.width),
                dtype=root.x.dtype, device=root.x.device, generator=generator,
            )
            for root in roots
        ]  # fmt: skip


def _quasi_normal(roots: Sequence[Root], count: int, block: int, seed: int) -> Iterator[Block]:
    inputs, widths = [root.x for root in roots], [root.width for root in roots]
    if sum(widths) > SobolEngine.MAXDIM:
        raise UnsupportedOperation(
            f"torch has Sobol sequences of up to {SobolEngine.MAXDIM} dimensions, and the input "
            f"has {sum(widths)}; leave sobol=True away"
        )
    engine = SobolEngine(sum(widths), scramble=True, seed=seed)
    for start in range(0, count, block):
        uniform = engine.draw(min(block, count - start), dtype=torch.float64) + HALF_CELL
        parts = torch.special.ndtri(uniform).split(widths, dim=-1)
        yield [
            part.to(x.mean).reshape(len(part), *(1 for _ in x.batch_shape), width)
            .expand(len(part), *x.batch_shape, width)
            for x, part, width in zip(inputs, parts, widths, strict=True)
        ]  # fmt: skip


def _rounded(
    dtype: torch.dtype, mean: Tensor, covariance: Tensor, error: SamplingError
) -> Estimate:
    """From the float64 of the sums to the dtype of the output."""
    return mean.to(dtype), covariance.to(dtype), error.map(lambda tensor: tensor.to(dtype))
