"""The evidence lower bound, its terms one by one."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from covprop.bayes.layers import BayesLayer
from covprop.bayes.likelihoods import Likelihood
from covprop.bayes.prediction import DEFAULT, Inference, LocalReparametrisation, draws, kl, predict
from covprop.gaussian import Gaussian

Schedule: TypeAlias = Callable[[int], float]
"""The weight of the divergence at a step of training."""


@final
@dataclass(frozen=True)
class LinearAnnealing:
    """A weight of the KL divergence that grows linearly to 1.

    Args:
        steps: The number of training steps until it is 1.
        start: The weight at step 0.

    Example:
        bayes.ELBO(bayes.Poisson(), data_size=1000, annealing=bayes.LinearAnnealing(500))
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.start <= 1:
            raise ValueError("annealing takes at least one step and starts between 0 and 1")

    def __call__(self, step: int) -> float:
        """Return the weight at a step, counted from 0."""
        return self.start + (1 - self.start) * min(1.0, step / self.steps)


@final
@dataclass(frozen=True)
class Terms:
    """The terms of an ELBO, for each member of an ensemble (members,) or for one network ()."""

    loss: Tensor
    """To minimise: a scalar, the sum over members, which do not share parameters."""
    expected_log_prob: Tensor
    """E[log p(t | f)], averaged over the batch."""
    kl: Tensor
    """Divergence of the weights from the prior, of all of them together."""
    kl_weight: float
    """The factor of the divergence in the loss: annealing times temperature."""
    data_size: int | Tensor

    @property
    def elbo(self) -> Tensor:
        """The bound for one datum, in nats, without annealing and temperatures."""
        return self.expected_log_prob - self.kl / self.data_size

    def record(self) -> dict[str, float]:
        """Return numbers for a log, averaged over members."""
        names = ("loss", "elbo", "expected_log_prob", "kl")
        averages = {name: float(getattr(self, name).detach().mean()) for name in names}
        return averages | {"kl_weight": self.kl_weight}


@final
@dataclass(frozen=True)
class ELBO:
    """The evidence lower bound per data point: mean E[log p(t | f)] - KL / data_size.

    Without Bayesian layers the KL divergence is zero. With uncertain inputs, this is then the
    training of Gast & Roth (2018).

    Args:
        likelihood: The distribution p(t | f) of the target given the outputs.
        data_size: The number of training data, not of a batch; one for each member of an ensemble,
            (members,), if they differ.
        annealing: The weight of the KL divergence as a function of the step, by default 1.
        likelihood_temperature: T, for the likelihood p^(1/T).
        kl_temperature: A factor of the KL divergence; values below 1 give a cold posterior.
        log: A function that receives the terms of every call as numbers, such as `list.append`.

    Example:
        elbo = bayes.ELBO(bayes.HomoskedasticGaussian(), data_size=100)
        elbo(bayes.BayesLinear(3, 1), torch.ones(10, 3), torch.ones(10)).loss.backward()
    """

    likelihood: Likelihood
    data_size: int | Tensor
    _: KW_ONLY
    annealing: Schedule | None = None
    likelihood_temperature: float = 1.0
    kl_temperature: float = 1.0
    log: Callable[[dict[str, float]], object] | None = None

    def __post_init__(self) -> None:
        size = self.data_size
        if isinstance(size, bool) or not isinstance(size, Real | Tensor):
            raise TypeError(f"data_size is the number of training data, not {size!r}")
        sizes = torch.as_tensor(size)
        if not bool((torch.isfinite(sizes) & (sizes >= 1)).all()):
            raise ValueError(f"data_size is the number of training data, from 1, not {size}")
        if self.likelihood_temperature <= 0 or self.kl_temperature < 0:
            raise ValueError("the likelihood's temperature is positive, the KL's not negative")

    def __call__(
        self, model: nn.Module, x: Tensor | Gaussian, target: Tensor, method: Inference = DEFAULT,
        *, step: int = 0, weight: Tensor | None = None,
    ) -> Terms:  # fmt: skip
        """Return the terms for a batch.

        Args:
            model: The network.
            x: Inputs, as in `bayes.predict`.
            target: Targets of the batch.
            method: As in `bayes.predict`.
            step: The step of training, for annealing.
            weight: How much each datum counts, (*batch), as where batches are padded.
        """
        log_prob = self.log_likelihood(model, x, target, method)  # (*members, batch)
        return self.combine(log_prob, self.divergence(model), step=step, weight=weight)

    def divergence(self, model: nn.Module) -> Tensor:
        """Return the KL of the weights of a model, zero for one without Bayesian layers."""
        random = any(isinstance(layer, BayesLayer) for layer in model.modules())
        return kl(model) if random else torch.zeros(())

    def log_likelihood(
        self, model: nn.Module, x: Tensor | Gaussian, target: Tensor, method: Inference = DEFAULT
    ) -> Tensor:
        """Return E[log p(t | f)] of every datum, from moments of the outputs or from draws."""
        if isinstance(method, LocalReparametrisation):
            values = draws(model, x, method.samples, method.generator)
            return self.likelihood.log_prob(values, target).mean(0)
        return self.likelihood.expected_log_prob(predict(model, x, method), target)

    def combine(
        self, log_prob: Tensor, divergence: Tensor, *, step: int = 0, weight: Tensor | None = None
    ) -> Terms:
        """Combine E[log p(t | f)] of each datum (*members, batch) and KL (*members,)."""
        if weight is None:
            expected = log_prob.mean(-1)
        else:
            expected = (weight * log_prob).sum(-1) / weight.expand(log_prob.shape).sum(-1)
        divergence = divergence.to(expected).expand(expected.shape)
        anneal = 1.0 if self.annealing is None else self.annealing(step)
        kl_weight, size = anneal * self.kl_temperature, self.data_size
        each = kl_weight * divergence / size - expected / self.likelihood_temperature
        terms = Terms(each.sum(), expected, divergence, kl_weight, size)
        if self.log is not None:
            self.log(terms.record())
        return terms
