"""One training loop, for every model, likelihood, method and number of members."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from tqdm import tqdm

from covprop.bayes.elbo import ELBO, Terms
from covprop.bayes.evaluation import lead_of, log_predictive, take
from covprop.bayes.likelihoods import Likelihood
from covprop.bayes.prediction import EXACT
from covprop.bayes.sampling import LocalReparametrisation, batch_dims
from covprop.errors import MomentOverflow, TrainingDiverged, warn_user
from covprop.gaussian import Gaussian
from covprop.methods import Method

FUSED = ("cpu", "cuda")
"""Devices on which torch updates all parameters in one call."""


@final
@dataclass
class History:
    """What happened in every epoch: one entry each, a tensor () or (members,)."""

    elbo: list[Tensor] = field(default_factory=list)
    """The bound for one datum in nats, an average over the steps of the epoch."""
    expected_log_prob: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    """Of all weights, not of one datum."""
    validation: list[Tensor] = field(default_factory=list)
    """The log predictive density of the validation data, for one datum; empty without them."""
    best_epoch: Tensor | None = None
    """() or (members,): the epoch, from 0, whose parameters the model has; None: the last one."""

    @property
    def epochs(self) -> int:
        """How many there were."""
        return len(self.elbo)

    def record(self) -> dict[str, list[float]]:
        """Plain numbers for a log, averaged over members."""
        names = ("elbo", "expected_log_prob", "kl", "validation")
        return {name: [float(one.mean()) for one in getattr(self, name)] for name in names}


Held: TypeAlias = tuple[Tensor | Gaussian, Tensor] | tuple[Tensor | Gaussian, Tensor, Tensor]
"""Data to validate with: inputs, targets, and how much each counts if they are not equal."""
Callback: TypeAlias = Callable[[int, History], object]
"""Is given the epoch, from 0, and the history up to it; ends the training if it returns True."""


def fit(
    model: nn.Module,
    elbo: ELBO,
    x: Tensor | Gaussian,
    y: Tensor,
    *,
    method: Method | LocalReparametrisation = EXACT,
    epochs: int,
    batch_size: int,
    learning_rate: float | Tensor,
    weight_decay: float = 0.0,
    cooldown: float = 0.0,
    weight: Tensor | None = None,
    generator: torch.Generator | None = None,
    validation: Held | None = None,
    patience: int | None = None,
    progress: bool = False,
    callback: Callback | None = None,
) -> History:
    """Train a model, and what its likelihood has to learn, by AdamW on the ELBO.

    x: data (N, ...), or a Gaussian of them where inputs are uncertain; y: targets (N, ...); weight
    (N,): how much each datum counts, next to the others. Of a model with members all of these lead
    with them, each member has its own data in an order of its own, and none sees another; y and
    weight without members are the same for all.

    learning_rate: one, or one for each member (members,), to compare them in one computation.
    cooldown: the share of the steps, at the end, in which it falls in a straight line to zero:
    the last epoch is then no longer moved about by single batches. generator: where the order of
    the data comes from (torch's global one by default); draws have the method's.

    validation: other data (x, y) or (x, y, weight), whose log predictive density is noted after
    every epoch. patience: end when that has not improved for so many epochs, and restore the best
    one, each member its own; without it, the last epoch is kept.
    """
    dims = batch_dims(model, x)
    lead = lead_of(x, dims)
    _check(lead, epochs, batch_size, learning_rate, cooldown, patience, validation is not None)
    y = _for_all(y, lead, "y")
    if weight is None:
        _check_size(elbo.data_size, lead[-1])
    else:
        weight = _relative(_for_all(weight, lead, "weight"))
    parameters = [*model.parameters(), *elbo.likelihood.parameters()]
    rates = torch.as_tensor(learning_rate)
    rate = float(rates.max())
    optimiser = torch.optim.AdamW(
        parameters,
        lr=rate,
        weight_decay=weight_decay,
        fused=all(parameter.device.type in FUSED for parameter in parameters),
    )
    if rates.dim():
        _slow_down(optimiser, rates, lead)
    history = History()
    best = None if patience is None else _Best(model, elbo.likelihood, lead[:-1], patience)
    step, steps = 0, epochs * math.ceil(lead[-1] / batch_size)
    with tqdm(total=epochs, unit="epoch", disable=not progress) as bar:
        for epoch in range(epochs):
            sums = _Sums()
            for rows in _order(lead, batch_size, generator, y.device):
                now = (take(x, rows, dims), take(y, rows, dims))
                try:
                    log_prob = elbo.log_likelihood(model, *now, method)
                except MomentOverflow as error:
                    raise _diverged(epoch) from error
                if weight is not None:
                    log_prob = log_prob * take(weight, rows, dims)
                terms = elbo.combine(log_prob, elbo.divergence(model), step=step)
                optimiser.zero_grad()
                terms.loss.backward()
                for group in optimiser.param_groups:
                    group["lr"] = rate * _warmth(step, steps, cooldown)
                optimiser.step()
                sums.add(terms, rows.shape[-1])
                step += 1
            sums.finish(history)
            if validation is not None:
                found = _density(model, elbo.likelihood, validation, method)
                if bool(torch.isnan(found).any()):
                    raise _diverged(epoch)
                history.validation.append(found)
            bar.update()
            bar.set_postfix(elbo=f"{float(history.elbo[-1].mean()):.3g}", refresh=False)
            patient = best is None or best.see(epoch, history.validation[-1])
            if (callback is not None and callback(epoch, history) is True) or not patient:
                break
    if best is not None:
        history.best_epoch = best.restore()
    return history


def _warmth(step: int, steps: int, cooldown: float) -> float:
    """The share of the learning rate that a step takes: 1, then down to zero after the last."""
    return 1.0 if not cooldown else min(1.0, (steps - step) / (cooldown * steps))


def _slow_down(optimiser: torch.optim.Optimizer, rates: Tensor, lead: torch.Size) -> None:
    """Let members take the share of every step that is their rate's of the largest.

    A step of AdamW is proportional to the rate, and what it remembers does not depend on it.
    """
    parameters = [one for group in optimiser.param_groups for one in group["params"]]
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


def _density(
    model: nn.Module,
    likelihood: Likelihood,
    held: Held,
    method: Method | LocalReparametrisation,
) -> Tensor:
    """The average log predictive density of held-out data, of each member."""
    each = log_predictive(model, likelihood, held[0], held[1], method)
    if len(held) == 2:  # noqa: PLR2004
        return each.mean(-1)
    return (held[2] * each).sum(-1) / held[2].expand(each.shape).sum(-1)


def _diverged(epoch: int) -> TrainingDiverged:
    return TrainingDiverged(
        f"the ELBO is no longer a number in epoch {epoch + 1}; take a lower learning rate, or see "
        "that the data are standardised and have no nan"
    )


class _Sums:
    """Averages of the terms over an epoch, found without waiting for any of them."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: list[Tensor] = []

    def add(self, terms: Terms, rows: int) -> None:
        """The terms of a batch of so many rows."""
        now = [rows * part.detach() for part in (terms.elbo, terms.expected_log_prob, terms.kl)]
        self.sums = [a + b for a, b in zip(self.sums, now, strict=True)] if self.sums else now
        self.rows += rows

    def finish(self, history: History) -> None:
        """Note them; a loss that is no number ends the training."""
        elbo, expected, divergence = (part / self.rows for part in self.sums)
        if not bool(torch.isfinite(elbo).all()):
            raise _diverged(history.epochs)
        history.elbo.append(elbo)
        history.expected_log_prob.append(expected)
        history.kl.append(divergence)


class _Best:
    """The best parameters so far, of each member on its own."""

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, members: torch.Size, patience: int
    ) -> None:
        self.tensors = [*model.parameters(), *model.buffers(), *likelihood.parameters()]
        self.kept = [tensor.detach().clone() for tensor in self.tensors]
        self.score = torch.full(members, -math.inf, dtype=torch.float64)
        self.epoch = torch.zeros(members, dtype=torch.long)
        self.patience, self.members = patience, members

    @torch.no_grad()
    def see(self, epoch: int, score: Tensor) -> bool:
        """Keep what is better than before; False when every member has waited in vain."""
        score = score.to(self.score)
        # A member that would have ended, trained alone, has ended: the others change nothing.
        better = (score > self.score) & (epoch - self.epoch <= self.patience)
        self.score = torch.where(better, score, self.score)
        self.epoch = torch.where(better, epoch, self.epoch)
        for kept, tensor in zip(self.kept, self.tensors, strict=True):
            kept.copy_(torch.where(self._mask(better, tensor), tensor, kept))
        return bool((epoch - self.epoch < self.patience).any())

    @torch.no_grad()
    def restore(self) -> Tensor:
        """Put the best parameters back; the epochs they are from."""
        for kept, tensor in zip(self.kept, self.tensors, strict=True):
            tensor.copy_(kept)
        return self.epoch

    def _mask(self, better: Tensor, tensor: Tensor) -> Tensor:
        if not self.members:
            return better.to(tensor.device)
        if tensor.shape[:1] != self.members:  # shared by members: it goes with any of them
            return better.any().to(tensor.device)
        return better.to(tensor.device).reshape(-1, *[1] * (tensor.dim() - 1))


