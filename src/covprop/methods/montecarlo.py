"""Sampling: what everything else is measured by.

Samples come alone, or in antithetic pairs, or in replicates of a quasi-random sequence: what is
independent is the group. Sums are kept about a centre c, the mean of the first block, in place, and
moved to the mean at the end. Little cancels: the centre is k of the N samples' own mean, so that
its squared distance from the mean is at most N / k variances.

Each group has d = its mean - c and g = its mean of (y - c)(y - c)^T. The standard error of the
covariance is that of the mean of g - delta d^T - d delta^T, with delta the mean of d: what g would
be about the mean of all samples, but for a constant.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.covariance.base import symmetric
from covprop.error_estimate import SamplingError
from covprop.errors import UnsupportedOperation
from covprop.methods.base import FunctionMethod, check_generator
from covprop.methods.call import Advance
from covprop.methods.network import Estimate, Network
from covprop.methods.root import Root

REPLICATES = 32
"""Independent scramblings of Sobol's sequence; they tell its error."""
DRAWN = 2**20
"""Numbers that are drawn at a time, whatever the chunk."""
HALF_CELL = 2.0**-31
"""Half the distance of neighbours in torch's Sobol sequence: keeps it off 0 and 1."""

Result: TypeAlias = tuple[Tensor, Tensor, SamplingError]
"""Mean, covariance and their standard errors, in float64."""


@final
@dataclass(frozen=True)
class MonteCarlo(FunctionMethod):
    """Moments of samples, with standard errors.

    The result has `mean_stderr`, `covariance_stderr` and `samples`. It works for any model, and has
    no gradients.

    Args:
        samples: The number of samples, rounded up to whole pairs or replicates.
        generator: A random generator, by default torch's global one. Random numbers inside the
            model, such as dropout masks, always come from the global one.
        chunk: The largest number of samples that the model sees at a time, by default from the size
            of its tensors. It does not change the samples.
        antithetic: Draw pairs mean +- deviation (for skewed inputs, quantiles of p and 1 - p),
            which is better where the model is nearly linear.
        sobol: Use 32 independently scrambled Sobol sequences, the same for each Gaussian of a
            batch, which is even better for a smooth model with few inputs.

    Example:
        y = cp.propagate(model, x, cp.MonteCarlo(10_000, torch.Generator().manual_seed(0)))
        y.mean, y.mean_stderr
    """

    samples: int = 75_000
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    chunk: int | None = field(default=None, kw_only=True)
    antithetic: bool = field(default=False, kw_only=True)
    sobol: bool = field(default=False, kw_only=True)

    averages_draws: ClassVar[bool] = True
    uses_skewness: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.samples) is not int or self.samples < 2:  # noqa: PLR2004
            raise ValueError(f"samples is a whole number from 2, not {self.samples!r}")
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            raise ValueError(f"chunk is a whole number from 1, not {self.chunk!r}")
        check_generator(self.generator)
        if self.antithetic and self.sobol:
            raise ValueError("samples are antithetic or a Sobol sequence, not both")

    @property
    def stochastic(self) -> bool:
        """Samples are random."""
        return True

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """Sums of three kinds, of four for groups, in float64 whatever the output."""
        del dtype
        return (4 if self.antithetic or self.sobol else 3) * torch.float64.itemsize

    @torch.no_grad()
    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Streaming moments of all outputs."""
        roots = [Root.of(x) for x in network.inputs]
        widths = [root.width for root in roots]
        widths += [output.event_shape.numel() for output in network.outputs]
        block = max(1, DRAWN // max(1, network.batch_shape.numel() * max(widths)))
        sampled = self._replicated if self.sobol else self._streamed
        estimates: list[Estimate] = []
        results = sampled(network, roots, block, advance)
        for output, (mean, covariance, error) in zip(network.outputs, results, strict=True):
            rounded = partial(torch.Tensor.to, dtype=output.dtype)
            estimates.append(Estimate(rounded(mean), rounded(covariance), error.map(rounded)))
        return estimates

    def _streamed(
        self, network: Network, roots: Sequence[Root], block: int, advance: Advance
    ) -> list[Result]:
        """Samples, or pairs of them, one after another."""
        pairs = 2 if self.antithetic else 1
        count = max(2, -(-self.samples // pairs))
        moments = [Moments() for _ in network.outputs]
        for start in range(0, count, block):
            size = min(block, count - start)
            if self.antithetic:
                normal = [root.normal(size, self.generator) for root in roots]
                drawn = [_transformed(roots, [sign * z for z in normal]) for sign in (1, -1)]
            else:
                drawn = [[root.standardised(size, self.generator) for root in roots]]
            parts = [self._values(network, roots, numbers) for numbers in drawn]
            for tally, *both in zip(moments, *parts, strict=True):
                tally.add(*both)
            advance(size * pairs, count * pairs)
        return [tally.result() for tally in moments]

    def _replicated(
        self, network: Network, roots: Sequence[Root], block: int, advance: Advance
    ) -> list[Result]:
        """Independent scramblings of a Sobol sequence."""
        each = max(2, -(-self.samples // REPLICATES))
        device = "cpu" if self.generator is None else self.generator.device
        seeds = torch.randint(2**31 - 1, (REPLICATES,), generator=self.generator, device=device)
        replicates = [Replicates() for _ in network.outputs]
        for seed in seeds.tolist():
            for numbers in _quasi_normal(roots, each, block, seed):
                values = self._values(network, roots, _transformed(roots, numbers))
                for tally, value in zip(replicates, values, strict=True):
                    tally.add(value)
                advance(len(numbers[0]), REPLICATES * each)
            for tally in replicates:
                tally.close()
        return [tally.result() for tally in replicates]

    def _values(
        self, network: Network, roots: Sequence[Root], numbers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Every output (count, *batch, m) in float64, a chunk at a time."""
        chunk = self.chunk or network.step
        parts = []
        for start in range(0, len(numbers[0]), chunk):
            points = [
                root.x.mean + root.times(z[start : start + chunk])
                for root, z in zip(roots, numbers, strict=True)
            ]
            parts.append([value.double() for value in network.at(points)])
        return [torch.cat(part) for part in zip(*parts, strict=True)]


