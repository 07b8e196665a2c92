"""`sampling`: when to propagate and when to sample: errors and seconds of both.

`cp.propagate` with its default method, and the loop that anybody would write: draw inputs, run the
network, take the standard deviation. Four networks in float32, independent noise as a part of the
inputs' spread. An error is that of the outputs' standard deviations, root mean square over outputs,
inputs and seeds; seconds are those of one CPU core for one input. The truth is more samples.
`python -m experiments.sampling README.md docs/why.md docs/experiments.md` writes it into the pages.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from benchmarks import models
from experiments import drawing
from experiments.corpus_networks import Convolutional, Tabular, table, trained
from experiments.options import RESULTS, Options
from experiments.randomness import seed_of, seeded
from experiments.table import Table

NAME = "sampling"
NOISES = (0.1, 1.0)
COUNTS = {1_000: 10, 100_000: 2}
"""Samples, and how many times they are drawn."""
CHUNK = 1_000
"""Samples that the network sees at a time: ten times as many took three times as long each."""
REPEATS = 3
"""The fastest of so many runs counts."""
SMOKE_TRUTH, SMOKE_COUNTS = 1_000, {100: 1, 1_000: 1}
PROPAGATED = "propagate"


@final
class Case(NamedTuple):
    """A network, inputs (count, *event), what their spread is, and how many samples are true."""

    model: nn.Module
    inputs: Tensor
    spread: float
    truth: int


def _rows(name: str, count: int, shape: tuple[int, ...] = (-1,)) -> tuple[Tensor, float]:
    """Rows of a table, and their standard deviation."""
    rows = table(name)[0].float()
    return rows[:count].reshape(count, *shape), float(rows.std())


@cache
def case(name: str) -> Case:
    """By the words of the table."""
    if name == "regressor":
        return Case(trained(Tabular("diabetes")).model.float(), *_rows("diabetes", 4), 2**22)
    if name == "classifier":
        return Case(trained(Tabular("digits")).model.float(), *_rows("digits", 4), 2**22)
    if name == "small CNN":
        model = trained(Convolutional()).model.float()
        return Case(model, *_rows("digits", 4, (1, 8, 8)), 2**21)
    with seeded(NAME, name):
        return Case(models.convolutional(4).float(), torch.randn(2, 1, 20, 20), 1.0, 400_000)


NETWORKS = {
    "regressor": "10 inputs, three layers of 50 ReLUs, trained (diabetes)",
    "classifier": "64 pixels, three layers of 50 ReLUs, trained (digits)",
    "small CNN": "8x8 pixels, two convolutions, max pooling, trained (digits)",
    "wide CNN": "20x20 pixels, three convolutions of 4,000 ReLUs, random weights",
}


def settings(options: Options) -> dict[str, Any]:
    """Seed and sizes."""
    counts = {str(count): draws for count, draws in COUNTS.items()}
    return {"seed": options.seed, "smoke": options.smoke, "draws": counts}


def units(options: Options) -> list[str]:
    """Networks and noises."""
    names = ["regressor"] if options.smoke else NETWORKS
    return [f"{name}/{noise}" for name in names for noise in NOISES]


def sampled(model: nn.Module, mean: Tensor, stddev: float, count: int, *seed: object) -> Tensor:
    """Standard deviations of outputs, in float64, by a loop over samples."""
    generator = torch.Generator().manual_seed(seed_of(NAME, *seed))
    sums = squares = shift = None
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        noise = torch.randn(size, *mean.shape, generator=generator)
        outputs = model(mean + stddev * noise).double()
        shift = outputs.mean(0) if shift is None else shift
        outputs -= shift
        sums = outputs.sum(0) + (0 if sums is None else sums)
        squares = outputs.square().sum(0) + (0 if squares is None else squares)
    assert sums is not None
    assert squares is not None
    variance: Tensor = (squares - sums.square() / count) / (count - 1)
    return variance.sqrt()


def _seconds(run: Callable[[], Any]) -> float:
    """Of the CPU, the fastest of some runs."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def measure(key: str, options: Options) -> dict[str, Any]:
    """Errors and seconds of each way; of `propagate` also the estimate and the methods taken."""
    name, noise = key.split("/")
    model, inputs, spread, true = case(name)
    stddev = float(noise) * spread
    inputs, true = (inputs[:1], SMOKE_TRUTH) if options.smoke else (inputs, true)
    errors: dict[str, list[Tensor]] = {}
    estimates, methods = [], []
    for i, mean in enumerate(inputs):
        truth = sampled(model, mean, stddev, true, options.seed, key, i, "truth")
        x = cp.Gaussian.isotropic(mean[None], stddev, batch_dims=1)
        y = cp.propagate(model, x)
        errors.setdefault(PROPAGATED, []).append(y.stddev[0].double() / truth - 1)
        estimates.append(y.error.largest_stddev if y.error else None)
        methods.append(type(y.method).__name__)
        for count, draws in (SMOKE_COUNTS if options.smoke else COUNTS).items():
            for draw in range(draws):
                found = sampled(model, mean, stddev, count, options.seed, key, i, count, draw)
                errors.setdefault(str(count), []).append(found / truth - 1)
    mean = inputs[0]
    x = cp.Gaussian.isotropic(mean[None], stddev, batch_dims=1)
    runs: dict[str, Callable[[], Any]] = {
        way: (lambda way=way: sampled(model, mean, stddev, int(way), "time")) for way in errors
    }
    runs[PROPAGATED] = lambda: cp.propagate(model, x)
    return {
        "ways": {
            way: {
                "error": float(torch.stack(each).square().mean().sqrt()),
                "seconds": _seconds(runs[way]),
            }
            for way, each in errors.items()
        },
        "estimated": estimates,
        "methods": methods,
        "truth": true,
    }


