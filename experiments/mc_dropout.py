"""`mc_dropout`: moments over the masks of dropout, against those of very many stochastic passes.

Two small networks (10 features, two layers of 50 ReLUs, dropout of 0.2 behind each) are trained on
a sum of sines and products: as a regression, and to tell its thirds apart. `cp.mc_dropout` and 50
passes are compared with 40,000 passes, at 100 inputs that they have not seen.
"""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.errors import approximations_ignored
from experiments.options import Options
from experiments.randomness import seed_of
from experiments.table import Table

NAME = "mc_dropout"
TASKS = {"regression": 1, "classes": 3}
"""How many outputs each has."""
METHODS = ("gaussian-layers", "cumulants", "auto")
FEATURES, UNITS, DROPPED = 10, 50, 0.2
ROWS, TRAINED, EPOCHS = 100, 1000, 300
PASSES, FEW, BLOCKS, TOGETHER = 40_000, 50, 20, 500
"""Passes for the truth, of those that are compared, how many such sets, and how many at once."""
SEEDS, TIMINGS = 3, 5
SMOKE = {"passes": 1000, "epochs": 5}
MEASURES = {
    "mean": "error of means, in deviations",
    "stddev": "of standard deviations",
    "probability": "of probabilities",
    "seconds": "time",
}


def settings(options: Options) -> dict[str, Any]:
    """Passes and epochs."""
    given = SMOKE if options.smoke else {"passes": PASSES, "epochs": EPOCHS}
    return {"seed": options.seed, "smoke": options.smoke, **given}


def units(options: Options) -> list[str]:
    """Tasks and seeds."""
    seeds = options.instances or (1 if options.smoke else SEEDS)
    return [f"{task}/{seed}" for task in TASKS for seed in range(seeds)]


def target(x: Tensor) -> Tensor:
    """What the networks learn, (rows, 1)."""
    return (x[:, :1] + torch.sin(2 * x[:, 1:2]) + x[:, 2:3] * x[:, 3:4]) / 2


@torch.enable_grad()
def trained(task: str, epochs: int, generator: torch.Generator) -> nn.Sequential:
    """A network in evaluation mode."""
    model = nn.Sequential(
        nn.Linear(FEATURES, UNITS), nn.ReLU(), nn.Dropout(DROPPED),
        nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Dropout(DROPPED), nn.Linear(UNITS, TASKS[task]),
    )  # fmt: skip
    x = torch.randn(TRAINED, FEATURES, generator=generator)
    y = target(x) + 0.1 * torch.randn(TRAINED, 1, generator=generator)
    ends = y.flatten().quantile(torch.tensor([1 / 3, 2 / 3]))
    classes = torch.bucketize(y.flatten(), ends)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        optimiser.zero_grad()
        output = model(x)
        if task == "regression":
            nn.functional.mse_loss(output, y).backward()
        else:
            nn.functional.cross_entropy(output, classes).backward()
        optimiser.step()
    return model.eval().requires_grad_(False)


def passes(model: nn.Module, x: Tensor, count: int) -> Tensor:
    """Outputs (count, rows, outputs): each row of each pass has masks of its own."""
    parts = []
    with cp.dropout_active(model):
        for start in range(0, count, TOGETHER):
            size = min(TOGETHER, count - start)
            parts.append(model(x.repeat(size, 1)).unflatten(0, (size, len(x))))
    return torch.cat(parts)


def seconds(function: Callable[[], object]) -> float:
    """Of the processor, the least of a few runs."""
    times = []
    for _ in range(TIMINGS):
        begun = time.process_time()
        function()
        times.append(time.process_time() - begun)
    return min(times)


def errors(mean: Tensor, stddev: Tensor, probability: Tensor, truth: Tensor) -> dict[str, float]:
    """Root mean squares of the errors of moments and of class probabilities."""
    exact = truth.double().std(0)
    return {
        "mean": float(((mean - truth.double().mean(0)) / exact).square().mean().sqrt()),
        "stddev": float((stddev / exact - 1).square().mean().sqrt()),
        "probability": float(
            (probability - truth.softmax(-1).double().mean(0)).square().mean().sqrt()
        ),
    }


@torch.no_grad()
def compared(model: nn.Module, x: Tensor, count: int) -> dict[str, Any]:
    """Few passes, and every method, against many passes."""
    truth = passes(model, x, count)
    few = [passes(model, x, FEW) for _ in range(BLOCKS)]
    each = [errors(one.mean(0), one.std(0), one.softmax(-1).mean(0), truth) for one in few]
    found: dict[str, Any] = {
        f"{FEW} passes": {name: fmean(e[name] for e in each) for name in each[0]}
    }

    def one_by_one() -> Tensor:
        with cp.dropout_active(model):
            return torch.stack([model(x) for _ in range(FEW)])

    found[f"{FEW} passes"]["seconds"] = seconds(one_by_one)
    for method in METHODS:
        y = cp.mc_dropout(model, x, method=method)
        probability = (
            bayes.Categorical().predict(y).mean if y.mean.shape[-1] > 1 else y.mean * 0 + 1
        )
        found[method] = errors(y.mean, y.stddev, probability, truth)
        found[method]["seconds"] = seconds(lambda m=method: cp.mc_dropout(model, x, method=m))  # type: ignore[misc]
    return found


def measure(key: str, options: Options) -> dict[str, Any]:
    """Of one network."""
    task, _, seed = key.partition("/")
    given, number = settings(options), seed_of(NAME, options.seed, task, seed)
    with torch.random.fork_rng():
        torch.manual_seed(number)
        generator = torch.Generator().manual_seed(number)
        model = trained(task, given["epochs"], generator)
        x = torch.randn(ROWS, FEATURES, generator=generator)
        with approximations_ignored():
            return compared(model, x, given["passes"])


def tables(record: dict[str, Any]) -> list[Table]:
    """A row for each task and method: averages over seeds, the least time."""
    rows = []
    for task, outputs in TASKS.items():
        seeds = [found for key, found in record["results"].items() if key.startswith(task)]
        for method in (f"{FEW} passes", *METHODS):
            mean, stddev, probability = (
                fmean(found[method][name] for found in seeds)
                for name in ("mean", "stddev", "probability")
            )
            words = [f"{mean:.1%}", f"{stddev:.1%}", f"{probability:.4f}" if outputs > 1 else ""]
            fastest = min(found[method]["seconds"] for found in seeds)
            rows.append([task, method, *words, f"{1e3 * fastest:.0f} ms"])
    note = "Root mean squares, averages over seeds, against 40,000 passes; the least time."
    return [
        Table(
            "Monte Carlo dropout without draws", ["task", "method", *MEASURES.values()], rows, note
        )
    ]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """None: the table says it."""
    del record
    return {}
