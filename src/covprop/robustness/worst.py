"""The noise that does most harm, within limits."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.covariance import Diagonal
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import EXACT, propagate
from covprop.robustness.balls import Ball
from covprop.robustness.logits import Logits
from covprop.robustness.probabilities import Probabilities, misclassification
from covprop.robustness.randomisation import POINTS, Randomisation
from covprop.robustness.sampled import Classifier, Model, refuse_inference_mode
from covprop.robustness.sensitivity import StandardisedMargin

STEPS = 30
LONGEST = 0.5
"""The first step, as a share of the radius or of the total variance."""
GROWTH, DECAY = 1.5, 0.5
"""Of the step, after one that has made things worse for the network and after one that has not."""


@final
@dataclass(frozen=True)
class VarianceBudget:
    """{N(mean, diag(v)) : v_i >= 0, sum_i v_i = total}: independent noise of fixed total variance.

    total: one number, or one for each of a batch; the trace of the given covariance by default.
    """

    total: float | Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse a budget that is none."""
        if self.total is None:
            return
        total = torch.as_tensor(self.total)
        if not bool(((total > 0) & torch.isfinite(total)).all()):
            raise ValueError("the total variance is finite and positive")


@final
@dataclass(frozen=True)
class WorstNoise:
    """The Gaussian that was found, and what it does.

    start: where the search began, a member of the set; before, after (*batch,): P(misclassified)
    at the start and now, the second never smaller; history (steps + 1, *batch): the best so far.
    """

    start: Gaussian
    gaussian: Gaussian
    before: Probabilities
    after: Probabilities
    history: Tensor

    @property
    def shift(self) -> Tensor:
        """How the mean has moved."""
        return self.gaussian.mean - self.start.mean


