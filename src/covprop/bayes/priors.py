"""Priors of weights, and how far a factorised Gaussian posterior is from them.

KL(N(m, s^2) || N(c, p^2)) = log(p / s) + (s^2 + (m - c)^2) / (2 p^2) - 1/2 for each weight.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.bayes.mixture import expected_bump

HE = 2.0
"""He et al. (2015): the variance of a weight times its fan-in that keeps the size of ReLU units."""
WIDE = 4.0
"""How much larger than He's the variance of the wide prior is: twice the standard deviation."""
LEAST_RATIO = 0.1
"""Of the root mean square of the trained weights: the size below which none is taken."""


@final
@dataclass(frozen=True)
class Posterior:
    """A factorised Gaussian over the weights, or the biases, of a layer; members lead if there are.

    centre: where the prior is centred, if it is not at zero.
    """

    mean: Tensor
    log_stddev: Tensor
    fan_in: int
    fan_out: int
    members: bool = False
    centre: Tensor | None = None

    def total(self, each: Tensor) -> Tensor:
        """The sum over weights: one number, or (members,)."""
        return each.flatten(1).sum(1) if self.members else each.sum()

    @property
    def distance(self) -> Tensor:
        """How far each mean is from the centre of the prior."""
        return self.mean if self.centre is None else self.mean - self.centre

    def second_moment(self) -> Tensor:
        """E (w - c)^2 of each weight."""
        return torch.exp(2 * self.log_stddev) + self.distance.square()

    def divergence_from(self, stddev: float) -> Tensor:
        """KL from N(c, stddev^2), summed; few operations, because training steps are short."""
        count = self.mean[0].numel() if self.members else self.mean.numel()
        weighted = self.second_moment() * (0.5 / stddev**2) - self.log_stddev
        return self.total(weighted) + count * (math.log(stddev) - 0.5)


class Prior(ABC):
    """What weights are before data: a divergence for each layer's weights and biases."""

    @abstractmethod
    def divergence(self, posterior: Posterior) -> Tensor:
        """KL(posterior || prior), or what stands for it: one number, or (members,)."""


