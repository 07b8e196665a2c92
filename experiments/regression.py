"""Bayesian networks for regression: the ways of inference, their training and their scores.

Scores are in nats for each datum, in the units of the target. Of each epoch three are kept:

    at the mean     log p(t | E[f]), how the published code evaluates; for MCVI E[log p(t | f)] of
                    10 draws, as there
    by batches      the same as the average of averages over batches of ten, as there: the last,
                    smaller one counts as much as the others
    expected        E[log p(t | f)], the term of the ELBO

and of the last epoch the density log E[p(t | f)], which counts the variance of the outputs.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.bayes import LocalReparametrisation
from covprop.methods import Method
from experiments.randomness import seed_of, seeded
from experiments.uci import Members, Rows

EXACT, SERIES, WU, DIAGONAL = "exact", "series 4", "Wu", "diagonal"
MCVI, MCVI_100, MCVI_1000 = "MCVI 10", "MCVI 100", "MCVI 1000"
MODES: dict[str, Callable[[torch.Generator], Method | LocalReparametrisation]] = {
    EXACT: lambda _: cp.Exact(),
    SERIES: lambda _: cp.Series(order=4, exact_variance=False),  # as published
    WU: lambda _: cp.Wu2019(),
    DIAGONAL: lambda _: cp.AssumedDensity(),
    MCVI: lambda generator: LocalReparametrisation(10, generator),
    MCVI_100: lambda generator: LocalReparametrisation(100, generator),
    MCVI_1000: lambda generator: LocalReparametrisation(1000, generator),
}
PUBLISHED_DRAWS, PUBLISHED_BATCH = 10, 10
"""Of the published evaluation."""
DRAWS = 1000
"""For the density of a network that was trained with draws."""
LIKELIHOOD = bayes.HeteroskedasticGaussian()
LEVEL = 0.95
DIGITS = 4
ROWS = 1000
"""Of all members together, that are evaluated at a time."""
JUDGED, REPEATS = 100, 20
"""Rows, and times DRAWS, for the error of a variance."""

Lift: TypeAlias = Callable[[Tensor], Tensor | cp.Gaussian]
"""What the network is told of an input."""


@final
@dataclass(frozen=True)
class Recipe:
    """How a network is made and trained."""

    hidden: tuple[int, ...]
    epochs: int
    batch: int = 10
    decay: float = 1e-3
    cooldown: float = 0.0
    kl_temperature: float = 1.0
    prior: bayes.Prior = bayes.EmpiricalBayes()  # noqa: RUF009 - it is frozen
    at_prior: bool = False
    """Whether to begin with draws of Xavier's prior and its deviations, biases at a tenth."""

    def network(self, features: int, members: int) -> nn.Sequential:
        """Bayesian layers with ReLU between."""
        widths = (features, *self.hidden, LIKELIHOOD.outputs(1))
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layer = bayes.BayesLinear(inputs, outputs, members=members, prior=self.prior)
            layers += [layer, nn.ReLU()]
        if self.at_prior:
            _start_at_prior(layers)
        return nn.Sequential(*layers[:-1])


