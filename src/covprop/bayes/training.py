"""One training loop, for every model, likelihood, method and number of members."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from covprop.bayes.elbo import ELBO
from covprop.bayes.likelihoods import Likelihood
from covprop.bayes.prediction import (
    DEFAULT,
    Inference,
    batch_dims,
    lead_shape,
    log_predictive,
    take,
)
from covprop.errors import MomentOverflow, TrainingDiverged, warn_user
from covprop.gaussian import Gaussian

FUSED = ("cpu", "cuda")
"""Devices on which torch updates all parameters in one call."""


@final
@dataclass
class History:
    """The history of a training: one tensor, () or (members,), for every epoch.

    Attributes:
        elbo: The bound for one datum in nats, an average over the steps of the epoch.
        expected_log_prob: Its first term, for one datum.
        kl: The divergence of all weights from the prior, for the whole network.
        validation: The log predictive density of the validation data, for one datum; empty without
            them.
        best_epoch: The epoch, from 0, whose parameters the model has, () or (members,); None if it
            is the last.

    Example:
        elbo, x = bayes.ELBO(bayes.HomoskedasticGaussian(), 10), torch.randn(10, 3)
        history = bayes.fit(bayes.BayesLinear(3, 1), elbo, x, x.sum(1), epochs=2, batch_size=5,
                            learning_rate=0.01)
        history.elbo[-1], history.record()
    """

    elbo: list[Tensor] = field(default_factory=list)
    expected_log_prob: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    validation: list[Tensor] = field(default_factory=list)
    best_epoch: Tensor | None = None

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return len(self.elbo)

    def record(self) -> dict[str, list[float]]:
        """Return plain numbers for a log, averaged over members."""
        names = ("elbo", "expected_log_prob", "kl", "validation")
        return {name: [float(one.mean()) for one in getattr(self, name)] for name in names}


Validation: TypeAlias = tuple[Tensor | Gaussian, Tensor] | tuple[Tensor | Gaussian, Tensor, Tensor]
"""Data to validate with: inputs, targets, and how much each counts if they are not equal."""
Callback: TypeAlias = Callable[[int, History], object]
"""Called with the epoch, from 0, and the history up to it; ends the training by returning True."""


def fit(
    model: nn.Module, elbo: ELBO, x: Tensor | Gaussian, y: Tensor, *, method: Inference = DEFAULT,
    epochs: int, batch_size: int, learning_rate: float | Tensor, weight_decay: float = 0.0,
    cooldown: float = 0.0, weight: Tensor | None = None, generator: torch.Generator | None = None,
    validation: Validation | None = None, patience: int | None = None, progress: bool = False,
    callback: Callback | None = None,
) -> History:  # fmt: skip
    """Train a model, and the parameters of its likelihood, by AdamW on the ELBO.

    If the model has members, the first dimension of x, y and weight is that of members. Each member
    then has its own data in its own order, and does not depend on the others. If y and weight lack
    that dimension, they are the same for all members.

    Args:
        model: The network.
        elbo: The bound, with the likelihood.
        x: Data (N, ...), or a batch of Gaussians if inputs are uncertain.
        y: Targets (N, ...).
        method: As in `predict`.
        epochs: Passes over the data.
        batch_size: The number of data in one step, for each member.
        learning_rate: One number, or one for each member, (members,), to compare them in one run.
        weight_decay: The weight decay of AdamW.
        cooldown: The fraction of the steps, at the end, in which the learning rate falls linearly
            to zero, so that single batches no longer move the result.
        weight: Relative weights of the data, (N,).
        generator: A random generator for the order of the data, by default torch's global one.
            Draws use that of the method.
        validation: Other data (x, y) or (x, y, weight), whose log predictive density is recorded
            after every epoch.
        patience: Stop when the validation density has not improved for so many epochs, and restore
            the best epoch of each member. Without it, the last epoch is kept.
        progress: Whether to show a progress bar.
        callback: Called after every epoch with its number and the history; True ends the training.

    Raises:
        TrainingDiverged: The ELBO, or the density of the validation data, is no longer a number.

    Example:
        elbo, x = bayes.ELBO(bayes.HomoskedasticGaussian(), 10), torch.randn(10, 3)
        bayes.fit(bayes.BayesLinear(3, 1), elbo, x, x.sum(1), epochs=2, batch_size=5,
                  learning_rate=0.01)
    """
    dims = batch_dims(model, x)
    lead = lead_shape(x, dims)
    if patience is not None and (patience < 1 or validation is None):
        raise ValueError("patience is a number of epochs from 1, and needs validation data")
    _check(lead, epochs, batch_size, cooldown)
    y = _for_all(y, lead, "y")
    if weight is None:
        _check_size(elbo.data_size, lead[-1])
    else:
        weight = _relative(_for_all(weight, lead, "weight"))
    optimiser = _optimiser(model, elbo.likelihood, learning_rate, weight_decay, lead)
    rate = optimiser.defaults["lr"]
    history = History()
    best = None if patience is None else _Best(model, elbo.likelihood, lead[:-1], patience)
    step, steps = 0, epochs * math.ceil(lead[-1] / batch_size)
    with tqdm(total=epochs, unit="epoch", disable=not progress) as bar:
        for epoch in range(epochs):
            sums = torch.zeros(())
            for rows in _batches(lead, batch_size, generator, y.device):
                try:
                    log_prob = elbo.log_likelihood(
                        model, take(x, rows, dims), take(y, rows, dims), method
                    )
                except MomentOverflow as error:
                    raise _diverged(epoch) from error
                if weight is not None:
                    log_prob = log_prob * take(weight, rows, dims)
                terms = elbo.combine(log_prob, elbo.divergence(model), step=step)
                optimiser.zero_grad()
                terms.loss.backward()
                for group in optimiser.param_groups:
                    group["lr"] = rate * _cooled(step, steps, cooldown)
                optimiser.step()
                parts = torch.broadcast_tensors(terms.elbo, terms.expected_log_prob, terms.kl)
                sums = sums.to(y.device) + rows.shape[-1] * torch.stack(parts).detach()
                step += 1
            _record(history, sums / lead[-1], epoch)
            if validation is not None:
                history.validation.append(_density(model, elbo, validation, method, epoch))
            bar.update()
            bar.set_postfix(elbo=f"{float(history.elbo[-1].mean()):.3g}", refresh=False)
            stop = best is not None and best.update(epoch, history.validation[-1])
            if (callback is not None and callback(epoch, history) is True) or stop:
                break
    if best is not None:
        history.best_epoch = best.restore()
    return history


def _optimiser(
    model: nn.Module, likelihood: Likelihood, learning_rate: float | Tensor, weight_decay: float,
    lead: torch.Size,
) -> torch.optim.Optimizer:  # fmt: skip
    """AdamW at the largest rate; members of a lower one take their share of every step.

    A step of AdamW is proportional to the rate, and its state does not depend on it.
    """
    rates = torch.as_tensor(learning_rate)
    if not bool((rates > 0).all()):
        raise ValueError(f"learning_rate is positive, not {learning_rate}")
    parameters = [*model.parameters(), *likelihood.parameters()]
    fused = all(parameter.device.type in FUSED for parameter in parameters)
    rate = float(rates.max())
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=weight_decay, fused=fused)
    if not rates.dim():
        return optimiser
    if rates.shape != lead[:-1] or any(one.shape[:1] != rates.shape for one in parameters):
        raise ValueError(
            f"learning rates of shape {tuple(rates.shape)} are for a model whose parameters all "
            "lead with as many members; give one rate, or a likelihood without parameters"
        )
    shares = [
        (rates / rates.max()).to(one).reshape(-1, *[1] * (one.dim() - 1)) for one in parameters
    ]
    before: list[Tensor] = []

    def keep(*_: object) -> None:
        before[:] = [one.detach().clone() for one in parameters]

    @torch.no_grad()
    def shorten(*_: object) -> None:
        for one, start, share in zip(parameters, before, shares, strict=True):
            one.copy_(torch.lerp(start, one, share))

    optimiser.register_step_pre_hook(keep)
    optimiser.register_step_post_hook(shorten)
    return optimiser


def _cooled(step: int, steps: int, cooldown: float) -> float:
    return 1.0 if not cooldown else min(1.0, (steps - step) / (cooldown * steps))


def _record(history: History, averages: Tensor, epoch: int) -> None:
    elbo, expected, divergence = averages
    if not bool(torch.isfinite(elbo).all()):
        raise _diverged(epoch)
    history.elbo.append(elbo)
    history.expected_log_prob.append(expected)
    history.kl.append(divergence)


def _density(
    model: nn.Module, elbo: ELBO, validation: Validation, method: Inference, epoch: int
) -> Tensor:
    """The average log predictive density of the validation data, of each member."""
    x, y, *weights = validation
    each = log_predictive(model, elbo.likelihood, x, y, method)
    average = each.mean(-1)
    if weights:
        average = (weights[0] * each).sum(-1) / weights[0].expand(each.shape).sum(-1)
    if bool(torch.isnan(average).any()):
        raise _diverged(epoch)
    return average


def _diverged(epoch: int) -> TrainingDiverged:
    return TrainingDiverged(
        f"the ELBO is no longer a number in epoch {epoch + 1}; take a lower learning rate, or see "
        "that the data are standardised and have no nan"
    )


class _Best:
    """The best parameters so far, of each member on its own."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, members: torch.Size, patience: int
    ) -> None:
        self.tensors = [*model.parameters(), *model.buffers(), *likelihood.parameters()]
        self.best = [tensor.detach().clone() for tensor in self.tensors]
        self.score = torch.full(members, -math.inf, dtype=torch.float64)
        self.epoch = torch.zeros(members, dtype=torch.long)
        self.patience, self.members = patience, members

    @torch.no_grad()
    def update(self, epoch: int, score: Tensor) -> bool:
        """Keep improvements; return whether the patience of every member is over."""
        score = score.to(self.score)
        # A member whose own training would have ended has ended: the others change nothing.
        better = (score > self.score) & (epoch - self.epoch <= self.patience)
        self.score = torch.where(better, score, self.score)
        self.epoch = torch.where(better, epoch, self.epoch)
        for best, tensor in zip(self.best, self.tensors, strict=True):
            best.copy_(torch.where(self._mask(better, tensor), tensor, best))
        return not bool((epoch - self.epoch < self.patience).any())

    @torch.no_grad()
    def restore(self) -> Tensor:
        """Restore the best parameters; return their epochs."""
        for best, tensor in zip(self.best, self.tensors, strict=True):
            tensor.copy_(best)
        return self.epoch

    def _mask(self, better: Tensor, tensor: Tensor) -> Tensor:
        if not self.members:
            return better.to(tensor.device)
        if tensor.shape[:1] != self.members:  # shared by members: it goes with any of them
            return better.any().to(tensor.device)
        return better.to(tensor.device).reshape(-1, *[1] * (tensor.dim() - 1))


