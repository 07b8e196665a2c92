"""Evaluations at fixed points whose mean and covariance are exactly those of the input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.covariance.base import symmetric
from covprop.error_estimate import STANDARD_ERRORS, SamplingError
from covprop.kernels.normal import inverse_deviation
from covprop.methods.base import FunctionMethod
from covprop.methods.call import Advance, random_state_kept
from covprop.methods.montecarlo import HALF_CELL
from covprop.methods.network import Estimate, Network
from covprop.methods.root import Root

REPLICATES = 8
"""Independent sets of points, whose spread gives the standard errors."""
SOBOL_WIDTH = 40
"""Dimensions up to which points are Sobol's; in more, his are no better than random ones."""
WIDENED_WIDTH = 8
"""Dimensions up to which half of the points are from a wider Gaussian."""
WIDENED_PAIRS = 8
"""Pairs for each dimension from which that is done: of fewer, weights leave too little."""
REMEMBERED = 2**20
"""Numbers of points up to which they are kept for the next call."""
TAIL, TAILED = 16, 256
"""Points with the largest parts in a variance, by which its tail is judged, and of how many."""
LARGE_PART = 0.05
"""Of a variance, that a few points may have."""
HELD = 2**17
"""Numbers of all outputs that are held at a time, but for those of one set."""


@final
@dataclass(frozen=True)
class QuasiMonteCarlo(FunctionMethod):
    """Moments from evaluations at fixed points, with standard errors.

    There are eight sets of scrambled Sobol points (pseudo-random ones for more than 40 independent
    directions of noise). Points come in pairs mean +- deviation, and are transformed to the exact
    covariance of the input if there are enough of them. With up to eight directions, half of the
    points lie further out and have smaller weights, so that rare events count. Linear networks are
    exact; with few inputs, errors fall nearly as 1 / points.

    The spread over the sets gives `mean_stderr`, `covariance_stderr` and `error`, which is infinite
    where a few points have most of a variance. The `skewness` is estimated from the points, and 0
    where chance explains it.

    Results are deterministic, with the same points for each Gaussian of a batch. Random numbers
    inside the model, such as dropout masks, are averaged. There are no gradients.

    Args:
        points: The number of evaluations, rounded up to equal sets of pairs.
        seed: The seed of the scrambling.

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
        for weights, values in self.blocks(network, advance):
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

    def furthest(self, width: int) -> float:
        """The largest distance of a point from the mean, in so many directions of noise."""
        return _furthest(width, self._pairs, self.seed) if width else 0.0

    @property
    def _pairs(self) -> int:
        """Of each set."""
        return -(-self.points // (2 * REPLICATES))

    def values(self, network: Network, advance: Advance) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Weights (count,) of a set of points, and values (count, *batch, m) of every output.

        In float64, one set after another.
        """
        for weights, values in self.blocks(network, advance):
            yield from zip(weights, map(list, zip(*values, strict=True)), strict=True)

    @torch.no_grad()
    def blocks(self, network: Network, advance: Advance) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Weights (sets, count), and values (sets, count, *batch, m) of every output, in float64.

        As many sets at a time as may be held.
        """
        outputs = sum(output.event_shape.numel() for output in network.outputs)
        each = 2 * self._pairs
        held = each * outputs * network.batch_shape.numel()
        together = max(1, min(REPLICATES, HELD // max(1, held)))
        with self._seeded(network):
            for first in range(0, REPLICATES, together):
                sets = range(first, min(REPLICATES, first + together))
                weights, points = self._points(network.roots, sets)
                values = [part.unflatten(0, weights.shape) for part in _values(network, points)]
                advance(each * len(sets), self.evaluations)
                yield weights, values

    @contextmanager
    def _seeded(self, network: Network) -> Iterator[None]:
        """What a model draws itself, as dropout does, comes from the seed, too.

        Generators of its own begin where they are, and are left there.
        """
        if not network.draws:
            yield
            return
        with random_state_kept(network.means):
            torch.manual_seed(self.seed)
            yield

    def _standard(self, width: int, sets: range) -> tuple[Tensor, Tensor]:
        """Points (sets, count, width) of mean 0 and covariance 1, and their weights."""
        keep = len(sets) * self._pairs * width <= REMEMBERED
        return (_remembered if keep else _several)(width, self._pairs, self.seed, sets)

    def _points(self, roots: Sequence[Root], sets: range) -> tuple[Tensor, list[Tensor]]:
        """Weights (sets, count), and all points (sets count, *batch, *event) for each input."""
        width = sum(root.width for root in roots)
        points, weights = (part.to(roots[0].x.device) for part in self._standard(width, sets))
        numbers = points.split([root.width for root in roots], dim=-1)
        return weights, [
            root.x.mean + root.times(root.standardised_points(z, weights).flatten(0, 1))
            for root, z in zip(roots, numbers, strict=True)
        ]


class Moments(NamedTuple):
    """Of some sets: means (sets, *batch, m), covariances (sets, *batch, m, m) and beyond."""

    mean: Tensor
    covariance: Tensor
    third: Tensor
    """Third central moments (sets, *batch, m)."""
    largest: Tensor
    """The largest parts that points have in variances (points, *batch, m), times the sets."""


def _values(network: Network, points: list[Tensor]) -> list[Tensor]:
    """Every output (count, *batch, m) in float64, as many points at a time as the network takes."""
    steps = zip(*(part.split(network.step) for part in points), strict=True)
    parts = [
        [value.double() for value in network.at(step, measure_rounding=True)] for step in steps
    ]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Of sets of values (sets, count, *batch, m), exactly that of values which are all the same."""
    first = values[:, :1]
    return first[:, 0] + torch.einsum("sk,sk...->s...", weights, values - first)


