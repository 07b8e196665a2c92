"""Matplotlib figures; matplotlib is imported only when one is drawn."""

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
"""Okabe & Ito's colours, which colour-blind readers can tell apart."""
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
WIDTH, HEIGHT = 9.0, 4.2
PANEL = 2.1
LABEL_HEIGHT = 2.2
"""Inches for the names of the steps."""
DISTANCES = {
    "covariance_error": "relative error of covariance",
    "wasserstein": "W2 to Monte Carlo",
    "kl": "KL(Monte Carlo || method), nats",
}
"""Measures of a comparison that have one panel each."""
LABELS = 40
"""Steps that can be named below an axis."""
DEVIATIONS = 2
"""Standard deviations on either side that a band shows."""
MOST_CORRELATED = 500
"""Elements up to which a figure of a Gaussian shows correlations."""
KOLMOGOROV = 1.358
"""95 % quantile of sqrt(n) times the largest distance of n data from their distribution."""
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
"""A legend on the right of its axis."""


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure without a window."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib; install it with pip install '.[plots]' in covprop's folder"
        ) from error
    return figures.Figure((width, height), layout="constrained")


def _style(axis: Any, grid: str = "both", colour: str = "0.92") -> None:
    axis.grid(axis=grid, color=colour)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def trace_figure(steps: Sequence[dict[str, Any]]) -> Any:
    """Plot steps from left to right: deviations, correlations, and what samples say of each."""
    sampled = any("kolmogorov" in step for step in steps)
    rows = 4 if sampled else 2
    width = max(WIDTH, min(2.2 * WIDTH, 0.3 * len(steps)))
    figure = new_figure(width, PANEL * rows + LABEL_HEIGHT)
    axes = figure.subplots(rows, 1, sharex=True)
    places = list(range(len(steps)))
    deviations = {
        "largest": [_positive(step["largest_variance"]) ** 0.5 for step in steps],
        "root of average": [_positive(step["variance"]) ** 0.5 for step in steps],
    }
    _curves(axes[0], deviations, "standard\ndeviation")
    axes[0].legend(**BESIDE)
    axes[1].bar(places, [step["largest_correlation"] for step in steps], color=BLUE)
    axes[1].set(ylabel="largest\n|correlation|", ylim=(0, 1.05))
    if sampled:
        _measure(axes[2], steps, "kolmogorov", "kolmogorov_noise", "Kolmogorov\ndistance")
        _measure(axes[3], steps, "variance_error", "variance_stderr", "|variance error|")
    every = math.ceil(len(steps) / LABELS)
    names = [f"{step['module']} {step['operation']}".strip() for step in steps]
    axes[-1].set_xticks(places[::every], names[::every], rotation=90)
    axes[-1].set_xlim(-0.6, len(steps) - 0.4)
    for axis in axes:
        _style(axis, "y", "0.9")
    figure.align_ylabels()
    return figure


def _curves(axis: Any, curves: Mapping[str, Sequence[float]], label: str) -> None:
    """Two curves on a logarithmic axis: the larger values dashed, the typical ones solid."""
    for (name, values), mark, colour in zip(
        curves.items(), ("^--", "o-"), (ORANGE, BLUE), strict=True
    ):
        axis.plot(values, mark, color=colour, markersize=4, linewidth=1, label=name)
    axis.set_yscale("log")
    axis.set_ylabel(label)


def _measure(
    axis: Any, steps: Sequence[dict[str, Any]], measure: str, noise: str, label: str
) -> None:
    unknown = {"median": math.nan, "worst": math.nan}
    values = [step.get(measure, unknown) for step in steps]
    kinds = ("worst", "median")
    _curves(axis, {kind: [_positive(value[kind]) for value in values] for kind in kinds}, label)
    sampling = [_positive(step.get(noise, math.nan)) for step in steps]
    axis.step(range(len(steps)), sampling, where="mid", color=GREY, linestyle=":",
              label="sampling alone")  # fmt: skip
    axis.legend(**BESIDE)


def _positive(value: float) -> float:
    """The value if a logarithmic axis can show it, else NaN."""
    return value if value > 0 else math.nan


