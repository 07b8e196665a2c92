"""Figures; matplotlib is asked for only when one is drawn."""

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
"""Okabe & Ito's colours, which those who see fewer can tell apart."""
WIDTH = 9.0
PANEL = 2.1
ROOM = 2.2
"""Inches for the names of the steps."""
DISTANCES = {
    "covariance_error": "relative error of covariance",
    "wasserstein": "W2 to Monte Carlo",
    "kl": "KL(Monte Carlo || method), nats",
}
"""Figures of a comparison that have one panel each."""
LABELS = 40
"""Steps that can be named below an axis."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure, which belongs to no window."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib; install it with pip install '.[plots]' in covprop's folder"
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


def comparison_figure(reference: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    """Methods from top to bottom: errors of mean and variance, distances, time and memory."""
    shown = [row for row in rows if "verdict" in row]
    names = [row["name"] for row in shown]
    figure = new_figure(1.6 * WIDTH, 2 * (1.0 + 0.36 * (len(shown) + 1)))
    axes = figure.subplots(2, 4, sharey=True)
    places = list(range(len(shown)))
    first, second, *others, legend = axes.flat
    _outputs(first, shown, "mean_error", 0.0, reference)
    first.set_xlabel("mean error / standard deviation")
    _outputs(second, shown, "variance_ratio", 1.0, reference)
    second.set_xlabel("variance ratio to Monte Carlo")
    amounts = {
        label: [_number(found[name]["average"]) for found in (*shown, reference)]
        for name, label in DISTANCES.items()
    }
    amounts["seconds"] = [found["seconds"] for found in (*shown, reference)]
    amounts["peak memory of tensors, MB"] = [r["peak_bytes"] / 1e6 for r in (*shown, reference)]
    for axis, (label, values) in zip(others, amounts.items(), strict=True):
        _amounts(axis, places, values[:-1], values[-1], label)
    for axis in (first, second, *others):
        axis.set_yticks(places, names)
        axis.set_ylim(max(1, len(shown)) - 0.5, -0.5)
        axis.grid(axis="both", color="0.9")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = others[0].get_legend_handles_labels()
    more, other = first.get_legend_handles_labels()
    legend.set_axis_off()
    legend.legend(handles + more, labels + other, loc="center", frameon=False,
                  title=f"against {reference['name']}")  # fmt: skip
    return figure


def _outputs(
    axis: Any,
    rows: Sequence[dict[str, Any]],
    measure: str,
    centre: float,
    reference: dict[str, Any],
) -> None:
    """A point for each output, and two standard errors of sampling on either side."""
    for place, row in enumerate(rows):
        values = list(_flat(row[measure]["values"]))
        label = "an output" if place == 0 else None
        axis.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.5, markersize=5,
                  markeredgewidth=0, label=label)  # fmt: skip
    error = 2 * _number(reference[measure]["average"])
    if math.isfinite(error):
        axis.axvspan(centre - error, centre + error, color=ORANGE, alpha=0.25, linewidth=0,
                     label="two standard errors of sampling")  # fmt: skip
    axis.axvline(centre, color=GREY, linewidth=1)


def _amounts(
    axis: Any, places: Sequence[int], values: Sequence[float], sampled: float, label: str
) -> None:
    """A mark for each method on a logarithmic axis; an infinite one is an arrow at its end."""
    known = [v for v in (*values, sampled) if math.isfinite(v) and v > 0]
    low, high = (min(known) / 2, max(known) * 2) if known else (0.1, 10.0)
    for place, value in zip(places, values, strict=True):
        mark, at = (">", high / 1.1) if math.isinf(value) else ("s", _positive(value))
        name = "method" if place == 0 else None
        axis.plot([at], [place], mark, color=GREEN, markersize=9, clip_on=False, label=name)
    if math.isfinite(sampled) and sampled > 0:
        axis.axvline(sampled, color=PURPLE, linestyle="--", label="Monte Carlo")
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel(label)


def _flat(values: Any) -> Iterator[float]:
    """The finite numbers of nested lists."""
    if isinstance(values, list):
        for item in values:
            yield from _flat(item)
    elif math.isfinite(number := _number(values)):
        yield number


def _number(value: Any) -> float:
    """A number that JSON may have as a word."""
    return float(value)
