"""`uci-deep`: two and three hidden layers, where covariances off the diagonal count.

Bayesian networks of 50 units in each layer for small UCI sets, five splits together, 50 epochs of
the ELBO at one learning rate: nothing but the way of inference differs. From the second hidden
layer on, units are correlated. Density log E[p(t | f)] of the test rows after the last epoch, by
the mode's own moments or draws (1000), and by draws for all.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments import drawing, regression, uci
from experiments.options import Options
from experiments.randomness import seed_of
from experiments.regression import DIAGONAL, EXACT, MCVI, MCVI_100, MCVI_1000, SERIES, WU, Recipe
from experiments.table import Table

NAME = "uci-deep"
SETS, DEPTHS, SPLITS = ("yacht", "boston", "energy", "concrete"), (2, 3), 5
MODES = (EXACT, WU, DIAGONAL, MCVI, MCVI_100, MCVI_1000)
JUDGED = (EXACT, SERIES, WU, DIAGONAL)
"""Whose variances are compared with those of draws, on the networks that were trained exactly."""
WIDTH, EPOCHS, RATE = 50, 50, 5e-3


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe."""
    return {"seed": options.seed, "smoke": options.smoke, "width": WIDTH, "epochs": EPOCHS,
            "rate": RATE, "splits": SPLITS, "batch": 10, "prior": "empirical Bayes"}  # fmt: skip


def units(options: Options) -> list[str]:
    """Set, depth, mode."""
    chosen = options.datasets or (SETS[:1] if options.smoke else SETS)
    return [f"{name}/{depth}/{mode}" for name in chosen for depth in DEPTHS for mode in MODES]


def measure(key: str, options: Options) -> dict[str, Any]:
    """Train and score; of the exactly trained networks also how good variances are."""
    name, depth, mode = key.split("/")
    width, epochs = (4, 1) if options.smoke else (WIDTH, EPOCHS)
    data = uci.standard(name, options.data, 2 if options.smoke else None).first(SPLITS)
    seed = (options.seed, NAME, name, depth)
    trained = regression.train(data, Recipe((width,) * int(depth), epochs), mode, RATE, seed)
    judge = torch.Generator().manual_seed(seed_of("judge", *seed))
    by_draws = regression.MODES[MCVI](judge)
    rounded = regression.rounded
    return {
        **{score: rounded(trained.scores[score]) for score in ("density", "rmse", "coverage")},
        "density by draws": rounded(
            regression.final_scores(trained.model, data.test, by_draws, data.scale)["density"]
        ),
        "seconds": trained.seconds, "milliseconds of a step": trained.step,
        **({"variance errors": regression.variance_errors(
            trained.model, data.test, JUDGED, judge
        )} if mode == EXACT else {}),
    }  # fmt: skip


def tables(record: dict[str, Any]) -> list[Table]:
    """Densities, then errors of variances, then time."""
    groups = regression.grouped(record)
    label = [f"{name}, {depth} hidden layers" for name, depth in groups]
    scores = {"density by draws": "Density, by draws", "density": "Density, by the mode itself"}
    found = [
        Table(title, ["", *MODES], [
            [one, *(regression.spread(by_mode[mode][score]) if mode in by_mode else ""
                    for mode in MODES)]
            for one, by_mode in zip(label, groups.values(), strict=True)
        ], "Mean ± standard error over splits, in nats; higher is better.")
        for score, title in scores.items()
    ]  # fmt: skip
    judged = [
        [one, *(f"{by_mode[EXACT]['variance errors'][mode]:.4f}" for mode in (*JUDGED, "draws"))]
        for one, by_mode in zip(label, groups.values(), strict=True) if EXACT in by_mode
    ]  # fmt: skip
    note = (
        "Root mean square relative error of the variance of the mean output, on the networks that "
        "were trained exactly; the last column is the error of the draws it is compared with."
    )
    found.append(Table("Variances", ["", *JUDGED, "draws"], judged, note))
    times = [
        [one, *(f"{by_mode[mode]['milliseconds of a step']:.1f}" if mode in by_mode else ""
                for mode in MODES)]
        for one, by_mode in zip(label, groups.values(), strict=True)
    ]  # fmt: skip
    return [*found, Table("Milliseconds of a step, all splits", ["", *MODES], times)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Densities by draws, less those of the exact mode."""
    groups = {key: each for key, each in regression.grouped(record).items() if EXACT in each}
    figure, axes = drawing.panels(1, 1, width=6.4, height=4.6)
    drawing.bands(axes[0, 0], len(groups))
    panel, colours = axes[0, 0], (drawing.GREEN, drawing.ORANGE, drawing.VERMILION, drawing.PURPLE,
                                  drawing.BLUE)  # fmt: skip
    for shift, (mode, colour) in enumerate(zip(MODES[1:], colours, strict=True)):
        points = []
        for place, by_mode in enumerate(groups.values()):
            if mode in by_mode:
                score = "density by draws"
                less = np.subtract(by_mode[mode][score], by_mode[EXACT][score])
                points.append((place + 0.3 - 0.15 * shift, less.mean(),
                               regression.standard_error(less)))  # fmt: skip
        if points:
            place, value, error = np.transpose(points)
            panel.errorbar(value, place, xerr=error, fmt="o", color=colour, markersize=4,
                           capsize=2, label=mode)  # fmt: skip
    panel.axvline(0, color="0.5", linewidth=0.8)
    panel.set_yticks(range(len(groups)), [f"{name}, {depth} layers" for name, depth in groups])
    panel.set_xlabel("log density of test rows less that of the exact mode, nats")
    panel.set_ylim(-0.5, len(groups) - 0.5)
    panel.legend(frameon=False, fontsize=drawing.FONT)
    return {NAME: figure}