def _batches(
    lead: torch.Size, batch_size: int, generator: torch.Generator | None, device: torch.device
) -> Iterator[Tensor]:
    """Rows of every batch of an epoch, (rows,) or (members, rows), in a random order."""
    where = device if generator is None else generator.device
    keys = torch.rand(lead, generator=generator, device=where, dtype=torch.float64)
    yield from keys.argsort(-1).to(device).split(batch_size, -1)


def _for_all(data: Tensor, lead: torch.Size, name: str) -> Tensor:
    """Expand data to lead with (members, N), as those of x do."""
    if data.shape[: len(lead)] == lead:
        return data
    if len(lead) > 1 and data.shape[:1] == lead[1:]:
        return data.expand(lead[0], *data.shape)
    wanted = f"{tuple(lead)}, as x does" + (f", or {tuple(lead[1:])}" if len(lead) > 1 else "")
    raise ValueError(f"{name} has the shape {tuple(data.shape)} and is to lead with {wanted}")


def _relative(weight: Tensor) -> Tensor:
    """Weights (*members, N) in units of their average over all data.

    In units of a batch's average a row would count more in the company of light ones.
    """
    if not bool(((weight >= 0).all(-1) & (weight.sum(-1) > 0)).all()):
        raise ValueError("weights are numbers from 0, and not all of them 0")
    return weight / weight.mean(-1, keepdim=True)


def _check(lead: torch.Size, epochs: int, batch_size: int, cooldown: float) -> None:
    if lead[-1] < 1:
        raise ValueError("there are no data to train on")
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size are at least 1, not {epochs} and {batch_size}")
    if not 0 <= cooldown <= 1:
        raise ValueError(f"cooldown is a share of the steps, from 0 to 1, not {cooldown}")


def _check_size(data_size: int | Tensor, rows: int) -> None:
    # The size of a batch in place of that of the data is an easy mistake.
    if bool((torch.as_tensor(data_size) != rows).any()):
        warn_user(
            f"data_size of the ELBO is {data_size}, and there are {rows} data, so that the "
            "divergence does not count as it should; to weigh it, ELBO has kl_temperature",
        )
