"""Priors of weights, and how far a factorised Gaussian posterior is from them.

KL(N(m, s^2) || N(c, p^2)) = log(p / s) + (s^2 + (m - c)^2) / (2 p^2) - 1/2 for each weight.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.normal import SQRT_2PI
from covprop.kernels.polynomials import unit_interval

HE = 2.0
"""He et al. (2015): the variance of a weight times its fan-in that keeps the size of ReLU units."""
WIDE = 4.0
"""How much larger than He's the variance of the wide prior is: twice the standard deviation."""
LEAST_RATIO = 0.1
"""The smallest size of a trained weight, relative to the root mean square of its layer."""
NODES = 96
"""Gauss-Legendre nodes: the error is below 1e-8 for components of any two widths."""
REACH = 9.0
"""Standard deviations of the posterior, on either side, over which to integrate."""
NEGLIGIBLE = 28.0
"""Minus the logarithm of the bump where the integral is cut off."""
TOGETHER = 2**20
"""Evaluations at a time."""


@final
@dataclass(frozen=True)
class Posterior:
    """A factorised Gaussian over the weights, or over the biases, of a layer.

    Args:
        mean: The mean of every weight; the first dimension is that of members, if there are any.
        log_stddev: Logarithms of the standard deviations, in the same shape.
        fan_in: The number of inputs of one output of the layer.
        fan_out: The number of outputs of one input of the layer.
        members: Whether the first dimension is that of members.
        centre: The centre of the prior, by default zero.

    Example:
        mean = torch.zeros(2, 3)
        bayes.HePrior().divergence(bayes.Posterior(mean, mean - 1, fan_in=3, fan_out=2))
    """

    mean: Tensor
    log_stddev: Tensor
    fan_in: int
    fan_out: int
    members: bool = False
    centre: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of weights of one network."""
        return self.mean[0].numel() if self.members else self.mean.numel()

    def total(self, each: Tensor) -> Tensor:
        """Sum over weights: one number, or (members,)."""
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
        weighted = self.second_moment() * (0.5 / stddev**2) - self.log_stddev
        return self.total(weighted) + self.count * (math.log(stddev) - 0.5)


class Prior(ABC):
    """A prior of weights: it gives the KL divergence of each layer's weights and biases.

    Example:
        class Narrow(bayes.Prior):
            def divergence(self, posterior):
                return posterior.divergence_from(0.1)
    """

    @abstractmethod
    def divergence(self, posterior: Posterior) -> Tensor:
        """KL(posterior || prior), or a substitute for it: one number, or (members,)."""


class _GaussianPrior(Prior, ABC):
    @abstractmethod
    def _stddev(self, posterior: Posterior) -> float: ...

    def divergence(self, posterior: Posterior) -> Tensor:
        """KL(posterior || prior) in closed form: one number, or (members,)."""
        return posterior.divergence_from(self._stddev(posterior))


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{name} is a positive number, not {value}")


@final
@dataclass(frozen=True)
class FixedPrior(_GaussianPrior):
    """N(0, stddev^2) for every weight and bias.

    Args:
        stddev: The standard deviation.

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.FixedPrior(0.5))
    """

    stddev: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("the stddev of a prior", self.stddev)

    def _stddev(self, posterior: Posterior) -> float:  # noqa: ARG002
        return self.stddev


@final
@dataclass(frozen=True)
class HePrior(_GaussianPrior):
    """N(0, 2 / fan_in): networks of ReLUs neither grow nor shrink with depth (He et al. 2015).

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.HePrior())
    """

    def _stddev(self, posterior: Posterior) -> float:
        return math.sqrt(HE / posterior.fan_in)


@final
@dataclass(frozen=True)
class WideHePrior(_GaussianPrior):
    """N(0, widening * 2 / fan_in).

    Args:
        widening: The variance in units of He's variance.

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.WideHePrior(widening=2.0))
    """

    widening: float = WIDE

    def __post_init__(self) -> None:
        _check_positive("the widening of a prior", self.widening)

    def _stddev(self, posterior: Posterior) -> float:
        return math.sqrt(self.widening * HE / posterior.fan_in)


@final
@dataclass(frozen=True)
class XavierPrior(_GaussianPrior):
    """N(0, 2 / (fan_in + fan_out)), of Glorot & Bengio (2010).

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.XavierPrior())
    """

    def _stddev(self, posterior: Posterior) -> float:
        return math.sqrt(2 / (posterior.fan_in + posterior.fan_out))


@final
@dataclass(frozen=True)
class ScaleMixturePrior(Prior):
    """share N(0, wide^2) + (1 - share) N(0, narrow^2), of Blundell et al. (2015).

    There is no closed form of the divergence; quadrature finds it to 1e-8.

    Args:
        share: The weight of the wide component, between 0 and 1.
        wide: Its standard deviation.
        narrow: The standard deviation of the other one, which must be smaller.

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.ScaleMixturePrior(share=0.25))
    """

    share: float = 0.5
    wide: float = 1.0
    narrow: float = math.exp(-6)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"the share of the wide component is between 0 and 1: {self.share}")
        _check_positive("the narrow stddev", self.narrow)
        if not self.narrow < self.wide < math.inf:
            raise ValueError(f"narrow {self.narrow} is to be less than wide {self.wide}")

    def divergence(self, posterior: Posterior) -> Tensor:
        """KL from the wide component in closed form, minus the bump that the narrow one adds.

        The logarithm of the mixture is that of the wide component, a quadratic, and a bump,
        softplus(b - d w^2 / 2), b = log((1 - s) wide / (s narrow)), d = 1/narrow^2 - 1/wide^2.
        """
        height = math.log((1 - self.share) * self.wide / (self.share * self.narrow))
        decay = 1 / self.narrow**2 - 1 / self.wide**2
        stddev = torch.exp(posterior.log_stddev)
        bump = posterior.total(_ExpectedBump.apply(posterior.distance, stddev, height, decay))
        wide = posterior.divergence_from(self.wide)
        return wide - bump - posterior.count * math.log(self.share)


class _ExpectedBump(Function):
    """E softplus(height - decay w^2 / 2) for w ~ N(mean, stddev^2), element by element."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, stddev: Tensor, height: float, decay: float) -> Tensor:
        means, stddevs = mean.detach().flatten().double(), stddev.detach().flatten().double()
        step = max(1, TOGETHER // NODES)
        parts = [
            torch.stack(_integrals(m, s, height, decay))
            for m, s in zip(means.split(step), stddevs.split(step), strict=True)
        ]
        value, by_mean, by_stddev = torch.cat(parts, -1).to(mean.dtype).unbind()
        ctx.save_for_backward(by_mean.reshape(mean.shape), by_stddev.reshape(mean.shape))
        return value.reshape(mean.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_mean, by_stddev = ctx.saved_tensors
        return gradient * by_mean, gradient * by_stddev, None, None


def _integrals(
    mean: Tensor, stddev: Tensor, height: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """E[f(w)], E[f'(w)] and E[f'(w) (w - m) / s], the derivatives by m and by s.

    The interval is where neither the bump nor the posterior is negligible, so that a posterior
    much wider or much narrower than the bump does not miss it.
    """
    nodes, weights = mean.new_tensor(unit_interval(NODES)).T[..., None]
    edge = math.sqrt(2 * (max(height, 0.0) + NEGLIGIBLE) / decay)
    low = (mean - REACH * stddev).clamp(-edge, edge)
    high = (mean + REACH * stddev).clamp(-edge, edge)
    w = low + (high - low) * nodes  # (nodes, n)
    z = (w - mean) / stddev
    mass = torch.exp(-z.square() / 2) * (weights * (high - low) / (SQRT_2PI * stddev))
    level = height - decay / 2 * w.square()
    slope = -decay * w * torch.sigmoid(level)
    return (mass * F.softplus(level)).sum(0), (mass * slope).sum(0), (mass * slope * z).sum(0)


@final
@dataclass(frozen=True)
class EmpiricalBayes(Prior):
    """N(0, v), with a separate variance v for the weights, and for the biases, of every layer.

    v has an inverse-gamma hyperprior and takes its optimal value, in closed form (Wu et al. 2019):
    v = (2 b + sum E w^2) / (2 a + 2 + count). This v minimises the divergence KL(q || N(0, v)) -
    log p(v), so gradients need not pass through it.

    Args:
        shape: The parameter a of the inverse gamma distribution.
        scale: The parameter b of the inverse gamma distribution.

    Example:
        bayes.BayesLinear(3, 2, prior=bayes.EmpiricalBayes())
    """

    shape: float = 4.4798
    scale: float = 10.0

    def __post_init__(self) -> None:
        _check_positive("the shape of the inverse gamma", self.shape)
        _check_positive("the scale of the inverse gamma", self.scale)

    def variance(self, posterior: Posterior) -> Tensor:
        """Return the best variance: one number, or (members,)."""
        return self._best(posterior, posterior.total(posterior.second_moment()))

    def divergence(self, posterior: Posterior) -> Tensor:
        """KL(q || N(0, v)) - log p(v) at the best variance, in closed form."""
        second = posterior.total(posterior.second_moment())
        best = self._best(posterior, second)
        kl = second / (2 * best) - posterior.total(posterior.log_stddev)
        kl = kl + posterior.count / 2 * (best.log() - 1)
        hyper = -(self.shape + 1) * best.log() - self.scale / best
        return kl - hyper - (self.shape * math.log(self.scale) - math.lgamma(self.shape))

    def _best(self, posterior: Posterior, second: Tensor) -> Tensor:
        return (second + 2 * self.scale) / (2 * self.shape + 2 + posterior.count)


@final
@dataclass(frozen=True)
class TrainedPrior(Prior):
    """N(w, (ratio |w|)^2) around trained weights w: MOPED, of Krishnan et al. (2020).

    For a weight that is smaller than a tenth of its layer's root mean square, that tenth takes the
    place of |w|. Otherwise a weight of zero would be fixed at zero.

    Args:
        ratio: The standard deviation in units of the trained weight.

    Example:
        model = bayes.to_bayesian(nn.Linear(3, 2), prior=bayes.TrainedPrior(0.1))
    """

    ratio: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("the ratio of deviations to weights", self.ratio)

    def stddev(self, centre: Tensor, members: bool) -> Tensor:
        """Return the standard deviation of every weight from its trained value."""
        dims = tuple(range(int(members), centre.dim()))
        size = centre.square().mean(dims, keepdim=True).sqrt()
        size = torch.where(size > 0, size, 1)  # all weights zero: biases that were reset
        return self.ratio * torch.maximum(centre.abs(), LEAST_RATIO * size)

    def divergence(self, posterior: Posterior) -> Tensor:
        """KL(posterior || prior) in closed form: one number, or (members,)."""
        if posterior.centre is None:
            raise ValueError(
                "TrainedPrior is centred at trained weights, and this layer has none; make it with "
                "bayes.to_bayesian(model, prior=bayes.TrainedPrior())"
            )
        stddev = self.stddev(posterior.centre, posterior.members)
        each = posterior.second_moment() / (2 * stddev.square()) - posterior.log_stddev
        return posterior.total(each + stddev.log() - 0.5)
