"""`noisy-inputs`: features with a noise of known size, in training and after, or only after.

Standardised features of small UCI sets get Gaussian noise; the network is told its size and carries
it together with the uncertainty of its weights, or (`ignored`) takes what it sees for the truth.
With noisy inputs, units are correlated from the first layer on. One hidden layer of 50 units, five
splits together, 50 epochs of the ELBO at one learning rate. Density log E[p(t | f)] of test rows.

`clean` is a sensor that became noisy: one network, trained exactly on the features as they are, for
test rows with noise, by every way of propagation.
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
from experiments.uci import Members, Rows

NAME = "noisy-inputs"
SETS, NOISES, SPLITS = ("yacht", "energy"), (0.1, 0.3, 1.0), 5
IGNORED, CLEAN = "ignored", "clean"
MODES = (EXACT, WU, DIAGONAL, MCVI, IGNORED)
JUDGED = (EXACT, SERIES, WU, DIAGONAL)
WAYS = (EXACT, WU, DIAGONAL, MCVI, MCVI_100, MCVI_1000, IGNORED)
"""Of predicting with a network that was trained without noise."""
WIDTH, EPOCHS, RATE = 50, 50, 5e-3
COLOURS = (drawing.BLACK, drawing.GREEN, drawing.ORANGE, drawing.VERMILION, drawing.PURPLE)
MARKS = ("o-", "x--", "D-", "v-", "s-")
"""What two modes share is seen of both: the second is a cross and dashes."""


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe."""
    return {"seed": options.seed, "smoke": options.smoke, "width": WIDTH, "epochs": EPOCHS,
            "rate": RATE, "splits": SPLITS, "batch": 10, "prior": "empirical Bayes"}  # fmt: skip


def units(options: Options) -> list[str]:
    """Set, deviation of the noise, mode of training."""
    chosen = options.datasets or (SETS[:1] if options.smoke else SETS)
    modes = (*MODES, CLEAN)
    return [f"{name}/{noise}/{mode}" for name in chosen for noise in NOISES for mode in modes]


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
    clean = uci.standard(name, options.data, 2 if options.smoke else None).first(SPLITS)
    data = corrupted(clean, float(noise), seed)
    recipe, told = Recipe((width,), epochs), regression.noisy(float(noise))
    if mode == CLEAN:
        return _sensor(clean, data.test, recipe, seed, told)
    lift = regression.known if mode == IGNORED else told
    way = EXACT if mode == IGNORED else mode
    trained = regression.train(data, recipe, way, RATE, seed, lift)
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


def _sensor(
    clean: Members, test: Rows, recipe: Recipe, seed: tuple[object, ...], told: regression.Lift
) -> dict[str, Any]:
    """Scores of test rows with noise, by every way, of networks that were trained without."""
    trained = regression.train(clean, recipe, EXACT, RATE, seed)
    found: dict[str, Any] = {}
    for way in WAYS:
        generator = torch.Generator().manual_seed(seed_of("draws", *seed))
        method = regression.MODES[EXACT if way == IGNORED else way](generator)
        draws = getattr(method, "samples", regression.DRAWS)
        scores = regression.final_scores(
            trained.model, test, method, clean.scale,
            regression.known if way == IGNORED else told, draws,
        )  # fmt: skip
        found[way] = {score: regression.rounded(value) for score, value in scores.items()}
    return {"ways": found, "seconds": trained.seconds}


def tables(record: dict[str, Any]) -> list[Table]:
    """Densities, coverage, errors of variances."""
    groups = regression.grouped(record)
    labels = [f"{name}, noise {noise}" for name, noise in groups]
    pairs = list(zip(labels, groups.values(), strict=True))
    cells = _density, _coverage
    density, coverage = (
        [[one, *(cell(each.get(mode)) for mode in MODES)] for one, each in pairs] for cell in cells
    )
    sensor = [
        [f"{one}: {title}", *(cell(each[CLEAN]["ways"][way]) for way in WAYS)]
        for one, each in pairs if CLEAN in each
        for title, cell in zip(("density", "within 95 %"), cells, strict=True)
    ]  # fmt: skip
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
        Table("Trained without noise", ["", *WAYS], sensor,
              "One network for all, trained exactly on clean features; test rows with noise."),
    ]  # fmt: skip


def _density(result: dict[str, Any] | None) -> str:
    return regression.spread(result["density"]) if result else ""


def _coverage(result: dict[str, Any] | None) -> str:
    return f"{np.mean(result['coverage']):.3f}" if result else ""


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Densities over the noise: a panel for each set, above trained with noise, below without."""
    groups = regression.grouped(record)
    names = list(dict.fromkeys(name for name, _ in groups))
    figure, axes = drawing.panels(2, len(names))
    for column, name in enumerate(names):
        of_set = {float(noise): each for (one, noise), each in groups.items() if one == name}
        rows = (of_set, {n: each[CLEAN]["ways"] for n, each in of_set.items() if CLEAN in each})
        for panel, by_noise in zip(axes[:, column], rows, strict=True):
            for mode, colour, mark in zip(MODES, COLOURS, MARKS, strict=True):
                points = [
                    (noise, np.mean(each[mode]["density"]))
                    for noise, each in by_noise.items() if mode in each
                ]  # fmt: skip
                if points:
                    panel.plot(*np.transpose(points), mark, color=colour, label=mode, markersize=5)
            panel.set(xscale="log", xlabel="standard deviation of the features' noise")
            panel.set_xticks(list(by_noise), [f"{noise:g}" for noise in by_noise], minor=False)
            panel.set_xticks([], minor=True)
        axes[0, column].set_title(f"{name}, trained with noise", fontsize=drawing.FONT)
        axes[1, column].set_title(f"{name}, trained without", fontsize=drawing.FONT)
    for panel in axes[:, 0]:
        panel.set_ylabel("log density of test rows, nats")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False,
                  fontsize=drawing.FONT)  # fmt: skip
    return {NAME: figure}
