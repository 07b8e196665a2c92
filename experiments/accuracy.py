"""How far whole networks are from sampling: the table of docs/accuracy.md.

Small versions of well-known architectures, several random inputs, isotropic noise; the worst
relative error of an output's standard deviation, with branches joined and as if independent.
"""

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


def units(_: Options) -> list[str]:
    """An architecture each."""
    return list(ARCHITECTURES)


def measure(key: str, options: Options) -> dict[str, Any]:
    """One architecture at every noise and input."""
    chosen = settings(options)
    model, shape = ARCHITECTURES[key].build(), ARCHITECTURES[key].shape
    generator = torch.Generator().manual_seed(options.seed)
    means = torch.randn((chosen["inputs"], 1, *shape), dtype=torch.float64, generator=generator)
    return {
        str(noise): [_compared(model, mean, noise, chosen["samples"], seed)
                     for seed, mean in enumerate(means)]
        for noise in chosen["noises"]
    }  # fmt: skip


def _compared(
    model: nn.Module, mean: Tensor, noise: float, samples: int, seed: int
) -> dict[str, float | None]:
    x = cp.Gaussian.isotropic(mean, noise, batch_dims=1)
    expected = sampled_stddev(model, x, samples, seed)
    row = {"joined": worst(model, x, expected)}
    with independent_branches():
        row["independent"] = worst(model, x, expected)
    return row


def tables(record: dict[str, Any]) -> list[Table]:
    """Ranges over inputs, in percent."""
    results = record["results"]
    noises = list(next(iter(results.values())))
    header = ["network", *(f"noise {noise}" for noise in noises), "independent, 0.01"]
    rows = [
        [name, *(_range(rows, "joined") for rows in by_noise.values()),
         _range(by_noise.get("0.01", []), "independent")]
        for name, by_noise in results.items()
    ]  # fmt: skip
    return [Table("Worst relative error of a standard deviation", header, rows)]


def figures(_: dict[str, Any]) -> dict[str, Figure]:
    """None."""
    return {}


def _range(rows: list[dict[str, float | None]], key: str) -> str:
    values = sorted(value for row in rows if (value := row[key]) is not None)
    failed = f" ({len(rows) - len(values)} refused)" if len(values) < len(rows) else ""
    return f"{100 * values[0]:.1f}-{100 * values[-1]:.1f} %{failed}" if values else "-"
