"""How far whole networks are from sampling: the tables of docs/accuracy.md.

Small versions of well-known architectures, several random inputs, isotropic noise; the worst
relative error of an output's standard deviation, with branches joined and as if independent, and
with third cumulants.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import covprop as cp
from covprop.carriers import Full
from experiments.options import Options
from experiments.table import Table
from tests.architectures import ARCHITECTURES

NAME = "accuracy"
NOISES = (0.001, 0.01, 0.03, 0.3)
INPUTS, SAMPLES, CHUNK = 5, 200_000, 10_000
CUMULANTS = "cumulants"
"""The second part of a key whose result has third cumulants, of the same inputs; the third is the
noise."""
CONTROLLED, FEWER = 100_000, 20_000
"""Samples with a control variate, at the largest noise and at others: those leave it little."""


@contextmanager
def independent_branches() -> Iterator[None]:
    """Take tensors that meet as independent, as most tools do."""
    plain = Full.cross

    def cross(self: Full, other: Full) -> Tensor | None:
        return plain(self, other) if self is other else None

    Full.cross = cross  # type: ignore[method-assign]
    try:
        yield
    finally:
        Full.cross = plain  # type: ignore[method-assign]


def sampled_stddev(model: nn.Module, x: cp.Gaussian, samples: int, seed: int) -> Tensor:
    """Of every output of the network, by sampling."""
    generator, count = torch.Generator().manual_seed(seed), 0
    total, squares = torch.zeros(()), torch.zeros(())
    centre = model(x.mean)
    for _ in range(max(1, samples // CHUNK)):
        draws = x[0].sample(min(CHUNK, samples), generator)
        outputs = model(draws) - centre
        count += len(outputs)
        total, squares = total + outputs.sum(0), squares + outputs.square().sum(0)
    return ((squares - total.square() / count) / (count - 1)).sqrt()


def worst(model: nn.Module, x: cp.Gaussian, expected: Tensor) -> float | None:
    """The worst relative error, or None where the branches contradict each other."""
    try:
        stddev = cp.propagate(model, x).stddev[0]
    except cp.InconsistentBranches:
        return None
    return float((stddev / expected - 1).abs().max())


def settings(options: Options) -> dict[str, Any]:
    """Inputs, samples and noises."""
    inputs, samples = (1, 2_000) if options.smoke else (INPUTS, SAMPLES)
    noises = NOISES[-1:] if options.smoke else NOISES
    return {"inputs": inputs, "samples": samples, "noises": noises, "seed": options.seed}


def units(options: Options) -> list[str]:
    """An architecture each, and with third cumulants an architecture at one noise."""
    noises = reversed(settings(options)["noises"])
    further = [f"{name}/{CUMULANTS}/{noise}" for noise in noises for name in ARCHITECTURES]
    return [*ARCHITECTURES, *further]


def measure(key: str, options: Options) -> Any:
    """One architecture at every noise and input; with third cumulants, at one noise."""
    chosen = settings(options)
    name, *further = key.split("/")
    model, shape = ARCHITECTURES[name].build(), ARCHITECTURES[name].shape
    generator = torch.Generator().manual_seed(options.seed)
    means = torch.randn((chosen["inputs"], 1, *shape), dtype=torch.float64, generator=generator)
    if further:
        noise = float(further[1])
        count = min(chosen["samples"], CONTROLLED if noise == max(NOISES) else FEWER)
        return [_with_cumulants(model, mean, noise, count, seed) for seed, mean in enumerate(means)]
    return {
        str(noise): [_compared(model, mean, noise, chosen["samples"], seed)
                     for seed, mean in enumerate(means)]
        for noise in chosen["noises"]
    }  # fmt: skip


def _compared(
    model: nn.Module, mean: Tensor, noise: float, samples: int, seed: int
) -> dict[str, float | None]:
    x = cp.Gaussian.isotropic(mean, stddev=noise, batch_dims=1)
    expected = sampled_stddev(model, x, samples, seed)
    row = {"joined": worst(model, x, expected)}
    with independent_branches():
        row["independent"] = worst(model, x, expected)
    return row


def _with_cumulants(
    model: nn.Module, mean: Tensor, noise: float, samples: int, seed: int
) -> dict[str, Any]:
    """Worst errors of both methods by the same truth, whose worst standard error is beside."""
    x = cp.Gaussian.isotropic(mean, stddev=noise, batch_dims=1)
    generator = torch.Generator().manual_seed(seed)
    true = cp.propagate(model, x, cp.ControlVariate(samples, generator=generator))
    assert true.covariance_stderr is not None
    stderr = true.covariance_stderr.diagonal(dim1=-2, dim2=-1).flatten() / true.variance.flatten()
    row: dict[str, Any] = {"samples": samples, "stderr": float(stderr.max()) / 2, "notes": 0}
    for name, method in (("exact", cp.Exact()), (CUMULANTS, cp.Cumulants())):
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cp.ApproximationWarning)  # notes are counted
            try:
                y = cp.propagate(model, x, method)
            except cp.InconsistentBranches:
                row[name] = None
                continue
        row[f"{name} seconds"] = round(time.perf_counter() - started, 3)
        row[name] = float((y.stddev / true.stddev - 1).abs().max())
        row["notes"] = len(y.notes)
    return row


def tables(record: dict[str, Any]) -> list[Table]:
    """Ranges over inputs, in percent."""
    further = {key: rows for key, rows in record["results"].items() if "/" in key}
    first = {key: rows for key, rows in record["results"].items() if "/" not in key}
    made = [_table(first)] if first else []
    return [*made, *([_cumulants_table(further)] if further else [])]


def _cumulants_table(results: dict[str, list[dict[str, Any]]]) -> Table:
    by_name: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for key, rows in results.items():
        name, _, noise = key.split("/")
        by_name.setdefault(name, {})[noise] = rows
    noises = sorted({noise for found in by_name.values() for noise in found}, key=float)
    largest = noises[-1]
    lines = []
    for name, found in by_name.items():
        rows = found.get(largest, [])
        lines.append([
            name, *(_range(found.get(noise, []), CUMULANTS) for noise in noises),
            _range(rows, "exact"), _range(rows, "stderr"),
            f"{sum(row['notes'] > 0 for row in rows)} of {len(rows)}",
        ])  # fmt: skip
    header = ["network", *(f"noise {noise}" for noise in noises), f"`Exact()`, {largest}",
              f"error of the truth, {largest}", f"with notes, {largest}"]  # fmt: skip
    note = "The truth is sampled with a control variate; its standard error is that of the worst."
    return Table("The same with third cumulants, `cp.Cumulants()`", header, lines, note)


def _table(results: dict[str, Any]) -> Table:
    noises = list(next(iter(results.values())))
    header = ["network", *(f"noise {noise}" for noise in noises), "independent, 0.01"]
    rows = [
        [name, *(_range(rows, "joined") for rows in by_noise.values()),
         _range(by_noise.get("0.01", []), "independent")]
        for name, by_noise in results.items()
    ]  # fmt: skip
    return Table("Worst relative error of a standard deviation", header, rows)


def figures(_: dict[str, Any]) -> dict[str, Figure]:
    """None."""
    return {}


def _range(rows: list[dict[str, float | None]], key: str) -> str:
    values = sorted(value for row in rows if (value := row[key]) is not None)
    failed = f" ({len(rows) - len(values)} refused)" if len(values) < len(rows) else ""
    return f"{100 * values[0]:.1f}-{100 * values[-1]:.1f} %{failed}" if values else "-"
