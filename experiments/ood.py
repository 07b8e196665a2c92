"""`ood`: digits that a network knows, against clothes and rotated digits that it does not.

784-100-100-10 ReLU networks, trained on MNIST for 5 epochs of batches of 100, deterministic and
Bayesian (He's prior, the ELBO). Scores that are higher for the unknown: the entropy of the
predicted class, and the mutual information of class and weights. AUROC against Fashion-MNIST;
rotated digits from 0 to 180 degrees.
"""

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.bayes import metrics
from experiments import drawing, mnist, regression
from experiments.options import Options
from experiments.randomness import seed_of, seeded
from experiments.regression import DIAGONAL, EXACT, MCVI
from experiments.table import Table

NAME = "ood"
PLAIN = "deterministic"
MODES = (PLAIN, EXACT, DIAGONAL, MCVI)
WIDTH, EPOCHS, BATCH, RATE, JUDGED = 100, 5, 100, 1e-3, 5000
SMOKE = {"width": 5, "images": 200, "judged": 100}
ANGLES = (0, 30, 60, 90, 120, 150, 180)
LIKELIHOOD = bayes.Categorical()
PIXELS, CLASSES, DRAWS = 28 * 28, 10, 100
COLOURS = (drawing.PURPLE, drawing.BLACK, drawing.ORANGE, drawing.VERMILION)
MARKS = ("s-", "o-", "D-", "v--")


def settings(options: Options) -> dict[str, Any]:
    """Seed and recipe."""
    return {"seed": options.seed, "smoke": options.smoke, "width": WIDTH, "epochs": EPOCHS,
            "batch": BATCH, "rate": RATE, "test images": JUDGED, "prior": "He"}  # fmt: skip


def units(options: Options) -> list[str]:
    """The modes."""
    del options
    return list(MODES)


def network(mode: str, width: int) -> nn.Sequential:
    """The same network with and without random weights."""
    layer = nn.Linear if mode == PLAIN else bayes.BayesLinear
    return nn.Sequential(
        nn.Flatten(), layer(PIXELS, width), nn.ReLU(), layer(width, width), nn.ReLU(),
        layer(width, CLASSES),
    )  # fmt: skip


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Turned about their middle, background around."""
    turn = math.radians(degrees)
    matrix = torch.tensor(
        [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0]]
    )
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    background = -mnist.MEAN / mnist.STDDEV
    return F.grid_sample(images - background, grid, align_corners=False) + background


def measure(key: str, options: Options) -> dict[str, Any]:
    """Train on digits; predict digits, clothes and rotated digits."""
    digits = mnist.load("train", options.data)
    images, labels, width, judged = digits.images, digits.labels, WIDTH, JUDGED
    if options.smoke:
        width, judged = SMOKE["width"], SMOKE["judged"]
        images, labels = images[: SMOKE["images"]], labels[: SMOKE["images"]]
    generators = [
        torch.Generator().manual_seed(seed_of(options.seed, NAME, part)) for part in ("o", "d", "t")
    ]
    method = cp.Exact() if key == PLAIN else regression.MODES[key](generators[1])
    with seeded(options.seed, NAME):
        model = network(key, width)
    elbo = bayes.ELBO(LIKELIHOOD, data_size=len(images))
    started = time.perf_counter()
    with torch.enable_grad():
        bayes.fit(
            model, elbo, images, labels, method=method, epochs=1 if options.smoke else EPOCHS,
            batch_size=BATCH, learning_rate=RATE, generator=generators[0],
        )  # fmt: skip
    seconds = time.perf_counter() - started
    if isinstance(method, bayes.LocalReparametrisation):
        method = bayes.LocalReparametrisation(DRAWS, generators[2])
    test = mnist.load("t10k", options.data)
    known, answers = test.images[:judged], test.labels[:judged]
    clothes = mnist.load("t10k", options.data, mnist.FASHION).images[:judged]
    inside, outside = (bayes.predict_target(model, LIKELIHOOD, x, method) for x in (known, clothes))
    density = bayes.log_predictive(model, LIKELIHOOD, known, answers, method).mean()
    turned = [
        bayes.predict_target(model, LIKELIHOOD, rotated(known, angle), method) for angle in ANGLES
    ]
    entropies = [metrics.predictive_entropy(each.mean) for each in (inside, outside)]
    information = [each.mutual_information for each in (inside, outside)]
    return {
        "accuracy": _number(metrics.accuracy(inside.mean, answers)),
        "density": _number(density),
        "calibration error": _number(metrics.expected_calibration_error(inside.mean, answers)),
        "AUROC of the entropy": _number(metrics.auroc(entropies[1], entropies[0])),
        "AUROC of the information": _number(metrics.auroc(information[1], information[0])),
        "rotated: accuracy": [_number(metrics.accuracy(each.mean, answers)) for each in turned],
        "rotated: entropy": [
            _number(metrics.predictive_entropy(each.mean).mean()) for each in turned
        ],
        "rotated: density": [
            _number(each.mean.gather(-1, answers[:, None]).clamp(min=1e-30).log().mean())
            for each in turned
        ],
        "seconds": round(seconds, 1),
    }


def _number(value: Tensor) -> float:
    return round(float(value), regression.DIGITS)


def tables(record: dict[str, Any]) -> list[Table]:
    """Digits, clothes, then rotated digits."""
    scores = ("accuracy", "density", "calibration error", "AUROC of the entropy",
              "AUROC of the information", "seconds")  # fmt: skip
    found = [
        [mode, *("" if mode == PLAIN and score.endswith("information") else f"{each[score]:.4g}"
                 for score in scores)]
        for mode, each in record["results"].items()
    ]  # fmt: skip
    turned = [
        [f"{mode}: {score}", *(f"{value:.3f}" for value in each[f"rotated: {score}"])]
        for score in ("accuracy", "entropy", "density") for mode, each in record["results"].items()
    ]  # fmt: skip
    return [
        Table("Digits and clothes", ["", *scores], found),
        Table("Rotated digits", ["", *(f"{angle}°" for angle in ANGLES)], turned),
    ]


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Accuracy, entropy and density over the angle."""
    units = {"accuracy": "accuracy", "entropy": "entropy, nats", "density": "log density, nats"}
    figure, axes = drawing.panels(1, len(units), width=3.0, height=3.0)
    styles = dict(zip(MODES, zip(COLOURS, MARKS, strict=True), strict=True))
    for panel, (score, label) in zip(axes[0], units.items(), strict=True):
        for mode, each in record["results"].items():
            colour, mark = styles[mode]
            panel.plot(ANGLES, each[f"rotated: {score}"], mark, color=colour, label=mode,
                       markersize=4)  # fmt: skip
        panel.set(xlabel="rotation, degrees", ylabel=label, xticks=ANGLES[::2])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False,
                  fontsize=drawing.FONT)  # fmt: skip
    return {NAME: figure}
