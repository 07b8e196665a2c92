"""Evaluations at fixed points whose mean and covariance are exactly those of the input."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, TypeAlias, final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.covariance.base import symmetric
from covprop.gaussian import SamplingError
from covprop.methods.base import FunctionMethod
from covprop.methods.call import Advance, random_state_kept
from covprop.methods.montecarlo import HALF_CELL
from covprop.methods.network import Estimate, Network
from covprop.methods.root import Root

REPLICATES = 8
"""Independent sets of points: their spread tells the error."""
SOBOL_WIDTH = 40
"""Dimensions up to which points are Sobol's; in more, his are no better than random ones."""
WIDENED_WIDTH = 8
"""Dimensions up to which half of the points are from a wider Gaussian."""
WIDENED_PAIRS = 8
"""Pairs for each dimension from which that is done: of fewer, weights leave too little."""
REMEMBERED = 2**17
"""Numbers of a set of points, up to which it is kept for the next call."""
HELD = 2**22
"""Numbers of all outputs that are held at a time, but for those of one set."""


@final
@dataclass(frozen=True)
class QuasiMonteCarlo(FunctionMethod):
    """Moments of the network at fixed points, with their standard errors on the result.

    Eight sets of scrambled Sobol points (of pseudo-random ones for more than 40 independent
    directions of noise), each with the exact mean and covariance of the input: points come in pairs
    mean +- deviation, and where they outnumber the directions they are transformed to have its
    covariance. With up to eight directions half of the points lie further out and have smaller
    weights, so that rare events count. Linear networks are exact; with few inputs errors fall
    nearly as 1 / points. The spread over the sets gives `mean_stderr` and `covariance_stderr`.

    Deterministic, and the same points for each Gaussian of a batch. Random numbers that the model
    draws itself, as dropout does, are averaged. No gradients.

    Args:
        points: How many evaluations, rounded up to equal sets of pairs.
        seed: Of the scrambling.

    Example:
        y = cp.propagate(model, x, cp.QuasiMonteCarlo(4096))
        y.mean, y.mean_stderr
    """

    points: int = 4096
    seed: int = 0

    averages_draws: ClassVar[bool] = True
    uses_skewness: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.points) is not int or self.points < 2 * REPLICATES:
            raise ValueError(f"points is a whole number from {2 * REPLICATES}, not {self.points!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed is a whole number, not {self.seed!r}")

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """A covariance for each set, in float64 whatever the output, and a few beside them."""
        del dtype
        return (REPLICATES + 4) * torch.float64.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Moments of each set, their average and their spread."""
        found: list[list[Moments]] = [[] for _ in network.outputs]
        for weights, values in self.values(network, advance):
            for moments, value in zip(found, values, strict=True):
                moments.append(_moments(value, weights))
        return [
            _estimate(self.evaluations, output.dtype, moments)
            for output, moments in zip(network.outputs, found, strict=True)
        ]

    @property
    def evaluations(self) -> int:
        """The points of all sets."""
        return 2 * self._pairs * REPLICATES

    @property
    def _pairs(self) -> int:
        """Of each set."""
        return -(-self.points // (2 * REPLICATES))

    @torch.no_grad()
    def values(self, network: Network, advance: Advance) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Weights (count,) of a set of points, and values (count, *batch, m) of every output.

        In float64, one set after another.
        """
        roots = [Root.of_full_rank(x) for x in network.inputs]
        outputs = sum(output.event_shape.numel() for output in network.outputs)
        each = 2 * self._pairs
        held = each * outputs * network.batch_shape.numel()
        together = max(1, min(REPLICATES, HELD // max(1, held)))
        with self._seeded(network):
            for first in range(0, REPLICATES, together):
                seeds = range(first, min(REPLICATES, first + together))
                sets = [self._points(roots, seed) for seed in seeds]
                points = [torch.cat(part) for part in zip(*(p for _, p in sets), strict=True)]
                values = [part.split(each) for part in _values(network, points)]
                advance(each * len(seeds), self.evaluations)
                for (weights, _), *parts in zip(sets, *values, strict=True):
                    yield weights, parts

    @contextmanager
    def _seeded(self, network: Network) -> Iterator[None]:
        """What a model draws itself, as dropout does, comes from the seed, too."""
        if not network.draws:
            yield
            return
        with random_state_kept(network.means):
            torch.manual_seed(self.seed)
            yield

    def _points(self, roots: list[Root], replicate: int) -> tuple[Tensor, list[Tensor]]:
        """Weights of one set, and its points (2 pairs, *batch, *event) for each input."""
        width = sum(root.width for root in roots)
        seed = self.seed * REPLICATES + replicate
        keep = self._pairs * width <= REMEMBERED
        made = (_remembered if keep else standard_points)(width, self._pairs, seed)
        points, weights = (part.to(roots[0].x.device) for part in made)
        numbers = points.split([root.width for root in roots], dim=-1)
        return weights, [
            root.x.mean + root.times(root.standardised_points(z, weights))
            for root, z in zip(roots, numbers, strict=True)
        ]


Moments: TypeAlias = tuple[Tensor, Tensor]
"""The mean (*batch, m) and the covariance (*batch, m, m) of a set."""


def _values(network: Network, points: list[Tensor]) -> list[Tensor]:
    """Every output (count, *batch, m) in float64, as many points at a time as the network takes."""
    steps = zip(*(part.split(network.step) for part in points), strict=True)
    parts = [[value.double() for value in network.at(step)] for step in steps]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Of values (count, *batch, m); exactly that of values which are all the same."""
    return values[0] + torch.einsum("k,k...->...", weights, values - values[0])


def _moments(values: Tensor, weights: Tensor) -> Moments:
    mean = weighted_mean(values, weights)
    d = (values - mean).movedim(0, -2)
    return mean, d.mT @ (weights[:, None] * d)


def _estimate(samples: int, dtype: torch.dtype, found: list[Moments]) -> Estimate:
    """The average over sets, about the mean of all, and standard errors."""
    means = torch.stack([mean for mean, _ in found])
    mean = means.mean(0)
    shift = means - mean
    moments = torch.stack([covariance for _, covariance in found])
    moments = moments + shift[..., :, None] * shift[..., None, :]
    error = SamplingError(samples, _stderr(means).to(dtype), _stderr(moments).to(dtype))
    return mean.to(dtype), symmetric(moments.mean(0)).to(dtype), error


def _stderr(replicates: Tensor) -> Tensor:
    return replicates.std(0) / len(replicates) ** 0.5


def standard_points(width: int, pairs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (2 pairs, width) of mean 0 and covariance 1, and their weights, whose sum is 1.

    In few dimensions half of the points are from a wider Gaussian, and all are weighted as draws
    from the mixture of both (defensive importance sampling, Hesterberg 1995): what is rare and
    large, as behind a kink far from the mean, is seen in time. The covariance is 1 but for rounding
    where there are at least twice as many pairs as dimensions, else in the limit.
    """
    if width <= SOBOL_WIDTH:
        engine = SobolEngine(max(1, width), scramble=True, seed=seed)
        uniform = engine.draw(pairs, dtype=torch.float64)[:, :width] + HALF_CELL
        half = torch.special.ndtri(uniform)
    else:
        generator = torch.Generator().manual_seed(seed)
        half = torch.randn(pairs, width, dtype=torch.float64, generator=generator)
    weights = torch.full((pairs,), 1 / pairs, dtype=torch.float64)
    if 0 < width <= WIDENED_WIDTH and pairs >= WIDENED_PAIRS * width:
        scale = 1 + 1.5 / width**0.5
        half[pairs // 2 :] *= scale
        radius = half.square().sum(-1)
        wider = scale**-width * torch.exp((1 - scale**-2) * radius / 2)
        weights = 1 / (1 + wider)
        weights = weights / weights.sum()
    if width and pairs >= 2 * width:
        root = torch.linalg.cholesky(half.mT @ (weights[:, None] * half))
        half = torch.linalg.solve_triangular(root, half.mT, upper=False).mT
    return torch.cat([half, -half]), torch.cat([weights, weights]) / 2


_remembered = lru_cache(maxsize=64)(standard_points)
