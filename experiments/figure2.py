"""Figure 2: the covariance of two rectified Gaussians over their means, by numerical integration.

Unit variances, correlation 0.5. The exact covariance of covprop is compared with it.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import covprop as cp
from experiments import drawing, grid, truth
from experiments.options import Options
from experiments.table import Table, scientific

NAME = "figure2"
STEPS, SMOKE_STEPS = 81, 11
SLICES = {-1.0: drawing.PURPLE, 0.0: drawing.BLUE, 1.0: drawing.GREEN, 3.0: drawing.ORANGE}


def settings(options: Options) -> dict[str, Any]:
    """The grid."""
    return {"steps": SMOKE_STEPS if options.smoke else STEPS, "means": grid.LARGEST_MEAN,
            "rho": grid.RHO}  # fmt: skip


def units(_: Options) -> list[str]:
    """One."""
    return ["relu"]


def measure(_: str, options: Options) -> dict[str, Any]:
    """The surface, and how far covprop is from it."""
    steps = settings(options)["steps"]
    exact = truth.relu_covariance(*grid.means(steps).T, grid.RHO)
    surface = grid.square(exact, steps)
    ours = grid.covariance(torch.relu, steps, grid.RHO, cp.Exact())
    return {"covariance": grid.packed(surface), "exact": grid.summary(ours - surface)}


def tables(record: dict[str, Any]) -> list[Table]:
    """The agreement."""
    error = record["results"]["relu"]["exact"]
    return [Table(
        "Exact covariance against numerical integration",
        ["", "maximum absolute error", "mean absolute error"],
        [["`cp.Exact()`", scientific(error["max"]), scientific(error["mean"])]],
    )]  # fmt: skip


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """The surface from above, and slices through it."""
    steps = record["settings"]["steps"]
    surface = grid.square(np.array(record["results"]["relu"]["covariance"]), steps)
    axis = grid.axis(steps)
    figure, ((left, right),) = drawing.panels(1, 2, width=4.4, height=3.7)
    mesh = left.pcolormesh(axis, axis, surface, cmap=drawing.MAP, shading="nearest",
                           rasterized=True)  # fmt: skip
    lines = left.contour(axis, axis, surface, levels=np.arange(0.05, 0.5, 0.1), colors="white",
                         linewidths=0.8)  # fmt: skip
    left.clabel(lines, fontsize=drawing.FONT - 2)
    drawing.means(left, "Cov(relu $y_1$, relu $y_2$), $\\sigma_1=\\sigma_2=1$, $\\rho=0.5$")
    figure.colorbar(mesh, ax=left, label="covariance")
    for (mean, colour), style in zip(SLICES.items(), ("-", "--", "-.", ":"), strict=True):
        row = surface[int(np.abs(axis - mean).argmin())]
        right.plot(axis, row, style, color=colour, label=f"$\\mu_2={mean:g}$")
    right.axhline(grid.RHO, color="0.6", linewidth=0.8)
    right.annotate("covariance of the inputs", (-4.9, grid.RHO), (0, -11),
                   textcoords="offset points", fontsize=drawing.FONT - 1, color="0.35")  # fmt: skip
    right.set(xlabel="mean $\\mu_1$", ylabel="covariance")
    right.set_title("slices", fontsize=drawing.FONT)
    right.legend(frameon=False, loc="center left")
    return {NAME: figure}
