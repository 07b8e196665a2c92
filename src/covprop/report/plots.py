"""Figures; matplotlib is asked for only when one is drawn."""

import importlib
import math
from collections.abc import Sequence
from typing import Any

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
"""Okabe & Ito's colours, which those who see fewer can tell apart."""
WIDTH = 9.0
PANEL = 2.1
ROOM = 2.2
"""Inches for the names of the steps."""
LABELS = 40
"""Steps that can be named below an axis."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure, which belongs to no window."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib; install it with pip install 'covprop[plots]'"
        ) from error
    return figures.Figure((width, height), layout="constrained")


def trace_figure(steps: Sequence[dict[str, Any]]) -> Any:
    """Steps from left to right: deviations, correlations, and what samples said of each."""
    sampled = any("kolmogorov" in step for step in steps)
    rows = 4 if sampled else 2
    width = max(WIDTH, min(2.2 * WIDTH, 0.3 * len(steps)))
    figure = new_figure(width, PANEL * rows + ROOM)
    axes = figure.subplots(rows, 1, sharex=True)
    places = list(range(len(steps)))
    _deviations(axes[0], places, steps)
    axes[1].bar(places, [step["largest_correlation"] for step in steps], color=BLUE)
    axes[1].set(ylabel="largest\n|correlation|", ylim=(0, 1.05))
    if sampled:
        _measure(axes[2], places, steps, "kolmogorov", "Kolmogorov\ndistance")
        _line(axes[2], places, steps, "kolmogorov_noise")
        _measure(axes[3], places, steps, "variance_error", "|variance error|")
        _line(axes[3], places, steps, "variance_stderr")
        axes[2].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes[3].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    every = math.ceil(len(steps) / LABELS)
    names = [f"{step['module']} {step['operation']}".strip() for step in steps]
    axes[-1].set_xticks(places[::every], names[::every], rotation=90)
    axes[-1].set_xlim(-0.6, len(steps) - 0.4)
    for axis in axes:
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    return figure


def _deviations(axis: Any, places: Sequence[int], steps: Sequence[dict[str, Any]]) -> None:
    average = [_positive(step["variance"]) ** 0.5 for step in steps]
    largest = [_positive(step["largest_variance"]) ** 0.5 for step in steps]
    axis.plot(places, largest, "^--", color=ORANGE, markersize=4, linewidth=1, label="largest")
    axis.plot(places, average, "o-", color=BLUE, markersize=4, linewidth=1, label="root of average")
    axis.set_yscale("log")
    axis.set_ylabel("standard\ndeviation")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _measure(
    axis: Any, places: Sequence[int], steps: Sequence[dict[str, Any]], measure: str, label: str
) -> None:
    none = {"median": math.nan, "worst": math.nan}
    found = [step.get(measure, none) for step in steps]
    for kind, mark, colour in (("worst", "^--", ORANGE), ("median", "o-", BLUE)):
        values = [_positive(item[kind]) for item in found]
        axis.plot(places, values, mark, color=colour, markersize=4, linewidth=1, label=kind)
    axis.set_yscale("log")
    axis.set_ylabel(label)


def _line(axis: Any, places: Sequence[int], steps: Sequence[dict[str, Any]], key: str) -> None:
    values = [_positive(step.get(key, math.nan)) for step in steps]
    axis.step(places, values, where="mid", color=GREY, linestyle=":", label="sampling alone")


def _positive(value: float) -> float:
    """What a logarithmic axis can show."""
    return value if value > 0 else math.nan
