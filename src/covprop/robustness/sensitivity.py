"""Derivatives with respect to the noise of each input element, and the most harmful noise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from covprop.covariance import Dense, Diagonal
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import GAUSSIAN_LAYERS, check_gaussian, propagate
from covprop.robustness.classifier import Ball, Classifier, Model, refuse_inference_mode
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import (
    POINTS,
    Logits,
    Randomisation,
    check_count,
    margins,
)
from covprop.robustness.probabilities import misclassification, misclassification_probability

STEPS = 30
FIRST_STEP = 0.5
"""The first step, as a share of the radius or of the total variance."""
GROWTH, DECAY = 1.5, 0.5
"""Of the step, after one that has made things worse for the network and after one that has not."""

Measure: TypeAlias = Callable[[Gaussian, Tensor], Tensor]
"""A number (*batch,) for every output Gaussian and label; differentiable."""


@final
@dataclass(frozen=True)
class Misclassification:
    """P(another class than the label has the largest logit), as a measure for `sensitivity`.

    Args:
        points: Number of Sobol points in all, rounded up.
        generator: Draws their scramblings; torch's global one by default.

    Example:
        measure = cp.robustness.Misclassification(generator=torch.Generator().manual_seed(0))
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.sensitivity(nn.Linear(4, 3), x, of=measure))
    """

    points: int = POINTS
    generator: torch.Generator | None = field(default=None, compare=False)

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """The measure of each of the batch, (*batch,)."""
        return misclassification_probability(
            output, label, points=self.points, generator=self.generator
        ).probability


@final
@dataclass(frozen=True)
class ExpectedMargin:
    """min_j E[y_label - y_j]: the expected margin to the nearest rival.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        print(cp.robustness.sensitivity(model, x, of=cp.robustness.ExpectedMargin()))
    """

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """The measure of each of the batch, (*batch,)."""
        return margins(output, label).mean.amin(-1)


@final
@dataclass(frozen=True)
class StandardisedMargin:
    """min_j E[y_label - y_j] / Std[y_label - y_j]; the expected margin if one does not vary.

    For two classes, Phi(-margin) is the probability of misclassification. The margin has a useful
    gradient even where that probability is tiny.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.sensitivity(nn.Linear(4, 3), x, of=cp.robustness.StandardisedMargin()))
    """

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """The measure of each of the batch, (*batch,)."""
        margin = margins(output, label)
        varies = (margin.variance > 0).all(-1, keepdim=True)
        return (margin.mean / torch.where(varies, margin.variance, 1).sqrt()).amin(-1)


@final
@dataclass(frozen=True)
class OutputVariance:
    """The variance of one output, or the sum of all variances; the label does not matter.

    Args:
        output: A number in the flattened event; all outputs by default.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.sensitivity(nn.Linear(4, 3), x, of=cp.robustness.OutputVariance(0)))
    """

    output: int | None = None

    def __call__(self, output: Gaussian, label: Tensor) -> Tensor:
        """The measure of each of the batch, (*batch,)."""
        del label
        variance = output.covariance.diagonal()
        return variance.sum(-1) if self.output is None else variance[..., self.output]


def sensitivity(
    model: Model,
    x: Gaussian,
    label: int | Tensor | None = None,
    of: Measure | None = None,
    *,
    method: Method | str = GAUSSIAN_LAYERS,
) -> Tensor:
    """d(measure) / d(variance of each input element), in the shape of the input's mean.

    It takes one gradient through `cp.propagate` (Bibi et al. 2018). The derivative with respect to
    a variance is finite at zero noise; multiply it by 2 sigma for the derivative with respect to
    the standard deviation sigma. In a dense covariance only the diagonal is varied.

    Args:
        model: Returns logits; a single one is the log-odds of class 1.
        x: The Gaussian input.
        label: A class number or one for each of the batch; by default the network's own decision.
        of: `Misclassification()` by default, `ExpectedMargin()`, `StandardisedMargin()`,
            `OutputVariance()`, or any differentiable function of the output and the label.
        method: As for `cp.propagate`; by default `cp.GaussianLayers()`. The answer of `cp.Auto()`
            may come from points, and its gradient would then belong to another answer.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.sensitivity(nn.Linear(4, 3), x))
    """
    refuse_inference_mode("sensitivity")
    check_gaussian(x)
    if label is not None:
        labels = torch.as_tensor(label, device=x.device).expand(x.batch_shape)
    elif isinstance(of, OutputVariance):
        labels = torch.zeros(x.batch_shape, dtype=torch.long, device=x.device)
    else:
        labels = Classifier(model, x).decision()
    measure = Misclassification() if of is None else of
    with torch.enable_grad():
        variance, noisy = _with_variance(x.detach())
        output = propagate(model, noisy, method=method)
        if not isinstance(output, Gaussian):
            raise TypeError(
                f"a sensitivity takes a model that returns one tensor, and this one returns a "
                f"{type(output).__name__}; wrap it in a function that picks one"
            )
        value = measure(output, labels)
        if not value.requires_grad:
            raise UnsupportedOperation(
                f"cp.{type(method).__name__} gives no gradients of this model with respect to its "
                "input's variances; use cp.GaussianLayers() or cp.Series(order=4)"
            )
        (gradient,) = torch.autograd.grad(value.sum(), variance)
    return gradient.reshape(x.mean.shape)


def _with_variance(x: Gaussian) -> tuple[Tensor, Gaussian]:
    """Variances (*batch, n) that require a gradient, and the same Gaussian made with them."""
    if x.covariance.independent:
        variance = x.covariance.diagonal().clone().requires_grad_()
        return variance, x.with_moments(covariance=Diagonal(variance))
    matrix = x.covariance_matrix
    variance = matrix.diagonal(dim1=-2, dim2=-1).clone().requires_grad_()
    dense = torch.diagonal_scatter(matrix, variance, dim1=-2, dim2=-1)
    return variance, x.with_moments(covariance=Dense(dense))


@final
@dataclass(frozen=True)
class VarianceBudget:
    """{N(mean, diag(v)) : v_i >= 0, sum_i v_i = total}: independent noise of fixed total variance.

    Args:
        total: One number, or one for each of a batch; by default the trace of the covariance.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        within = cp.robustness.VarianceBudget(0.5)
        print(cp.robustness.worst_noise(nn.Linear(4, 3), x, within=within).gaussian.variance)
    """

    total: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.total is None:
            return
        total = torch.as_tensor(self.total)
        if not bool(((total > 0) & torch.isfinite(total)).all()):
            raise ValueError("the total variance is finite and positive")


@final
@dataclass(frozen=True)
class WorstNoise:
    """The most harmful Gaussian that `worst_noise` found.

    Attributes:
        start: Where the search began, a member of the set.
        gaussian: Where it ended.
        before: P(misclassified) at the start, (*batch,).
        after: P(misclassified) at the end, never smaller.
        history: The best so far after each step, (steps + 1, *batch).

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        print(cp.robustness.worst_noise(nn.Linear(4, 3), x).after.probability)
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
    method: Method | str = GAUSSIAN_LAYERS,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> WorstNoise:
    """Find the noise within a set that misclassifies most often, by projected gradient ascent.

    Each step follows the gradient of the probability of misclassification through `cp.propagate`,
    and is projected on the set. If that probability underflows to zero, the step goes against the
    gradient of `StandardisedMargin`. Steps that do not help are undone and halved. The result is a
    local optimum: another noise may be worse still.

    Args:
        model: Returns logits; a single one is the log-odds of class 1.
        x: The Gaussian input.
        label: A class number or one for each of the batch; by default the network's own decision.
        within: `Ball(radius, norm)` moves the mean and leaves the covariance of x as it is;
            `VarianceBudget(total)`, the default, spreads a total variance over the elements,
            starting from the variances of x (correlations are dropped).
        steps: Number of steps.
        method: As for `cp.propagate`; by default `cp.GaussianLayers()`. The answer of `cp.Auto()`
            may come from points, and its gradient would then belong to another answer.
        points: Number of Sobol points in all, rounded up.
        generator: Draws their scramblings; torch's global one by default.

    Example:
        x = cp.Gaussian.isotropic(torch.ones(4), stddev=0.1)
        worst = cp.robustness.worst_noise(nn.Linear(4, 3), x, within=cp.robustness.Ball(0.2))
        print(worst.shift)
    """
    refuse_inference_mode("worst_noise")
    check_count("steps", steps)
    labels = Classifier(model, x).decision() if label is None else torch.as_tensor(label)
    x = x.detach()
    noise = _Shifts(within, x) if isinstance(within, Ball) else _Variances(within, x)
    objective = _Objective(model, labels, method, Randomisation.draw(points, generator))
    best = noise.start
    before, margin, gradient = objective(noise, best)
    after = before
    share = torch.full_like(before.probability, FIRST_STEP)
    history = [before.probability]
    for _ in range(steps):
        trial = noise.moved(best, gradient, share)
        new, new_margin, new_gradient = objective(noise, trial)
        better = new.probability > after.probability
        better |= (new.probability == after.probability) & (new_margin < margin)
        wide = _expanded(better, best)
        best = torch.where(wide, trial, best)
        gradient = torch.where(wide, new_gradient, gradient)
        margin = torch.where(better, new_margin, margin)
        after = Probabilities(
            torch.where(better, new.probability, after.probability),
            torch.where(better, new.stderr, after.stderr),
        )
        share = torch.where(better, (share * GROWTH).clamp(max=1), share * DECAY)
        history.append(after.probability)
    return WorstNoise(
        noise.gaussian(noise.start), noise.gaussian(best), before, after, torch.stack(history)
    )


