"""Predictions of numbers: means, deviations and targets of the same shape (*members, data).

Calibration is measured from cumulative probabilities P(T <= t): `gaussian_cumulative` of a mean and
a deviation, or the likelihood's own `cumulative`, which knows that noise of unknown size has tails.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.bayes.likelihoods import Likelihood
from covprop.gaussian import Gaussian
from covprop.kernels.normal import SQRT_PI, cumulative, density, standardise

LEVELS = 99
"""Quantiles that a calibration curve has: 1 % ... 99 %."""


def log_predictive_density(likelihood: Likelihood, output: Gaussian, target: Tensor) -> Tensor:
    """Average of log E[p(t | f)], in nats for each datum: larger is better."""
    return likelihood.log_predictive(output, target).mean(-1)


def rmse(mean: Tensor, target: Tensor) -> Tensor:
    """Root of the average squared error of the mean."""
    _check(mean, target)
    return (mean - target).square().mean(-1).sqrt()


def crps(mean: Tensor, stddev: Tensor, target: Tensor) -> Tensor:
    """Average continuous ranked probability score of a Gaussian prediction: smaller is better.

    s [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)], z = (t - m) / s   (Gneiting & Raftery 2007)

    in the units of the target; |t - m| where s = 0.
    """
    _check(mean, stddev, target)
    distance = (target - mean).abs()
    z = standardise(distance, stddev)
    inside = distance * (1 - 2 * cumulative(-z)) + stddev * (2 * density(z) - 1 / SQRT_PI)
    return inside.mean(-1)


def sharpness(stddev: Tensor) -> Tensor:
    """Root of the average predicted variance: how much a prediction commits itself."""
    return stddev.square().mean(-1).sqrt()


def gaussian_cumulative(mean: Tensor, stddev: Tensor, target: Tensor) -> Tensor:
    """P(T <= t) of a Gaussian prediction, uniform over [0, 1] if it is calibrated."""
    _check(mean, stddev, target)
    return cumulative(standardise(target - mean, stddev))


def coverage(probability: Tensor, level: float = 0.95) -> Tensor:
    """The share of targets within the central interval of this probability.

    probability: P(T <= t) of each target.
    """
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval is between 0 and 1, not {level}")
    return ((probability - 0.5).abs() <= level / 2).to(probability).mean(-1)


@final
@dataclass(frozen=True)
class Calibration:
    """How many targets should be, and how many are, below each quantile of their prediction."""

    expected: Tensor
    """(levels,)"""
    observed: Tensor
    """(*members, levels)"""
    data: int

    @property
    def error(self) -> Tensor:
        """Average of |observed - expected|: 0 is calibrated, 1/2 the worst."""
        return (self.observed - self.expected).abs().mean(-1)


def calibration_curve(probability: Tensor, levels: int = LEVELS) -> Calibration:
    """Shares of targets below the quantiles 1 / (levels + 1) ... levels / (levels + 1).

    probability: P(T <= t) of each target.
    """
    expected = torch.arange(1, levels + 1).to(probability) / (levels + 1)
    below = (probability[..., None, :] <= expected[:, None]).to(probability)
    return Calibration(expected, below.mean(-1), probability.shape[-1])


def calibration_error(probability: Tensor, levels: int = LEVELS) -> Tensor:
    """Average of |observed - expected| over the quantiles of a calibration curve."""
    return calibration_curve(probability, levels).error


def _check(*tensors: Tensor) -> None:
    """A (data, 1) against a (data,) would broadcast to all pairs."""
    for tensor in tensors[1:]:
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f"predictions have the shape of the targets, not {tuple(tensors[0].shape)} and "
                f"{tuple(tensor.shape)}; select one target with [..., 0]"
            )
