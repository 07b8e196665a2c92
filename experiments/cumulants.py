"""`cumulants`: what third cumulants add to exact propagation, and where they do not.

Errors of standard deviations and means, in units of the true standard deviations, by `cp.Exact()`
and `cp.Cumulants()`: on 300 random small networks, on the digit classifier of `split`, and on wide
random networks. The truth is sampled with a control variate; its standard error stands beside.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from covprop import demo
from covprop.methods.base import Method
from experiments import drawing, random_networks, split
from experiments.options import Options
from experiments.randomness import seed_of, seeded
from experiments.table import Table, scientific

NAME = "cumulants"
RANDOM, DIGITS, WIDE = "random", "digits", "wide"
"""The parts, which keys begin with."""
NETWORKS, IMAGES = 300, 20
NOISES = (0.3, 0.5)
DEPTHS = {8: 50, 32: 4}
"""How many wide networks of each."""
WIDTH, SMOKE_WIDTH = 256, 8
SAMPLES = {RANDOM: 2**18, DIGITS: 2**18, WIDE: 2**17}
PILOT, SMOKE_SAMPLES = 2**12, 2**10
EXACT, CUMULANTS = "Exact()", "Cumulants()"
METHODS: dict[str, Method] = {EXACT: cp.Exact(), CUMULANTS: cp.Cumulants()}
SPLITS: dict[str, Method] = {
    "Split(3)": cp.Split(3),
    "Split(3, Cumulants())": cp.Split(3, base=cp.Cumulants()),
    "Split(9, Cumulants())": cp.Split(9, base=cp.Cumulants()),
}
"""Three nodes have an error of their own, which third cumulants do not mend."""
UNKNOWN = 0.05
"""The standard error of a true standard deviation, as a part of it, beyond which it is unknown."""
LARGE = 0.1
"""A mean error of standard deviations that must have a note."""
REPEATS = 3


def settings(options: Options) -> dict[str, Any]:
    """What results depend on."""
    samples = dict.fromkeys(SAMPLES, SMOKE_SAMPLES) if options.smoke else SAMPLES
    return {"seed": options.seed, "smoke": options.smoke, "samples": samples}


def units(options: Options) -> list[str]:
    """Part, and what there is of it: a number; noise and image; depth and number."""
    smoke = options.smoke

    def numbers(count: int, least: int = 1) -> range:
        return range(least if smoke else min(count, options.instances or count))

    return [
        *(f"{RANDOM}/{number}" for number in numbers(NETWORKS, 3)),
        *(f"{DIGITS}/{noise}/{image}"
          for noise in NOISES[: 1 if smoke else None] for image in numbers(IMAGES)),
        *(f"{WIDE}/{depth}/{number}"
          for depth, count in DEPTHS.items() for number in numbers(count)),
    ]  # fmt: skip


def measure(key: str, options: Options) -> dict[str, Any]:
    """One network and input by every method of its part, and by sampling."""
    part, *rest = key.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.ApproximationWarning)  # notes are kept
        return MEASURES[part](key, rest, options)


def truth(model: nn.Module, x: cp.Gaussian, key: str, options: Options) -> tuple[cp.Gaussian, str]:
    """Moments by sampling, beside the linearisation that has the smaller standard errors."""
    generator = torch.Generator().manual_seed(seed_of(options.seed, NAME, key, "samples"))
    samples = settings(options)["samples"][key.partition("/")[0]]
    errors = {}
    for name, base in METHODS.items():
        with suppress(cp.InconsistentBranches):  # the other one is as good
            pilot = cp.propagate(model, x, cp.ControlVariate(min(PILOT, samples), base, generator))
            errors[name] = float(stderr(pilot).nanmean())
    best = min(errors, key=lambda name: errors[name])
    return cp.propagate(model, x, cp.ControlVariate(samples, METHODS[best], generator)), best


def stderr(y: cp.Gaussian) -> Tensor:
    """Of standard deviations, as parts of them, (outputs,)."""
    assert y.covariance_stderr is not None
    return (y.covariance_stderr.diagonal(dim1=-2, dim2=-1) / y.variance.flatten() / 2).flatten()


def small_network(key: str, _: Sequence[str], options: Options) -> dict[str, Any]:
    """A random small network: errors averaged over the outputs whose truth is known."""
    with seeded(options.seed, NAME, key):
        drawn = random_networks.draw()
        model = random_networks.build(drawn)
        mean = torch.randn(drawn.widths[0], dtype=torch.float64)
    x = cp.Gaussian.isotropic(mean, stddev=drawn.noise)
    true, base = truth(model, x, key, options)
    relative = stderr(true)
    known = relative < UNKNOWN
    result: dict[str, Any] = {
        **drawn._asdict(), "base": base, "known": [int(known.sum()), known.numel()],
        "stderr": _number(relative[known].mean()),
        "mean stderr": _number((true.mean_stderr / true.stddev)[known].mean()),
    }  # fmt: skip
    for name, method in METHODS.items():
        started = time.perf_counter()
        try:
            y = cp.propagate(model, x, method)
        except cp.InconsistentBranches as error:
            result[name] = {"refused": str(error)}
            continue
        seconds = time.perf_counter() - started
        stddev = (y.stddev / true.stddev - 1).abs()[known]
        means = ((y.mean - true.mean).abs() / true.stddev)[known]
        result[name] = {
            "stddev": _number(stddev.mean()), "mean": _number(means.mean()),
            "worst": _number(stddev.max()) if len(stddev) else float("nan"),
            "notes": len(y.notes), "seconds": round(seconds, 4),
        }  # fmt: skip
    return result


def digit(key: str, rest: Sequence[str], options: Options) -> dict[str, Any]:
    """An image of the trained classifier: errors of every logit."""
    noise, image = rest
    model, _ = split.trained("MLP", options.seed, split.SMOKE_ROWS if options.smoke else None)
    x = cp.Gaussian.isotropic(demo.digits()[2][int(image)][None], stddev=float(noise), batch_dims=1)
    true, base = truth(model, x, key, options)
    result: dict[str, Any] = {"base": base, "stderr": _numbers(stderr(true))}
    for name, method in {**METHODS, **SPLITS}.items():
        y, seconds = split.fastest(partial(cp.propagate, model, x, method), REPEATS)
        result[name] = {
            "stddev": _numbers(y.stddev / true.stddev - 1),
            "mean": _numbers((y.mean - true.mean) / true.stddev),
            "notes": len(y.notes), "seconds": round(seconds, 4),
        }  # fmt: skip
    return result


def wide_network(key: str, rest: Sequence[str], options: Options) -> dict[str, Any]:
    """A wide network of standard normal input: squared errors of means without the truth's own."""
    width = SMOKE_WIDTH if options.smoke else WIDTH
    with seeded(options.seed, NAME, key):
        model = random_networks.wide(width, int(rest[0]))
    x = cp.Gaussian.isotropic(torch.zeros(width), stddev=1.0)
    true, base = truth(model, x, key, options)
    assert true.mean_stderr is not None
    own = float(true.mean_stderr.double().square().mean())
    size = true.stddev.mean()
    result: dict[str, Any] = {
        "base": base, "mean square error": own,
        "stderr": _number((stderr(true) * true.stddev).nanmean() / size),
        "variance": _number(true.variance.mean()),
    }  # fmt: skip
    for name, method in METHODS.items():
        y, seconds = split.fastest(partial(cp.propagate, model, x, method), REPEATS)
        square = float((y.mean - true.mean).double().square().mean())
        stddev = (y.stddev - true.stddev).abs().mean() / size  # some units are hardly ever active
        result[name] = {
            "mean square error": square - own, "stddev": _number(stddev),
            "notes": len(y.notes), "seconds": round(seconds, 4),
        }  # fmt: skip
    return result


