"""What a likelihood is: how the target is distributed given the network's outputs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class Prediction:
    """Moments of the target, its variance split by the law of total variance.

    Var[t] = E[Var[t | f]] + Var[E[t | f]], all of shape (*batch, k). For classes the mean holds
    their probabilities, and the variances are those of the indicators of the classes.
    """

    mean: Tensor
    aleatoric: Tensor
    """E[Var[t | f]]: noise that would remain if the outputs f were known."""
    epistemic: Tensor
    """Var[E[t | f]]: what not knowing the outputs f adds."""
    entropy: Tensor | None = None
    """(*batch,), of classes alone: the entropy of the predicted class in nats."""
    expected_entropy: Tensor | None = None
    """(*batch,), of classes alone: the part of it that knowing the outputs would leave."""

    @property
    def variance(self) -> Tensor:
        """The sum of both parts."""
        return self.aleatoric + self.epistemic

    @property
    def stddev(self) -> Tensor:
        """The root of the variance."""
        return self.variance.sqrt()

    @property
    def mutual_information(self) -> Tensor:
        """Of class and outputs (*batch,): how much of the entropy is for want of knowing f."""
        if self.entropy is None or self.expected_entropy is None:
            raise ValueError("mutual information is found for classes; use .epistemic for numbers")
        # Jensen's inequality makes it non-negative; rounding alone would not.
        return (self.entropy - self.expected_entropy).clamp(min=0)


class Likelihood(ABC):
    """The distribution p(t | f) of a target given outputs f, and its averages over Gaussian f.

    Outputs have the shape (*batch, n), targets (*batch, k) or, for one target, (*batch,). Leading
    dimensions that a target lacks (draws, members of an ensemble) are shared by it.
    """

    @abstractmethod
    def outputs(self, targets: int) -> int:
        """How many outputs a network needs for so many targets (or classes)."""

    @abstractmethod
    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """log p(t | f) for outputs f that are known, (*batch,)."""

    @abstractmethod
    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """E[log p(t | f)], (*batch,): what the ELBO is made of."""

    @abstractmethod
    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[p(t | f)], (*batch,): the density that the prediction gave to what happened."""

    @abstractmethod
    def predict(self, output: Gaussian) -> Prediction:
        """Mean and variance of the target for Gaussian outputs."""

    @abstractmethod
    def predict_draws(self, values: Tensor) -> Prediction:
        """The same from draws of the outputs (samples, *batch, n)."""

    def log_predictive_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """log of the average of p(t | f) over draws (samples, *batch, n)."""
        return self.log_prob(values, target).logsumexp(0) - math.log(len(values))

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is to be learned of it: nothing, unless it is a module that says otherwise."""
        return iter(())


def flat_mean(output: Gaussian) -> Tensor:
    """(*batch, n), whatever the shape of the event."""
    return output.mean.reshape(*output.batch_shape, output.event_shape.numel())


def columns(target: Tensor, batch: torch.Size, count: int, like: Tensor) -> Tensor:
    """A target as (*batch', k) in the dtype of the outputs, batch' the end of the batch's shape.

    Of one target, the last dimension may be missing.
    """
    missing = count == 1 and target.shape == batch[len(batch) - target.dim() :]
    shaped = target[..., None] if missing and target.dim() <= len(batch) else target
    lead = shaped.shape[:-1]
    if shaped.dim() == 0 or shaped.shape[-1] != count or lead != batch[len(batch) - len(lead) :]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} do not go with {count} for each element of a "
            f"batch {tuple(batch)}; give them the shape {(*batch, count)}"
        )
    return shaped.to(like)


def of_conditionals(mean: Tensor, variance: Tensor) -> Prediction:
    """The law of total variance over draws: moments given f as (samples, *batch, k)."""
    return Prediction(mean.mean(0), variance.mean(0), mean.var(0, correction=0))
