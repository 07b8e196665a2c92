"""How the figures look: colours that all can tell apart, maps whose brightness is the value."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Okabe and Ito's colours (2008)."""
MAP = "cividis"
DIVERGING = "PuOr"
RESOLUTION = 130
PANEL = 3.4
"""Inches of a panel's side."""
FONT = 9


def panels(
    rows: int, columns: int, width: float = PANEL, height: float = PANEL
) -> tuple[Figure, Any]:
    """A figure and its axes, (rows, columns)."""
    figure = Figure((columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def bands(axes: Axes, rows: int) -> None:
    """Every second row of a chart in grey, so that what belongs together is seen."""
    for row in range(0, rows, 2):
        axes.axhspan(row - 0.5, row + 0.5, color="0.95", linewidth=0, zorder=-1)


def means(axes: Axes, title: str) -> None:
    """Label axes that are the two input means."""
    axes.set_title(title, fontsize=FONT)
    axes.set(xlabel="mean $\\mu_1$", ylabel="mean $\\mu_2$", aspect="equal")


def error_map(
    axes: Axes, axis: Sequence[float], errors: np.ndarray, low: float, high: float
) -> Any:
    """Absolute errors over both means, on a logarithmic scale; below `low` all is one colour."""
    shown = np.clip(np.asarray(errors), low, None)
    return axes.pcolormesh(
        axis, axis, shown.T, norm=LogNorm(low, high), cmap=MAP, shading="nearest", rasterized=True
    )
