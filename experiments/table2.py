"""Table 2: the trained MNIST network with noisy test images, logit by logit, against Monte Carlo.

Ratios of Monte Carlo's mean and variance to those of each method, average ± standard deviation over
random test images and covariances, and (the appendix) of every covariance of two logits.
"""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import covprop as cp
from benchmarks import inputs
from experiments import drawing, mnist, ratio_methods, training
from experiments.options import Options
from experiments.randomness import seeded
from experiments.ratio_methods import CENTRED, EXACT, METHODS, PUBLISHED, SAMPLED
from experiments.ratios import noise, ratio, seconds
from experiments.table import Table

NAME = "table2"
INSTANCES, SMOKE_INSTANCES = 200, 2
LOGITS, SIDE = 10, 28
PRINTED = {
    PUBLISHED: ["1.001 ± 0.007", "1.004 ± 0.005", "1.009 ± 0.008", "1.009 ± 0.008",
                "1.005 ± 0.006", "1.006 ± 0.006", "1.004 ± 0.007", "1.009 ± 0.009",
                "1.005 ± 0.006", "1.004 ± 0.005"],
    CENTRED: ["1.422 ± 0.229", "1.553 ± 0.254", "1.531 ± 0.222", "1.512 ± 0.252",
                "1.383 ± 0.244", "1.733 ± 0.267", "1.382 ± 0.217", "1.500 ± 0.161",
                "1.453 ± 0.205", "1.557 ± 0.297"],
}  # fmt: skip
"""The paper's ratios of variances, by logit."""
MAPPED = (PUBLISHED, EXACT, CENTRED)
MAPS = {"average": (drawing.DIVERGING, 0.4, 1.6), "standard deviation": (drawing.MAP, 0.0, 0.5)}
"""Colours of the appendix's maps, and their scales."""


def settings(options: Options) -> dict[str, Any]:
    """What the instances depend on, the weights among it."""
    samples = ratio_methods.SMOKE_SAMPLES if options.smoke else ratio_methods.SAMPLES
    weights = None if options.smoke else training.checksum(training.found(options))
    return {"seed": options.seed, "samples": samples, "smoke": options.smoke, "dtype": "float32",
            "covariance": "unit Frobenius norm", "weights": weights}  # fmt: skip


def units(options: Options) -> list[str]:
    """An instance each."""
    count = options.instances or (SMOKE_INSTANCES if options.smoke else INSTANCES)
    return [str(index) for index in range(count)]


def measure(key: str, options: Options) -> dict[str, Any]:
    """A random test image and covariance, as the published numbers were made."""
    digits = mnist.load("t10k", options.data)
    with seeded(options.seed, NAME, key):
        model = training.network(True) if options.smoke else training.trained(options)
        chosen = int(torch.randint(len(digits.images), ()))
        _, covariance = inputs.paper(1, SIDE, SIDE)
    covariance = (covariance / torch.linalg.matrix_norm(covariance)).float()
    x = cp.Gaussian(digits.images[chosen], covariance, validate_args=False)
    samples = settings(options)["samples"]
    result = ratio_methods.measured(model, x, samples, options.seed, NAME, key, covariance=True)
    return {"image": chosen, "label": int(digits.labels[chosen]), **result}


def tables(record: dict[str, Any]) -> list[Table]:
    """Variances beside the paper's, then means."""
    instances = list(record["results"].values())
    times = ", ".join(f"{name} {seconds(instances, name):.2g} s" for name in (SAMPLED, *METHODS))
    note = f"{len(instances)} instances. Median times: {times}."
    own = noise(instances, "variance")
    found = {method: ratio(instances, method, "variance") for method in METHODS}
    rows = [
        [str(logit), f"1 ± {own[logit]:.3f}", *(value.words(logit) for value in found.values()),
         PRINTED[PUBLISHED][logit], PRINTED[CENTRED][logit]]
        for logit in range(LOGITS)
    ]  # fmt: skip
    header = ["logit", f"{SAMPLED} itself", *METHODS, "paper: proposed", "paper: PL-DNN"]
    return [Table("Ratio of variances", header, rows, note), _means(instances, note)]


def _means(instances: list[dict[str, Any]], note: str) -> Table:
    own = noise(instances, "mean")
    found = {method: ratio(instances, method, "mean") for method in METHODS}
    rows = [
        [str(logit), f"1 ± {own[logit]:.3f}", *(value.words(logit) for value in found.values())]
        for logit in range(LOGITS)
    ]
    return Table("Ratio of means", ["logit", f"{SAMPLED} itself", *METHODS], rows, note)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """The appendix's maps: average and spread of the ratio of every covariance."""
    instances = list(record["results"].values())
    figure, axes = drawing.panels(2, len(MAPPED), width=3.3, height=3.1)
    for row, (word, (colours, low, high)) in zip(axes, MAPS.items(), strict=True):
        for panel, method in zip(row, MAPPED, strict=True):
            found = ratio(instances, method, "covariance")
            values = _square(found.average if word == "average" else found.spread)
            image = panel.imshow(values, cmap=colours, vmin=low, vmax=high)
            panel.set_title(f"{method}: {word}", fontsize=drawing.FONT)
            panel.set(xlabel="logit", ylabel="logit", xticks=range(LOGITS), yticks=range(LOGITS))
        figure.colorbar(image, ax=list(row), label=f"{word} of the ratio", shrink=0.85,
                        extend="both" if low > 0 else "max")  # fmt: skip
    figure.suptitle(f"Covariance of two logits, Monte Carlo / method, {len(instances)} instances",
                    fontsize=drawing.FONT + 1)  # fmt: skip
    return {f"{NAME}-covariance": figure}


def _square(triangle: np.ndarray) -> np.ndarray:
    rows, columns = np.tril_indices(LOGITS)
    result = np.empty((LOGITS, LOGITS))
    result[rows, columns] = result[columns, rows] = triangle
    return result
