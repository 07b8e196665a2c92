"""How much noise a decision takes."""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from covprop.covariance import Zero
from covprop.gaussian import Gaussian
from covprop.kernels.normal import SATURATION
from covprop.methods import Method
from covprop.propagate import EXACT, propagate
from covprop.report.table import in_digits, plain
from covprop.robustness.bracket import End, narrowed
from covprop.robustness.logits import Logits
from covprop.robustness.probabilities import misclassification
from covprop.robustness.randomisation import POINTS, Randomisation
from covprop.robustness.sampled import Classifier, Model

LARGEST = 2.0**10
"""The level at which the search ends."""
SMALLEST = 2.0**-20
"""The level below which it ends."""
TOLERANCE = 1e-4
"""Of the level, relative to itself."""
NOISY = 5.0
"""Standard errors by which a probability may rise with the noise without being seen to rise."""
ROUNDING = 100.0
"""In units of machine epsilon: a rise that says nothing."""

FOUND = "found"
NOT_MONOTONE = "found, but the probability was also seen to rise with the noise"
MISCLASSIFIED = "misclassified without noise"
KEPT = "kept up to the largest level"
LOST = "lost at the smallest level"
NO_NOISE = "there is no noise to scale"

WHOLE = 100.0
"""Levels from which on digits behind the point say nothing."""


