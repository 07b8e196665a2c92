"""Accuracy per second: the sampling that would be as close to the truth as covprop is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from benchmarks import inputs, models, naive
from benchmarks.figures import Figure, outcome
from benchmarks.layers import METHODS
from benchmarks.timing import interleave, shortest

NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int, int]] = {
    "FC-4": (partial(models.fully_connected, 4), (100,), 20, 500_000),
    "CNN-4": (partial(models.convolutional, 4), (1, 20, 20), 4, 150_000),
    "CNN-8": (partial(models.convolutional, 8), (1, 20, 20), 2, 150_000),
}
"""How to make one, the shape of its input, how many random ones, samples for the truth of each."""

VARIANCES = {"variance 1": 1.0, "variance 0.01": 0.01}
"""The largest variance of an input: the paper's, and a small one."""
TIMED = 5_000
"""Samples for the time of one sample."""
GRADIENTS = 1_000


def run(smoke: bool) -> dict[str, Any]:
    """Every network at every noise; root mean square errors over random networks and inputs.

    The truth is a large Monte Carlo run (its own error is taken into account); the time of a sample
    is that of plain sampling in float64, the network's dtype.
    """
    figures, rows = [], []
    networks = ["FC-4"] if smoke else list(NETWORKS)
    for network in networks:
        for noise, variance in VARIANCES.items():
            row = measure(network, variance, smoke)
            rows.append({"network": network, "noise": noise, **row})
            for name, result in row["methods"].items():
                label = f"{network}, {noise}, {name}: Monte Carlo of equal error"
                bound = "" if result["resolved"] else " (a lower bound)"
                figures.append(Figure(f"{label}, samples{bound}", result["samples"]))
                figures.append(Figure(f"{label}, time / ours{bound}", result["times our time"]))
    return outcome(figures, rows=rows)


def measure(network: str, variance: float, smoke: bool) -> dict[str, Any]:
    """One network at one noise."""
    make, shape, instances, samples = NETWORKS[network]
    samples = 20_000 if smoke else samples
    differences: dict[str, list[float]] = {name: [] for name in METHODS}
    truth_errors, excess = [], []
    for _ in range(2 if smoke else instances):
        model, (mean, covariance) = make(), inputs.paper(*shape, largest_variance=variance)
        x = cp.Gaussian(mean, covariance, validate_args=False)
        stddev, error, kurtosis = true_stddev(model.float(), mean, covariance, samples)
        model.double()
        for name, method in METHODS.items():
            differences[name].append(float(cp.propagate(model, x, method).stddev) / stddev - 1)
        excess.append((kurtosis - 1) / 4)
        truth_errors.append(error)
    candidates: dict[str, Callable[[], object]] = {
        name: partial(cp.propagate, model, x, method) for name, method in METHODS.items()
    }
    candidates["samples"] = partial(naive.monte_carlo, model, mean, covariance, TIMED)
    best = shortest(interleave(candidates, rounds=2 if smoke else 5))
    one_sample, noise = best["samples"] / TIMED, _mean_square(truth_errors)
    factor = sum(excess) / len(excess)
    return {
        "instances": len(excess),
        "samples of the truth": samples,
        "error of the truth": noise**0.5,
        "squared error x samples of Monte Carlo": factor,
        "seconds of a sample": one_sample,
        "methods": {
            name: _equivalent(values, noise, factor, one_sample, best[name])
            for name, values in differences.items()
        },
    }


def _equivalent(
    values: list[float], noise: float, factor: float, one_sample: float, ours: float
) -> dict[str, Any]:
    """The error without the truth's; where it drowns in that, a bound: "resolved" is False."""
    square = _mean_square(values)
    resolved = square > 2 * noise
    error = (square - noise if resolved else square + noise) ** 0.5
    samples = factor / error**2
    return {
        "relative error of the stddev": error, "resolved": resolved, "seconds": ours,
        "samples": samples, "seconds of so many samples": samples * one_sample,
        "times our time": samples * one_sample / ours,
    }  # fmt: skip


def true_stddev(
    model: nn.Sequential, mean: Tensor, covariance: Tensor, samples: int
) -> tuple[float, float, float]:
    """Standard deviation of a scalar output, its relative standard error, and the kurtosis.

    Sampled in float32 beside g (x - mean), g the mean gradient: that variance is known, and what
    the sampled one misses is taken off by regression (a control variate).
    """
    gradient = mean_gradient(model, mean, covariance)
    known = float(gradient.double() @ covariance @ gradient.double())
    centre = mean.float().flatten()

    def both(x: Tensor) -> Tensor:
        return torch.cat((model(x), (x.flatten(1) - centre) @ gradient[:, None]), 1)

    outputs = naive.sampled(both, mean.float(), covariance.float(), samples, naive.CHUNK).double()
    output, linear = (outputs - outputs.mean(0)).square().unbind(1)
    moments = torch.cov(torch.stack((output, linear)))
    slope = moments[0, 1] / moments[1, 1]
    variance = float(output.mean() - slope * (linear.mean() - known))
    rest = float((output - slope * linear).std()) / samples**0.5
    kurtosis = float(output.square().mean() / output.mean().square())
    return variance**0.5, rest / (2 * variance), kurtosis


def mean_gradient(model: nn.Sequential, mean: Tensor, covariance: Tensor) -> Tensor:
    """Of a scalar output, over a few samples of the input."""
    factor = torch.linalg.cholesky(covariance)
    draws = mean.flatten() + torch.randn(GRADIENTS, len(factor), dtype=mean.dtype) @ factor.mT
    with torch.enable_grad():
        x = draws.float().reshape(-1, *mean.shape).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    return gradient.flatten(1).mean(0)


def _mean_square(values: list[float]) -> float:
    return sum(value**2 for value in values) / len(values)
