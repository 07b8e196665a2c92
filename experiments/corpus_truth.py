"""True moments of a network's output by quasi-random points; nothing of covprop in it.

Independent scramblings of Sobol's sequence grow together, each twice as long as before, until the
standard errors that they tell by their differences are small, or until as many points are used as
may be. Where inputs are few, two thirds of the points come from wider Gaussians and are weighted: a
network that is flat but for what happens five deviations away is seen to be so.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from covprop.files import write_atomically
from experiments.randomness import seed_of

REPLICATES = 16
FIRST = 2**13
"""Points of a replicate before it is looked at, and of a block."""
IMAGES = 2**9
"""Images, or sequences, that go through a network at a time: what fits into a cache."""
GOAL = 5e-4
"""A standard error of standard deviations, as a part of them, that is small."""
SCALES, FEW = (1.0, 1.5, 2.5), 8
"""Of Gaussians that points come from, where so many inputs or fewer vary."""
NEGLIGIBLE = 1e-9
"""Outputs that vary less than so much of the largest output's size have no relative error."""
HALF_CELL = 2.0**-31
"""Half the distance of neighbours in torch's sequence: keeps points off 0 and 1."""


@final
class Truth(NamedTuple):
    """Moments of all outputs, their standard errors, and what they were made of."""

    mean: Tensor  # (outputs,)
    covariance: Tensor  # (outputs, outputs)
    mean_stderr: Tensor
    covariance_stderr: Tensor
    samples: int
    halves: tuple[Tensor, ...] = ()
    """Mean and covariance by the first half of the replicates, then by the second."""

    @property
    def stddev(self) -> Tensor:
        """(outputs,)."""
        return self.covariance.diagonal().clamp(min=0).sqrt()

    @property
    def counted(self) -> Tensor:
        """Outputs that vary, (outputs,)."""
        size = (self.mean.square() + self.stddev.square()).sqrt().max()
        return self.stddev > NEGLIGIBLE * size

    @property
    def stddev_error(self) -> Tensor:
        """Standard errors of standard deviations, as parts of them, (outputs that vary,)."""
        variance = self.covariance.diagonal()[self.counted]
        return self.covariance_stderr.diagonal()[self.counted] / variance / 2

    @property
    def mean_error(self) -> Tensor:
        """Standard errors of means in standard deviations, (outputs that vary,)."""
        return (self.mean_stderr / self.stddev)[self.counted]


@final
class _Replicate:
    """Scrambled sequences through the network, one for each scale, and the weighted sums so far."""

    def __init__(self, inputs: int, seed: int) -> None:
        self.scales = torch.tensor(SCALES if inputs <= FEW else (1.0,), dtype=torch.float64)
        self.engines = [
            SobolEngine(inputs, scramble=True, seed=seed_of(seed, place))
            for place in range(len(self.scales))
        ]
        self.count, self.weight = 0, torch.zeros(())
        self.total, self.squares = torch.zeros(()), torch.zeros(())

    def extend(self, outputs: Callable[[Tensor], Tensor]) -> None:
        """One more block of points of each scale."""
        for engine, scale in zip(self.engines, self.scales, strict=True):
            uniform = engine.draw(FIRST, dtype=torch.float64) + HALF_CELL
            points = scale * torch.special.ndtri(uniform)
            found, weights = outputs(points), self._weights(points)
            self.count += len(found)
            self.weight = self.weight + weights.sum()
            self.total = self.total + weights @ found
            self.squares = self.squares + (weights[:, None] * found).T @ found

    def _weights(self, points: Tensor) -> Tensor:
        """The standard normal density over that of all scales together, (points,)."""
        energy = points.square().sum(1, keepdim=True) / 2
        ratios = energy * (1 - self.scales**-2) - points.shape[1] * self.scales.log()
        return ratios.exp().mean(1).reciprocal()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance, about the centre."""
        mean = self.total / self.weight
        return mean, self.squares / self.weight - mean[:, None] * mean


@torch.no_grad()
def sampled(
    model: nn.Module, mean: Tensor, covariance: Tensor, seed: int, most: int, goal: float = GOAL
) -> Truth:
    """Moments of model(x) for Gaussian x.

    mean: (*event,), without a batch; covariance: (elements, elements); most: points in all.
    """
    values, vectors = torch.linalg.eigh(covariance)
    varying = values > torch.finfo(values.dtype).eps * values.max()
    root = (vectors * values.clamp(min=0).sqrt())[:, varying].flip(1)  # the largest first
    centre = model(mean[None]).flatten()
    rows = FIRST if mean.dim() == 1 else IMAGES

    def outputs(z: Tensor) -> Tensor:
        x = mean + (z @ root.T).reshape(-1, *mean.shape)
        return torch.cat([model(part).flatten(1) for part in x.split(rows)]) - centre

    replicates = [_Replicate(root.shape[1], seed_of(seed, k)) for k in range(REPLICATES)]
    first = FIRST * REPLICATES * len(replicates[0].scales)
    blocks = 1
    while True:
        for replicate in replicates:
            for _ in range(blocks):
                replicate.extend(outputs)
        truth = _combined(replicates, centre)
        if not len(truth.stddev_error) or truth.stddev_error.max() < goal:
            return truth
        if 2 * truth.samples > most:
            return truth
        blocks = truth.samples // first


def _combined(replicates: list[_Replicate], centre: Tensor) -> Truth:
    """Averages, and standard errors by the differences of replicates about the common mean."""
    mean, covariance, means, covariances = _averaged(replicates)
    several, middle = len(replicates) ** 0.5, len(replicates) // 2
    first, second = (_averaged(part)[:2] for part in (replicates[:middle], replicates[middle:]))
    return Truth(
        centre + mean, covariance, means.std(0) / several, covariances.std(0) / several,
        sum(replicate.count for replicate in replicates),
        (centre + first[0], first[1], centre + second[0], second[1]),
    )  # fmt: skip


def _averaged(replicates: list[_Replicate]) -> tuple[Tensor, ...]:
    """Mean and covariance of all, and what each has about the common mean."""
    pairs = [replicate.moments() for replicate in replicates]
    means, covariances = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    mean = means.mean(0)
    shift = means - mean
    covariances = covariances + shift[:, :, None] * shift[:, None, :]
    return mean, covariances.mean(0), means, covariances


def fingerprint(model: nn.Module, mean: Tensor, covariance: Tensor, *more: object) -> str:
    """Of all that the moments depend on."""
    found = hashlib.sha256(f"{model}/{more}/{REPLICATES}/{FIRST}/{GOAL}/{SCALES}".encode())
    for tensor in (*model.state_dict().values(), mean, covariance):
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def kept(path: Path, fingerprint: str, make: Callable[[], Truth]) -> Truth:
    """From the file if it was made for the same, else made now and kept."""
    if path.exists():
        old, *values = torch.load(path, weights_only=True)
        if old == fingerprint:
            return Truth(*values)
    truth = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: torch.save((fingerprint, *truth), file))
    return truth