@final
@dataclass(frozen=True)
class NoiseBudget:
    """The largest noise that keeps a class with some probability, and how it was found.

    level (*batch,): what the standard deviations of the given Gaussian are multiplied with; 0 where
    the class is lost without noise or at the smallest level, the largest level where it is kept
    there, NaN where the Gaussian does not vary. stddev (*batch,): the root of the average variance
    of the input's elements at that level. reason: one of the sentences of
    `covprop.robustness.budget` for each of the batch, in a flat tuple. probability (*batch,):
    P(label) at the level. levels, probabilities (evaluations, *batch): all that was tried,
    ascending, NaN where an element of the batch was not.
    """

    target: float
    level: Tensor
    stddev: Tensor
    reason: tuple[str, ...]
    probability: Tensor
    levels: Tensor
    probabilities: Tensor

    @property
    def found(self) -> Tensor:
        """Whether there is a level at which the probability is the target, (*batch,)."""
        known = [reason in (FOUND, NOT_MONOTONE) for reason in self.reason]
        return torch.tensor(known, device=self.level.device).reshape(self.level.shape)

    @property
    def bounded(self) -> Tensor:
        """Whether the level is the largest that was tried, and the budget at least that."""
        bounded = [reason == KEPT for reason in self.reason]
        return torch.tensor(bounded, device=self.level.device).reshape(self.level.shape)

    @property
    def exists(self) -> Tensor:
        """Whether the level is a noise that keeps the class, (*batch,)."""
        return self.found | self.bounded

    def written(self, place: tuple[int, ...] = ()) -> str:
        """The level of one of a batch as it is read: a dash where there is none."""
        level = float(self.level[place])
        text = f"{level:,.0f}" if level >= WHOLE else in_digits(level)
        return f"at least {text}" if bool(self.bounded[place]) else text

    def pick(self, place: tuple[int, ...]) -> "NoiseBudget":
        """One of a batch; with what was tried for it."""
        numbers = torch.arange(self.level.numel()).reshape(self.level.shape)
        column: Any = (slice(None), *place)
        tried = ~self.levels[column].isnan()
        return replace(
            self,
            level=self.level[place],
            stddev=self.stddev[place],
            reason=(self.reason[int(numbers[place])],),
            probability=self.probability[place],
            levels=self.levels[column][tried],
            probabilities=self.probabilities[column][tried],
        )

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers, lists and words, for JSON."""
        reason = np.array(self.reason, dtype=object).reshape(self.level.shape).tolist()
        told: dict[str, Any] = {"target": self.target, "reason": reason}
        for name in ("level", "stddev", "probability", "levels", "probabilities"):
            told[name] = plain(getattr(self, name).tolist())
        return told


@torch.no_grad()
def noise_budget(
    model: Model,
    x: Gaussian | Tensor,
    label: int | Tensor | None = None,
    probability: float = 0.99,
    *,
    batch_dims: int = 0,
    method: Method = EXACT,
    largest: float = LARGEST,
    tolerance: float = TOLERANCE,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> NoiseBudget:
    """The largest level at which noise leaves the label its class with this probability.

    x: a Gaussian, whose covariance times level^2 is the noise; or a tensor, of whose dimensions
    batch_dims are a batch, for isotropic noise with the level as its standard deviation. Levels
    are doubled or halved from 1 until they bracket the target, then Chandrupatla's method finds the
    root of Phi^-1(P(label)) - Phi^-1(probability) in 1 / level, in which a linear network of two
    classes is a straight line. P(label) falls with the noise in practice, not by any theorem: all
    that was tried is in the result, and `reason` says where it was seen to rise. The points of
    cubature are drawn once, so that the function is continuous. An input whose covariance is zero
    has no noise to scale, and its level is NaN; a batch of constants (`cp.Gaussian.constant`) is
    refused.

    label: the network's own decision by default; tolerance: of the level, relative to itself;
    largest: the level at which the search ends.
    """
    shape = x if isinstance(x, Gaussian) else Gaussian.isotropic(x, 1.0, batch_dims)
    _check(shape, probability, largest, tolerance)
    labels = Classifier(model, shape).decision() if label is None else label
    search = _Search(
        model, shape, labels, probability, method, Randomisation.draw(points, generator)
    )
    return search.run(largest, tolerance)


def scaled(x: Gaussian, level: Tensor) -> Gaussian:
    """The same mean with standard deviations times a level (*batch,)."""
    factor = level.to(x.mean)[..., None].expand(x.covariance.diagonal().shape)
    return Gaussian(x.mean, x.covariance.scale(factor), validate_args=False)


def _check(x: Gaussian, probability: float, largest: float, tolerance: float) -> None:
    if not 0 < probability < 1:
        raise ValueError(f"probability is between 0 and 1, not {probability!r}")
    if not SMALLEST < largest < math.inf:
        raise ValueError(f"largest is a finite level above {SMALLEST:.1e}, not {largest!r}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is between 0 and 1, not {tolerance!r}")
    if isinstance(x.covariance, Zero):
        raise ValueError(
            "the Gaussian does not vary, and there is no noise to scale; use "
            "cp.Gaussian.isotropic(mean, 1.0) or another covariance as the shape of the noise"
        )


class _Search:
    """Evaluations of the probability, all of which are kept."""

    def __init__(
        self,
        model: Model,
        shape: Gaussian,
        labels: int | Tensor,
        target: float,
        method: Method,
        points: Randomisation,
    ) -> None:
        self.model, self.shape, self.labels = model, shape, labels
        self.target, self.method, self.points = target, method, points
        self.levels: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.errors: list[Tensor] = []

    def run(self, largest: float, tolerance: float) -> NoiseBudget:
        """Without noise, at 1, on to a bracket, and into it."""
        everywhere = torch.ones(self.shape.batch_shape, dtype=torch.bool, device=self.shape.device)
        level = torch.ones(self.shape.batch_shape, dtype=torch.float64, device=self.shape.device)
        level = level.clamp(max=largest)
        right = self.excess(torch.zeros_like(level), everywhere) >= 0
        varies = (self.shape.covariance.diagonal() > 0).any(-1)
        sought = right & varies
        first = End(level, self.excess(level, sought))
        keeps = first.value >= 0
        first, second = self._bracketed(first, sought, keeps, largest)
        inside = sought & (torch.sign(first.value) != torch.sign(second.value))
        root = narrowed(
            lambda place, active: self.excess(1 / place, active),
            End(1 / first.place, first.value), End(1 / second.place, second.value),
            inside, tolerance,
        )  # fmt: skip
        level = torch.where(inside, 1 / root.place, torch.where(sought & keeps, second.place, 0))
        level = torch.where(right & ~varies, math.nan, level)
        return self._result(level, right, inside, keeps)

    def excess(self, level: Tensor, active: Tensor) -> Tensor:
        """Phi^-1(P(label)) - Phi^-1(target) at a level (*batch,), noted where active."""
        noisy = scaled(self.shape, level)
        given = Logits.of(propagate(self.model, noisy, method=self.method))
        lost = misclassification(given, self.labels, self.points)
        unknown = torch.full_like(level, math.nan)
        self.levels.append(torch.where(active, level, unknown))
        self.kept.append(torch.where(active, 1 - lost.probability.double(), unknown))
        self.errors.append(lost.stderr.double())
        wanted = torch.special.ndtri(torch.tensor(self.target, dtype=torch.float64))
        found = -torch.special.ndtri(lost.probability.double().clamp(0, 1))
        return found.clamp(-SATURATION, SATURATION) - wanted.to(level.device)

    def _bracketed(
        self, first: End, sought: Tensor, keeps: Tensor, largest: float
    ) -> tuple[End, End]:
        """Another level each: twice the last one where it keeps the class, half of it if not."""
        second = first
        while True:
            open_ = sought & (torch.sign(first.value) == torch.sign(second.value))
            open_ &= torch.where(keeps, second.place < largest, second.place > SMALLEST)
            if not bool(open_.any()):
                return first, second
            following = torch.where(keeps, (2 * second.place).clamp(max=largest), second.place / 2)
            place = torch.where(open_, following, second.place)
            new = End(place, self.excess(place, open_))
            first, second = second.where(open_, first), new.where(open_, second)

    def _result(self, level: Tensor, right: Tensor, inside: Tensor, keeps: Tensor) -> NoiseBudget:
        levels, kept = torch.stack(self.levels), torch.stack(self.kept)
        errors = torch.stack(self.errors)
        order = levels.argsort(0)  # NaN last
        levels, kept, errors = (part.gather(0, order) for part in (levels, kept, errors))
        slack = NOISY * (errors[1:] + errors[:-1])
        slack = slack + ROUNDING * torch.finfo(self.shape.dtype).eps
        still = level.isnan()
        rises = (kept.diff(dim=0) > slack).any(0)
        reason = [
            FOUND if is_inside and not rose else NOT_MONOTONE if is_inside
            else MISCLASSIFIED if not is_right else NO_NOISE if is_still
            else KEPT if has_kept else LOST
            for is_right, is_still, is_inside, has_kept, rose in zip(
                *(flag.reshape(-1).tolist() for flag in (right, still, inside, keeps, rises)),
                strict=True,
            )
        ]  # fmt: skip
        at = torch.where(levels == level, kept, -math.inf).amax(0)
        variance = self.shape.covariance.diagonal().double().mean(-1)
        stddev = torch.where(still, 0, level * variance.sqrt())
        dtype = self.shape.dtype
        return NoiseBudget(
            self.target, level.to(dtype), stddev.to(dtype), tuple(reason),
            torch.where(at >= 0, at, kept[0]).to(dtype), levels.to(dtype), kept.to(dtype),
        )  # fmt: skip
