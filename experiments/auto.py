"""`auto`: how good the default's answers are, and how well results know their own errors.

Networks of `experiments.corpus`: trained ones with few inputs, classifiers and regressors of
tabular data, random ones and ten architectures, at noise of 0.01 to 1 of the input's spread. For
each: `cp.Auto()` and `cp.Auto(tolerance)`, single methods, their true errors (the larger of the
worst standard deviation and the worst mean), their estimates and their times.
"""

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import covprop as cp
from covprop.methods.base import Method
from experiments import corpus, drawing
from experiments.options import Options
from experiments.table import Table

NAME = "auto"
AUTO = "Auto()"
LAYERWISE: dict[str, Method] = {
    "GaussianLayers()": cp.GaussianLayers(),
    "Cumulants()": cp.Cumulants(),
}
TOLERANCES = (0.05, 0.01, 0.002)
AUTOS: dict[str, Method] = {
    AUTO: cp.Auto(), **{f"Auto({t})": cp.Auto(tolerance=t) for t in TOLERANCES}
}  # fmt: skip
SAMPLES = (256, 1024, 4096, 16384, 65536)
SINGLE: dict[str, Method] = {"Linearized()": cp.Linearized(), "Unscented()": cp.Unscented()}
SMALL_WORK = 2**33
"""Numbers that samples may take in all: there are fewer of large networks."""
BRIEF = 0.1
"""Seconds of a run that is timed three times."""
SMOKE, SMOKE_POINTS = 3, 2**14
FLOOR = 3e-4
"""Errors below are not told from those of the truth."""
LARGE, WRONG = 0.02, 0.1
"""Errors that are to be found, and that must have a warning."""


def settings(options: Options) -> dict[str, Any]:
    """What results depend on."""
    return {"seed": options.seed, "smoke": options.smoke, "samples": list(SAMPLES)}


@cache
def by_name() -> dict[str, corpus.Case]:
    """The corpus."""
    return {case.name: case for case in corpus.cases()}


def units(options: Options) -> list[str]:
    """The names of cases, those of the smallest networks in a smoke test."""
    names = list(by_name())
    if options.smoke:
        return [name for name in names if name.startswith(corpus.RANDOM)][:SMOKE]
    return names[: options.instances] if options.instances else names


