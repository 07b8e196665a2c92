"""Whole networks of the paper, float64: against the naive series, sampling, and a loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import covprop as cp
from benchmarks import inputs, models, naive
from benchmarks.figures import Figure, outcome
from benchmarks.layers import METHODS
from benchmarks.timing import interleave, shortest

BATCH, SMOKE_BATCH = 200, 4
SMOKE_SAMPLES = 2_000


def cnn8(smoke: bool) -> dict[str, Any]:
    """CNN-8 end to end, from one Gaussian image to a scalar; 4,000 units in each layer."""
    model = models.convolutional(4, side=8, channels=3) if smoke else models.convolutional(8)
    mean, covariance = inputs.paper(1, 8, 8) if smoke else inputs.paper(1, 20, 20)
    return _against_baselines(
        model,
        mean,
        covariance,
        smoke,
        rounds=3,
        targets={("series", "monte carlo"): 30, ("exact", "monte carlo"): 20},
    )


def fc4(smoke: bool) -> dict[str, Any]:
    """FC-4 end to end, one Gaussian: milliseconds, in which every call into torch counts."""
    mean, covariance = inputs.paper(100)
    rounds = 3 if smoke else 60
    targets = {("series", "naive"): 2.0, ("exact", "naive"): 1.0}
    return _against_baselines(models.fully_connected(4), mean, covariance, smoke, rounds, targets)


def _against_baselines(
    model: torch.nn.Sequential,
    mean: torch.Tensor,
    covariance: torch.Tensor,
    smoke: bool,
    rounds: int,
    targets: dict[tuple[str, str], float],
) -> dict[str, Any]:
    x = cp.Gaussian(mean, covariance, validate_args=False)
    samples = SMOKE_SAMPLES if smoke else naive.SAMPLES
    candidates: dict[str, Callable[[], object]] = {
        "naive": partial(naive.network, model, mean, covariance),
        "monte carlo": partial(naive.monte_carlo, model, mean, covariance, samples),
    }
    for name, method in METHODS.items():
        candidates[name] = partial(cp.propagate, model, x, method)
    times = interleave(candidates, rounds)
    best = shortest(times)
    figures = []
    for name in METHODS:
        for base in ("naive", "monte carlo"):
            ratio, target = best[base] / best[name], targets.get((name, base))
            figures.append(Figure(f"{name}: {base} / ours", ratio, at_least=target))
    _, sampled = naive.monte_carlo(model, mean, covariance, samples)
    for name, method in METHODS.items():
        apart = naive.disagreement(cp.propagate(model, x, method).stddev, sampled)
        figures.append(Figure(f"{name}: |stddev / Monte Carlo's - 1|", apart))
    facts = {"samples": samples, "dtype": str(mean.dtype)}
    return outcome(figures, **facts, shortest=best, seconds=times)


def batch(smoke: bool) -> dict[str, Any]:
    """200 Gaussians through FC-4 in one batch, against a loop over them."""
    count = SMOKE_BATCH if smoke else BATCH
    model = models.fully_connected(4)
    pairs = [inputs.paper(100) for _ in range(count)]
    means, covariances = (torch.stack(part) for part in zip(*pairs, strict=True))
    x = cp.Gaussian(means, covariances, validate_args=False)
    singles = [x[i] for i in range(count)]
    candidates: dict[str, Callable[[], object]] = {}
    for name, method in METHODS.items():
        candidates[f"{name}, loop"] = partial(_loop, model, singles, method)
        candidates[f"{name}, batch"] = partial(cp.propagate, model, x, method)
    times = interleave(candidates, rounds=2 if smoke else 7)
    best = shortest(times)
    figures = [
        Figure(f"{name}: loop / batch", best[f"{name}, loop"] / best[f"{name}, batch"], at_least=10)
        for name in METHODS
    ]
    return outcome(figures, gaussians=count, shortest=best, seconds=times)


def _loop(model: torch.nn.Module, singles: list[cp.Gaussian], method: Any) -> None:
    for x in singles:
        cp.propagate(model, x, method)
