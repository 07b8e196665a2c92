"""Probabilistic backpropagation (Hernandez-Lobato & Adams 2015), from the formulas of the paper.

Weights are independent Gaussians N(m, v) with a prior N(0, 1 / lambda), targets have noise of
precision gamma, both precisions are Gamma distributed. A layer of n inputs and a bias has

    a = W z / sqrt(n + 1)      mean  M m_z / sqrt(n + 1)
                               variance  (M^2 v_z + V m_z^2 + V v_z) / (n + 1)

and a hidden unit the moments of a rectified Gaussian. For each datum Z = N(y | mean, variance +
noise), and assumed density filtering moves every weight by

    m -> m + v dlogZ/dm        v -> v - v^2 ((dlogZ/dm)^2 - 2 dlogZ/dv)

Precisions match the mean and the variance of Gamma; factors of the prior are refined by expectation
propagation after every pass. All members (splits) are trained together.
"""

import math
import time
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from experiments.randomness import seed_of
from experiments.uci import Members

EPOCHS, SHAPE, RATE = 40, 6.0, 6.0
"""Of the paper; shape and rate of the Gammas that both precisions begin with."""
SMALLEST, LARGEST = 1e-100, 1e6
"""Variances of weights that are kept, and of a cavity from which a factor is refined."""
INTERVAL = 1.959963984540054
"""Deviations of a 95 % interval."""
LOG_TWO_PI = math.log(2 * math.pi)

Layers: TypeAlias = list[Tensor]
"""(members, outputs, inputs + 1) each."""


@final
class Scores(NamedTuple):
    """Of the test rows after the last pass, (members,) each, and the seconds of training."""

    density: Tensor
    rmse: Tensor
    coverage: Tensor
    seconds: float
    step: float


