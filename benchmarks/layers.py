"""One activation layer: against the naive series, a copy of the matrix, and other activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from benchmarks import inputs, naive, reference
from benchmarks.figures import Figure, outcome
from benchmarks.timing import interleave, shortest

SIZE, SMOKE_SIZE, ROUNDS = 4000, 60, 7
PAIRS, EXTREME = 100_000, 1_000
FAR = 15.0
"""Standard deviations between a mean and zero at which float32 meets denormals."""

METHODS = {"series": cp.Series(order=4), "exact": cp.Exact()}
LAYERS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "relu, series": (torch.relu, METHODS["series"]),
    "relu, exact": (torch.relu, METHODS["exact"]),
    "gelu, exact": (F.gelu, METHODS["exact"]),
    "tanh, exact": (torch.tanh, METHODS["exact"]),
}


def moderate(smoke: bool) -> dict[str, Any]:
    """Correlations of about 0.07: a layer as it is met in networks."""
    facts = _measure(inputs.MODERATE, smoke)
    times = facts["shortest"]
    base, copy, relu = times["naive"], times["copy"], times["relu, exact"]
    figures = [
        Figure("ReLU, Series(4): naive / ours", base / times["relu, series"], at_least=60),
        Figure("ReLU, Series(4): ours / copy", times["relu, series"] / copy, at_most=2.5),
        Figure("ReLU, Exact: naive / ours", base / relu, at_least=30),
        Figure("ReLU, Exact: largest error / sd^2", facts["error"]["exact"], at_most=1e-9),
        Figure("ReLU, Exact: ours / copy", relu / copy, at_most=5),
        Figure("GELU / ReLU, Exact", times["gelu, exact"] / relu, at_most=2),
        Figure("tanh / ReLU, Exact", times["tanh, exact"] / relu, at_most=2),
    ]
    return outcome(figures, **facts)


def correlated(smoke: bool) -> dict[str, Any]:
    """Correlations of about 0.3, many near one: exact kernels have more to do."""
    facts = _measure(inputs.STRONG, smoke)
    times = facts["shortest"]
    base, relu = times["naive"], times["relu, exact"]
    figures = [
        Figure("ReLU, Series(4): naive / ours", base / times["relu, series"]),
        Figure("ReLU, Exact: naive / ours", base / relu, at_least=8),
        Figure("ReLU, Exact: largest error / sd^2", facts["error"]["exact"]),
        Figure("ReLU, Series(4): largest error / sd^2", facts["error"]["series"]),
        Figure("GELU / ReLU, Exact", times["gelu, exact"] / relu),
        Figure("tanh / ReLU, Exact", times["tanh, exact"] / relu),
    ]
    return outcome(figures, **facts)


def _measure(rank: int, smoke: bool) -> dict[str, Any]:
    size = SMOKE_SIZE if smoke else SIZE
    mean, covariance = inputs.layer(size, rank)
    x, target = cp.Gaussian(mean, covariance, validate_args=False), torch.empty_like(covariance)
    candidates: dict[str, Callable[[], object]] = {
        "naive": partial(naive.relu_series, mean, covariance),
        "copy": covariance.clone,
        "copy into memory that is there": partial(target.copy_, covariance),
    }
    for name, (function, method) in LAYERS.items():
        candidates[name] = partial(cp.propagate, function, x, method)
    times = interleave(candidates, rounds=2 if smoke else ROUNDS)
    errors = _errors(x, pairs=1000 if smoke else PAIRS, extreme=50 if smoke else EXTREME)
    return {
        "n": size, "rank": rank, "dtype": str(x.dtype), **errors,
        "shortest": shortest(times), "seconds": times,
    }  # fmt: skip


def _errors(x: cp.Gaussian, pairs: int, extreme: int) -> dict[str, Any]:
    """The largest error of each method, and how well the reference agrees with a finer one."""
    chosen = reference.random_pairs(x.covariance_matrix, pairs, extreme)
    expected = reference.relu_covariance(x.mean, x.covariance_matrix, chosen)
    finer = reference.relu_covariance(x.mean, x.covariance_matrix, chosen[:, -extreme:], panels=150)
    i, j = chosen
    scale = x.stddev[i] * x.stddev[j]
    error = {}
    for name, method in METHODS.items():
        found = cp.propagate(torch.relu, x, method).covariance_matrix[i, j] / scale
        error[name] = float((found - expected).abs().max())
    return {
        "error": error,
        "error of the reference": float((finer - expected[-extreme:]).abs().max()),
        "pairs": chosen.shape[1],
        "largest correlation": float((x.covariance_matrix[i, j] / scale).abs().max()),
    }


def far_means(smoke: bool) -> dict[str, Any]:
    """float32, ReLU: means 15 standard deviations away from zero against means near it."""
    mean, covariance = inputs.layer(SMOKE_SIZE if smoke else SIZE, inputs.MODERATE, torch.float32)
    stddev = covariance.diagonal().sqrt()
    signs = 2.0 * torch.randint(2, stddev.shape) - 1
    places = {
        "near 0": mean,
        f"+{FAR:g} sd": FAR * stddev,
        f"-{FAR:g} sd": -FAR * stddev,
        f"{FAR:g} sd, mixed signs": FAR * signs * stddev,
    }
    near, *far = places
    candidates: dict[str, Callable[[], object]] = {}
    for place, centre in places.items():
        x = cp.Gaussian(centre, covariance, validate_args=False)
        for name, method in METHODS.items():
            candidates[f"{name}, {place}"] = partial(cp.propagate, torch.relu, x, method)
    times = interleave(candidates, rounds=2 if smoke else ROUNDS)
    best = shortest(times)
    figures = [
        Figure(
            f"{name}, {place}: time / near 0",
            best[f"{name}, {place}"] / best[f"{name}, {near}"],
            at_most=1.3,
        )
        for name in METHODS
        for place in far
    ]
    return outcome(figures, n=len(mean), dtype="torch.float32", shortest=best, seconds=times)
