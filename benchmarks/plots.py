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


def units(result: dict[str, Any]) -> Figure:
    """Time and memory of a sketch against units, with the fitted powers and what n^2 would be."""
    figure = Figure((2 * SIZE[0] / 1.6, SIZE[1]), layout="constrained")
    counts = np.array([row["units"] for row in result["rows"]])
    panels = zip(figure.subplots(1, 2), (("seconds", 1.0), ("bytes", 1e9)), strict=True)
    for axes, (name, scale) in panels:
        values = np.array([row[name] for row in result["rows"]]) / scale
        power, factor = result["fits"][name]
        axes.loglog(counts, values, "o", label=f"measured: $n^{{{power:.2f}}}$")
        axes.loglog(counts, factor / scale * counts**power, color="tab:blue", linewidth=1)
        axes.loglog(counts, values[0] * (counts / counts[0]), ":", color="0.4", label="$n$")
        square = values[0] * (counts / counts[0]) ** 2
        axes.loglog(counts, square, "--", color="0.4", label="$n^2$")
        label = "seconds" if name == "seconds" else "memory, GB"
        axes.set(xlabel="units n of the network", ylabel=label)
        axes.legend()
    figure.suptitle("cp.Sketched(16), ResNet-18 with 16 channels, one image")
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
    "units": ("sketched-units", units),
    "layers": ("layers", layers),
    "correlated-layers": ("correlated-layers", layers),
    "accuracy": ("accuracy", accuracy),
}
