"""Networks of the corpus that are trained: on functions, on tables, on digits; kept by their names.

Weights are files of a folder outside git, so that each network is trained once on a machine.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from covprop.files import write_atomically
from experiments import uci
from experiments.corpus_targets import EDGE, TARGETS
from experiments.randomness import seeded

VERSION = 1
"""Of the recipes: another one trains all networks again."""
VARIABLE = "COVPROP_CORPUS"
STEPS, BATCH, RATE = 3000, 512, 4e-3
HELD_OUT = 4096
"""Points that a fit is judged by."""
SHIFTED = "digits-shifted"
"""The table of digits under another name, for a network whose noise is of low rank."""
TABLE_STEPS, ROWS = 1500, 128
"""Steps on a table, and rows of each."""


def folder() -> Path:
    """Where weights and truths are kept."""
    return Path(os.environ.get(VARIABLE, Path.home() / ".cache" / "covprop" / "corpus"))


@final
class Trained(NamedTuple):
    """A network in float64, and how wrong it is.

    That is the root mean square of what it does not explain, where the target has deviation 1; of a
    classifier the share of errors.
    """

    model: nn.Sequential
    residual: float


@final
@dataclass(frozen=True)
class Fit:
    """A network fitted to a function; another number of steps is in its name."""

    target: str
    width: int
    depth: int
    activation: str = "ReLU"
    steps: int = STEPS

    @property
    def name(self) -> str:
        """Of the file too."""
        steps = "" if self.steps == STEPS else f"-{self.steps}"
        return f"{self.target}-{self.width}x{self.depth}-{self.activation}{steps}"

    def model(self) -> nn.Sequential:
        """As torch initialises it."""
        target = TARGETS[self.target]
        outputs = target(torch.zeros(1, target.inputs)).shape[1]
        return layers(target.inputs, (self.width,) * self.depth, outputs, self.activation)

    def train(self, model: nn.Sequential) -> Tensor:
        """On fresh points in every step; the root mean square of what is not explained."""
        target = TARGETS[self.target]
        held_out = cube(HELD_OUT, target.inputs)
        wanted = target(held_out)
        centre, spread = wanted.mean(0), wanted.std(0)

        def difference(x: Tensor) -> Tensor:
            return model(x) - (target(x) - centre) / spread  # type: ignore[no-any-return]

        minimise(model, lambda: difference(cube(BATCH, target.inputs)).square().mean(), self.steps)
        return difference(held_out).square().mean().sqrt()


@final
@dataclass(frozen=True)
class Tabular:
    """A regressor or classifier of a table's rows, standardised."""

    table: str
    hidden: tuple[int, ...] = (50, 50, 50)
    activation: str = "ReLU"
    steps: int = TABLE_STEPS

    @property
    def name(self) -> str:
        """Of the file too."""
        return f"{self.table}-{'-'.join(map(str, self.hidden))}-{self.activation}"

    def model(self) -> nn.Sequential:
        """As torch initialises it; an output for each class."""
        rows, labels = table(self.table)
        outputs = 1 if labels.is_floating_point() else int(labels.max()) + 1
        return layers(rows.shape[1], self.hidden, outputs, self.activation)

    def train(self, model: nn.Sequential) -> Tensor:
        """Root mean square of residuals, or the share of rows that are classified wrongly."""
        rows, labels = table(self.table)
        return by_rows(model, rows.float(), labels, self.steps)


@final
@dataclass(frozen=True)
class Convolutional:
    """A small convolutional classifier of digits."""

    name: str = "digits-convolutional"
    steps: int = TABLE_STEPS

    def model(self) -> nn.Sequential:
        """As torch initialises it."""
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip

    def train(self, model: nn.Sequential) -> Tensor:
        """The share of images that are classified wrongly."""
        images, labels = table("digits")
        return by_rows(model, images.float().reshape(-1, 1, 8, 8), labels, self.steps)


def by_rows(model: nn.Sequential, x: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Mean square or cross-entropy, on rows drawn in every step; how wrong it is in the end."""
    regression = labels.is_floating_point()

    def loss() -> Tensor:
        chosen = torch.randint(len(x), (ROWS,))
        if regression:
            return (model(x[chosen])[:, 0] - labels[chosen].float()).square().mean()
        return nn.functional.cross_entropy(model(x[chosen]), labels[chosen])

    minimise(model, loss, steps)
    if regression:
        return (model(x)[:, 0] - labels).square().mean().sqrt()
    return (model(x).argmax(1) != labels).float().mean()


Network: TypeAlias = Fit | Tabular | Convolutional


def cube(rows: int, inputs: int) -> Tensor:
    """Uniform points, each coordinate of deviation 1."""
    return EDGE * (2 * torch.rand(rows, inputs) - 1)


def layers(inputs: int, hidden: tuple[int, ...], outputs: int, activation: str) -> nn.Sequential:
    """Linear layers with an activation between."""
    widths = (inputs, *hidden, outputs)
    function: Callable[[], nn.Module] = getattr(nn, activation)
    parts = [part for ends in pairwise(widths) for part in (nn.Linear(*ends), function())]
    return nn.Sequential(*parts[:-1])


def minimise(model: nn.Module, loss: Callable[[], Tensor], steps: int) -> None:
    """Adam with one cycle of the rate."""
    optimiser = torch.optim.Adam(model.parameters(), fused=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
        cycle.step()


@cache
def trained(network: Network) -> Trained:
    """As kept on this machine, or trained now and kept."""
    path = folder() / "weights" / f"{network.name}-{network.steps}-{VERSION}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with seeded("corpus", network.name), torch.enable_grad():
            made = network.model()
            residual = float(network.train(made).detach())
        write_atomically(path, lambda file: torch.save((made.state_dict(), residual), file))
    weights, residual = torch.load(path, weights_only=True)
    model = network.model()
    model.load_state_dict(weights)
    return Trained(model.double().requires_grad_(requires_grad=False).eval(), residual)


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """Standardised features (rows, features) and a standardised target or classes, (rows,).

    A table of UCI, or one that ships with scikit-learn; pixels of digits go from 0 to 1.
    """
    if name in uci.CHECKSUMS:
        values = uci.table(name)
        features, target = values[:, :-1], values[:, -1]
    elif name in ("digits", SHIFTED):
        images = datasets.load_digits()
        return torch.from_numpy(images.data / 16), torch.from_numpy(images.target).long()
    else:
        features, target = getattr(datasets, f"load_{name}")(return_X_y=True)
    x = torch.from_numpy(_standardised(features))
    if np.issubdtype(np.asarray(target).dtype, np.integer):
        return x, torch.from_numpy(target).long()
    return x, torch.from_numpy(_standardised(target))


def _standardised(values: np.ndarray) -> np.ndarray:
    """Constants become 0."""
    constant = np.ptp(values, axis=0) == 0
    spread = np.where(constant, 1, values.std(0))
    return np.asarray(np.where(constant, 0, (values - values.mean(0)) / spread), dtype=np.float64)
