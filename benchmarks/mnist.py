"""The paper's MNIST network in float32: memory, sampling, and the products nobody can avoid."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from benchmarks import inputs, memory, models, naive
from benchmarks.figures import Figure, outcome
from benchmarks.timing import interleave, shortest

ADDRESS_SPACE = 12 * 2**30
GIGABYTE = 1e9
IMAGES = 64
"""Rows of a covariance that the baseline of matrix products convolves at once."""
SEED = 0


def run(smoke: bool) -> dict[str, Any]:
    """Each part in a process of its own, in 12 GB of address space; a failure is a result."""
    failure, figures, peak = None, [], None
    try:
        peak = memory.spawned(measure_memory, smoke, limit=ADDRESS_SPACE)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        figures.append(Figure("peak memory, GB", peak["bytes"] / GIGABYTE, at_most=3))
        figures.append(Figure("Exact: largest |stddev / Monte Carlo's - 1|", peak["apart"]))
    times = memory.spawned(measure_times, smoke, failure is None, limit=ADDRESS_SPACE)
    best = shortest(times)
    if failure is None:
        ours, products = best["exact"], best["products"]
        sampling = best["monte carlo"]
        figures += [
            Figure("Exact: monte carlo / ours", sampling / ours, at_least=3),
            Figure("Exact: ours / matrix products", ours / products, at_most=3),
            Figure("Exact: ours / matrix products, by symmetry", ours / best["half products"]),
            Figure("Series(4): monte carlo / ours", sampling / best["series"], at_least=4),
        ]
    return outcome(
        figures, failure=failure, memory=peak, counted=products_of.__doc__,
        samples=_samples(smoke), dtype="torch.float32", shortest=best, seconds=times,
    )  # fmt: skip


def _network(smoke: bool) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(SEED)
    side = 8 if smoke else 28
    model = models.mnist(8, (3, 4), 20) if smoke else models.mnist()
    return model.float(), *inputs.paper(1, side, side, dtype=torch.float32)


def _samples(smoke: bool) -> int:
    return 2_000 if smoke else naive.SAMPLES


@torch.no_grad()
def measure_memory(smoke: bool) -> dict[str, float]:
    """The peak of resident memory above that after importing torch and covprop; is it right?"""
    before = memory.resident()
    model, mean, covariance = _network(smoke)
    x = cp.Gaussian(mean, covariance, validate_args=False)
    results = []
    peak = memory.peak(lambda: results.append(cp.propagate(model, x, cp.GaussianLayers())))
    _, sampled = naive.monte_carlo(model, mean, covariance, _samples(smoke))
    apart = naive.disagreement(results[0].stddev, sampled)
    return {"bytes": peak - before, "imports": before, "apart": apart}


@torch.no_grad()
def measure_times(smoke: bool, ours: bool) -> dict[str, list[float]]:
    """Seconds of sampling, of the products, and (unless it failed before) of covprop."""
    model, mean, covariance = _network(smoke)
    x = cp.Gaussian(mean, covariance, validate_args=False)
    candidates: dict[str, Callable[[], object]] = {
        "monte carlo": partial(naive.monte_carlo, model, mean, covariance, _samples(smoke)),
        "products": partial(products_of, model, mean.shape),
        "half products": partial(products_of, model, mean.shape, columns=0.5),
    }
    if ours:
        candidates["exact"] = partial(cp.propagate, model, x, cp.GaussianLayers())
        candidates["series"] = partial(cp.propagate, model, x, cp.Series(order=4))
    return interleave(candidates, rounds=2 if smoke else 3, budget=120)


def products_of(model: nn.Sequential, shape: tuple[int, ...], columns: float = 1.0) -> None:
    """A S A^T of every linear layer A (m x n): A on n rows, then on m columns (or half of them).

    Plain F.linear and F.conv2d without bias, in batches of 64 rows (the fastest) that are ready in
    memory, in the network's dtype; no activations, no transposes, nothing stored. Half of the
    columns is what would be left if the symmetry of the result were used fully.
    """
    for layer in model:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            inputs_of_layer = torch.Size(shape).numel()
            rows = torch.randn(IMAGES, *shape, dtype=layer.weight.dtype)
            shape = tuple(_apply(layer, rows[:1]).shape[1:])
            outputs = torch.Size(shape).numel()
            remaining = inputs_of_layer + round(columns * outputs)
            while remaining > 0:
                _apply(layer, rows[:remaining])
                remaining -= IMAGES
        elif isinstance(layer, nn.Flatten):
            shape = (torch.Size(shape).numel(),)


def _apply(layer: nn.Linear | nn.Conv2d, rows: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(rows, layer.weight)
    return F.conv2d(rows, layer.weight, None, layer.stride, layer.padding)
