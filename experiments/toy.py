"""`toy`: one dimension, noise that grows, a gap in the data; what each mode makes of it.

t = sin(3x) + noise of deviation 0.05 + 0.25 (x + 1)_+, x uniform over [-1.5, -0.5] and [0.3, 1.5].
Two hidden layers of 50 units, the ELBO with the divergence at a tenth, 300 epochs, all modes from
the same weights. The variance of a prediction is split into noise (aleatoric) and weights
(epistemic).
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from covprop import bayes
from experiments import drawing, regression
from experiments.options import Options
from experiments.randomness import seed_of
from experiments.regression import DIAGONAL, EXACT, MCVI, WU, Recipe
from experiments.table import Table
from experiments.uci import Members, Rows

NAME = "toy"
MODES = (EXACT, WU, DIAGONAL, MCVI)
ROWS, HIDDEN, EPOCHS, RATE, KL = 120, (50, 50), 300, 5e-3, 0.1
PARTS = ((-1.5, -0.5), (0.3, 1.5))
"""Where there are data."""
GRID = np.linspace(-3, 3, 121)
COLUMNS = 2
INTERVAL = 1.96
"""Deviations of a 95 % interval."""


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe."""
    return {"seed": options.seed, "smoke": options.smoke, "rows": ROWS, "hidden": HIDDEN,
            "epochs": EPOCHS, "rate": RATE, "KL temperature": KL}  # fmt: skip


def units(options: Options) -> list[str]:
    """The modes."""
    del options
    return list(MODES)


def noise(x: Tensor) -> Tensor:
    """The deviation of the target."""
    return 0.05 + 0.25 * (x + 1).clamp(min=0)


def drawn(seed: int, part: str, count: int) -> Rows:
    """Data, a member in front."""
    generator = torch.Generator().manual_seed(seed_of(seed, NAME, part))
    low, high = torch.tensor(PARTS)[torch.arange(count) % len(PARTS)].unbind(-1)
    x = low + (high - low) * torch.rand(count, generator=generator)
    y = torch.sin(3 * x) + noise(x) * torch.randn(count, generator=generator)
    return Rows(x[None, :, None], y[None])


def measure(key: str, options: Options) -> dict[str, Any]:
    """Train, then predict over the grid."""
    hidden, epochs = ((5, 5), 2) if options.smoke else (HIDDEN, EPOCHS)
    data = Members(
        drawn(options.seed, "train", ROWS), drawn(options.seed, "test", 10 * ROWS), torch.ones(1)
    )
    recipe = Recipe(hidden, epochs, decay=0.0, kl_temperature=KL)
    trained = regression.train(data, recipe, key, RATE, (options.seed, NAME))
    grid = torch.from_numpy(GRID).float()[None, :, None]
    method = regression.MODES[key](torch.Generator().manual_seed(seed_of(options.seed, "grid")))
    if isinstance(method, bayes.LocalReparametrisation):
        method = bayes.LocalReparametrisation(regression.DRAWS, method.generator)
    prediction = bayes.predict_target(trained.model, regression.LIKELIHOOD, grid, method)
    parts = {name: getattr(prediction, name) for name in ("mean", "aleatoric", "epistemic")}
    scores = ("density", "rmse", "coverage")
    return {
        **{name: regression.rounded(part) for name, part in parts.items()},
        **{score: regression.rounded(trained.scores[score])[0] for score in scores},
        "milliseconds of a step": trained.step,
        "data": [regression.rounded(part) for part in data.train],
    }


def tables(record: dict[str, Any]) -> list[Table]:
    """Scores on new data of the same kind, and how much the deviation grows away from them."""
    inside, outside = (int(np.abs(GRID - place).argmin()) for place in (1.0, -3.0))
    rows = [
        [mode, f"{each['density']:.3f}", f"{each['rmse']:.3f}", f"{each['coverage']:.3f}",
         *(f"{each['epistemic'][place] ** 0.5:.3f}" for place in (inside, outside)),
         f"{each['milliseconds of a step']:.1f}"]
        for mode, each in record["results"].items()
    ]  # fmt: skip
    header = [
        "",
        "density",
        "RMSE",
        "within 95 %",
        "epistemic deviation at 1",
        "at -3",
        "ms of a step",
    ]
    return [Table("New data of the same kind", header, rows)]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Means, noise, and all of the variance, with the data."""
    results = record["results"]
    rows = -(-len(results) // COLUMNS)
    figure, axes = drawing.panels(rows, COLUMNS, width=4.4, height=2.8)
    for panel, (mode, each) in zip(axes.flat, results.items(), strict=False):
        mean, aleatoric, epistemic = (
            np.array(each[part]) for part in ("mean", "aleatoric", "epistemic")
        )
        for variance, colour, label in (
            (aleatoric + epistemic, drawing.SKY, "95 % interval: noise and weights"),
            (aleatoric, drawing.YELLOW, "95 % interval: noise alone"),
        ):
            width = INTERVAL * np.sqrt(variance)
            panel.fill_between(GRID, mean - width, mean + width, color=colour, linewidth=0,
                               label=label)  # fmt: skip
        panel.plot(GRID, mean, color=drawing.BLACK, label="mean")
        panel.plot(*each["data"], ".", color=drawing.VERMILION, markersize=3, label="data")
        panel.set(ylim=(-5, 5), xlabel="x", ylabel="t")
        panel.set_title(mode, fontsize=drawing.FONT)
        panel.label_outer()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False, fontsize=drawing.FONT)  # fmt: skip
    return {NAME: figure}
