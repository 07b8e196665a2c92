"""How far whole networks are from sampling: the table of docs/accuracy.md.

Small versions of well-known architectures, several random inputs, isotropic noise; the worst
relative error of an output's standard deviation, with branches joined and as if independent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import covprop as cp
from covprop.lineage import Lineage, Node
from experiments import record
from tests.architectures import ARCHITECTURES

NOISES = (0.001, 0.01, 0.03, 0.3)
INPUTS, SAMPLES, CHUNK = 5, 200_000, 10_000


@contextmanager
def independent_branches() -> Iterator[None]:
    """Take tensors that meet as independent, as most tools do."""
    plain = Lineage.cross

    def cross(self: Lineage, u: Node, v: Node) -> Tensor | None:
        return plain(self, u, v) if u is v else None

    Lineage.cross = cross  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lineage.cross = plain  # type: ignore[method-assign]


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


@torch.no_grad()
def run(out: Path | None = None, smoke: bool = False) -> dict[str, Any]:
    """Measure every architecture at every noise and input; write as results come."""
    path = out or record.default_path("accuracy", smoke)
    inputs, samples = (1, 2_000) if smoke else (INPUTS, SAMPLES)
    noises = NOISES[-1:] if smoke else NOISES
    settings = {"inputs": inputs, "samples": samples, "noises": noises, "seed": 0}
    results: dict[str, Any] = {}
    for name, architecture in ARCHITECTURES.items():
        model, results[name] = architecture.build(), {}
        generator = torch.Generator().manual_seed(0)
        means = torch.randn(
            (inputs, 1, *architecture.shape), dtype=torch.float64, generator=generator
        )
        for noise in noises:
            rows = []
            for seed, mean in enumerate(means):
                x = cp.Gaussian.isotropic(mean, noise, batch_dims=1)
                expected = sampled_stddev(model, x, samples, seed)
                row = {"joined": worst(model, x, expected)}
                with independent_branches():
                    row["independent"] = worst(model, x, expected)
                rows.append(row)
            results[name][str(noise)] = rows
        record.write(path, settings, results)
    return results


def show(results: dict[str, Any]) -> None:
    """Print the table of ranges, in percent, as Markdown."""
    noises = list(next(iter(results.values())))
    print("| network |", " | ".join(f"noise {noise}" for noise in noises), "| independent, 0.01 |")
    print("| --- |", " | ".join("---" for _ in noises), "| --- |")
    for name, by_noise in results.items():
        cells = [_range(rows, "joined") for rows in by_noise.values()]
        print(f"| {name} |", " | ".join(cells), "|", end=" ")
        print(_range(by_noise.get("0.01", []), "independent"), "|")


def _range(rows: list[dict[str, float | None]], key: str) -> str:
    values = sorted(value for row in rows if (value := row[key]) is not None)
    failed = f" ({len(rows) - len(values)} refused)" if len(values) < len(rows) else ""
    return f"{100 * values[0]:.1f}-{100 * values[-1]:.1f} %{failed}" if values else "-"
