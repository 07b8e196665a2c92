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
LOWEST = 1e-17
"""An error that is drawn in place of a smaller one."""
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
    """The paper's maps, and the largest errors of all."""
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
        drawn[f"{NAME}-activations"] = ranking(results)
    return drawn


def ranking(results: dict[str, Any]) -> Figure:
    """The largest error of each activation, as a part of its largest covariance, by size."""
    parts = {
        name: (result["max"] / result["largest covariance"],
               result["exact"]["max"] / result["largest covariance"])
        for name, result in results.items()
    }  # fmt: skip
    names = sorted(parts, key=lambda name: parts[name])
    figure, ((panel,),) = drawing.panels(1, 1, width=7.5, height=8.0)
    for name, place in zip(names, range(len(names)), strict=True):
        fourth, exact = (max(part, LOWEST) for part in parts[name])
        panel.plot([exact, fourth], [place, place], color="0.8", linewidth=1, zorder=0)
        panel.plot(fourth, place, "o", color=drawing.ORANGE, label=place == 0 and "order 4")
        panel.plot(exact, place, "s", color=drawing.BLUE, label=place == 0 and "exact")
    panel.set_yticks(range(len(names)), names, fontsize=drawing.FONT)
    panel.set(xscale="log", ylim=(-0.7, len(names) - 0.3),
              xlabel="largest error of the covariance / largest covariance")  # fmt: skip
    panel.grid(axis="x", color="0.9")
    handles, labels = panel.get_legend_handles_labels()
    shown = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label]
    panel.legend(*zip(*shown[:2], strict=True), loc="lower right", fontsize=drawing.FONT)
    panel.set_title("$\\sigma=1$, $\\rho=0.5$, means within ±5", fontsize=drawing.FONT)
    return figure
