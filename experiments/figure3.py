"""Figure 3: the error of ReLU's covariance by the order of the series, and of its rivals.

Maximum and mean absolute error over means in [-5, 5]^2, unit variances, against numerical
integration; the paper has correlation 0.5.
"""

from typing import Any

import torch
from matplotlib.figure import Figure

import covprop as cp
from experiments import drawing, grid, truth
from experiments.options import Options
from experiments.table import Table, scientific

NAME = "figure3"
CORRELATIONS = (0.5, 0.9, 0.99, 0.999)
ORDERS = range(1, 11)
STEPS, SMOKE_STEPS = 201, 11
PUBLISHED = {"order 1": 2.034e-2, "order 4": 3.740e-4, "Wu et al.": 1.160e-1}
"""Maximum errors at rho = 0.5 as the paper prints them; docs/errata.md on the last two."""
STYLES = {
    0.5: (drawing.BLUE, "o"), 0.9: (drawing.GREEN, "s"),
    0.99: (drawing.ORANGE, "^"), 0.999: (drawing.VERMILION, "D"),
}  # fmt: skip


def settings(options: Options) -> dict[str, Any]:
    """The grid."""
    steps = SMOKE_STEPS if options.smoke else STEPS
    return {"steps": steps, "means": grid.LARGEST_MEAN, "published": PUBLISHED}


def units(_: Options) -> list[str]:
    """A correlation each."""
    return [str(rho) for rho in CORRELATIONS]


def measure(key: str, options: Options) -> dict[str, Any]:
    """Every order, Wu et al. and the exact method at one correlation."""
    steps, rho = settings(options)["steps"], float(key)
    expected = grid.square(truth.relu_covariance(*grid.means(steps).T, rho), steps)
    methods = {f"order {order}": cp.Series(order=order) for order in ORDERS}
    methods |= {"Wu et al.": cp.Wu2019(), "exact": cp.Exact()}
    return {
        name: grid.summary(grid.covariance(torch.relu, steps, rho, method) - expected)
        for name, method in methods.items()
    }


def tables(record: dict[str, Any]) -> list[Table]:
    """Maximum and mean errors, a column for each correlation."""
    results = record["results"]
    rows = list(next(iter(results.values())))
    published = {name: scientific(value) for name, value in PUBLISHED.items()}
    return [
        Table(
            f"{title} absolute error",
            [
                "",
                *(f"ρ = {rho}" for rho in results),
                *(["paper, ρ = 0.5"] if kind == "max" else []),
            ],
            [
                [name, *(scientific(result[name][kind]) for result in results.values())]
                + ([published.get(name, "")] if kind == "max" else [])
                for name in rows
            ],
        )
        for kind, title in (("max", "Maximum"), ("mean", "Mean"))
    ]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Error against order, the rivals as horizontal lines."""
    figure, (axes,) = drawing.panels(1, 2, width=4.2, height=4.2)
    for panel, kind, title in zip(axes, ("max", "mean"), ("maximum", "mean"), strict=True):
        for key, result in record["results"].items():
            colour, marker = STYLES[float(key)]
            errors = [result[f"order {order}"][kind] for order in ORDERS]
            panel.semilogy(ORDERS, errors, marker=marker, color=colour, markersize=4,
                           label=f"series, $\\rho={key}$")  # fmt: skip
            panel.axhline(result["Wu et al."][kind], color=colour, linestyle="--", linewidth=1)
        panel.set(xlabel="order of the series", ylabel=f"{title} absolute error",
                  xticks=list(ORDERS))  # fmt: skip
        panel.set_title(f"({'ab'[kind == 'mean']}) {title} error, ReLU", fontsize=drawing.FONT)
        panel.grid(alpha=0.3)
    for name, value in PUBLISHED.items():
        order = int(name.split()[1]) if name.startswith("order") else ORDERS[-1]
        axes[0].plot(order, value, "x", color=drawing.BLACK, markersize=7)
    axes[0].plot([], [], "x", color=drawing.BLACK, label="printed in the paper, $\\rho=0.5$")
    axes[0].annotate("Wu et al. (paper)", (ORDERS[-1], PUBLISHED["Wu et al."]), (-8, -3),
                     textcoords="offset points", ha="right", fontsize=drawing.FONT - 2)  # fmt: skip
    worst = max(result["exact"]["max"] for result in record["results"].values())
    axes[0].plot([], [], "--", color="0.4", label="Wu et al., same colours")
    axes[0].plot([], [], " ", label=f"exact: at most {worst:.0e}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=drawing.FONT - 1)  # fmt: skip
    return {NAME: figure}
