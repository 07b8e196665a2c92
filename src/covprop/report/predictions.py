"""Figures of predictions: their calibration, and intervals along one input."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from covprop.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, WIDTH, new_figure

COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
HEIGHT = 4.2
DEVIATIONS = 2
"""Standard deviations on either side that a band shows."""
KOLMOGOROV = 1.358
"""95 % quantile of sqrt(n) times the largest distance of n data from their distribution."""


def calibration_figure(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], data: int
) -> Any:
    """Observed over expected shares; the band holds 95 % of the curves of calibrated predictions.

    curves: expected and observed shares by name; data: how many each is of.
    """
    figure = new_figure(HEIGHT + 0.6, HEIGHT)
    axis = figure.subplots()
    width = KOLMOGOROV / math.sqrt(data)
    axis.fill_between([0, 1], [-width, 1 - width], [width, 1 + width], color="0.88", linewidth=0,
                      label="calibrated, 95 %")  # fmt: skip
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    for (name, (expected, observed)), colour in zip(curves.items(), _colours(curves), strict=True):
        x, y = [0.0, *expected, 1.0], [0.0, *observed, 1.0]
        axis.plot(x, y, color=colour, linewidth=1.8, label=name or "prediction")
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="quantile of the prediction",
             ylabel="share of targets below it")  # fmt: skip
    axis.legend(loc="upper left", frameon=False)
    return _finished(figure, axis)


def reliability_figure(
    confidence: Sequence[float], accuracy: Sequence[float], share: Sequence[float]
) -> Any:
    """Accuracy over confidence of bins; below it the share of the data that each has."""
    figure = new_figure(HEIGHT, HEIGHT + 1.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=GREY, linewidth=1)
    upper.plot(confidence, accuracy, "o-", color=BLUE, linewidth=1.8, markersize=5, label="bins")
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    middle = [(place + 0.5) / len(share) for place in range(len(share))]
    lower.bar(middle, share, width=0.9 / len(share), color=ORANGE)
    lower.set(xlabel="confidence", ylabel="share of data")
    _finished(figure, lower)
    return _finished(figure, upper)


def intervals_figure(
    x: Sequence[float],
    mean: Sequence[float],
    stddev: Sequence[float],
    epistemic: Sequence[float],
    points: tuple[Sequence[float], Sequence[float]] | None,
) -> Any:
    """The mean along x, and two standard deviations: all, and the part for want of data."""
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
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return _finished(figure, axis)


def _colours(curves: Mapping[str, object]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(curves))]


def _finished(figure: Any, axis: Any) -> Any:
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
