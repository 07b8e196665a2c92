"""Figure 5: error maps of the fourth-order covariance of GELU and sigmoid, and of every activation.

Unit variances, correlation 0.5, means in [-5, 5]^2, against numerical integration. The paper takes
an approximated sigmoid (Daunizeau 2017); beside it are the sigmoid's own coefficients.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import covprop as cp
from covprop.activations import DECLARATIONS
from experiments import drawing, grid, truth
from experiments.options import Options
from experiments.table import Table, scientific
from tests.cases import CASES

NAME = "figure5"
STEPS, SMOKE_STEPS = 51, 5
ORDER = 4
APPROXIMATED = "Daunizeau sigmoid"
REPRESENTATIVES = {"pow": "pow(3)"}
"""Where the first case of an activation is a dull one."""
PAPER = {"gelu": "(a) GELU", APPROXIMATED: "(b) sigmoid as approximated by Daunizeau",
         "sigmoid": "(c) sigmoid, its own coefficients"}  # fmt: skip
PAPER_SCALE = (1e-7, 2e-3)
LOWEST, HIGHEST = 1e-8, 1e-2
COLUMNS = 8
"""Colours of the gallery, and its panels in a row."""


def functions() -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]]:
    """Every declared activation, and where it is not smooth."""
    chosen: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]] = {}
    for name in ("prelu", *(declaration.name for declaration in DECLARATIONS)):
        fitting = [case for case in CASES.values() if case.declaration == name]
        case = CASES[REPRESENTATIVES[name]] if name in REPRESENTATIVES else fitting[0]
        chosen[name] = case.function, case.kinks
    return {**chosen, APPROXIMATED: (torch.sigmoid, ())}


def settings(options: Options) -> dict[str, Any]:
    """The grid."""
    return {"steps": SMOKE_STEPS if options.smoke else STEPS, "means": grid.LARGEST_MEAN,
            "rho": grid.RHO, "order": ORDER}  # fmt: skip


def units(options: Options) -> list[str]:
    """An activation each."""
    return list(PAPER) if options.smoke else sorted(functions())


def measure(key: str, options: Options) -> dict[str, Any]:
    """The series' errors over the grid, and the exact method's largest."""
    steps = settings(options)["steps"]
    function, kinks = functions()[key]
    approximated = {torch.sigmoid: cp.DaunizeauSigmoid} if key == APPROXIMATED else {}
    method = cp.Series(order=ORDER, activations=approximated)
    expected = truth.covariance_map(function, kinks, grid.axis(steps), grid.RHO)
    errors = np.abs(grid.covariance(function, steps, grid.RHO, method) - expected)
    exact = grid.covariance(function, steps, grid.RHO, cp.Exact()) - expected
    return {
        **grid.summary(errors), "exact": grid.summary(exact),
        "largest covariance": float(np.abs(expected).max()), "errors": grid.packed(errors),
    }  # fmt: skip


def tables(record: dict[str, Any]) -> list[Table]:
    """Errors of every activation, beside the largest covariance."""
    rows = [
        [name, scientific(result["largest covariance"]), scientific(result["max"]),
         scientific(result["mean"]), scientific(result["exact"]["max"])]
        for name, result in record["results"].items()
    ]  # fmt: skip
    header = ["activation", "largest covariance", "order 4: maximum error",
              "order 4: mean error", "exact: maximum error"]  # fmt: skip
    return [Table("Absolute error of the covariance, ρ = 0.5", header, rows)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """The paper's maps, and a gallery of all."""
    axis = grid.axis(record["settings"]["steps"])
    results = record["results"]
    maps = {
        name: grid.square(np.array(result["errors"]), len(axis)) for name, result in results.items()
    }
    figure, (axes,) = drawing.panels(1, len(PAPER), width=3.7, height=3.5)
    for panel, (name, title) in zip(axes, PAPER.items(), strict=True):
        mesh = drawing.error_map(panel, axis, maps[name], *PAPER_SCALE)
        drawing.means(panel, f"{title}:\nat most {results[name]['max']:.1e}")
    figure.colorbar(mesh, ax=list(axes), label="absolute error", extend="min", shrink=0.9)
    drawn = {NAME: figure}
    if set(results) > set(PAPER):
        drawn[f"{NAME}-activations"] = gallery(axis, maps, results)
    return drawn


def gallery(axis: np.ndarray, maps: dict[str, np.ndarray], results: dict[str, Any]) -> Figure:
    """A small map for each activation, on one scale."""
    rows = -(-len(maps) // COLUMNS)
    figure, axes = drawing.panels(rows, COLUMNS, width=1.5, height=1.7)
    for panel in axes.flat[len(maps) :]:
        panel.set_axis_off()
    for panel, (name, errors) in zip(axes.flat, maps.items(), strict=False):
        mesh = drawing.error_map(panel, axis, errors, LOWEST, HIGHEST)
        title = f"{name}\n{results[name]['max']:.1e}"
        panel.set_title(title, fontsize=drawing.FONT - 2)
        panel.set(aspect="equal", xticks=[-5, 0, 5], yticks=[-5, 0, 5])
        panel.tick_params(labelsize=drawing.FONT - 3)
    figure.supxlabel("mean $\\mu_1$", fontsize=drawing.FONT)
    figure.supylabel("mean $\\mu_2$", fontsize=drawing.FONT)
    figure.suptitle("Absolute error of the fourth-order covariance, $\\sigma=1$, $\\rho=0.5$; "
                    "below each name its maximum", fontsize=drawing.FONT + 1)  # fmt: skip
    figure.colorbar(mesh, ax=axes, label="absolute error", extend="both", shrink=0.5)
    return figure
