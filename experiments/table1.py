"""Table 1: random networks with Gaussian input, against Monte Carlo.

Ratios of Monte Carlo's mean and variance to those of each method, average ± standard deviation over
random networks and inputs; 1 ± 0 is ideal. The row of Monte Carlo is its own standard error: the
spread that a perfect method would show.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import covprop as cp
from benchmarks import inputs, models
from experiments import drawing, ratio_methods
from experiments.options import Options
from experiments.randomness import seeded
from experiments.ratio_methods import (
    BEYOND,
    CENTRED,
    CUMULANTS,
    EXACT,
    METHODS,
    PIECEWISE,
    PUBLISHED,
    SAMPLED,
    SERIES,
    SPLIT,
)
from experiments.ratios import noise, ratio, seconds
from experiments.table import Table

NAME = "table1"
INSTANCES, SMOKE_INSTANCES = 200, 2


@final
class Setup(NamedTuple):
    """How an instance is drawn; no largest variance means a covariance of unit Frobenius norm."""

    about: str
    kaiming: bool
    largest_variance: float | None


SETUPS = {
    "published": Setup("as the published numbers were made: torch's default initialisation, "
                       "covariance of unit Frobenius norm", False, None),
    "text": Setup("as the text says: Kaiming initialisation, largest variance 1", True, 1.0),
    "moderate noise": Setup("moderate noise: torch's default initialisation, largest variance 1",
                            False, 1.0),
    "large noise": Setup("large noise: torch's default initialisation, largest variance 10",
                         False, 10.0),
}  # fmt: skip
NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "FC-4": (partial(models.fully_connected, 4), (100,)),
    "FC-8": (partial(models.fully_connected, 8), (100,)),
    "CNN-4": (partial(models.convolutional, 4), (1, 20, 20)),
    "CNN-8": (partial(models.convolutional, 8), (1, 20, 20)),
}
SMALL: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "FC-4": (partial(models.fully_connected, 4, 30), (30,)),
    "FC-8": (partial(models.fully_connected, 8, 30), (30,)),
    "CNN-4": (partial(models.convolutional, 4, 6, 4), (1, 6, 6)),
    "CNN-8": (partial(models.convolutional, 8, 6, 4), (1, 6, 6)),
}
"""For smoke runs."""
PRINTED = {
    "FC-4": {PUBLISHED: ("1.000 ± 0.014", "1.010 ± 0.011"),
             CENTRED: ("0.999 ± 0.643", "1.155 ± 0.311")},
    "FC-8": {PUBLISHED: ("1.000 ± 0.001", "1.016 ± 0.017"),
             CENTRED: ("1.012 ± 0.169", "1.067 ± 0.419")},
    "CNN-4": {PUBLISHED: ("1.001 ± 0.021", "1.007 ± 0.006"),
              CENTRED: ("0.997 ± 0.168", "1.222 ± 0.240")},
    "CNN-8": {PUBLISHED: ("1.000 ± 0.000", "1.009 ± 0.007"),
              CENTRED: ("1.001 ± 0.026", "1.184 ± 0.347")},
}  # fmt: skip
"""The paper's table: means, variances."""
OFFSETS = (0.36, 0.24, 0.12, 0, -0.12, -0.24, -0.36)
PRINT_OFFSET = 0.06
"""Upwards, so that methods and the paper's numbers stand beside each other."""
STYLES = {
    CENTRED: (drawing.PURPLE, "D"), PIECEWISE: (drawing.VERMILION, "s"),
    PUBLISHED: (drawing.ORANGE, "^"), SERIES: (drawing.SKY, "v"), EXACT: (drawing.BLUE, "o"),
    SPLIT: (drawing.GREEN, "P"), CUMULANTS: (drawing.BLACK, "*"),
}  # fmt: skip


def settings(options: Options) -> dict[str, Any]:
    """What the instances depend on; their number is not part of it."""
    samples = ratio_methods.SMOKE_SAMPLES if options.smoke else ratio_methods.SAMPLES
    return {"seed": options.seed, "samples": samples, "smoke": options.smoke, "dtype": "float32"}


def units(options: Options) -> list[str]:
    """Network, set-up, instance; all set-ups of an instance one after another."""
    count = options.instances or (SMOKE_INSTANCES if options.smoke else INSTANCES)
    return [
        f"{network}/{setup}/{index}{part}"
        for network in NETWORKS for part in ("", *(f"/{name}" for name in BEYOND))
        for index in range(count) for setup in SETUPS
    ]  # fmt: skip


def instance(key: str, options: Options) -> tuple[nn.Sequential, cp.Gaussian]:
    """A random network and input; the same random numbers at every noise."""
    network, setup, index, *_ = key.split("/")
    make, shape = (SMALL if options.smoke else NETWORKS)[network]
    _, kaiming, largest = SETUPS[setup]
    with seeded(options.seed, NAME, network, index):
        mean, covariance = inputs.paper(*shape, largest_variance=largest or 1.0)
        model = make()
        if not kaiming:
            model.apply(models.as_torch_does)
    if largest is None:
        covariance = covariance / torch.linalg.matrix_norm(covariance)
    return model.float(), cp.Gaussian(mean.float(), covariance.float(), validate_args=False)


