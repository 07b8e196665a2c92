"""Plots of what the benchmarks wrote; a benchmark that was not run has none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

SIZE, RESOLUTION = (7.0, 4.2), 150


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what there is, and return the files."""
    made = []
    for name, (benchmark, plot) in PLOTS.items():
        result = results.get(benchmark)
        if result is None or result.get("failure"):
            continue
        figure = plot(result)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=RESOLUTION)
        made.append(path)
    return made


def cost(result: dict[str, Any]) -> Figure:
    """Seconds against n, with the fitted power."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    sizes = np.array(result["n"])
    for name, seconds in result["curves"].items():
        power, factor = result["fits"][name]
        (line,) = axes.loglog(sizes, seconds, "o", label=f"{name}: $n^{{{power:.2f}}}$")
        axes.loglog(sizes, factor * sizes**power, color=line.get_color(), linewidth=1)
    axes.set(xlabel="units n", ylabel="seconds", title="One activation layer, float64")
    axes.set_xticks(sizes, [str(n) for n in sizes], minor=False)
    axes.minorticks_off()
    axes.legend()
    return figure


def layers(result: dict[str, Any]) -> Figure:
    """Seconds of each activation, between a copy and the naive series."""
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    seconds = dict(sorted(result["shortest"].items(), key=lambda item: item[1]))
    bars = axes.barh(list(seconds), list(seconds.values()))
    axes.bar_label(bars, fmt="%.3g s", padding=3)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    title = f"n = {result['n']}, float64, covariance of rank {result['rank']} and noise"
    axes.set(xlabel="seconds", title=title)
    return figure


def accuracy(result: dict[str, Any]) -> Figure:
    """Error of the output's standard deviation against time: sampling is a line, we are points."""
    networks = list(dict.fromkeys(row["network"] for row in result["rows"]))
    figure = Figure((4.2 * len(networks), 4.2), layout="constrained")
    panels = figure.subplots(1, len(networks), squeeze=False, sharey=True)[0]
    for axes, network in zip(panels, networks, strict=True):
        rows = [row for row in result["rows"] if row["network"] == network]
        for colour, row in zip(("tab:blue", "tab:orange"), rows, strict=True):
            _accuracy_of(axes, row, colour)
        axes.set(title=network, xlabel="seconds", xscale="log", yscale="log")
    panels[0].set_ylabel("relative error of the standard deviation")
    panels[-1].legend(fontsize="x-small")
    return figure


def _accuracy_of(axes: Any, row: dict[str, Any], colour: str) -> None:
    samples = np.logspace(2, 7, 20)
    error = (row["squared error x samples of Monte Carlo"] / samples) ** 0.5
    label = f"Monte Carlo, {row['noise']}"
    axes.plot(samples * row["seconds of a sample"], error, color=colour, label=label)
    for marker, (name, method) in zip("^o", row["methods"].items(), strict=True):
        value = method["relative error of the stddev"]
        face = colour if method["resolved"] else "none"
        bound = "" if method["resolved"] else " (at most)"
        axes.plot(
            method["seconds"], value, marker, color=colour, markerfacecolor=face, linestyle="none",
            label=f"covprop, {name}{bound}",
        )  # fmt: skip


PLOTS: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "cost": ("cost", cost),
    "layers": ("layers", layers),
    "correlated-layers": ("correlated-layers", layers),
    "accuracy": ("accuracy", accuracy),
}
