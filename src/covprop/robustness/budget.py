"""The largest noise that a decision tolerates."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from covprop.errors import approximations_ignored
from covprop.gaussian import Gaussian
from covprop.kernels.normal import SATURATION
from covprop.kernels.rounding import PROBABILITY
from covprop.methods import Auto, Method, as_method
from covprop.propagate import AUTO
from covprop.robustness.classifier import Classifier, Model
from covprop.robustness.decisions import decide, method_at
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import POINTS, Randomisation
from covprop.text_table import in_digits, plain

SMALLEST, LARGEST = 2.0**-20, 2.0**10
"""Levels at which the search ends."""
TOLERANCE = 1e-4
"""Of the level, relative to itself."""
EVALUATIONS = 100
"""Most evaluations of a root finder; bisection alone needs no more in float64."""
SEARCHES = 3
"""Searches at most, with the methods that `cp.Auto` chooses."""
NOISY = 5.0
"""Standard errors by which a probability may rise with the noise without being seen to rise."""
INTEGRAL = 100.0
"""Levels from which on decimals are not written."""

FOUND = "found"
NOT_MONOTONE = "found, but the probability was also seen to rise with the noise"
MISCLASSIFIED = "misclassified without noise"
KEPT = "kept up to the largest level"
LOST = "lost at the smallest level"
NO_NOISE = "there is no noise to scale"


@final
@dataclass(frozen=True)
class NoiseBudget:
    """The largest noise that keeps a class with some probability, and how it was determined.

    Attributes:
        target: The probability with which the class is to be kept.
        level: The factor of the given standard deviations, (*batch,). It is 0 if the class is lost
            without noise or at the smallest level, the largest level if the class is kept there,
            and NaN if the Gaussian does not vary.
        stddev: The root of the average variance of the input's elements at that level, (*batch,).
        reason: One of the sentences of `covprop.robustness.budget` for each of the batch, flat.
        probability: P(label) at the level, (*batch,).
        error: The error of that probability, from the integration and from assumptions about the
            logits, (*batch,); NaN if it is not known.
        levels: All levels that were tried, ascending, (evaluations, *batch); NaN where an element
            of the batch was not evaluated.
        probabilities: P(label) at each of them.

    Example:
        budget = cp.robustness.noise_budget(nn.Linear(4, 3), torch.ones(4))
        print(budget.written(), budget.reason)
    """

    target: float
    level: Tensor
    stddev: Tensor
    reason: tuple[str, ...]
    probability: Tensor
    levels: Tensor
    probabilities: Tensor
    error: Tensor

    @property
    def found(self) -> Tensor:
        """Whether there is a level at which the probability is the target, (*batch,)."""
        return self._has(FOUND, NOT_MONOTONE)

    @property
    def bounded(self) -> Tensor:
        """Whether the level is the largest that was tried, and the budget at least that."""
        return self._has(KEPT)

    @property
    def exists(self) -> Tensor:
        """Whether the level is a noise that keeps the class, (*batch,)."""
        return self._has(FOUND, NOT_MONOTONE, KEPT)

    def _has(self, *reasons: str) -> Tensor:
        flags = [reason in reasons for reason in self.reason]
        return torch.tensor(flags, device=self.level.device).reshape(self.level.shape)

    def _reasons(self) -> Any:
        return np.array(self.reason, dtype=object).reshape(self.level.shape)

    def written(self, place: tuple[int, ...] = ()) -> str:
        """The level of one element of the batch as text; a dash if there is no level."""
        level = float(self.level[place])
        text = f"{level:,.0f}" if level >= INTEGRAL else in_digits(level)
        return f"at least {text}" if bool(self.bounded[place]) else text

    def pick(self, place: tuple[int, ...]) -> "NoiseBudget":
        """One of a batch, with the levels that were tried for it."""
        column: Any = (slice(None), *place)
        tried = ~self.levels[column].isnan()
        return replace(
            self, level=self.level[place], stddev=self.stddev[place],
            reason=(self._reasons()[place],), probability=self.probability[place],
            levels=self.levels[column][tried], probabilities=self.probabilities[column][tried],
            error=self.error[place],
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """Every field as plain numbers, lists and words, for JSON."""
        record: dict[str, Any] = {"target": self.target, "reason": self._reasons().tolist()}
        for name in ("level", "stddev", "probability", "error", "levels", "probabilities"):
            record[name] = plain(getattr(self, name).tolist())
        return record


@torch.no_grad()
def noise_budget(
    model: Model,
    x: Gaussian | Tensor,
    label: int | Tensor | None = None,
    probability: float = 0.99,
    *,
    batch_dims: int = 0,
    method: Method | str = AUTO,
    largest: float = LARGEST,
    tolerance: float = TOLERANCE,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> NoiseBudget:
    """Find the largest noise level at which the label keeps its class with this probability.

    Levels are doubled or halved from 1 until they bracket the target. Then Chandrupatla's method
    finds the root of Phi^-1(P(label)) - Phi^-1(probability) as a function of 1 / level, which is
    linear for a linear network of two classes. P(label) falls with the noise in practice, but not
    by a theorem: the result has all levels that were tried, and `reason` says if it rose anywhere.
    The Sobol points are drawn once, so the function is continuous.

    By default `cp.Auto()` chooses the method at level 1, and again at the level that was found. If
    it then chooses another kind of method, the search is repeated with that. If it evaluates
    points, the decisions at the points are counted.

    Args:
        model: Returns logits; a single one is the log-odds of class 1.
        x: A Gaussian, whose covariance times level^2 is the noise; or a tensor, for isotropic noise
            with the level as its standard deviation. The level of an input whose covariance is zero
            is NaN; a batch of constants (`cp.Gaussian.constant`) is refused.
        label: A class number or one for each of the batch; by default the network's own decision.
        probability: The probability with which the label must be kept.
        batch_dims: How many dimensions of a tensor are a batch.
        method: As for `cp.propagate`.
        largest: The level at which the search ends.
        tolerance: The relative tolerance of the level.
        points: Number of Sobol points in all, rounded up.
        generator: Draws their scramblings; torch's global one by default.

    Example:
        print(cp.robustness.noise_budget(nn.Linear(4, 3), torch.ones(4), probability=0.9).level)
    """
    method = as_method(method)
    if not isinstance(x, Gaussian):
        x = Gaussian.isotropic(x, stddev=1.0, batch_dims=batch_dims)
    if not 0 < probability < 1:
        raise ValueError(f"probability is between 0 and 1, not {probability!r}")
    if not SMALLEST < largest < math.inf:
        raise ValueError(f"largest is a finite level above {SMALLEST:.1e}, not {largest!r}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is between 0 and 1, not {tolerance!r}")
    if x.covariance.constant:
        raise ValueError(
            "the Gaussian does not vary, and there is no noise to scale; use cp.Gaussian.isotropic("
            "mean, stddev=1.0) or another covariance as the shape of the noise"
        )
    labels = Classifier(model, x).decision() if label is None else label
    fixed = Randomisation.draw(points, generator)
    if not isinstance(method, Auto):
        return _Search(model, x, labels, probability, method, fixed).run(largest, tolerance)
    with approximations_ignored():  # at a noise that nobody has asked about
        used = method_at(model, x, method)
    for _ in range(SEARCHES):
        found = _Search(model, x, labels, probability, used, fixed).run(largest, tolerance)
        chosen = method_at(model, scaled(x, found.level.nan_to_num()), method)
        if type(chosen) is type(used):
            break
        used = chosen
    return found


def scaled(x: Gaussian, level: Tensor) -> Gaussian:
    """The same mean with standard deviations times a level (*batch,)."""
    factor = level.to(x.mean)[..., None].expand(x.covariance.diagonal().shape)
    return x.with_moments(covariance=x.covariance.scale(factor))


class Endpoint(NamedTuple):
    """One end of every bracket: its place, and the value of the function there."""

    place: Tensor
    value: Tensor

    def where(self, condition: Tensor, other: "Endpoint") -> "Endpoint":
        """These where the condition holds, else the others."""
        return Endpoint(*(torch.where(condition, *pair) for pair in zip(self, other, strict=True)))


@dataclass
class _Search:
    model: Model
    x: Gaussian
    labels: int | Tensor
    target: float
    method: Method
    points: Randomisation
    evaluations: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Level, P(label) and its standard error."""

    def run(self, largest: float, tolerance: float) -> NoiseBudget:
        """Evaluate without noise and at level 1, bracket the target, and narrow the bracket."""
        batch: Any = {"size": self.x.batch_shape, "device": self.x.device}
        level = torch.ones(**batch, dtype=torch.float64).clamp(max=largest)
        right = self.excess(torch.zeros_like(level), torch.ones(**batch, dtype=torch.bool)) >= 0
        varies = (self.x.covariance.diagonal() > 0).any(-1)
        sought = right & varies
        first = Endpoint(level, self.excess(level, sought))
        keeps = first.value >= 0
        first, second = self.bracket(first, sought, keeps, largest)
        inside = sought & (torch.sign(first.value) != torch.sign(second.value))
        lower, upper = (Endpoint(1 / end.place, end.value) for end in (first, second))
        root = find_roots(
            lambda place, active: self.excess(1 / place, active), lower, upper, inside, tolerance
        )
        level = torch.where(inside, 1 / root.place, torch.where(sought & keeps, second.place, 0))
        level = torch.where(right & ~varies, math.nan, level)
        return self.result(level, right, inside, keeps)

    def excess(self, level: Tensor, active: Tensor) -> Tensor:
        """Phi^-1(P(label)) - Phi^-1(target) at a level (*batch,), recorded where active."""
        wrong = self.misclassification(level)
        p = wrong.probability.double()
        self.evaluations.append((
            torch.where(active, level, math.nan), torch.where(active, 1 - p, math.nan),
            wrong.stderr.double(),
        ))  # fmt: skip
        target = torch.special.ndtri(torch.tensor(self.target, dtype=torch.float64))
        quantile = -torch.special.ndtri(p.clamp(0, 1))
        return quantile.clamp(-SATURATION, SATURATION) - target.to(level.device)

    def misclassification(self, level: Tensor, with_error: bool = False) -> Probabilities:
        """P(another class than the label) at a level (*batch,)."""
        noisy = scaled(self.x, level)
        found = decide(self.model, noisy, self.method, self.points, with_error)
        return found.misclassification(self.labels)

    def bracket(
        self, first: Endpoint, sought: Tensor, keeps: Tensor, largest: float
    ) -> tuple[Endpoint, Endpoint]:
        """Double the level where it keeps the class, halve it elsewhere, until the sign changes."""
        second = first
        while True:
            active = sought & (torch.sign(first.value) == torch.sign(second.value))
            active &= torch.where(keeps, second.place < largest, second.place > SMALLEST)
            if not bool(active.any()):
                return first, second
            following = torch.where(keeps, (2 * second.place).clamp(max=largest), second.place / 2)
            place = torch.where(active, following, second.place)
            new = Endpoint(place, self.excess(place, active))
            first, second = second.where(active, first), new.where(active, second)

    def result(self, level: Tensor, right: Tensor, inside: Tensor, keeps: Tensor) -> NoiseBudget:
        """Sort the evaluations by level, and say how the search ended."""
        levels, kept, errors = (torch.stack(part) for part in zip(*self.evaluations, strict=True))
        order = levels.argsort(0)  # NaN last
        levels, kept, errors = (part.gather(0, order) for part in (levels, kept, errors))
        dtype = self.x.dtype
        slack = NOISY * (errors[1:] + errors[:-1]) + PROBABILITY * torch.finfo(dtype).eps
        rises = (kept.diff(dim=0) > slack).any(0)
        constant = level.isnan()
        flags = (flag.flatten().tolist() for flag in (right, constant, inside, keeps, rises))
        at_level = torch.where(levels == level, kept, -math.inf).amax(0)
        checked = self.misclassification(level.nan_to_num(), with_error=True)
        error = torch.full_like(level, math.nan)
        if checked.assumption is not None:
            error = (checked.stderr + checked.assumption).double()
        variance = self.x.covariance.diagonal().double().mean(-1)
        stddev = torch.where(constant, 0, level * variance.sqrt())
        return NoiseBudget(
            self.target, level.to(dtype), stddev.to(dtype),
            tuple(_reason(*each) for each in zip(*flags, strict=True)),
            torch.where(at_level >= 0, at_level, kept[0]).to(dtype), levels.to(dtype),
            kept.to(dtype), error.to(dtype),
        )  # fmt: skip