def measure(key: str, options: Options) -> dict[str, Any]:
    """One instance by every method of the paper, or by those beyond it."""
    model, x = instance(key, options)
    if (part := key.rpartition("/")[2]) in BEYOND:
        return ratio_methods.beyond(part, model, x)
    return ratio_methods.measured(model, x, settings(options)["samples"], options.seed, key)


def grouped(record: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Instances by network and set-up."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    results = record["results"]
    for key, result in results.items():
        if key.rpartition("/")[2] in BEYOND:
            continue
        network, setup, _ = key.split("/")
        further = {name: row for part in BEYOND
                   for name, row in results.get(f"{key}/{part}", {}).items()}  # fmt: skip
        groups[network, setup].append({**result, **further})
    return groups


def tables(record: dict[str, Any]) -> list[Table]:
    """A table for each set-up, with the paper's numbers beside the two readings of its own."""
    groups = grouped(record)
    return [
        _table(setup, {network: groups[network, setup] for network in NETWORKS
                       if (network, setup) in groups})
        for setup in SETUPS if any((network, setup) in groups for network in NETWORKS)
    ]  # fmt: skip


def _table(setup: str, by_network: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for network, instances in by_network.items():
        own = [f"1 ± {float(noise(instances, moment)[0]):.3f}" for moment in ("mean", "variance")]
        time = f"{seconds(instances, SAMPLED):.2g}"
        rows.append([f"{network}, {len(instances)} instances", f"{SAMPLED} itself", *own, time])
        for method in (*METHODS, SPLIT, CUMULANTS):
            those = [each for each in instances if method in each]
            if not those:
                continue
            found = [ratio(those, method, moment).words() for moment in ("mean", "variance")]
            label = method if len(those) == len(instances) else f"{method}, {len(those)} of them"
            rows.append(["", label, *found, f"{seconds(those, method):.2g}"])
            if setup in ("published", "text") and method in PRINTED[network]:
                rows.append(["", f"{method}: the paper", *PRINTED[network][method], ""])
    header = ["network", "method", "ratio of means", "ratio of variances", "seconds"]
    return Table(f"Set-up: {setup}", header, rows, f"{SETUPS[setup].about}.")


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Ratios of variances, a row for each set-up: all methods, and those without PL-DNN."""
    groups = grouped(record)
    setups = [setup for setup in SETUPS if any(setup == key[1] for key in groups)]
    figure, axes = drawing.panels(len(setups), 2, width=4.6, height=2.6)
    close = {method for method in STYLES if method not in (CENTRED, PIECEWISE)}
    for (left, right), setup in zip(axes, setups, strict=True):
        by_network = {name: groups[name, setup] for name in NETWORKS if (name, setup) in groups}
        _ratios(left, by_network, set(STYLES), paper=setup == "published")
        _ratios(right, by_network, close, paper=setup == "published")
        left.set_title(f"{setup}: all methods", fontsize=drawing.FONT)
        right.set_title(f"{setup}: without PL-DNN", fontsize=drawing.FONT)
    for panel in axes[-1]:
        panel.set_xlabel("variance: Monte Carlo / method")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False, fontsize=drawing.FONT)  # fmt: skip
    return {NAME: figure}


def _ratios(
    panel: Axes, by_network: dict[str, list[dict[str, Any]]], methods: set[str], paper: bool
) -> None:
    """Averages as points and spreads as bars, network by network from the top."""
    places = np.arange(len(by_network))[::-1]
    panel.axvline(1, color="0.5", linewidth=0.8)
    for offset, (method, (colour, marker)) in zip(OFFSETS, STYLES.items(), strict=True):
        if method not in methods:
            continue
        those = [[each for each in group if method in each] for group in by_network.values()]
        there = [number for number, group in enumerate(those) if group]
        found = [ratio(group, method, "variance") for group in those if group]
        panel.errorbar(
            [float(value.average[0]) for value in found], places[there] + offset,
            xerr=[float(value.spread[0]) for value in found], fmt=marker, color=colour,
            markersize=5, capsize=2, label=method,
        )  # fmt: skip
        if paper and method in (CENTRED, PUBLISHED):
            printed = [float(PRINTED[name][method][1].split()[0]) for name in by_network]
            label = "printed in the paper" if method == PUBLISHED else None
            panel.plot(printed, places + offset + PRINT_OFFSET, "x", color=drawing.BLACK,
                       markersize=6, label=label)  # fmt: skip
    panel.set_yticks(places, list(by_network))
    panel.set_ylim(-0.55, len(by_network) - 0.45)
    drawing.bands(panel, len(by_network))
