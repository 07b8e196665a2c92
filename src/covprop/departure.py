"""How far samples of a step are from the Gaussian that was propagated, and from any Gaussian."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

CHOSEN = 64
"""Elements of a step whose Kolmogorov distance is taken, evenly spaced."""
DRAWS = 10_000
"""Samples that a Kolmogorov distance is taken of: the first ones."""
NEGLIGIBLE = 1e-2
"""Share of the average variance below which an element is left out, such as a dead ReLU."""
ROUNDING = 32.0
"""In units of machine epsilon, relative to the mean: a deviation that is none."""
DOUBT = 0.05
"""Probability that Gaussian samples exceed what is called the noise of a Kolmogorov distance."""


@final
class RunningMoments:
    """Mean and central moments of samples that come in chunks, in float64 (Pebay 2008)."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.count = 0
        self.mean = self.second = self.third = self.fourth = torch.zeros((), dtype=torch.float64)

    def add(self, samples: Tensor) -> None:
        """Take in samples (count, *shape)."""
        values = samples.double()
        m, mean = len(values), values.mean(0)
        centred = values - mean
        square = centred.square()
        second, third = square.sum(0), (square * centred).sum(0)
        fourth = square.square().sum(0)
        if self.count:
            n, total = self.count, self.count + m
            step = mean - self.mean
            fourth = (
                self.fourth + fourth
                + step**4 * (n * m * (n * n - n * m + m * m) / total**3)
                + 6 * step**2 * (n * n * second + m * m * self.second) / total**2
                + 4 * step * (n * third - m * self.third) / total
            )  # fmt: skip
            third = (
                self.third + third
                + step**3 * (n * m * (n - m) / total**2)
                + 3 * step * (n * second - m * self.second) / total
            )  # fmt: skip
            second = self.second + second + step**2 * (n * m / total)
            mean = self.mean + step * (m / total)
        self.count += m
        self.mean, self.second, self.third, self.fourth = mean, second, third, fourth

    @property
    def variance(self) -> Tensor:
        """The unbiased variance."""
        return self.second / max(1, self.count - 1)

    @property
    def skewness(self) -> Tensor:
        """E[(x - m)^3] / sigma^3."""
        return math.sqrt(self.count) * self.third / self.second**1.5

    @property
    def excess_kurtosis(self) -> Tensor:
        """E[(x - m)^4] / sigma^4 - 3."""
        return self.count * self.fourth / self.second**2 - 3


@dataclass(frozen=True)
class Departure:
    """Samples of one step against Gaussians; NaN for elements that hardly vary.

    mean_error: propagated less sampled mean, over the sampled standard deviation;
    variance_error: propagated over sampled variance, less one; both in the shape of the mean, as
    skewness and excess_kurtosis are. variance_stderr: the standard error of variance_error, which
    is that of sampling; mean_stderr the same of mean_error.
    kolmogorov: sup |F - Phi| of the elements `chosen` of the flattened mean, for the Gaussian that
    has their sampled mean and variance; kolmogorov_noise is what sampling alone makes of it.
    """

    samples: int
    skewness: Tensor
    excess_kurtosis: Tensor
    mean_error: Tensor
    variance_error: Tensor
    variance_stderr: Tensor
    chosen: Tensor
    kolmogorov: Tensor

    @property
    def mean_stderr(self) -> float:
        """The standard error of mean_error."""
        return self.samples**-0.5

    @property
    def kolmogorov_noise(self) -> float:
        """What 95 % of truly Gaussian elements would stay below."""
        return kolmogorov_quantile(self.samples, DOUBT)


@final
class Departing:
    """Gathers the samples of one step, chunk by chunk."""

    def __init__(self, features: int) -> None:
        """Choose the elements of which samples are kept."""
        self.moments = RunningMoments()
        count = min(features, CHOSEN)
        self.chosen = torch.linspace(0, max(0, features - 1), count).round().long()
        self._kept: list[Tensor] = []

    def add(self, samples: Tensor) -> None:
        """Take in samples (count, *shape of the mean)."""
        wanted = DRAWS - self.moments.count
        if wanted > 0:
            flat = samples.flatten(1) if samples.dim() > 1 else samples[:, None]
            self._kept.append(flat[:wanted, self.chosen.to(flat.device)])
        self.moments.add(samples)

    def result(self, mean: Tensor, variance: Tensor, batch_dims: int) -> Departure:
        """Compare with the propagated mean and variance, in one shape."""
        moments = self.moments
        sampled = moments.variance
        event = tuple(range(batch_dims, sampled.dim()))
        average = sampled.mean(event, keepdim=True) if event else sampled
        still = (ROUNDING * torch.finfo(mean.dtype).eps * moments.mean).square()
        varies = (sampled > NEGLIGIBLE * average) & (sampled > still)

        def told(values: Tensor) -> Tensor:
            return torch.where(varies, values, math.nan)

        kurtosis = moments.excess_kurtosis
        chosen = self.chosen[varies.flatten().cpu()[self.chosen]]
        return Departure(
            moments.count,
            told(moments.skewness),
            told(kurtosis),
            told((mean.double() - moments.mean) / sampled.sqrt()),
            told(variance.double() / sampled - 1),
            told(((kurtosis + 2).clamp(min=0) / moments.count).sqrt()),
            chosen,
            kolmogorov_distance(torch.cat(self._kept)[:, torch.isin(self.chosen, chosen)]),
        )


def kolmogorov_distance(samples: Tensor) -> Tensor:
    """sup |F_n - Phi((x - m) / s)| of each column of (count, k), with its own m and s."""
    if not samples.numel():
        return samples.new_zeros(samples.shape[1:], dtype=torch.float64)
    values = samples.double()
    values = ((values - values.mean(0)) / values.std(0)).sort(0).values
    normal = torch.special.ndtr(values)
    count = len(values)
    ranks = torch.arange(count + 1, dtype=torch.float64, device=values.device)[:, None] / count
    return torch.maximum((ranks[1:] - normal).amax(0), (normal - ranks[:-1]).amax(0))


def kolmogorov_quantile(samples: int, doubt: float) -> float:
    """What the distance of one Gaussian element exceeds with this probability.

    With mean and variance of the n samples themselves (Lilliefors), by Dallal & Wilkinson (1986):
    log p = -a d^2 (n + b) + c d sqrt(n + b) - e + f / sqrt(n) + g / n up to n = 100, and from there
    as 1 / sqrt(n). It is checked against samples from p = 0.05 to 0.001.
    """
    count = min(samples, DRAWS)
    n = min(count, 100)
    a, b, c = 7.01256, 2.78019, 2.99587
    rest = 0.122119 - 0.974598 / math.sqrt(n) - 1.67997 / n + math.log(doubt)
    root = (c + math.sqrt(max(0.0, c * c - 4 * a * rest))) / (2 * a)
    return root / math.sqrt(n + b) * math.sqrt(n / count)


def median_and_worst(values: Tensor) -> tuple[float, float]:
    """Of the absolute values, without NaN; NaN where nothing is left."""
    known = values[~values.isnan()].abs()
    if not known.numel():
        return math.nan, math.nan
    return float(known.median()), float(known.max())