def _order(
    lead: torch.Size, batch_size: int, generator: torch.Generator | None, device: torch.device
) -> Iterator[Tensor]:
    """Rows of every batch of an epoch, (rows,) or (members, rows), in a random order."""
    where = device if generator is None else generator.device
    keys = torch.rand(lead, generator=generator, device=where, dtype=torch.float64)
    yield from keys.argsort(-1).to(device).split(batch_size, -1)


def _for_all(data: Tensor, lead: torch.Size, name: str) -> Tensor:
    """Data that lead with (members, N), as those of x do."""
    if data.shape[: len(lead)] == lead:
        return data
    if len(lead) > 1 and data.shape[:1] == lead[1:]:
        return data.expand(lead[0], *data.shape)
    wanted = f"{tuple(lead)}, as x does" + (f", or {tuple(lead[1:])}" if len(lead) > 1 else "")
    raise ValueError(f"{name} has the shape {tuple(data.shape)} and is to lead with {wanted}")


def _relative(weight: Tensor) -> Tensor:
    """Weights (*members, N) in units of their average over all data.

    That over a batch would make rows count more in the company of light ones.
    """
    if not bool(((weight >= 0).all(-1) & (weight.sum(-1) > 0)).all()):
        raise ValueError("weights are numbers from 0, and not all of them 0")
    return weight / weight.mean(-1, keepdim=True)


def _check_size(data_size: int | Tensor, rows: int) -> None:
    """The size of a batch in place of that of the data is an easy mistake."""
    if bool((torch.as_tensor(data_size) != rows).any()):
        warn_user(
            f"data_size of the ELBO is {data_size}, and there are {rows} data, so that the "
            "divergence does not count as it should; to weigh it, ELBO has kl_temperature",
        )


def _check(
    lead: torch.Size,
    epochs: int,
    batch_size: int,
    learning_rate: float | Tensor,
    cooldown: float,
    patience: int | None,
    validated: bool,
) -> None:
    if lead[-1] < 1:
        raise ValueError("there are no data to train on")
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size are at least 1, not {epochs} and {batch_size}")
    if not bool((torch.as_tensor(learning_rate) > 0).all()):
        raise ValueError(f"learning_rate is positive, not {learning_rate}")
    if not 0 <= cooldown <= 1:
        raise ValueError(f"cooldown is a share of the steps, from 0 to 1, not {cooldown}")
    if patience is not None and (patience < 1 or not validated):
        raise ValueError("patience is a number of epochs from 1, and needs validation data")