@torch.no_grad()
def _start_at_prior(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        if isinstance(layer, bayes.BayesLinear):
            assert layer.bias_mean is not None
            assert layer.bias_log_stddev is not None
            stddev = math.sqrt(2 / (layer.fan_in + layer.fan_out))  # Xavier's
            for mean, log_stddev, width in (
                (layer.weight_mean, layer.weight_log_stddev, stddev),
                (layer.bias_mean, layer.bias_log_stddev, stddev / 10),
            ):
                mean.normal_(0, width)
                log_stddev.fill_(math.log(width))


@final
class Trained(NamedTuple):
    """Networks, how good they are, and how long it took."""

    model: nn.Module
    scores: dict[str, Tensor]
    """(epochs, members) of those of epochs, (members,) of those at the end."""
    seconds: float
    step: float
    """Milliseconds."""


def known(x: Tensor) -> Tensor:
    """An input without noise."""
    return x


def train(
    data: Members,
    recipe: Recipe,
    mode: str,
    rate: float | Tensor,
    seed: tuple[object, ...],
    lift: Lift = known,
) -> Trained:
    """All members together; scores of the test rows by member, epoch by epoch and at the end."""
    order, drawing = (torch.Generator().manual_seed(seed_of(part, *seed)) for part in ("o", "d"))
    method = MODES[mode](drawing)
    members, rows, features = data.train.x.shape
    with seeded("weights", *seed):
        model = recipe.network(features, members)
    elbo = bayes.ELBO(LIKELIHOOD, data_size=rows, kl_temperature=recipe.kl_temperature)
    epochs: list[dict[str, Tensor]] = []
    started = time.perf_counter()
    evaluating = 0.0

    def note(*_: object) -> None:
        nonlocal evaluating
        now = time.perf_counter()
        epochs.append(epoch_scores(model, data.test, method, data.scale, lift))
        evaluating += time.perf_counter() - now

    with torch.enable_grad():  # an experiment is run without
        bayes.fit(
            model, elbo, lift(data.train.x), data.train.y, method=method, epochs=recipe.epochs,
            batch_size=recipe.batch, learning_rate=rate, weight_decay=recipe.decay,
            cooldown=recipe.cooldown, generator=order, callback=note,
        )  # fmt: skip
    seconds = time.perf_counter() - started - evaluating
    steps = recipe.epochs * -(-rows // recipe.batch)
    scores = {
        **{name: torch.stack([each[name] for each in epochs]) for name in epochs[0]},
        **final_scores(model, data.test, method, data.scale, lift),
    }  # fmt: skip
    return Trained(model, scores, round(seconds, 1), round(1e3 * seconds / steps, 3))


@torch.no_grad()
def epoch_scores(
    model: nn.Module,
    rows: Rows,
    method: Method | LocalReparametrisation,
    scale: Tensor,
    lift: Lift = known,
) -> dict[str, Tensor]:
    """Those of an epoch, (members,) each."""
    if isinstance(method, LocalReparametrisation):
        values = bayes.draws(model, lift(rows.x), PUBLISHED_DRAWS, method.generator)
        at_mean = expected = LIKELIHOOD.log_prob(values, rows.y).mean(0)
    else:
        output = bayes.predict(model, lift(rows.x), method)
        at_mean = LIKELIHOOD.log_prob(output.mean, rows.y)
        expected = LIKELIHOOD.expected_log_prob(output, rows.y)
    by_batches = [batch.mean(-1) for batch in at_mean.split(PUBLISHED_BATCH, -1)]
    averages = {
        "at the mean": at_mean.mean(-1),
        "by batches": torch.stack(by_batches).mean(0),
        "expected": expected.mean(-1),
    }
    return {name: average - scale.log() for name, average in averages.items()}


@torch.no_grad()
def final_scores(
    model: nn.Module,
    rows: Rows,
    method: Method | LocalReparametrisation,
    scale: Tensor,
    lift: Lift = known,
    draws: int = DRAWS,
) -> dict[str, Tensor]:
    """Of the trained networks: density, error, and targets within 95 % intervals, (members,)."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    step = max(1, ROWS // len(rows.x))
    for start in range(0, rows.y.shape[-1], step):
        x, y = (part[:, start : start + step] for part in rows)
        if isinstance(method, LocalReparametrisation):
            values = bayes.draws(model, lift(x), draws, method.generator)
            density = LIKELIHOOD.log_predictive_draws(values, y)
            below = LIKELIHOOD.cumulative_draws(values, y)[..., 0]
            parts.append((density, below, (values[..., 0].mean(0) - y).square()))
        else:
            output = bayes.predict(model, lift(x), method)
            density, below = (
                LIKELIHOOD.log_predictive(output, y), LIKELIHOOD.cumulative(output, y)[..., 0]
            )  # fmt: skip
            parts.append((density, below, (output.mean[..., 0] - y).square()))
    density, below, squares = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return {
        "density": density.mean(-1) - scale.log(),
        "rmse": squares.mean(-1).sqrt() * scale,
        "coverage": bayes.metrics.coverage(below, LEVEL),
    }


def search(
    data: Members,
    recipe: Recipe,
    mode: str,
    rates: Iterable[float],
    seed: tuple[object, ...],
    score: Callable[[dict[str, Tensor]], Tensor],
    lift: Lift = known,
) -> dict[str, float]:
    """The average score of validation rows at every rate, in one computation."""
    tried = list(rates)
    members = data.repeated(len(tried))
    each = torch.tensor(tried).repeat(len(data.scale))
    found = score(train(members, recipe, mode, each, (*seed, "search"), lift).scores)
    averages = found.reshape(-1, len(tried)).mean(0)
    return {
        f"{rate:g}": round(float(one), DIGITS) for rate, one in zip(tried, averages, strict=True)
    }


@torch.no_grad()
def variance_errors(
    model: nn.Module,
    rows: Rows,
    modes: Iterable[str],
    generator: torch.Generator,
    lift: Lift = known,
) -> dict[str, float]:
    """How far the variance of the mean output is off, relative to that of draws: root mean square.

    Of the same trained networks and rows, so that nothing but the propagation differs. `draws` is
    the error of the draws themselves.
    """
    some = max(1, JUDGED // len(rows.x))
    x = lift(rows.x[:, :some])
    values = torch.cat([bayes.draws(model, x, DRAWS, generator)[..., 0] for _ in range(REPEATS)])
    truth = values.var(0)
    fourth = (values - values.mean(0)).pow(4).mean(0)
    own = ((fourth - truth.square()) / len(values)).sqrt() / truth
    errors = {"draws": own.square().mean().sqrt()}
    for mode in modes:
        found = bayes.predict(model, x, MODES[mode](generator)).variance[..., 0]
        errors[mode] = (found / truth - 1).square().mean().sqrt()
    return {name: round(float(error), DIGITS + 1) for name, error in errors.items()}


def grouped(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by set and what was varied, then by mode."""
    groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, result in record["results"].items():
        name, varied, mode = key.split("/")
        groups[name, varied][mode] = result
    return groups


def best(scores: Tensor) -> Tensor:
    """The largest of all epochs (epochs, members), of each member: selection by what is scored."""
    return scores.max(0).values


def spread(values: Sequence[float], error: bool = True) -> str:
    """Mean ± standard error, or the standard deviation as published, over splits."""
    width = standard_error(values) if error else np.std(values)
    return f"{np.mean(values):.2f} ± {width:.2f}"


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the average; the variance is the unbiased one, which matters for five splits."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def rounded(values: Tensor) -> list[float]:
    """Numbers for the record."""
    return [round(float(value), DIGITS) for value in values.flatten()]


def noisy(stddev: float) -> Lift:
    """Inputs of which a noise of this deviation is known; none if it is zero."""
    return partial(cp.Gaussian.isotropic, stddev=stddev, batch_dims=2) if stddev else known
