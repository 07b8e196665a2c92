"""Training of Bayesian networks: a step without sampling, and many networks at once.

The network of the paper's Table 3 for the Boston data: 13 features, 50 hidden units, a mean and a
log-variance; batches of 10. And the same with two hidden layers, where covariances are carried.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from benchmarks.figures import Figure, outcome
from benchmarks.timing import interleave, medians
from covprop import bayes as bnn

FEATURES, HIDDEN, OUTPUTS = 13, 50, 2
BATCH, SAMPLES = 10, 10
ROWS, SMOKE_ROWS = 455, 20
MEMBERS, SMOKE_MEMBERS = 20, 3
STEPS, SMOKE_STEPS = 50, 2
METHODS: dict[str, Any] = {
    "exact": cp.Exact(),
    "series": cp.Series(),
    "Wu 2019": cp.Wu2019(),
    "diagonal": cp.AssumedDensity(),
    "MCVI": bnn.LocalReparametrisation(SAMPLES),
}


DEEP: dict[str, Any] = {
    **METHODS,
    **{f"MCVI {samples}": bnn.LocalReparametrisation(samples) for samples in (100, 1000)},
}


def network(members: int | None = None, depth: int = 1) -> nn.Module:
    """The network, or several of them."""
    widths = (FEATURES, *[HIDDEN] * depth, OUTPUTS)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [bnn.BayesLinear(inputs, outputs, members=members), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, method: Any, x: Tensor, y: Tensor) -> None:
    """One epoch, as any training has it."""
    elbo = bnn.ELBO(bnn.HeteroskedasticGaussian(), data_size=y.shape[-1])
    bnn.fit(model, elbo, x, y, method=method, epochs=1, batch_size=BATCH, learning_rate=1e-3)


@torch.enable_grad()
def step(smoke: bool) -> dict[str, Any]:
    """A training step of 10 rows: each method against sampling with 10 draws, float32."""
    return _steps(METHODS, 1, STEPS, 31, smoke)


@torch.enable_grad()
def deep(smoke: bool) -> dict[str, Any]:
    """The same with two hidden layers; sampling also with 100 and 1000 draws."""
    return _steps(DEEP, 2, STEPS // 5, 11, smoke)


def _steps(
    methods: dict[str, Any], depth: int, steps: int, rounds: int, smoke: bool
) -> dict[str, Any]:
    """Times of a step by method, and their ratios to sampling; the target is that of depth 1."""
    rows = BATCH * (SMOKE_STEPS if smoke else steps)
    x, y = torch.randn(rows, FEATURES), torch.randn(rows)
    candidates: dict[str, Callable[[], object]] = {
        name: partial(train, network(depth=depth), method, x, y) for name, method in methods.items()
    }
    times = interleave(candidates, rounds=2 if smoke else rounds)
    typical = medians(times)
    figures = [
        Figure(
            f"{name} / MCVI with {SAMPLES} samples",
            typical[name] / typical["MCVI"],
            at_most=1.5 if name == "exact" else None,
        )
        for name in methods
        if name != "MCVI"
    ]
    each = {name: seconds * BATCH / rows for name, seconds in typical.items()}
    return outcome(figures, step=each, seconds=times)


@torch.enable_grad()
def members(smoke: bool) -> dict[str, Any]:
    """An epoch of 20 networks, each with its own data, together and one after another, float32."""
    count, rows = (SMOKE_MEMBERS, SMOKE_ROWS) if smoke else (MEMBERS, ROWS)
    x, y = torch.randn(count, rows, FEATURES), torch.randn(count, rows)
    together, alone = network(count), [network() for _ in range(count)]
    method = METHODS["exact"]

    def one_by_one() -> None:
        for model, own, target in zip(alone, x, y, strict=True):
            train(model, method, own, target)

    candidates: dict[str, Callable[[], object]] = {
        "together": partial(train, together, method, x, y),
        "one after another": one_by_one,
    }
    times = interleave(candidates, rounds=2 if smoke else 7)
    typical = medians(times)
    ratio = typical["one after another"] / typical["together"]
    figure = Figure(f"{count} members: one after another / together", ratio, at_least=5)
    return outcome([figure], members=count, median=typical, seconds=times)
