"""Which inputs of a batch and which outputs the page shows: all, or so many that it stays small."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.gaussian import Gaussian

NUMBERS = 100_000
"""Numbers that the inputs of a batch may add to the page, about."""
MOST = 24
"""Inputs of a batch that a person would choose from."""
OUTPUTS = 1000
"""Outputs that are shown one by one."""
MAP = 100
"""Rows of a map; a larger matrix is shown by blocks."""


@final
@dataclass(frozen=True)
class Batch:
    """Which inputs of a batch are shown; places: in the flattened batch; kind: how chosen."""

    shape: tuple[int, ...]
    places: tuple[int, ...]
    kind: str = "first"

    @classmethod
    def of(cls, shape: Sequence[int], numbers: int, risk: Tensor | None = None) -> "Batch":
        """As many as stay small, of so many numbers each; those of the largest risk, or first."""
        size = math.prod(shape)
        count = max(1, min(MOST, size, NUMBERS // max(1, numbers)))
        if risk is None:
            return cls(tuple(shape), tuple(range(min(count, size))))
        riskiest = risk.flatten().nan_to_num(math.inf).argsort(descending=True, stable=True)
        return cls(tuple(shape), tuple(sorted(riskiest[:count].tolist())), "riskiest")

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Of each, in all dimensions of the batch."""
        every = list(itertools.product(*(range(length) for length in self.shape)))
        return [every[place] for place in self.places]

    @property
    def labels(self) -> list[str]:
        """Names; of one alone, none."""
        if math.prod(self.shape) == 1:
            return []
        return [f"input {', '.join(map(str, index))}" for index in self.indices]

    @property
    def sentence(self) -> str:
        """What is left out."""
        size = math.prod(self.shape)
        if len(self.places) == size:
            return ""
        return (
            f"The page shows the {len(self.places)} {self.kind} of {size:,} inputs, to stay small."
        )


@final
@dataclass(frozen=True)
class Choice:
    """Which inputs, and which elements of the flattened event of each, with their names."""

    batch: Batch
    outputs: Tensor
    names: tuple[str, ...]
    size: int

    @classmethod
    def of(cls, y: Gaussian, batch: Batch, names: Sequence[str] = ()) -> "Choice":
        """All outputs, or evenly spaced ones where there are too many."""
        size = y.event_shape.numel()
        places = torch.linspace(0, max(0, size - 1), min(size, OUTPUTS), dtype=torch.float64)
        outputs = places.round().long()
        return cls(batch, outputs, _names(y, outputs, names), size)

    @property
    def sentence(self) -> str:
        """What is left out."""
        few = (
            f"Of {self.size:,} outputs, {len(self.outputs):,} that are evenly spaced are shown."
            if len(self.outputs) < self.size
            else ""
        )
        return f"{self.batch.sentence} {few}".strip()

    def within(self, x: Gaussian) -> list[Gaussian]:
        """Each chosen input of the batch, with the chosen outputs alone, in float64."""
        index = self.outputs.to(x.device)
        return [x[place].marginal(index).to("cpu", torch.float64) for place in self.batch.indices]


def numbers_of(size: int) -> int:
    """How many numbers an output of this size adds to the page, about."""
    kept = min(size, OUTPUTS)
    rows = min(kept, MAP)
    return 8 * kept + rows * (rows + 1)


def _names(y: Gaussian, outputs: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    size = y.event_shape.numel()
    if names:
        if len(names) != size:
            raise ValueError(f"{len(names)} names for {size} outputs; give one for each, or none")
        return tuple(str(names[i]) for i in outputs.tolist())
    shape = [length for length in y.event_shape if length > 1]
    if len(shape) < 2:  # noqa: PLR2004
        return tuple(f"output {i}" for i in outputs.tolist())
    places = torch.unravel_index(outputs, shape)
    return tuple(
        f"output {', '.join(map(str, place))}"
        for place in zip(*(axis.tolist() for axis in places), strict=True)
    )


def deviations(x: Gaussian) -> Tensor:
    """Standard deviations in the shape of the mean; NaN for a variance that is none."""
    return x.stddev