def rectified(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of a rectified Gaussian, as the paper writes them."""
    stddev = variance.sqrt()
    ratio = mean / stddev
    log_share = torch.special.log_ndtr(ratio)
    hazard = torch.exp(-ratio.square() / 2 - log_share) / math.sqrt(2 * math.pi)
    share, inner = log_share.exp(), mean + stddev * hazard
    first = share * inner
    second = first * inner * torch.special.ndtr(-ratio)
    return first, second + share * variance * (1 - hazard * (hazard + ratio))


def output(means: Layers, variances: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the network's output, (members, rows), for x (members, rows, inputs)."""
    mean, variance = x, torch.zeros_like(x)
    for place, (m, v) in enumerate(zip(means, variances, strict=True)):
        if place:
            mean, variance = rectified(mean, variance)
        one = torch.ones_like(mean[..., :1])
        mean, variance = torch.cat([mean, one], -1), torch.cat([variance, 0 * one], -1)
        size = mean.shape[-1]
        second = mean.square() + variance
        variance = (variance @ m.square().mT + second @ v.mT) / size
        mean = mean @ m.mT / math.sqrt(size)
    return mean[..., 0], variance[..., 0]


def log_density(target: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Of a Gaussian."""
    return -((target - mean).square() / variance + variance.log() + LOG_TWO_PI) / 2


@final
class Network:
    """The approximate posterior of a network with one output for each member."""

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], members: int, generator: torch.Generator
    ) -> None:
        shapes = [(members, after, before + 1) for before, after in pairwise((inputs, *hidden, 1))]
        self.means = [
            torch.randn(shape, dtype=torch.float64, generator=generator) / math.sqrt(shape[-1])
            for shape in shapes
        ]
        spread = RATE / (SHAPE - 1)
        self.variances = [torch.full_like(mean, spread) for mean in self.means]
        self.noise = tuple(torch.full((members,), part).double() for part in (SHAPE, RATE))
        self.prior = tuple(np.full(members, part) for part in (SHAPE, RATE))
        weights = sum(mean[0].numel() for mean in self.means)
        self._factors = np.zeros((4, weights, members))
        """Precision and precision times mean, shape and rate, of each factor of the prior."""
        self._factors[0] = 1 / spread

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets."""
        shape, rate = self.noise
        mean, variance = output(self.means, self.variances, x)
        return mean, variance + (rate / (shape - 1))[:, None]

    def see(self, x: Tensor, y: Tensor) -> None:
        """One datum of each member, x (members, inputs) and y (members,)."""
        shape, rate = self.noise
        with torch.enable_grad():
            means = [mean.detach().requires_grad_() for mean in self.means]
            variances = [variance.detach().requires_grad_() for variance in self.variances]
            mean, variance = (part[:, 0] for part in output(means, variances, x[:, None]))
            log_z = log_density(y, mean, variance + rate / (shape - 1))
            slopes = torch.autograd.grad(log_z.sum(), [*means, *variances])
        with torch.no_grad():
            others = [log_density(y, mean, variance + rate / (shape + k)) for k in (0, 1)]
            found = matched(shape, rate, log_z, *others)
            valid = (found[0] > 1) & (found[1] > 0) & found[0].isfinite() & found[1].isfinite()
            self.noise = tuple(
                torch.where(valid, new, old) for new, old in zip(found, (shape, rate), strict=True)
            )
            for place, (m, v) in enumerate(zip(self.means, self.variances, strict=True)):
                by_mean, by_variance = slopes[place], slopes[place + len(means)]
                new = v - v.square() * (by_mean.square() - 2 * by_variance)
                kept = (new > SMALLEST) & new.isfinite() & by_mean.isfinite()
                self.means[place] = torch.where(kept, m + v * by_mean, m)
                self.variances[place] = torch.where(kept, new, v)

    def refine(self) -> None:
        """Expectation propagation of the prior's factors, one weight after another."""
        m, v = (_flat(part) for part in (self.means, self.variances))
        for place, factor in enumerate(self._factors.transpose(1, 0, 2)):
            precision = 1 / v[place] - factor[0]
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                variance = 1 / precision
                mean = variance * (m[place] / v[place] - factor[1])
                shape, rate = self.prior[0] - factor[2], self.prior[1] - factor[3]
                spread = variance + rate / (shape - 1)
                new_m = mean - variance * mean / spread
                new_v = variance - variance**2 / spread
                logs = (
                    -(mean**2 / total + np.log(total)) / 2
                    for total in (variance + rate / (shape + k) for k in (-1, 0, 1))
                )
                new_shape, new_rate = matched(shape, rate, *logs)
                good = (precision > 0) & (variance < LARGEST) & (shape > 1) & (rate > 0)
                good &= (new_v > SMALLEST) & (new_shape > 1) & (new_rate > 0)
                good &= np.isfinite(new_m + new_v + new_shape + new_rate)
                safe = np.where(good, new_v, 1.0)
                change = (
                    1 / safe - precision, new_m / safe - mean * precision,
                    new_shape - shape, new_rate - rate,
                )  # fmt: skip
            for row, new in zip(factor, change, strict=True):
                row[good] = new[good]
            m[place][good], v[place][good] = new_m[good], new_v[good]
            for row, new in zip(self.prior, (new_shape, new_rate), strict=True):
                row[good] = new[good]
        self.means, self.variances = (_layers(part, self.means) for part in (m, v))


def matched(shape: Any, rate: Any, log_z: Any, log_z1: Any, log_z2: Any) -> tuple[Any, Any]:
    """Shape and rate of the Gamma with the mean and the variance of a precision after a datum.

    log_z1, log_z2: of Z with a shape that is larger by one and two.
    """
    exp = torch.exp if isinstance(shape, Tensor) else np.exp
    new_shape = 1 / (exp(log_z2 - 2 * log_z1 + log_z) * (shape + 1) / shape - 1)
    slope = exp(log_z2 - log_z1) * (shape + 1) / rate - exp(log_z1 - log_z) * shape / rate
    return new_shape, 1 / slope


def train(
    data: Members, hidden: tuple[int, ...], seed: tuple[object, ...], epochs: int = EPOCHS
) -> Scores:
    """Passes over the training rows, then the scores of the test rows."""
    x, y = (part.double() for part in data.train)
    members, rows, inputs = x.shape
    generator = torch.Generator().manual_seed(seed_of("pbp", *seed))
    network = Network(inputs, hidden, members, generator)
    started = time.perf_counter()
    for _ in range(epochs):
        for row in torch.randperm(rows, generator=generator).tolist():
            network.see(x[:, row], y[:, row])
        network.refine()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        targets = data.test.y.double()
        mean, variance = network.predict(data.test.x.double())
        density = log_density(targets, mean, variance).mean(-1) - data.scale.log()
        rmse = (mean - targets).square().mean(-1).sqrt() * data.scale
        inside = (mean - targets).abs() <= INTERVAL * variance.sqrt()
    step = 1e3 * seconds / (epochs * rows)
    return Scores(density, rmse, inside.double().mean(-1), round(seconds, 1), round(step, 3))


def _flat(layers: Layers) -> np.ndarray:
    """All weights, (weights, members)."""
    return np.ascontiguousarray(torch.cat([layer.flatten(1) for layer in layers], 1).numpy().T)


def _layers(flat: np.ndarray, like: Layers) -> Layers:
    parts = torch.from_numpy(flat).T.split([layer[0].numel() for layer in like], 1)
    return [part.reshape(layer.shape) for part, layer in zip(parts, like, strict=True)]