def _moments(values: Tensor, weights: Tensor) -> Moments:
    mean = weighted_mean(values, weights)
    d = values - mean[:, None]
    shares = weights.reshape(*weights.shape, *(1 for _ in d.shape[2:]))
    weighted = shares * d
    parts = weighted * d
    return Moments(
        mean,
        d.movedim(1, -2).mT @ weighted.movedim(1, -2),
        (parts * d).sum(1),
        largest_terms(parts),
    )


def largest_terms(parts: Tensor) -> Tensor:
    """The largest (terms, *batch, m) of all (sets, count, *batch, m)."""
    terms = parts.flatten(0, 1)
    return terms.topk(min(TAIL, len(terms)), dim=0).values


def heavy_tailed(largest: Tensor, total: Tensor, points: int) -> Tensor:
    """Whether a few of the points have so much of a sum that it says nothing of the integral.

    Hill's estimator (1975): where the tail falls as t^-a, the mean of log(t_i / t_k) over the k
    largest terms is 1 / a, and the integral is infinite from a = 1 on.

    largest: the largest terms (terms, ...); total: the sum (...).
    """
    if points < TAILED or len(largest) < TAIL:
        return torch.zeros_like(total, dtype=torch.bool)
    terms = largest.sort(0, descending=True).values[:TAIL]
    logs = terms.clamp(min=torch.finfo(terms.dtype).tiny).log()
    index = (logs[:-1] - logs[-1]).mean(0)
    return (index > 1) & (terms.sum(0) > LARGE_PART * total)


def _estimate(samples: int, dtype: torch.dtype, found: list[Moments]) -> Estimate:
    """The average over sets, about the mean of all, and standard errors."""
    means, moments, third, largest = (
        torch.cat(part) if len(part) > 1 else part[0] for part in zip(*found, strict=True)
    )
    mean = means.mean(0)
    shift = means - mean
    moments = moments + shift[..., :, None] * shift[..., None, :]
    matrix, variances = symmetric(moments.mean(0)), moments.diagonal(dim1=-2, dim2=-1)
    variance = variances.mean(0)
    tails = heavy_tailed(largest, len(means) * variance, samples)
    third = (third + (3 * variances - 2 * shift.square()) * shift) * inverse_deviation(
        variance
    ) ** 3
    skewness, chance = third.mean(0), STANDARD_ERRORS * _stderr(third)
    error = SamplingError(samples, _stderr(means).to(dtype), _stderr(moments).to(dtype), tails)
    # What chance explains is no skewness, and of a heavy tail it is not known.
    skewness = torch.where((skewness.abs() > chance) & ~tails, skewness, 0.0)
    return Estimate(mean.to(dtype), matrix.to(dtype), error, skewness.to(dtype))


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


def _several(width: int, pairs: int, seed: int, sets: range) -> tuple[Tensor, Tensor]:
    """Sets of points (sets, 2 pairs, width) and their weights (sets, 2 pairs)."""
    made = [standard_points(width, pairs, seed * REPLICATES + one) for one in sets]
    points, weights = zip(*made, strict=True)
    return torch.stack(points), torch.stack(weights)


@lru_cache(maxsize=64)
def _furthest(width: int, pairs: int, seed: int) -> float:
    """The largest distance of a point of all sets from 0."""
    every = (_several(width, pairs, seed, range(one, one + 1)) for one in range(REPLICATES))
    return max(float(points.square().sum(-1).max().sqrt()) for points, _ in every)


_remembered = lru_cache(maxsize=64)(_several)
