"""`penultimate`: a classifier's head from features that are drawn, after Seo et al. (2021).

A network learns scikit-learn's digits. Of each class only the mean and covariance of its training
images are used afterwards: `cp.trace` carries that Gaussian to the last hidden layer, features are
drawn from what it finds there, and a new head learns them, either by the class they were drawn from
or by the answers of the network's own head to them (distillation). Beside it heads that learn the
features of the training images themselves, Gaussians with the moments of those, and images that are
drawn and go through the network. Seo et al. take a distribution that the weights of the head imply.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from experiments import drawing
from experiments.corpus_networks import by_rows, layers, minimise, table
from experiments.options import Options
from experiments.randomness import seed_of, seeded
from experiments.table import Table

NAME = "penultimate"
SEEDS, SMOKE_SEEDS = 10, 1
HIDDEN, CLASSES = (50, 50, 50), 10
LAYER, FEATURES = "4", "5"
"""The last hidden layer before its ReLU and after it."""
TEST = 4
"""One in so many images tests."""
RIDGE = 1e-3
"""Added to the variance of every pixel: some are the same in all images of a class."""
DRAWS, STEPS, ROWS, SMOKE_STEPS = 500, 1500, 128, 60
"""Features of each class; steps of the network and of heads, and rows of each."""

IMAGES, MOMENTS, DRAWN = "features of images", "their moments", "images drawn"
PROPAGATED, RECTIFIED, DIAGONAL = (
    "`trace`, features", "`trace`, before ReLU", "`trace`, variances alone",
)  # fmt: skip
SOURCES = (IMAGES, DRAWN, MOMENTS, RECTIFIED, PROPAGATED, DIAGONAL)
LABELS, DISTILLED = "by classes", "by the network's answers"


def settings(options: Options) -> dict[str, Any]:
    """What results depend on."""
    return {
        "seed": options.seed, "smoke": options.smoke, "hidden": HIDDEN, "draws": DRAWS,
        "steps": SMOKE_STEPS if options.smoke else STEPS, "ridge": RIDGE,
    }  # fmt: skip


def units(options: Options) -> list[str]:
    """Networks, each with its own test images."""
    count = SMOKE_SEEDS if options.smoke else options.instances or SEEDS
    return [str(index) for index in range(count)]


def measure(key: str, options: Options) -> dict[str, Any]:
    """The network's accuracy on test images, and that of the heads."""
    steps = SMOKE_STEPS if options.smoke else STEPS
    with seeded(NAME, options.seed, key), torch.enable_grad():
        images, labels = table("digits")
        order = torch.randperm(len(images))
        held_out = order[: len(order) // TEST]
        rest = order[len(held_out) :]
        model = layers(images.shape[1], HIDDEN, CLASSES, "ReLU")
        by_rows(model, images[rest].float(), labels[rest], steps)
        model = model.double().eval().requires_grad_(requires_grad=False)
        row: dict[str, Any] = {"network": accuracy(model, images[held_out], labels[held_out])}
        body, head = model[:-1], model[-1]
        tests, answers = body(images[held_out]), head(body(images[held_out])).argmax(1)
        for source in SOURCES:
            features, classes = drawn(source, model, images[rest], labels[rest], key)
            for way, targets in ((LABELS, classes), (DISTILLED, head(features).softmax(1))):
                new = nn.Linear(HIDDEN[-1], CLASSES).double()
                learn(new, features, targets, steps)
                row[f"{source}/{way}"] = {
                    "accuracy": accuracy(new, tests, labels[held_out]),
                    "agreement": accuracy(new, tests, answers),
                }
    return row


def drawn(
    source: str, model: nn.Sequential, images: Tensor, labels: Tensor, key: str
) -> tuple[Tensor, Tensor]:
    """Features of the last hidden layer and their classes."""
    body, relu = model[:-1], torch.relu
    if source == IMAGES:
        return body(images), labels
    generator = torch.Generator().manual_seed(seed_of(NAME, key, source))
    classes = torch.arange(CLASSES).repeat_interleave(DRAWS)

    def samples(x: cp.Gaussian) -> Tensor:
        return x.sample(DRAWS, generator).transpose(0, 1).flatten(0, 1)

    if source == MOMENTS:
        return samples(by_class(body(images), labels)), classes
    x = by_class(images, labels)
    if source == DRAWN:
        return body(samples(x)), classes
    if source == RECTIFIED:
        return relu(samples(penultimate(model, x, LAYER))), classes
    found = penultimate(model, x, FEATURES)
    if source == DIAGONAL:
        found = cp.Gaussian.diagonal(found.mean, variance=found.variance, batch_dims=1)
    return samples(found), classes


def by_class(rows: Tensor, labels: Tensor) -> cp.Gaussian:
    """A Gaussian for each class with the moments of its rows."""
    groups = [rows[labels == label] for label in range(CLASSES)]
    ridge = RIDGE * torch.eye(rows.shape[1], dtype=rows.dtype)
    covariances = torch.stack([group.T.cov(correction=0) + ridge for group in groups])
    return cp.Gaussian(torch.stack([group.mean(0) for group in groups]), covariances)


def penultimate(model: nn.Module, x: cp.Gaussian, path: str) -> cp.Gaussian:
    """What goes into the head, or its layer's output before the activation, for each class."""
    found = cp.trace(model, x, cp.GaussianLayers(), keep=path)[path]
    assert isinstance(found, cp.Gaussian)
    return found


def learn(head: nn.Linear, features: Tensor, targets: Tensor, steps: int) -> None:
    """Cross-entropy with classes, or with probabilities of them."""

    def loss() -> Tensor:
        chosen = torch.randint(len(features), (ROWS,))
        return nn.functional.cross_entropy(head(features[chosen]), targets[chosen])

    minimise(nn.Sequential(head), loss, steps)


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], rows: Tensor, labels: Tensor) -> float:
    """The share of rows whose largest output is that of their label."""
    of = next(iter(model.parameters())).dtype if isinstance(model, nn.Module) else rows.dtype
    return float((model(rows.to(of)).argmax(1) == labels).double().mean())


