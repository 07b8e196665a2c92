"""Points of randomised quasi-Monte Carlo, the same for all that is compared."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from covprop.methods.montecarlo import HALF_CELL, REPLICATES

POINTS = 4096
"""Points of all replicates together."""


@final
@dataclass(frozen=True)
class Randomisation:
    """Scrambled Sobol points that are fixed by their seeds: what they average is continuous."""

    each: int
    seeds: tuple[int, ...]

    @classmethod
    def draw(cls, points: int, generator: torch.Generator | None) -> "Randomisation":
        """So many points in all, rounded up: Sobol's sequence is balanced at powers of two."""
        if type(points) is not int or points < 1:
            raise ValueError(f"points is a whole number from 1, not {points!r}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                "generator is a torch.Generator, as torch.Generator().manual_seed(0) gives, not "
                f"{generator!r}"
            )
        each = 2 ** math.ceil(math.log2(max(2, points / REPLICATES)))
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**31 - 1, (REPLICATES,), generator=generator, device=device)
        return cls(each, tuple(seeds.tolist()))

    @property
    def replicates(self) -> int:
        """How many scramblings."""
        return len(self.seeds)

    def uniform(self, size: int, device: torch.device) -> Tensor:
        """Points of the unit cube, (size, replicates * each) in float64, by scrambling."""
        return _uniform(size, self.each, self.seeds).to(device)


@lru_cache(maxsize=8)
def _uniform(size: int, each: int, seeds: tuple[int, ...]) -> Tensor:
    engines = (SobolEngine(size, scramble=True, seed=seed) for seed in seeds)
    points = torch.cat([engine.draw(each, dtype=torch.float64) for engine in engines])
    return points.mT.contiguous() + HALF_CELL