class _Shifts:
    """Gaussians with a mean in a ball."""

    def __init__(self, ball: Ball, x: Gaussian) -> None:
        ball.check(x.mean)
        self.ball, self.x, self.start = ball, x, x.mean

    def gaussian(self, mean: Tensor) -> Gaussian:
        return self.x.with_moments(mean)

    def moved(self, mean: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        """Step along the gradient by a share (*batch,) of the set's size, and project."""
        dims = len(self.x.batch_shape)
        length = self.ball.at(self.start, dims) * _expanded(share, self.start)
        step = length * self.ball.direction(gradient, dims)
        return self.ball.project(mean + step, self.start, dims)


class _Variances:
    """Gaussians with independent elements of a fixed total variance."""

    def __init__(self, budget: VarianceBudget | None, x: Gaussian) -> None:
        variance = x.covariance.diagonal()
        own = total = variance.sum(-1)
        if budget is not None and budget.total is not None:
            total = torch.as_tensor(budget.total, dtype=own.dtype, device=own.device)
            total = total.expand(own.shape)
        if bool((total <= 0).any()):
            raise ValueError(
                "the Gaussian does not vary, so that there is no variance to spread; give "
                "VarianceBudget(total)"
            )
        even = torch.full_like(variance, 1 / variance.shape[-1])
        shares = torch.where(own[..., None] > 0, variance / _positive(own)[..., None], even)
        self.x, self.total, self.start = x, total[..., None], shares * total[..., None]

    def gaussian(self, variance: Tensor) -> Gaussian:
        return self.x.with_moments(covariance=Diagonal(variance))

    def moved(self, variance: Tensor, gradient: Tensor, share: Tensor) -> Tensor:
        """Step along the gradient by a share (*batch,) of the set's size, and project."""
        centred = gradient - gradient.mean(-1, keepdim=True)  # a common rise leaves the sum
        size = centred.abs().amax(-1, keepdim=True)
        step = share[..., None] * self.total * centred / _positive(size)
        return project_on_simplex(variance + step, self.total)


@dataclass(frozen=True)
class _Objective:
    model: Model
    labels: Tensor
    method: Method | str
    points: Randomisation

    def __call__(
        self, noise: _Shifts | _Variances, parameter: Tensor
    ) -> tuple[Probabilities, Tensor, Tensor]:
        """P(misclassified), the standardised margin, and the direction of ascent."""
        with torch.enable_grad():
            leaf = parameter.detach().clone().requires_grad_()
            output = propagate(self.model, noise.gaussian(leaf), method=self.method)
            wrong = misclassification(Logits.of(output), self.labels, self.points)
            margin = StandardisedMargin()(output, self.labels)
            if not margin.requires_grad:
                raise UnsupportedOperation(
                    f"cp.{type(self.method).__name__} gives no gradients of this model; use "
                    "cp.GaussianLayers() or cp.Series(order=4)"
                )
            p = wrong.probability
            relative = p / torch.where(p > 0, p, 1).detach()
            score = torch.where(p > 0, relative, -margin)
            (gradient,) = torch.autograd.grad(score.sum(), leaf)
        return Probabilities(p.detach(), wrong.stderr), margin.detach(), gradient


def _positive(values: Tensor) -> Tensor:
    return torch.where(values > 0, values, 1)


def _expanded(values: Tensor, like: Tensor) -> Tensor:
    """(*batch,) with as many further dimensions as another tensor (*batch, *rest) has."""
    return values.reshape(*values.shape, *(1,) * (like.dim() - values.dim()))


def project_on_simplex(values: Tensor, total: Tensor) -> Tensor:
    """The nearest point of {v >= 0, sum_i v_i = total} (Held, Wolfe & Crowder 1974).

    values (*batch, n), total (*batch, 1): v_i = max(values_i - t, 0) with the t that fits.
    """
    ordered = values.sort(dim=-1, descending=True).values
    counts = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    thresholds = (ordered.cumsum(-1) - total) / counts
    last = (ordered > thresholds).sum(-1, keepdim=True).clamp(min=1) - 1
    moved = (values - thresholds.gather(-1, last)).clamp(min=0)
    return moved * total / moved.sum(-1, keepdim=True)  # to rounding the sum is the total already