def tables(record: dict[str, Any]) -> list[Table]:
    """Accuracies by where the features come from."""
    rows = list(record["results"].values())
    lines = []
    for source in SOURCES:
        cells = [
            _words([row[f"{source}/{way}"][measure] for row in rows])
            for way in (LABELS, DISTILLED)
            for measure in ("accuracy", "agreement")
        ]
        lines.append([source, *cells])
    header = ["features", *(f"{way}: {of}" for way in (LABELS, DISTILLED)
                            for of in ("accuracy", "as the network"))]  # fmt: skip
    note = (
        f"Test images, mean ± standard error over {len(rows)} networks, whose own accuracy is "
        f"{_words([row['network'] for row in rows])}. As the network: the share of test images "
        "that both heads give the same class."
    )
    return [Table("Heads by the features that they learnt", header, lines, note)]


def _words(values: list[float]) -> str:
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{100 * np.mean(values):.2f} ± {100 * error:.2f} %"


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Errors on test images, by the features that a head learnt."""
    rows = list(record["results"].values())
    figure, axes = drawing.panels(1, 1, width=6.4, height=3.2)
    panel = axes[0, 0]
    for offset, way, colour in ((0.15, LABELS, drawing.BLUE), (-0.15, DISTILLED, drawing.ORANGE)):
        for place, source in enumerate(reversed(SOURCES)):
            errors = [1 - row[f"{source}/{way}"]["accuracy"] for row in rows]
            label = way if place == 0 else None
            panel.barh(place + offset, np.mean(errors), 0.28, color=colour, label=label)
    panel.axvline(1 - np.mean([row["network"] for row in rows]), color=drawing.BLACK,
                  linewidth=1.2, linestyle="--", label="the network itself")  # fmt: skip
    sources = [source.replace("`", "") for source in reversed(SOURCES)]
    panel.set_yticks(range(len(SOURCES)), sources, fontsize=drawing.FONT)
    panel.set_xlabel("share of test images that the head gets wrong", fontsize=drawing.FONT)
    figure.legend(fontsize=drawing.FONT, frameon=False, loc="outside upper center", ncols=3)
    return {NAME: figure}