def worst_noise(
    model: Model,
    x: Gaussian,
    label: int | Tensor | None = None,
    within: Ball | VarianceBudget | None = None,
    *,
    steps: int = STEPS,
    method: Method = EXACT,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> WorstNoise:
    """The noise within a set that misclassifies most often, by projected gradient ascent.

    within: `Ball(radius, norm)` moves the mean and leaves the covariance of x as it is;
    `VarianceBudget(total)`, the default, spreads a total variance over the elements, from the
    variances of x on (correlations are dropped). Each step goes along the gradient of the
    probability of misclassification through `cp.propagate`, or, where that is so small that it is
    zero, against the gradient of `StandardisedMargin`, and is projected on the set; steps that do
    not help are taken back and halved. A local optimum: another noise may be worse still.

    label: the network's own decision by default.
    """
    refuse_inference_mode("worst_noise")
    if type(steps) is not int or steps < 1:
        raise ValueError(f"steps is a whole number from 1, not {steps!r}")
    labels = Classifier(model, x).decision() if label is None else torch.as_tensor(label)
    x = x.detach()
    inside: _Set = _Shifts(within, x) if isinstance(within, Ball) else _Spreads(within, x)
    ascent = _Ascent(model, inside, labels, method, Randomisation.draw(points, generator))
    return ascent.run(steps)


class _Set(ABC):
    """The Gaussians that are allowed, by a parameter."""

    start: Tensor
    """(*batch, *rest)"""

    @abstractmethod
    def gaussian(self, parameter: Tensor) -> Gaussian:
        """Of this parameter."""

    @abstractmethod
    def moved(self, parameter: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        """Along the gradient by a share (*batch,) of the set's size, and back into the set."""


@final
class _Shifts(_Set):
    def __init__(self, ball: Ball, x: Gaussian) -> None:
        ball.check(x.mean)
        self.ball, self.x, self.start = ball, x, x.mean
        self.dims = len(x.batch_shape)

    def gaussian(self, parameter: Tensor) -> Gaussian:
        return Gaussian(parameter, self.x.covariance, validate_args=False)

    def moved(self, parameter: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        length = self.ball.at(self.start, self.dims) * along_batch(share, self.start)
        step = length * self.ball.direction(gradient, self.dims)
        return self.ball.project(parameter + step, self.start, self.dims)


@final
class _Spreads(_Set):
    def __init__(self, budget: VarianceBudget | None, x: Gaussian) -> None:
        variance = x.covariance.diagonal()
        own = variance.sum(-1)
        given = None if budget is None else budget.total
        total = own
        if given is not None:
            total = torch.as_tensor(given, dtype=own.dtype, device=own.device).expand(own.shape)
        if bool((total <= 0).any()):
            raise ValueError(
                "the Gaussian does not vary, so that there is no variance to spread; give "
                "VarianceBudget(total)"
            )
        even = torch.full_like(variance, 1 / variance.shape[-1])
        shares = torch.where(own[..., None] > 0, variance / _positive(own)[..., None], even)
        self.x, self.total, self.start = x, total[..., None], shares * total[..., None]

    def gaussian(self, parameter: Tensor) -> Gaussian:
        return Gaussian(self.x.mean, Diagonal(parameter), validate_args=False)

    def moved(self, parameter: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        centred = gradient - gradient.mean(-1, keepdim=True)  # a common rise leaves the sum
        size = centred.abs().amax(-1, keepdim=True)
        step = share[..., None] * self.total * centred / _positive(size)
        return on_simplex(parameter + step, self.total)


def _positive(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1)


def along_batch(values: Tensor, like: Tensor) -> Tensor:
    """(*batch,) with as many further dimensions as another tensor (*batch, *rest) has."""
    return values.reshape(*values.shape, *(1,) * (like.dim() - values.dim()))


def on_simplex(values: Tensor, total: Tensor) -> Tensor:
    """The nearest point of {v >= 0, sum_i v_i = total} (Held, Wolfe & Crowder 1974).

    values (*batch, n), total (*batch, 1): v_i = max(values_i - t, 0) with the t that fits.
    """
    ordered = values.sort(dim=-1, descending=True).values
    counts = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    thresholds = (ordered.cumsum(-1) - total) / counts
    last = (ordered > thresholds).sum(-1, keepdim=True).clamp(min=1) - 1
    moved = (values - thresholds.gather(-1, last)).clamp(min=0)
    return moved * total / moved.sum(-1, keepdim=True)  # to rounding the sum is the total already


class _Ascent:
    """The search; everything at the best parameter so far."""

    def __init__(
        self,
        model: Model,
        inside: _Set,
        labels: Tensor,
        method: Method,
        points: Randomisation,
    ) -> None:
        self.model, self.inside, self.labels = model, inside, labels
        self.method, self.points = method, points

    def run(self, steps: int) -> WorstNoise:
        best = self.inside.start
        before, margin, gradient = self.at(best)
        now = before
        share = torch.full_like(before.probability, LONGEST)
        history = [before.probability]
        for _ in range(steps):
            trial = self.inside.moved(best, gradient, share)
            found, its_margin, its_gradient = self.at(trial)
            better = found.probability > now.probability
            better |= (found.probability == now.probability) & (its_margin < margin)
            wide = along_batch(better, best)
            best, gradient = (
                torch.where(wide, trial, best),
                torch.where(wide, its_gradient, gradient),
            )
            margin = torch.where(better, its_margin, margin)
            now = Probabilities(
                torch.where(better, found.probability, now.probability),
                torch.where(better, found.stderr, now.stderr),
            )
            share = torch.where(better, (share * GROWTH).clamp(max=1), share * DECAY)
            history.append(now.probability)
        start, end = self.inside.gaussian(self.inside.start), self.inside.gaussian(best)
        return WorstNoise(start, end, before, now, torch.stack(history))

    def at(self, parameter: Tensor) -> tuple[Probabilities, Tensor, Tensor]:
        """P(misclassified), the standardised margin, and the direction in which to go."""
        with torch.enable_grad():
            leaf = parameter.detach().clone().requires_grad_()
            output = propagate(self.model, self.inside.gaussian(leaf), method=self.method)
            given = Logits.of(output)
            wrong = misclassification(given, self.labels, self.points)
            margin = StandardisedMargin()(output, self.labels)
            if not margin.requires_grad:
                raise UnsupportedOperation(
                    f"cp.{type(self.method).__name__} gives no gradients of this model; use "
                    "cp.Exact() or cp.Series(order=4)"
                )
            p = wrong.probability
            relative = p / torch.where(p > 0, p, 1).detach()
            score = torch.where(p > 0, relative, -margin)
            (gradient,) = torch.autograd.grad(score.sum(), leaf)
        found = Probabilities(p.detach(), wrong.stderr)
        return found, margin.detach(), gradient
