"""Time and memory of activation layers against the number of units n."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import covprop as cp
from benchmarks import inputs, memory
from benchmarks.figures import Figure, outcome
from benchmarks.layers import LAYERS
from benchmarks.timing import interleave, shortest

SIZES, SMOKE_SIZES = (500, 1000, 2000, 4000, 8000), (50, 100, 200)
ROUNDS = 5
MEMORY_SIZE, SMOKE_MEMORY_SIZE = 4000, 500


def exponent(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """p and c of the fit seconds = c n^p, by least squares on logarithms."""
    power, offset = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(power), float(np.exp(offset))


def cost(smoke: bool) -> dict[str, Any]:
    """Seconds at each n, float64, all sizes taking turns, and the exponent fitted to them."""
    sizes = list(SMOKE_SIZES if smoke else SIZES)
    candidates: dict[tuple[str, int], Callable[[], object]] = {}
    for size in sizes:
        mean, covariance = inputs.layer(size, inputs.MODERATE)
        x = cp.Gaussian(mean, covariance, validate_args=False)
        candidates["copy", size] = covariance.clone
        for name, (function, method) in LAYERS.items():
            candidates[name, size] = partial(cp.propagate, function, x, method)
    named = {f"{name}, n = {size}": function for (name, size), function in candidates.items()}
    times = interleave(named, rounds=2 if smoke else ROUNDS)
    best = shortest(times)
    curves = {name: [best[f"{name}, n = {size}"] for size in sizes] for name in ("copy", *LAYERS)}
    fits = {name: exponent(sizes, curve) for name, curve in curves.items()}
    figures = [Figure(f"{name}: exponent", fits[name][0], at_most=2.1) for name in LAYERS]
    figures.append(Figure("copy: exponent", fits["copy"][0]))
    return outcome(figures, n=sizes, curves=curves, fits=fits, seconds=times)


def matrices(smoke: bool) -> dict[str, Any]:
    """Peak memory of one layer in n x n matrices of float64, the input's own included."""
    size = SMOKE_MEMORY_SIZE if smoke else MEMORY_SIZE
    names = ["relu, exact"] if smoke else list(LAYERS)
    peaks = {name: memory.spawned(layer_peak, name, size) for name in names}
    figures = [
        Figure(f"{name}: peak in matrices, with the input", peaks[name], at_most=2.2)
        for name in names
    ]
    return outcome(figures, n=size)


@torch.no_grad()
def layer_peak(name: str, size: int) -> float:
    """In a fresh process: what one layer adds to memory, and its input, in matrices."""
    torch.manual_seed(0)
    function, method = LAYERS[name]
    small = cp.Gaussian(*inputs.layer(100, 10), validate_args=False)
    cp.propagate(function, small, method)  # threads, tables and libraries are there from here on
    x = cp.Gaussian(*inputs.layer(size, inputs.MODERATE), validate_args=False)
    before = memory.resident()
    peak = memory.peak(lambda: cp.propagate(function, x, method))
    matrix = 8 * size**2
    return 1 + (peak - before) / matrix