def comparison_figure(reference: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Any:
    """Plot methods from top to bottom: errors of mean and variance, distances, time and memory."""
    shown = [row for row in rows if "verdict" in row]
    figure = new_figure(1.6 * WIDTH, 2 * (1.0 + 0.36 * (len(shown) + 1)))
    first, second, *others, legend = figure.subplots(2, 4, sharey=True).flat
    _outputs(first, shown, "mean_error", 0.0, reference)
    first.set_xlabel("mean error / standard deviation")
    _outputs(second, shown, "variance_ratio", 1.0, reference)
    second.set_xlabel("variance ratio to Monte Carlo")
    every = (*shown, reference)
    amounts = {
        label: [float(row[name]["average"]) for row in every] for name, label in DISTANCES.items()
    }
    amounts["seconds"] = [row["seconds"] for row in every]
    amounts["peak memory of tensors, MB"] = [row["peak_bytes"] / 1e6 for row in every]
    for axis, (label, values) in zip(others, amounts.items(), strict=True):
        _amounts(axis, values[:-1], values[-1], label)
    for axis in (first, second, *others):
        axis.set_yticks(range(len(shown)), [row["name"] for row in shown])
        axis.set_ylim(max(1, len(shown)) - 0.5, -0.5)
        _style(axis, colour="0.9")
    labelled = {
        label: handle
        for axis in (*others, first)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    legend.set_axis_off()
    legend.legend(labelled.values(), labelled, loc="center", frameon=False,
                  title=f"against {reference['name']}")  # fmt: skip
    return figure


def _outputs(
    axis: Any, rows: Sequence[dict[str, Any]], measure: str, centre: float, reference: Any
) -> None:
    """A point for each output, and two standard errors of sampling on either side."""
    for place, row in enumerate(rows):
        values = list(_finite(row[measure]["values"]))
        label = "an output" if place == 0 else None
        axis.plot(values, [place] * len(values), "o", color=BLUE, alpha=0.5, markersize=5,
                  markeredgewidth=0, label=label)  # fmt: skip
    error = 2 * float(reference[measure]["average"])
    if math.isfinite(error):
        axis.axvspan(centre - error, centre + error, color=ORANGE, alpha=0.25, linewidth=0,
                     label="two standard errors of sampling")  # fmt: skip
    axis.axvline(centre, color=GREY, linewidth=1)


def _amounts(axis: Any, values: Sequence[float], sampled: float, label: str) -> None:
    """A mark for each method on a logarithmic axis; an infinite one is an arrow at its end."""
    known = [v for v in (*values, sampled) if math.isfinite(v) and v > 0]
    low, high = (min(known) / 2, max(known) * 2) if known else (0.1, 10.0)
    for place, value in enumerate(values):
        mark, at = (">", high / 1.1) if math.isinf(value) else ("s", _positive(value))
        name = "infinite" if math.isinf(value) else "method"
        axis.plot([at], [place], mark, color=GREEN, markersize=9, clip_on=False, label=name)
    if math.isfinite(sampled) and sampled > 0:
        axis.axvline(sampled, color=PURPLE, linestyle="--", label="Monte Carlo")
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel(label)


def _finite(values: Any) -> Iterator[float]:
    """The finite numbers of nested lists, in which JSON has some as words."""
    if isinstance(values, list):
        for item in values:
            yield from _finite(item)
    elif math.isfinite(number := float(values)):
        yield number


def calibration_figure(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], data: int
) -> Any:
    """Plot observed over expected shares, and a band for 95 % of calibrated predictions.

    curves: expected and observed shares by name; data: how many each is of.
    """
    figure = new_figure(HEIGHT + 0.6, HEIGHT)
    axis = figure.subplots()
    width = KOLMOGOROV / math.sqrt(data)
    axis.fill_between([0, 1], [-width, 1 - width], [width, 1 + width], color="0.88", linewidth=0,
                      label="calibrated, 95 %")  # fmt: skip
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    for place, (name, (expected, observed)) in enumerate(curves.items()):
        x, y = [0.0, *expected, 1.0], [0.0, *observed, 1.0]
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(x, y, color=colour, linewidth=1.8, label=name or "prediction")
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="quantile of the prediction",
             ylabel="share of targets below it")  # fmt: skip
    axis.legend(loc="upper left", frameon=False)
    _style(axis)
    return figure


def reliability_figure(
    confidence: Sequence[float], accuracy: Sequence[float], share: Sequence[float]
) -> Any:
    """Plot accuracy over confidence of bins; below it the share of the data in each."""
    figure = new_figure(HEIGHT, HEIGHT + 1.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    upper.plot(confidence, accuracy, "o-", color=BLUE, linewidth=1.8, markersize=5, label="bins")
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    middle = [(place + 0.5) / len(share) for place in range(len(share))]
    lower.bar(middle, share, width=0.9 / len(share), color=ORANGE)
    lower.set(xlabel="confidence", ylabel="share of data")
    _style(lower)
    _style(upper)
    return figure


def intervals_figure(
    x: Sequence[float],
    mean: Sequence[float],
    stddev: Sequence[float],
    epistemic: Sequence[float],
    points: tuple[Sequence[float], Sequence[float]] | None,
) -> Any:
    """Plot the mean along x, and two standard deviations: total and epistemic."""
    figure = new_figure(WIDTH, HEIGHT)
    axis = figure.subplots()
    for deviation, colour, alpha, label in (
        (stddev, BLUE, 0.18, "two standard deviations"),
        (epistemic, ORANGE, 0.35, "epistemic part"),
    ):
        low = [m - DEVIATIONS * s for m, s in zip(mean, deviation, strict=True)]
        high = [m + DEVIATIONS * s for m, s in zip(mean, deviation, strict=True)]
        axis.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0, label=label)
    axis.plot(x, mean, color=BLUE, linewidth=1.8, label="mean")
    if points is not None:
        axis.plot(*points, "o", color="black", alpha=0.45, markersize=3.5, markeredgewidth=0,
                  label="data")  # fmt: skip
    axis.set(xlabel="input", ylabel="target", xlim=(min(x), max(x)))
    axis.legend(**BESIDE)
    _style(axis)
    return figure


def gaussian_figure(
    mean: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    correlations: Sequence[Sequence[float]] | None,
) -> Any:
    """Plot means with intervals over the number of the element, and beside it correlations."""
    figure = new_figure(WIDTH, HEIGHT)
    panels = figure.subplots(1, 1 if correlations is None else 2, squeeze=False)[0]
    places = range(len(mean))
    panels[0].vlines(places, low, high, color=BLUE, alpha=0.5, linewidth=2, label="95 % interval")
    panels[0].plot(places, mean, "o", color=BLUE, markersize=4, label="mean")
    panels[0].set(xlabel="element", ylabel="value")
    panels[0].legend(frameon=False)
    _style(panels[0])
    if correlations is not None:
        picture = panels[1].imshow(correlations, cmap="RdBu_r", vmin=-1, vmax=1)
        figure.colorbar(picture, ax=panels[1], label="correlation")
        panels[1].set(xlabel="element", ylabel="element")
    return figure