def _transformed(roots: Sequence[Root], numbers: Sequence[Tensor]) -> list[Tensor]:
    """Numbers with the skewness of each input, made of standard normal ones."""
    return [root.transformed(z) for root, z in zip(roots, numbers, strict=True)]


def _quasi_normal(
    roots: Sequence[Root], count: int, block: int, seed: int
) -> Iterator[list[Tensor]]:
    """Blocks of a scrambled Sobol sequence, as normal numbers (count, *batch, n) for each input."""
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


def add_products(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Add sums over samples (count, *batch, m) of all pairs to a total (*batch, m, m), in place."""
    count, *batch, size = left.shape
    shape = count, torch.Size(batch).numel(), size
    total.view(shape[1], size, size).baddbmm_(
        left.reshape(shape).permute(1, 2, 0), right.reshape(shape).permute(1, 0, 2), alpha=factor
    )


@final
class Moments:
    """Samples, or antithetic pairs, one after another.

    A sample has g = d d^T. A pair has its half sum c + d and its half difference b, and
    g = d d^T + b b^T. Sums over groups: of d, d_i d_j, g_ij d_j and g_ij^2; of b_i b_j of pairs.
    """

    _centre: Tensor
    _first: Tensor
    _second: Tensor
    _mixed: Tensor
    _squares: Tensor
    _halves: Tensor | None

    def __init__(self) -> None:
        """Begin without any."""
        self._count = 0

    def add(self, values: Tensor, opposite: Tensor | None = None) -> None:
        """A block (count, *batch, m), or one and its antithetic counterpart."""
        middle = values if opposite is None else (values + opposite) / 2
        if not self._count:
            self._centre = middle.mean(0)
            self._first = torch.zeros_like(self._centre)
            self._second, self._mixed, self._squares = (_zeros(self._centre) for _ in range(3))
            self._halves = None if opposite is None else _zeros(self._centre)
        d = middle - self._centre
        self._count += len(values)
        self._first += d.sum(0)
        square = d.square()
        add_products(self._second, d, d)
        add_products(self._mixed, d, square)
        add_products(self._squares, square, square)
        if opposite is not None and self._halves is not None:
            half = (values - opposite) / 2
            both, square = d * half, half.square()
            add_products(self._halves, half, half)
            add_products(self._mixed, half, both)
            add_products(self._squares, both, both, 2)
            add_products(self._squares, square, square)

    def result(self) -> Result:
        """Mean, unbiased covariance and their standard errors; the sums are used up.

        The mean of g about the mean is the covariance of the samples about their mean, to which
        the covariance of that mean is added.
        """
        n, halves, second = self._count, self._halves, self._second
        delta = self._first / n
        total = second if halves is None else halves.add_(second)
        self._squares.addcmul_(total, total, value=-1 / n)
        self._mixed.addcmul_(total, _column(delta), value=-1)
        second.addcmul_(_row(delta), _column(delta), value=-n)
        if halves is not None:
            total.addcmul_(_row(delta), _column(delta), value=-n)
        stderr = _stderr(n, self._squares, self._mixed, second, delta)
        error = SamplingError(n if halves is None else 2 * n, _mean_stderr(n, second), stderr)
        if halves is None:
            covariance = total.div_(n - 1)
        else:
            covariance = total.add_(second, alpha=1 / (n - 1)).div_(n)
        del self._mixed, self._second, second  # memory
        return self._centre + delta, symmetric(covariance), error


@final
class Replicates:
    """Independent replicates of a sequence, equally long, one after another.

    Over replicates: the mean of g, sums of squares of its deviations, and with those of d.
    Deviations of g from its mean are tiny, and updated by Welford's formula.
    """

    _centre: Tensor
    _own: Tensor
    """The sum of the present replicate."""
    _average: Tensor
    _mixed: Tensor
    _squares: Tensor

    def __init__(self) -> None:
        """Begin without any."""
        self._samples = self._length = 0
        self._first: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        """A block (count, *batch, m) of the present replicate."""
        if not self._first:
            self._centre = values.mean(0)
            sums = (_zeros(self._centre) for _ in range(4))
            self._own, self._average, self._mixed, self._squares = sums
        d = values - self._centre
        if not self._length:
            self._first.append(torch.zeros_like(self._centre))
        self._first[-1] += d.sum(0)
        self._length += len(values)
        add_products(self._own, d, d)

    def close(self) -> None:
        """The present replicate is complete."""
        count = len(self._first)
        self._first[-1] /= self._length
        *earlier, d = self._first
        move = d - torch.stack(earlier).mean(0) if earlier else d
        step = self._own.div_(self._length).sub_(self._average)
        self._average.add_(step, alpha=1 / count)
        self._squares.addcmul_(step, step, value=1 - 1 / count)
        self._mixed.addcmul_(step, _column(move), value=1 - 1 / count)
        self._samples, self._length = self._samples + self._length, 0
        self._own.zero_()

    def result(self) -> Result:
        """Mean, covariance and their standard errors; the sums are used up."""
        n, first, second = len(self._first), torch.stack(self._first), self._own
        delta = first.mean(0)
        add_products(second, first - delta, first - delta)
        stderr = _stderr(n, self._squares, self._mixed, second, delta)
        covariance = self._average.addcmul_(_row(delta), _column(delta), value=-1)
        covariance.add_(second, alpha=1 / (n * (n - 1)))
        error = SamplingError(self._samples, _mean_stderr(n, second), stderr)
        del self._own, self._mixed, second  # memory
        return self._centre + delta, symmetric(covariance), error


def _stderr(n: int, squares: Tensor, mixed: Tensor, second: Tensor, delta: Tensor) -> Tensor:
    """Of the mean over n groups of g - delta d^T - d delta^T, in place of the squares.

    Sums over groups: squares of (g - mean g)_ij^2, mixed of (g - mean g)_ij (d - delta)_j, second
    of (d - delta)_i (d - delta)_j. Mixed is used up.
    """
    row, column, variance = _row(delta), _column(delta), second.diagonal(dim1=-2, dim2=-1)
    mixed.addcmul_(second, column, value=-0.5)  # half of 2 delta_i delta_j second_ij on each side
    squares.addcmul_(mixed, row, value=-2).addcmul_(mixed.mT, column, value=-2)
    squares.addcmul_(row.square(), _column(variance)).addcmul_(_row(variance), column.square())
    return squares.clamp_(min=0).div_(n * (n - 1)).sqrt_()


def _mean_stderr(n: int, second: Tensor) -> Tensor:
    return second.diagonal(dim1=-2, dim2=-1).clamp(min=0).div(n * (n - 1)).sqrt()


def _zeros(mean: Tensor) -> Tensor:
    return mean.new_zeros(*mean.shape, mean.shape[-1])


def _row(vector: Tensor) -> Tensor:
    """What multiplies the row of its number."""
    return vector[..., :, None]


def _column(vector: Tensor) -> Tensor:
    """What multiplies the column of its number."""
    return vector[..., None, :]