def _reason(right: bool, constant: bool, inside: bool, keeps: bool, rises: bool) -> str:
    if inside:
        return NOT_MONOTONE if rises else FOUND
    if not right:
        return MISCLASSIFIED
    if constant:
        return NO_NOISE
    return KEPT if keeps else LOST


def find_roots(
    function: Callable[[Tensor, Tensor], Tensor],
    first: Endpoint,
    second: Endpoint,
    active: Tensor,
    tolerance: float,
) -> Endpoint:
    """Narrow many brackets at once to a relative tolerance; return the ends with a value from 0.

    Inverse quadratic interpolation where its three points say that the inverse is a function, else
    bisection (Chandrupatla 1997). first, second: ends with values of opposite sign; active: where
    there is a bracket at all; function: of places and of a mask of those that are still sought.
    """
    share = torch.full_like(first.place, 0.5)
    for _ in range(EVALUATIONS):
        width = (second.place - first.place).abs()
        near = torch.where(first.value.abs() < second.value.abs(), first.place, second.place)
        least = tolerance * near.abs() / torch.where(width > 0, width, 1)
        active = active & (width > 0) & (least < 1) & (first.value != 0) & (second.value != 0)
        if not bool(active.any()):
            break
        share = torch.maximum(torch.minimum(share, 1 - least / 2), least / 2)
        place = first.place + share * (second.place - first.place)
        new = Endpoint(place, function(place, active))
        same = torch.sign(new.value) == torch.sign(first.value)
        third, other = first.where(same, second), second.where(same, first)
        first, second = new.where(active, first), other.where(active, second)
        share = _interpolate(first, second, third)
    return first.where(first.value >= 0, second)


def _interpolate(a: Endpoint, b: Endpoint, c: Endpoint) -> Tensor:
    """The next place between a and b, as a share of their distance."""
    place = _ratio(a.place - b.place, c.place - b.place)
    value = _ratio(a.value - b.value, c.value - b.value)
    smooth = (value.square() < place) & ((1 - value).square() < 1 - place)
    share = _ratio(a.value, b.value - a.value) * _ratio(c.value, b.value - c.value)
    outer = _ratio(c.place - a.place, b.place - a.place)
    share = share + outer * _ratio(a.value, c.value - a.value) * _ratio(b.value, c.value - b.value)
    return torch.where(smooth, share, 0.5)


def _ratio(numerator: Tensor, difference: Tensor) -> Tensor:
    return numerator / torch.where(difference != 0, difference, 1)
