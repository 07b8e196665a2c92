"""Recurrent networks: time over that of sampling, and against the number of steps."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from benchmarks import naive
from benchmarks.figures import Figure, outcome
from benchmarks.scaling import exponent
from benchmarks.timing import interleave, shortest

STEPS, SMOKE_STEPS = (8, 16, 32, 64), (2, 4)
INPUTS, UNITS = 4, 12
SAMPLES, ROUNDS = 5_000, 7
METHODS = {"exact": cp.GaussianLayers(), "series": cp.Series(order=4)}


def lstm() -> nn.LSTM:
    """12 units in either direction, float64."""
    layer = nn.LSTM(INPUTS, UNITS, batch_first=True, bidirectional=True).double()
    return layer.requires_grad_(requires_grad=False)


def run(smoke: bool) -> dict[str, Any]:
    """Seconds of the CPU at each number of steps, and the exponent; 5,000 samples at the first."""
    steps, layer = SMOKE_STEPS if smoke else STEPS, lstm()
    candidates: dict[str, Callable[[], object]] = {}
    for count in steps:
        mean = torch.randn(count, INPUTS, dtype=torch.float64)
        matrix = 0.1 * torch.eye(mean.numel(), dtype=torch.float64)
        x = cp.Gaussian(mean[None], matrix[None])
        if count == steps[0]:
            candidates["monte carlo"] = partial(
                naive.monte_carlo, partial(_flat, layer), mean, matrix, SAMPLES
            )
        for name, method in METHODS.items():
            candidates[f"{name}, {count} steps"] = partial(cp.propagate, layer, x, method)
            plan = partial(cp.plan, layer, x, method)
            candidates[f"plan of {name}, {count} steps"] = plan
    times = interleave(candidates, 1 if smoke else ROUNDS, clock=time.process_time)
    best = shortest(times)
    figures = []
    for name in METHODS:
        curve = [best[f"{name}, {count} steps"] for count in steps]
        ratio = curve[0] / best["monte carlo"]
        target = 3.0 if name == "exact" else None
        figures.append(
            Figure(f"{name}: LSTM, {steps[0]} steps / {SAMPLES:,} samples", ratio, at_most=target)
        )
        power = exponent(list(steps), curve)[0]
        figures.append(Figure(f"{name}: exponent in the number of steps", power, at_most=1.3))
        planned = best[f"plan of {name}, {steps[-1]} steps"] / curve[-1]
        figures.append(Figure(f"{name}: plan / propagation, {steps[-1]} steps", planned))
    return outcome(figures, steps=list(steps), units=UNITS, shortest=best, seconds=times)


def _flat(layer: nn.LSTM, x: Tensor) -> Tensor:
    """Outputs of a batch of sequences as vectors."""
    output: Tensor = layer(x)[0]
    return output.flatten(1)
