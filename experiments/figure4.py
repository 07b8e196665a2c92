"""Figure 4: error maps of ReLU's covariance: fourth order, Wu et al., and the exact method.

Unit variances, correlation 0.5, against numerical integration.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import covprop as cp
from experiments import drawing, grid, truth
from experiments.options import Options
from experiments.table import Table, scientific

NAME = "figure4"
STEPS, SMOKE_STEPS = 101, 11
TITLES = {"order 4": "(a) series, fourth order", "Wu et al.": "(b) Wu et al. 2019",
          "exact": "(c) exact method"}  # fmt: skip
SCALES = {"order 4": (1e-9, 2e-4), "Wu et al.": (1e-9, 2e-4), "exact": (1e-18, 1e-15)}


def settings(options: Options) -> dict[str, Any]:
    """The grid."""
    return {"steps": SMOKE_STEPS if options.smoke else STEPS, "means": grid.LARGEST_MEAN,
            "rho": grid.RHO}  # fmt: skip


def units(_: Options) -> list[str]:
    """A method each."""
    return list(TITLES)


def measure(key: str, options: Options) -> dict[str, Any]:
    """The errors of one method."""
    steps = settings(options)["steps"]
    method = {"order 4": cp.Series(order=4), "Wu et al.": cp.Wu2019(), "exact": cp.Exact()}[key]
    expected = grid.square(truth.relu_covariance(*grid.means(steps).T, grid.RHO), steps)
    errors = np.abs(grid.covariance(torch.relu, steps, grid.RHO, method) - expected)
    return {**grid.summary(errors), "errors": grid.packed(errors)}


def tables(record: dict[str, Any]) -> list[Table]:
    """Maximum and mean of each map."""
    rows = [
        [name, scientific(result["max"]), scientific(result["mean"])]
        for name, result in record["results"].items()
    ]
    header = ["", "maximum absolute error", "mean absolute error"]
    return [Table("Error of ReLU's covariance, ρ = 0.5", header, rows)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """A map for each method."""
    steps = record["settings"]["steps"]
    figure, (axes,) = drawing.panels(1, len(TITLES), width=3.4, height=2.8)
    for panel, (name, result) in zip(axes, record["results"].items(), strict=True):
        errors = grid.square(np.array(result["errors"]), steps)
        mesh = drawing.error_map(panel, grid.axis(steps), errors, *SCALES[name])
        drawing.means(panel, f"{TITLES[name]}:\nat most {result['max']:.1e}")
        panel.set(xticks=range(-4, 5, 2), yticks=range(-4, 5, 2))
        last = panel is axes[-1]
        figure.colorbar(mesh, ax=panel, label="absolute error" if last else "", extend="min")
    return {NAME: figure}
