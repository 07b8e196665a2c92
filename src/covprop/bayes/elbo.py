"""The evidence lower bound, its terms one by one."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from covprop.bayes.likelihoods import Likelihood
from covprop.bayes.prediction import EXACT, kl, predict
from covprop.bayes.sampling import LocalReparametrisation, draws
from covprop.bayes.weights import Weights
from covprop.gaussian import Gaussian
from covprop.methods import Method

Schedule: TypeAlias = Callable[[int], float]
"""The weight of the divergence at a step of training."""


@final
@dataclass(frozen=True)
class LinearAnnealing:
    """The weight of the divergence grows from `start` to 1 within so many steps."""

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.start <= 1:
            raise ValueError("annealing takes at least one step and starts between 0 and 1")

    def __call__(self, step: int) -> float:
        """At this step, counted from 0."""
        return self.start + (1 - self.start) * min(1.0, step / self.steps)


@final
@dataclass(frozen=True)
class Terms:
    """What an ELBO is made of, for each member of an ensemble (members,) or for one network ()."""

    loss: Tensor
    """To minimise: a scalar, the sum over members, which do not share parameters."""
    expected_log_prob: Tensor
    """E[log p(t | f)], averaged over the batch."""
    kl: Tensor
    """Divergence of the weights from the prior, of all of them together."""
    kl_weight: float
    """By which the loss multiplied it: annealing times temperature."""
    data_size: int | Tensor

    @property
    def elbo(self) -> Tensor:
        """The bound for one datum, in nats, without annealing and temperatures."""
        return self.expected_log_prob - self.kl / self.data_size

    def record(self) -> dict[str, float]:
        """Numbers for a log, averaged over members."""
        terms = {
            "loss": self.loss,
            "elbo": self.elbo,
            "expected_log_prob": self.expected_log_prob,
            "kl": self.kl,
        }
        averages = {name: float(term.detach().mean()) for name, term in terms.items()}
        return averages | {"kl_weight": self.kl_weight}


@final
@dataclass(frozen=True)
class ELBO:
    """The evidence lower bound for one datum: mean E[log p(t | f)] - KL / data_size.

    data_size is the number of data that the network is trained on, not that of a batch; members of
    an ensemble may have their own, (members,). Without Bayesian layers the divergence is zero, and
    for uncertain inputs this is probabilistic training as of Gast & Roth.
    """

    likelihood: Likelihood
    data_size: int | Tensor
    _: KW_ONLY
    annealing: Schedule | None = None
    """The weight of the divergence at each step; 1 at all of them if None."""
    likelihood_temperature: float = 1.0
    """T: the likelihood is p^(1/T)."""
    kl_temperature: float = 1.0
    """T: the divergence counts T times; below 1 the posterior is cold."""
    log: Callable[[dict[str, float]], object] | None = None
    """Is given the terms of every call, as numbers: a list's append, or a writer of your own."""

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
        self,
        model: nn.Module,
        x: Tensor | Gaussian,
        target: Tensor,
        method: Method | LocalReparametrisation = EXACT,
        *,
        step: int = 0,
        weight: Tensor | None = None,
    ) -> Terms:
        """The terms for a batch.

        method: how outputs are found, see `bayes.predict`; step: for annealing; weight (*batch):
        how much each datum counts, as where batches of different sizes are padded.
        """
        log_prob = self.log_likelihood(model, x, target, method)  # (*members, batch)
        return self.combine(log_prob, self.divergence(model), step=step, weight=weight)

    def divergence(self, model: nn.Module) -> Tensor:
        """KL of the weights of a model, zero for one without Bayesian layers."""
        random = any(isinstance(layer, Weights) for layer in model.modules())
        return kl(model) if random else torch.zeros(())

    def log_likelihood(
        self,
        model: nn.Module,
        x: Tensor | Gaussian,
        target: Tensor,
        method: Method | LocalReparametrisation = EXACT,
    ) -> Tensor:
        """E[log p(t | f)] of every datum: from the moments of the outputs, or averaged draws."""
        if isinstance(method, LocalReparametrisation):
            values = draws(model, x, method.samples, method.generator)
            return self.likelihood.log_prob(values, target).mean(0)
        output = predict(model, x, method)
        return self.likelihood.expected_log_prob(output, target)

    def combine(
        self, log_prob: Tensor, divergence: Tensor, *, step: int = 0, weight: Tensor | None = None
    ) -> Terms:
        """The terms from E[log p(t | f)] of each datum (*members, batch) and KL (*members,)."""
        if weight is None:
            expected = log_prob.mean(-1)
        else:
            expected = (weight * log_prob).sum(-1) / weight.expand(log_prob.shape).sum(-1)
        divergence = divergence.to(expected).expand(expected.shape)
        anneal = 1.0 if self.annealing is None else self.annealing(step)
        kl_weight = anneal * self.kl_temperature
        size = self.data_size
        each = kl_weight * divergence / size - expected / self.likelihood_temperature
        terms = Terms(each.sum(), expected, divergence, kl_weight, size)
        if self.log is not None:
            self.log(terms.record())
        return terms
