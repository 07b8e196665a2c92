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
class Choice:
    """The elements of a batch, and of the flattened event of each.

    batch: indices of the batch; outputs: indices of the flattened event; names: of those outputs.
    """

    batch: tuple[tuple[int, ...], ...]
    outputs: Tensor
    names: tuple[str, ...]
    batch_size: int
    event_size: int

    @classmethod
    def of(cls, y: Gaussian, names: Sequence[str] = (), most: int = MOST) -> "Choice":
        """The first inputs of the batch, and outputs evenly spaced where there are too many."""
        size = y.event_shape.numel()
        kept = min(size, OUTPUTS)
        outputs = torch.linspace(0, max(0, size - 1), kept, dtype=torch.float64).round().long()
        rows = min(kept, MAP)
        numbers = 8 * kept + rows * (rows + 1)
        count = max(1, min(most, NUMBERS // max(1, numbers)))
        shape = tuple(y.batch_shape)
        every = itertools.product(*(range(length) for length in shape))
        chosen = tuple(itertools.islice(every, count))
        return cls(chosen, outputs, _names(y, outputs, names), math.prod(shape), size)

    @property
    def labels(self) -> list[str]:
        """Names of the inputs of the batch; of one alone, none."""
        if len(self.batch) < 2:  # noqa: PLR2004
            return []
        return [f"input {', '.join(map(str, index))}" for index in self.batch]

    @property
    def sentence(self) -> str:
        """What is left out."""
        said = []
        if len(self.batch) < self.batch_size:
            said.append(
                f"The page shows the first {len(self.batch)} of {self.batch_size:,} inputs, to "
                "stay small."
            )
        if len(self.outputs) < self.event_size:
            said.append(
                f"Of {self.event_size:,} outputs, {len(self.outputs):,} that are evenly spaced are "
                "shown."
            )
        return " ".join(said)

    def within(self, x: Gaussian) -> list[Gaussian]:
        """Each chosen input of the batch, with the chosen outputs alone, in float64."""
        return [x[index].marginal(self.outputs.to(x.device)).to("cpu", torch.float64)
                for index in self.batch]  # fmt: skip


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
    """Standard deviations in the shape of the mean; of a variance that is not known, not known."""
    return x.variance.clamp(min=0).sqrt()