def _positive(name: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{name} is a positive number, not {value}")


@final
@dataclass(frozen=True)
class FixedPrior(Prior):
    """N(0, stddev^2) for every weight and bias."""

    stddev: float = 1.0

    def __post_init__(self) -> None:
        """A deviation is positive."""
        _positive("the stddev of a prior", self.stddev)

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form."""
        return posterior.divergence_from(self.stddev)


@final
@dataclass(frozen=True)
class HePrior(Prior):
    """N(0, 2 / fan_in): networks of ReLUs neither grow nor shrink with depth."""

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form."""
        return posterior.divergence_from(math.sqrt(HE / posterior.fan_in))


@final
@dataclass(frozen=True)
class WideHePrior(Prior):
    """N(0, widening * 2 / fan_in), four times He's variance if not said otherwise."""

    widening: float = WIDE

    def __post_init__(self) -> None:
        """A factor is positive."""
        _positive("the widening of a prior", self.widening)

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form."""
        return posterior.divergence_from(math.sqrt(self.widening * HE / posterior.fan_in))


@final
@dataclass(frozen=True)
class XavierPrior(Prior):
    """N(0, 2 / (fan_in + fan_out)), of Glorot & Bengio (2010)."""

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form."""
        fans = posterior.fan_in + posterior.fan_out
        return posterior.divergence_from(math.sqrt(2 / fans))


@final
@dataclass(frozen=True)
class ScaleMixturePrior(Prior):
    """share N(0, wide^2) + (1 - share) N(0, narrow^2), of Blundell et al. (2015).

    narrow must be the smaller. There is no closed form; quadrature (`mixture.py`) finds the
    divergence to 1e-8.
    """

    share: float = 0.5
    wide: float = 1.0
    narrow: float = math.exp(-6)

    def __post_init__(self) -> None:
        """A share and two deviations."""
        if not 0 < self.share < 1:
            raise ValueError(f"the share of the wide component is between 0 and 1: {self.share}")
        _positive("the narrow stddev", self.narrow)
        if not self.narrow < self.wide < math.inf:
            raise ValueError(f"narrow {self.narrow} is to be less than wide {self.wide}")

    def divergence(self, posterior: Posterior) -> Tensor:
        """From the wide component in closed form, less the bump that the narrow one makes."""
        height = math.log((1 - self.share) * self.wide / (self.share * self.narrow))
        decay = 1 / self.narrow**2 - 1 / self.wide**2
        stddev = torch.exp(posterior.log_stddev)
        bump = posterior.total(expected_bump(posterior.distance, stddev, height, decay))
        count = _count(posterior)
        return posterior.divergence_from(self.wide) - bump - count * math.log(self.share)


@final
@dataclass(frozen=True)
class EmpiricalBayes(Prior):
    """N(0, v) with a variance v of its own for the weights, and for the biases, of every layer.

    v has an inverse-gamma hyperprior (shape a, scale b) and is at its optimum, in closed form, as
    in Wu et al. (2019):  v = (2 b + sum E w^2) / (2 a + 2 + count).  The divergence is
    KL(q || N(0, v)) - log p(v), so that v minimises it and gradients need not know of v.
    """

    shape: float = 4.4798
    scale: float = 10.0

    def __post_init__(self) -> None:
        """Both are positive."""
        _positive("the shape of the inverse gamma", self.shape)
        _positive("the scale of the inverse gamma", self.scale)

    def variance(self, posterior: Posterior) -> Tensor:
        """The best variance: one number, or (members,)."""
        return self._best(posterior, posterior.total(posterior.second_moment()))

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form, at the best variance."""
        second = posterior.total(posterior.second_moment())
        best = self._best(posterior, second)
        count = _count(posterior)
        given = second / (2 * best) - posterior.total(posterior.log_stddev)
        given = given + count / 2 * (best.log() - 1)
        hyper = -(self.shape + 1) * best.log() - self.scale / best
        return given - hyper - (self.shape * math.log(self.scale) - math.lgamma(self.shape))

    def _best(self, posterior: Posterior, second: Tensor) -> Tensor:
        return (second + 2 * self.scale) / (2 * self.shape + 2 + _count(posterior))


def _count(posterior: Posterior) -> int:
    return posterior.mean[0].numel() if posterior.members else posterior.mean.numel()


@final
@dataclass(frozen=True)
class TrainedPrior(Prior):
    """N(w, (ratio |w|)^2) around trained weights w: MOPED, of Krishnan et al. (2020).

    A weight below a tenth of the root mean square of its layer's has the deviation of that tenth:
    one that happens to be zero would otherwise be fixed there.
    """

    ratio: float = 0.1

    def __post_init__(self) -> None:
        """A ratio is positive."""
        _positive("the ratio of deviations to weights", self.ratio)

    def stddev(self, centre: Tensor, members: bool) -> Tensor:
        """Of every weight, from where it was trained to."""
        dims = tuple(range(int(members), centre.dim()))
        size = centre.square().mean(dims, keepdim=True).sqrt()
        size = torch.where(size > 0, size, 1)  # all weights zero: biases that were reset
        return self.ratio * torch.maximum(centre.abs(), LEAST_RATIO * size)

    def divergence(self, posterior: Posterior) -> Tensor:
        """In closed form."""
        if posterior.centre is None:
            raise ValueError(
                "TrainedPrior is centred at trained weights, and this layer has none; make it with "
                "bayes.to_bayesian(model, prior=bayes.TrainedPrior())"
            )
        stddev = self.stddev(posterior.centre, posterior.members)
        each = posterior.second_moment() / (2 * stddev.square()) - posterior.log_stddev
        return posterior.total(each + stddev.log() - 0.5)
