"""What a likelihood is: how the target is distributed given the network's outputs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.gaussian import Gaussian


@final
@dataclass(frozen=True)
class Prediction:
    """Moments of the target, its variance split by the law of total variance.

    Var[t] = E[Var[t | f]] + Var[E[t | f]], all of shape (*batch, k). For classes the mean holds
    their probabilities, and the variances are those of the indicators of the classes.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), 0.1, batch_dims=1)
        bayes.Poisson().predict(output).stddev
    """

    mean: Tensor
    aleatoric: Tensor
    """E[Var[t | f]]: noise that would remain if the outputs f were known."""
    epistemic: Tensor
    """Var[E[t | f]]: what not knowing the outputs f adds."""
    entropy: Tensor | None = None
    """(*batch,), of classes only: the entropy of the predicted class in nats."""
    expected_entropy: Tensor | None = None
    """(*batch,), of classes only: the part of it that knowing the outputs would leave."""

    @classmethod
    def of_draws(cls, mean: Tensor, variance: Tensor, *entropies: Tensor) -> "Prediction":
        """Average moments given f, (samples, *batch, k), by the law of total variance."""
        return cls(mean.mean(0), variance.mean(0), mean.var(0, correction=0), *entropies)

    @classmethod
    def cat(cls, parts: Sequence["Prediction"], dim: int) -> "Prediction":
        """Concatenate predictions along a dimension of the batch."""
        columns = ([getattr(part, one.name) for part in parts] for one in fields(cls))
        joined: list[Any] = [None if one[0] is None else torch.cat(one, dim) for one in columns]
        return cls(*joined)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Prediction":
        """Apply a function to every tensor."""
        values = (getattr(self, one.name) for one in fields(self))
        mapped: list[Any] = [None if value is None else function(value) for value in values]
        return Prediction(*mapped)

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
        """Of class and outputs (*batch,): the part of the entropy due to not knowing f."""
        if self.entropy is None or self.expected_entropy is None:
            raise ValueError("mutual information is found for classes; use .epistemic for numbers")
        # Jensen's inequality makes it non-negative; rounding alone would not.
        return (self.entropy - self.expected_entropy).clamp(min=0)


class Likelihood(ABC):
    """The distribution p(t | f) of a target given outputs f, and its averages over Gaussian f.

    Outputs have the shape (*batch, n), targets (*batch, k) or, for one target, (*batch,). Leading
    dimensions that a target lacks (draws, members of an ensemble) are shared by it.

    Example:
        output = cp.Gaussian.isotropic(torch.zeros(5, 1), 0.1, batch_dims=1)
        bayes.Bernoulli().expected_log_prob(output, torch.ones(5))
    """

    def outputs(self, targets: int) -> int:
        """Count the outputs that a network needs for so many targets, or classes: one for each."""
        return targets

    @abstractmethod
    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """log p(t | f) for known outputs f, (*batch,)."""

    @abstractmethod
    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """E[log p(t | f)], (*batch,): the first term of the ELBO."""

    @abstractmethod
    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[p(t | f)], (*batch,): the predicted density of the target."""

    @abstractmethod
    def predict(self, output: Gaussian) -> Prediction:
        """Mean and variance of the target for Gaussian outputs."""

    @abstractmethod
    def predict_draws(self, values: Tensor) -> Prediction:
        """Mean and variance of the target from draws of the outputs (samples, *batch, n)."""

    def log_predictive_draws(self, values: Tensor, target: Tensor) -> Tensor:
        """log of the average of p(t | f) over draws (samples, *batch, n)."""
        return self.log_prob(values, target).logsumexp(0) - math.log(len(values))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over what is to be learned: nothing, unless it is a module with parameters."""
        return iter(())


def flat_mean(output: Gaussian) -> Tensor:
    """The mean as (*batch, n), whatever the shape of the event."""
    return output.mean.reshape(*output.batch_shape, output.event_shape.numel())


def columns(target: Tensor, like: Tensor) -> Tensor:
    """Shape a target as (*batch', k), batch' the end of the batch of outputs (*batch, k).

    Of one target, the last dimension may be missing.
    """
    batch, count = like.shape[:-1], like.shape[-1]
    missing = count == 1 and target.shape == batch[len(batch) - target.dim() :]
    shaped = target[..., None] if missing and target.dim() <= len(batch) else target
    lead = shaped.shape[:-1]
    if shaped.dim() == 0 or shaped.shape[-1] != count or lead != batch[len(batch) - len(lead) :]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} do not go with {count} for each element of a "
            f"batch {tuple(batch)}; give them the shape {(*batch, count)}"
        )
    return shaped.to(like)