def with_rows(text: str, table: Table) -> str:
    """A page whose rows of this table have the numbers of now, as many columns as they had."""
    for row in table.rows:
        pattern = re.compile(rf"^\| {row[0]} \| {re.escape(row[1])} \|.*$", re.MULTILINE)
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"the page has no row of {row[0]} at noise {row[1]}")
        cells = row[: found[0].count(" | ") + 1]
        text = pattern.sub(f"| {' | '.join(cells)} |", text)
    return text


def percent(part: float) -> str:
    """Two digits."""
    return f"{100 * part:.2g} %"


def seconds(value: float) -> str:
    """Milliseconds below one second."""
    return f"{value:.1f} s" if value >= 1 else f"{float(f'{1e3 * value:.2g}'):g} ms"


def tables(record: dict[str, Any]) -> list[Table]:
    """Error and time of each way."""
    rows = []
    for key, found in record["results"].items():
        name, noise = key.split("/")
        cells = [
            f"{percent(way['error'])}, {seconds(way['seconds'])}" for way in found["ways"].values()
        ]
        rows.append([name, noise, *cells, " and ".join(sorted(set(found["methods"])))])
    counts = list(next(iter(record["results"].values()))["ways"])[1:] if rows else []
    header = ["network", "noise", "`propagate`", *(f"{int(way):,} samples" for way in counts), "by"]
    note = "; ".join(f"{name}: {text}" for name, text in NETWORKS.items()) + "."
    return [Table("Error of standard deviations, and time of one core", header, rows, note)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Error against time, a panel for each noise: a line of samples, a star of `propagate`."""
    figure, axes = drawing.panels(1, len(NOISES), width=4.4, height=3.4)
    colours = dict(
        zip(NETWORKS, (drawing.BLUE, drawing.GREEN, drawing.ORANGE, drawing.VERMILION), strict=True)
    )
    for key, found in record["results"].items():
        name, noise = key.split("/")
        panel = axes[0, NOISES.index(float(noise))]
        time_and_error = [(way["seconds"], 100 * way["error"]) for way in found["ways"].values()]
        propagated, *samples = time_and_error
        panel.plot(*zip(*samples, strict=True), "o-", color=colours[name], markersize=4)
        panel.plot(*propagated, "*", color=colours[name], markersize=15, label=name)
        panel.set(xscale="log", yscale="log", xlabel="seconds of one core")
        panel.set_title(f"noise {noise} of the inputs' spread", fontsize=drawing.FONT)
        panel.grid(color="0.9")
        panel.yaxis.set_major_formatter("{x:g} %")
    axes[0, 0].set_ylabel("error of standard deviations")
    stars, names = axes[0, 0].get_legend_handles_labels()
    (line,) = axes[0, 0].plot([], [], "o-", color="0.5", markersize=4)
    figure.legend([*stars, line], [*(f"propagate: {name}" for name in names),
                  "1,000 and 100,000 samples"], loc="outside lower center", ncols=3,
                  frameon=False, fontsize=drawing.FONT)  # fmt: skip
    _share_limits(axes[0])
    return {NAME: figure}


def _share_limits(panels: Any) -> None:
    """The same axes for all, so that panels can be compared."""
    for limits, change in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
        low, high = zip(*(getattr(panel, limits)() for panel in panels), strict=True)
        for panel in panels:
            getattr(panel, change)(min(low), max(high))


if __name__ == "__main__":
    (measured,) = tables(json.loads((RESULTS / f"{NAME}.json").read_text()))
    for name in sys.argv[1:]:
        Path(name).write_text(with_rows(Path(name).read_text(), measured))
