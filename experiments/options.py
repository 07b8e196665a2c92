"""What the command line says about a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
WEIGHTS = ROOT / "data" / "weights"
"""Outside git, as everything in /data."""


@final
@dataclass(frozen=True)
class Options:
    """The options of experiments; `only` keeps units whose key begins with one.

    datasets: which UCI sets, all of the experiment's if empty; protocol: of table 3, all if None.
    """

    smoke: bool = False
    seed: int = 0
    instances: int | None = None
    data: Path | None = None
    out: Path | None = None
    weights: Path | None = None
    only: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    protocol: str | None = None

    def path(self, name: str) -> Path:
        """Of an experiment's JSON; a smoke run does not touch the real one."""
        return self.out or (RESULTS / "smoke" if self.smoke else RESULTS) / f"{name}.json"

    def weights_path(self) -> Path:
        """Of the trained MNIST network."""
        return self.weights or WEIGHTS / ("mnist-smoke.pt" if self.smoke else "mnist.pt")