def measure(key: str, options: Options) -> dict[str, Any]:
    """One case by every method."""
    case = by_name()[key]
    truth = case.truth(SMOKE_POINTS if options.smoke else None)
    model, x = case.build()
    row: dict[str, Any] = {
        "family": case.family, "noise": case.noise, "inputs": x.mean.numel(),
        "outputs": len(truth.mean), "samples": truth.samples,
        "truth": max(float(truth.stddev_error.max()), float(truth.mean_error.max())),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(options.seed)
    work = sum(p.numel() for p in model.parameters()) + x.mean.numel()
    sampling = {
        f"MonteCarlo({n})": cp.MonteCarlo(n, generator) for n in SAMPLES if n * work <= SMALL_WORK
    }
    with torch.no_grad():
        for name, method in {**AUTOS, **LAYERWISE, **SINGLE, **sampling}.items():
            row[name] = _measured(model, x, method, truth)
    return row


def _measured(model: Any, x: cp.Gaussian, method: Method, truth: corpus.Truth) -> dict[str, Any]:
    """Error, estimate, seconds of computing, and whether there was a warning."""
    best = float("inf")
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            started = time.process_time()
            try:
                y = cp.propagate(model, x, method)
            except cp.CovpropError as error:
                return {"refused": f"{type(error).__name__}: {error}"[:200]}
            seconds = time.process_time() - started
        best = min(best, seconds)
        if seconds > BRIEF:
            break
    found = corpus.errors(y, truth)
    result: dict[str, Any] = {
        "error": max(found["std_error"], found["mean_error"]), "seconds": round(best, 5),
        "warned": any(issubclass(one.category, cp.ApproximationWarning) for one in caught),
    }  # fmt: skip
    if isinstance(method, cp.Auto) or method in LAYERWISE.values():
        counted = truth.counted
        estimate = [getattr(y.error, of).flatten()[counted] for of in ("mean", "stddev")]
        result["estimate"] = max(float(part.max()) for part in estimate)
    if isinstance(method, cp.Auto):
        result["method"] = type(y.method).__name__
    return result


def answered(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Cases that a method has an answer for."""
    return [row for row in record["results"].values() if "error" in row.get(name, {})]


def tables(record: dict[str, Any]) -> list[Table]:
    """Errors, estimates, tolerances."""
    return [_errors(record), _estimates(record), _tolerances(record)]


def _errors(record: dict[str, Any]) -> Table:
    lines = []
    for name in (AUTO, *LAYERWISE, *SINGLE, "MonteCarlo(4096)", "MonteCarlo(65536)"):
        rows = answered(record, name)
        for family in ("all", *corpus.FAMILIES):
            part = [row for row in rows if family in ("all", row["family"])]
            if part and (family == "all" or name in (AUTO, *LAYERWISE)):
                lines.append([name if family == "all" else "", family, *_summary(part, name)])
    rows = list(record["results"].values())
    used = Counter(row[AUTO]["method"] for row in answered(record, AUTO))
    silent = unwarned(record)
    note = (
        f"{len(rows)} cases; the error of a case is the largest of its outputs, of means in "
        "standard deviations and of standard deviations relatively. The truth's own standard error "
        f"is {np.median([row['truth'] for row in rows]):.2%} (median), "
        f"{np.percentile([row['truth'] for row in rows], 95):.2%} (95th percentile). `Auto()` took "
        + ", ".join(f"`{method}` {count} times" for method, count in used.most_common())
        + f". Errors of `Auto()` above {WRONG:.0%} without a warning: {len(silent)}"
        + (f" ({', '.join(silent)})." if silent else ".")
    )
    header = ["method", "networks", "cases", "median error", "95th percentile", "largest", "ms"]
    return Table("Errors of the default and of single methods", header, lines, note)


def _summary(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    errors = [row[name]["error"] for row in rows]
    return [
        str(len(rows)), f"{np.median(errors):.2%}", f"{np.percentile(errors, 95):.2%}",
        f"{max(errors):.2%}", f"{1000 * np.median([row[name]['seconds'] for row in rows]):.1f}",
    ]  # fmt: skip


def unwarned(record: dict[str, Any]) -> list[str]:
    """Cases whose answer by the default is off by more than a tenth, without a warning."""
    return [
        key for key, row in record["results"].items()
        if row[AUTO].get("error", 0) > WRONG + 2 * row["truth"] and not row[AUTO]["warned"]
    ]  # fmt: skip


def quality(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """How well estimates know the errors."""
    errors = np.array([row[name]["error"] for row in rows])
    estimates = np.array([row[name]["estimate"] for row in rows])
    logs = [np.log(np.clip(values, FLOOR, 1e3)) for values in (errors, estimates)]
    large = errors > LARGE
    return {
        "correlation": float(np.corrcoef(*logs)[0, 1]),
        "within": float((errors <= np.maximum(estimates, FLOOR)).mean()),
        "found": float((estimates[large] > LARGE).mean()) if large.any() else float("nan"),
        "large": int(large.sum()),
        "false": float((estimates[~large] > LARGE).mean()),
    }


def _estimates(record: dict[str, Any]) -> Table:
    lines = []
    for name in (*LAYERWISE, AUTO):
        found = quality(answered(record, name), name)
        lines.append([
            name, f"{found['correlation']:.2f}", f"{found['within']:.0%}",
            f"{found['found']:.0%} of {found['large']}", f"{found['false']:.0%}",
        ])  # fmt: skip
    header = ["`y.error` of", "correlation of logarithms", "errors within the estimate",
              f"errors above {LARGE:.0%} found", "false alarms"]  # fmt: skip
    note = (
        f"Errors and estimates below {FLOOR:.2%} count as that: the truth is known no better. "
        f"Found: the estimate is above {LARGE:.0%}, too. False alarms: of the other cases. Errors "
        "of `Auto()` are what is left after it has taken a better method where the estimate was "
        "large, so that there is little to correlate."
    )
    return Table("Estimated and true errors", header, lines, note)


def cheapest(row: dict[str, Any], tolerance: float) -> tuple[str, float] | None:
    """The single method with such an error that took the least time."""
    singles = [name for name in row if name.startswith(("MonteCarlo", *LAYERWISE, *SINGLE))]
    good = [name for name in singles if row[name].get("error", 1.0) <= tolerance]
    best = min(good, key=lambda name: row[name]["seconds"], default=None)
    return None if best is None else (best, row[best]["seconds"])


def ratios(record: dict[str, Any], tolerance: float) -> list[tuple[str, float]]:
    """Times of the default over those of the cheapest single method, by case."""
    found = []
    for key, row in record["results"].items():
        other = cheapest(row, tolerance)
        if other is not None and "error" in row[f"Auto({tolerance})"]:
            found.append((key, row[f"Auto({tolerance})"]["seconds"] / other[1]))
    return found


def _tolerances(record: dict[str, Any]) -> Table:
    lines = []
    for tolerance in TOLERANCES:
        name = f"Auto({tolerance})"
        rows = answered(record, name)
        within = np.mean([row[name]["error"] <= tolerance + 2 * row["truth"] for row in rows])
        times = [ratio for _, ratio in ratios(record, tolerance)]
        none = sum(cheapest(row, tolerance) is None for row in rows)
        winners = Counter(
            other[0].partition("(")[0] for row in rows if (other := cheapest(row, tolerance))
        )
        lines.append([
            f"{tolerance:.1%}", f"{within:.1%}",
            f"{np.median([row[name]['error'] for row in rows]):.2%}",
            f"{1000 * np.median([row[name]['seconds'] for row in rows]):.1f}",
            *(f"{np.percentile(times, share):.2g}" if times else "" for share in (50, 90)),
            str(none),
            ", ".join(f"{method} {count}" for method, count in winners.most_common(3)),
        ])  # fmt: skip
    header = ["tolerance", "within it", "median error", "ms", "time over the cheapest's, median",
              "90th percentile", "no single method", "cheapest single method"]  # fmt: skip
    note = (
        "Within: up to two standard errors of the truth. The cheapest: of `GaussianLayers`, "
        "`Cumulants`, `Linearized`, `Unscented` and `MonteCarlo` with "
        f"{', '.join(f'{n:,}' for n in SAMPLES)} samples, the one that took the least time of "
        "those whose true error is within the tolerance, which it takes the truth to know; no "
        "single method: none of them is."
    )
    return Table("Tolerances", header, lines, note)


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    """Estimated errors over true ones, and errors of the default over those of Gaussian layers."""
    figure, axes = drawing.panels(1, 2)
    colours = (drawing.BLUE, drawing.VERMILION, drawing.SKY, drawing.ORANGE)
    layers = next(iter(LAYERWISE))
    for family, colour in zip(corpus.FAMILIES, colours, strict=True):
        rows = [row for row in answered(record, layers) if row["family"] == family]
        both = [row for row in rows if "error" in row[AUTO]]
        for panel, those, of in ((axes[0, 0], rows, "estimate"), (axes[0, 1], both, AUTO)):
            x = [max(FLOOR / 10, row[layers]["error"]) for row in those]
            y = [row[layers][of] if of == "estimate" else row[of]["error"] for row in those]
            y = np.clip(y, FLOOR / 10, 10)
            panel.scatter(x, y, s=6, color=colour, label=family, alpha=0.7, linewidths=0)
    titles = ("estimated error of GaussianLayers()", "error of Auto()")
    for panel, title in zip(axes[0], titles, strict=True):
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.plot([FLOOR / 10, 10], [FLOOR / 10, 10], color="0.6", linewidth=0.8, zorder=0)
        panel.set_xlabel("true error of GaussianLayers()", fontsize=drawing.FONT)
        panel.set_ylabel(title, fontsize=drawing.FONT)
        panel.tick_params(labelsize=drawing.FONT)
    axes[0, 0].legend(fontsize=drawing.FONT - 1, frameon=False)
    return {NAME: figure}
