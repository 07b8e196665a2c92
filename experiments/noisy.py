"""`noisy-inputs`: features with a noise of known size, in training and after.

Standardised features of small UCI sets get Gaussian noise; the network is told its size and carries
it together with the uncertainty of its weights, or (`ignored`) takes what it sees for the truth.
With noisy inputs, units are correlated from the first layer on. One hidden layer of 50 units, five
splits together, 50 epochs of the ELBO at one learning rate. Density log E[p(t | f)] of test rows.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments import drawing, regression, uci
from experiments.options import Options
from experiments.randomness import seed_of
from experiments.regression import DIAGONAL, EXACT, MCVI, SERIES, WU, Recipe
from experiments.table import Table
from experiments.uci import Members, Rows

NAME = "noisy-inputs"
SETS, NOISES, SPLITS = ("yacht", "energy"), (0.1, 0.3, 1.0), 5
IGNORED = "ignored"
MODES = (EXACT, WU, DIAGONAL, MCVI, IGNORED)
JUDGED = (EXACT, SERIES, WU, DIAGONAL)
WIDTH, EPOCHS, RATE = 50, 50, 5e-3
COLOURS = (drawing.BLACK, drawing.GREEN, drawing.ORANGE, drawing.VERMILION, drawing.PURPLE)


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe."""
    return {"seed": options.seed, "smoke": options.smoke, "width": WIDTH, "epochs": EPOCHS,
            "rate": RATE, "splits": SPLITS, "batch": 10, "prior": "empirical Bayes"}  # fmt: skip


def units(options: Options) -> list[str]:
    """Set, deviation of the noise, mode."""
    chosen = options.datasets or (SETS[:1] if options.smoke else SETS)
    return [f"{name}/{noise}/{mode}" for name in chosen for noise in NOISES for mode in MODES]


def corrupted(data: Members, noise: float, seed: tuple[object, ...]) -> Members:
    """Noise on all features, the same for every mode."""
    generator = torch.Generator().manual_seed(seed_of("noise", *seed))
    train, test = (
        Rows(rows.x + noise * torch.randn(rows.x.shape, generator=generator), rows.y)
        for rows in (data.train, data.test)
    )
    return Members(train, test, data.scale)


def measure(key: str, options: Options) -> dict[str, Any]:
    """Train and score; of the exactly trained networks also how good variances are."""
    name, noise, mode = key.split("/")
    width, epochs = (4, 1) if options.smoke else (WIDTH, EPOCHS)
    seed = (options.seed, NAME, name, noise)
    data = uci.standard(name, options.data, 2 if options.smoke else None).first(SPLITS)
    data = corrupted(data, float(noise), seed)
    lift = regression.known if mode == IGNORED else regression.noisy(float(noise))
    way = EXACT if mode == IGNORED else mode
    trained = regression.train(data, Recipe((width,), epochs), way, RATE, seed, lift)
    found: dict[str, Any] = {
        score: regression.rounded(trained.scores[score])
        for score in ("density", "rmse", "coverage")
    }
    if mode == EXACT:
        judge = torch.Generator().manual_seed(seed_of("judge", *seed))
        found["variance errors"] = regression.variance_errors(
            trained.model, data.test, JUDGED, judge, lift
        )
    return {**found, "seconds": trained.seconds, "milliseconds of a step": trained.step}


def grouped(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by set and noise."""
    groups: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
    for key, result in record["results"].items():
        name, noise, mode = key.split("/")
        groups[name, noise][mode] = result
    return groups


def tables(record: dict[str, Any]) -> list[Table]:
    """Densities, coverage, errors of variances."""
    groups = grouped(record)
    labels = [f"{name}, noise {noise}" for name, noise in groups]
    pairs = list(zip(labels, groups.values(), strict=True))
    density = [
        [one, *(regression.spread(each[mode]["density"]) if mode in each else "" for mode in MODES)]
        for one, each in pairs
    ]
    coverage = [
        [one, *(f"{np.mean(each[mode]['coverage']):.3f}" if mode in each else "" for mode in MODES)]
        for one, each in pairs
    ]
    judged = [
        [one, *(f"{each[EXACT]['variance errors'][mode]:.4f}" for mode in (*JUDGED, "draws"))]
        for one, each in pairs if EXACT in each
    ]  # fmt: skip
    return [
        Table("Density", ["", *MODES], density,
              "Mean ± standard error over splits, in nats; higher is better."),
        Table("Within 95 % intervals", ["", *MODES], coverage),
        Table("Variances", ["", *JUDGED, "draws"], judged,
              "Root mean square relative error of the variance of the mean output, on the networks "
              "that were trained exactly; the last column is the error of the draws."),
    ]  # fmt: skip


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Densities over the noise, a panel for each set."""
    groups = grouped(record)
    names = list(dict.fromkeys(name for name, _ in groups))
    figure, axes = drawing.panels(1, len(names))
    for panel, name in zip(axes[0], names, strict=True):
        for mode, colour in zip(MODES, COLOURS, strict=True):
            points = [
                (float(noise), np.mean(each[mode]["density"]))
                for (one, noise), each in groups.items() if one == name and mode in each
            ]  # fmt: skip
            if points:
                panel.plot(*np.transpose(points), "o-", color=colour, label=mode, markersize=4)
        panel.set(xscale="log", xlabel="noise of the features", title=name)
    axes[0, 0].set_ylabel("density of test rows, nats")
    axes[0, 0].legend(frameon=False, fontsize=drawing.FONT)
    return {NAME: figure}