MEASURES: dict[str, Callable[[str, Sequence[str], Options], dict[str, Any]]] = {
    RANDOM: small_network, DIGITS: digit, WIDE: wide_network,
}  # fmt: skip


def part_of(record: dict[str, Any], *prefix: str) -> dict[str, dict[str, Any]]:
    """The results of a part, by key."""
    start = "/".join(prefix) + "/"
    return {key: row for key, row in record["results"].items() if key.startswith(start)}


def failures(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Random networks of a large error, larger than that of `Exact`, without a note."""
    return [
        key for key, row in resolved(rows).items()
        if not (ours := row[CUMULANTS])["notes"]
        and ours["stddev"] > max(LARGE, row[EXACT]["stddev"])
    ]  # fmt: skip


def resolved(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Random networks of which the truth of some output is known, and that no method refused."""
    return {
        key: row for key, row in rows.items()
        if row["known"][0] and not any("refused" in row[name] for name in METHODS)
    }  # fmt: skip


def percentiles(rows: Sequence[dict[str, Any]], method: str, moment: str) -> list[float]:
    """The median and the 95th percentile over networks."""
    found = np.percentile([row[method][moment] for row in rows], [50, 95])
    return [float(value) for value in found]


def worse(images: Sequence[dict[str, Any]], method: str) -> float:
    """The share of outputs whose error exceeds that of `Exact` by more than the truth's error."""
    ours, exact = (np.abs([row[name]["stddev"] for row in images]) for name in (method, EXACT))
    return float((ours > exact + np.array([row["stderr"] for row in images])).mean())


def tables(record: dict[str, Any]) -> list[Table]:
    """A table for each part that has results."""
    made = []
    if rows := part_of(record, RANDOM):
        made.append(_random_table(rows))
    by_noise = {noise: list(part_of(record, DIGITS, str(noise)).values()) for noise in NOISES}
    if found := {noise: images for noise, images in by_noise.items() if images}:
        made.append(_digits_table(found))
    by_depth = {depth: list(part_of(record, WIDE, str(depth)).values()) for depth in DEPTHS}
    if those := {depth: networks for depth, networks in by_depth.items() if networks}:
        made.append(_wide_table(those))
    return made


def _random_table(by_key: dict[str, dict[str, Any]]) -> Table:
    rows = list(resolved(by_key).values())
    exact, ours = (percentiles(rows, name, "stddev") for name in METHODS)
    lines = [
        [name, *(f"{value:.2%}" for value in percentiles(rows, name, "stddev")),
         *(f"{value:.4f}" for value in percentiles(rows, name, "mean")),
         str(sum(row[name]["notes"] > 0 for row in rows)),
         f"{1000 * np.median([row[name]['seconds'] for row in rows]):.0f}"]
        for name in METHODS
    ]  # fmt: skip
    noted = [row for row in rows if row[CUMULANTS]["notes"]]
    larger = sum(row[CUMULANTS]["stddev"] > row[EXACT]["stddev"] + row["stderr"] for row in rows)
    failed = failures(by_key)
    skips = sum(row["skips"] and len(row["activations"]) > 1 for row in rows)
    own = percentiles([{"": {"": row["stderr"]}} for row in rows], "", "")
    note = (
        f"{len(rows)} networks, {skips} with skip connections, errors averaged over their outputs; "
        "the median and 95th percentile of the truth's own standard error are "
        f"{own[0]:.2%} and {own[1]:.2%}. "
        f"{len(by_key) - len(rows)} more were refused, or have no output whose truth is known to "
        f"{UNKNOWN:.0%}. "
        f"`Cumulants()` over `Exact()`: {ours[0] / exact[0]:.2f} (median), "
        f"{ours[1] / exact[1]:.2f} (95th percentile); its error is larger by more than the truth's "
        f"in {larger} networks. {len(noted)} results have notes. Errors above {LARGE:.0%}, larger "
        f"than that of `Exact()` and without a note: {len(failed)}"
        f"{' (' + ', '.join(failed) + ')' if failed else ''}."
    )
    header = ["", "std off by, median", "95th percentile", "means off by, median",
              "95th percentile", "with notes", "ms"]  # fmt: skip
    return Table("Random small networks", header, lines, note)


def _digits_table(by_noise: dict[float, list[dict[str, Any]]]) -> Table:
    header = [""]
    for noise in by_noise:
        header += [f"std off by, noise {noise}", "means off by", "worse than Exact()"]
    lines = []
    for name in (*METHODS, *SPLITS):
        cells = []
        for images in by_noise.values():
            sizes = [
                np.mean(np.abs([row[name][of] for row in images])) for of in ("stddev", "mean")
            ]
            cells += [f"{sizes[0]:.2%}", f"{sizes[1]:.4f}", f"{worse(images, name):.1%}"]
        times = [row[name]["seconds"] for images in by_noise.values() for row in images]
        lines.append([name, *cells, f"{1000 * np.median(times):.0f}"])
    sampled = " and ".join(
        f"{np.mean([row['stderr'] for row in images]):.2%} (noise {noise}, {len(images)} images)"
        for noise, images in by_noise.items()
    )
    note = (
        "Averages over images and logits of the fully connected digit classifier. The standard "
        f"error of the true std is {sampled}. Worse: outputs whose error is larger than that of "
        "`Exact()` by more than the truth's standard error."
    )
    return Table("Trained digit classifier", [*header, "ms"], lines, note)


def _wide_table(by_depth: dict[int, list[dict[str, Any]]]) -> Table:
    lines = []
    for depth, networks in by_depth.items():
        for name in METHODS:
            squares = [row[name]["mean square error"] for row in networks]
            spread = np.std(squares, ddof=1) / len(squares) ** 0.5 if len(squares) > 1 else np.nan
            lines.append([
                f"{depth} layers, {len(networks)} networks" if name == EXACT else "", name,
                f"{scientific(float(np.mean(squares)))} ± {spread:.0e}",
                f"{np.mean([row[name]['stddev'] for row in networks]):.2%}",
                str(sum(row[name]["notes"] > 0 for row in networks)),
                f"{np.median([row[name]['seconds'] for row in networks]):.2f}",
            ])  # fmt: skip
    own = " and ".join(
        f"{np.mean([row['mean square error'] for row in networks]):.1e} and "
        f"{np.mean([row['stderr'] for row in networks]):.2%} (depth {depth})"
        for depth, networks in by_depth.items()
    )
    note = (
        f"{WIDTH} units, He's weights, no biases, ReLU after every layer, standard normal input, "
        "float32. Averages over networks ± standard error; stds are off by their mean error over "
        "their mean, as some units are hardly ever active. The truth's own mean square error of "
        f"means, which is subtracted, and standard error of stds: {own}."
    )
    header = ["", "method", "mean square error of means", "std off by", "with notes", "seconds"]
    return Table("Wide random networks", header, lines, note)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Errors of `Cumulants` over those of `Exact`: random networks, and logits of digits."""
    figure, axes = drawing.panels(1, 2)
    rows = list(resolved(part_of(record, RANDOM)).values())
    for noted, colour, marker in ((False, drawing.BLUE, "o"), (True, drawing.VERMILION, "s")):
        those = [row for row in rows if bool(row[CUMULANTS]["notes"]) is noted]
        _scatter(axes[0, 0], those, colour, marker, "with notes" if noted else "without notes")
    axes[0, 0].set_title("random networks", fontsize=drawing.FONT)
    for noise, colour, marker in zip(
        NOISES, (drawing.SKY, drawing.ORANGE), ("o", "s"), strict=True
    ):
        images = list(part_of(record, DIGITS, str(noise)).values())
        _scatter(axes[0, 1], images, colour, marker, f"noise {noise}")
    axes[0, 1].set_title("digit classifier, each logit", fontsize=drawing.FONT)
    for panel in axes[0]:
        panel.set(xscale="log", yscale="log", xlabel="GaussianLayers(): error, %")
        panel.axline((1, 1), (10, 10), color="0.5", linewidth=0.8)
        panel.legend(frameon=False, fontsize=drawing.FONT - 1, loc="upper left")
    axes[0, 0].set_ylabel("Cumulants(): error, %")
    return {NAME: figure}


def _scatter(panel: Axes, rows: list[dict[str, Any]], colour: str, marker: str, label: str) -> None:
    exact, ours = (
        100 * np.abs(np.concatenate([np.ravel(row[name]["stddev"]) for row in rows] or [[]]))
        for name in METHODS
    )
    panel.plot(exact, ours, marker, color=colour, markersize=3, alpha=0.6, label=label)


def _number(value: Tensor) -> float:
    return float(f"{float(value):.4g}")


def _numbers(values: Tensor) -> list[float]:
    return [_number(value) for value in values.flatten()]
