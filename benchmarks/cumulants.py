"""Third cumulants: time and memory over those of exact propagation."""

import time
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

import covprop as cp
from benchmarks import memory
from benchmarks.figures import Figure, outcome
from benchmarks.timing import interleave, shortest

SIZES, SMOKE_SIZES = (100, 400, 1600), (10, 20)
DEPTHS, SMOKE_DEPTHS = (2, 4, 8), (2,)
ROUNDS = 3
METHODS = {"exact": cp.Exact(), "cumulants": cp.Cumulants()}
WARM_UP = 10
"""Units of a network that loads libraries and tables."""


def network(units: int, depth: int) -> nn.Sequential:
    """As many ReLU layers of He's weights, and a linear one."""
    linear = [nn.Linear(units, units) for _ in range(depth + 1)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    hidden = chain.from_iterable((layer, nn.ReLU()) for layer in linear[:-1])
    return nn.Sequential(*hidden, linear[-1]).requires_grad_(requires_grad=False)


def example(units: int, depth: int) -> tuple[nn.Sequential, cp.Gaussian]:
    """A network in float32 and standard normal noise around a random mean."""
    torch.manual_seed(0)
    return network(units, depth), cp.Gaussian.isotropic(torch.randn(units), stddev=1.0)


def run(smoke: bool) -> dict[str, Any]:
    """Seconds of the CPU and peak memory over those of `Exact`, ReLU networks in float32."""
    rows, figures = [], []
    for units in SMOKE_SIZES if smoke else SIZES:
        for depth in SMOKE_DEPTHS if smoke else DEPTHS:
            row = measure(units, depth, 1 if smoke else ROUNDS)
            rows.append(row)
            label = f"{units} units, {depth} layers"
            figures.append(Figure(f"{label}: time / that of Exact", row["time"]))
            figures.append(Figure(f"{label}: peak memory / that of Exact", row["memory"]))
            figures.append(Figure(f"{label}: peak memory / planned", row["over plan"]))
    return outcome(figures, rows=rows)


def measure(units: int, depth: int, rounds: int) -> dict[str, Any]:
    """Both methods in turns, then each in a process of its own."""
    model, x = example(units, depth)
    candidates = {name: partial(cp.propagate, model, x, method) for name, method in METHODS.items()}
    # Seconds of the CPU: runs of half a minute are never alone on a machine.
    times = interleave(candidates, rounds=rounds, clock=time.process_time)
    seconds = shortest(times)
    peaks = {name: memory.spawned(peak, name, units, depth) for name in METHODS}
    planned = cp.plan(model, x, METHODS["cumulants"]).peak_bytes
    return {
        "units": units, "layers": depth, "seconds": times, "bytes": peaks,
        "planned bytes": planned, "over plan": peaks["cumulants"] / planned,
        "time": seconds["cumulants"] / seconds["exact"],
        "memory": peaks["cumulants"] / peaks["exact"],
        "matrices": {name: found / (4 * units**2) for name, found in peaks.items()},
    }  # fmt: skip


@torch.no_grad()
def peak(name: str, units: int, depth: int) -> int:
    """In a fresh process: the most bytes that propagation adds to the network and its input."""
    method = METHODS[name]
    cp.propagate(*example(WARM_UP, 2), method)  # threads, tables and libraries are there
    model, x = example(units, depth)
    before = memory.resident()
    return max(1, memory.peak(lambda: cp.propagate(model, x, method)) - before)
