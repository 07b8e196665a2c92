"""Which class has the largest of Gaussian logits, and with what probability."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.gaussian import Gaussian
from covprop.kernels.gradients import first_order
from covprop.robustness.boundaries import gradient
from covprop.robustness.logits import Logits, differences, others
from covprop.robustness.orthant import Vectors, orthant
from covprop.robustness.randomisation import POINTS, Randomisation

HELD = 2**22
"""Entries of covariances of differences that are held at a time."""


@final
@dataclass(frozen=True)
class Probabilities:
    """Probabilities, and one standard error of each, zero where they are exact."""

    probability: Tensor
    stderr: Tensor


def class_probabilities(
    logits: Gaussian, *, points: int = POINTS, generator: torch.Generator | None = None
) -> Probabilities:
    """P(class c has the largest logit), (*batch, classes), for Gaussian logits.

    p_c = P(y_c - y_j > 0 for all j != c). Exact for two classes (Phi(m / sigma) of the difference)
    and to rounding for three (Plackett 1954); by sequential conditioning (Genz 1992) at scrambled
    Sobol points for more, with the standard error of 32 independent scramblings. One logit is the
    log-odds of class 1 against class 0. Classes whose logits are always equal share alike. Rows are
    not normalised: they sum to 1 within the errors. Differentiable with respect to mean and
    covariance, also where it is singular. Of an output that is a mixture (`cp.Split`), the average
    over its components.

    points: how many in all, rounded up; generator: draws the scramblings, torch's global one by
    default.
    """
    return of_logits(Logits.of(logits), Randomisation.draw(points, generator))


def misclassification_probability(
    logits: Gaussian,
    label: int | Tensor,
    *,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> Probabilities:
    """P(another class than the label has the largest logit), (*batch,).

    The sum of the others' probabilities, which is accurate relative to itself where it is small.
    label: a class number, or one for each of the batch; the rest as for `class_probabilities`.
    """
    given = Logits.of(logits)
    return misclassification(given, given.labels(label), Randomisation.draw(points, generator))


def misclassification(given: Logits, labels: Tensor, points: Randomisation) -> Probabilities:
    """The same for labels (rows,) and points that are given."""
    value, replicates = _replicated(given, others(labels[:, None], given.classes), points)
    spread = stderr_of(replicates.sum(-1))
    return Probabilities(given.restored(value.sum(-1)), given.restored(spread))


def of_logits(given: Logits, points: Randomisation) -> Probabilities:
    """Of all classes, with points that are given."""
    every = torch.arange(given.classes, device=given.mean.device).expand(given.mean.shape)
    value, replicates = _replicated(given, every, points)
    return Probabilities(given.restored(value), given.restored(stderr_of(replicates)))


def _replicated(given: Logits, kept: Tensor, points: Randomisation) -> tuple[Tensor, Tensor]:
    """Of the classes kept (rows, k): the average (batch, k), and of each replicate."""
    value, replicates = _ClassProbabilities.apply(
        given.mean, given.covariance, kept, given.rounding, points
    )
    return given.averaged(value), given.averaged(replicates)


def stderr_of(replicates: Tensor) -> Tensor:
    """Of the average of the replicates; one of them is exact."""
    count = len(replicates)
    if count == 1:
        return torch.zeros_like(replicates[0])
    squares = (replicates - replicates.mean(0)).square().sum(0)  # torch's std warns if empty
    return (squares / (count * (count - 1))).sqrt()


class _ClassProbabilities(Function):
    @staticmethod
    def forward(
        mean: Tensor, covariance: Tensor, kept: Tensor, rounding: float, points: Randomisation
    ) -> tuple[Tensor, Tensor]:
        rows, classes = mean.shape
        row = torch.arange(rows, device=mean.device).repeat_interleave(kept.shape[1])
        base = kept.reshape(-1)
        step = max(1, HELD // classes**2)
        parts = []
        for some, own in zip(row.split(step), base.split(step), strict=True):
            moments = differences(mean[some], covariance[some], own, others(own[:, None], classes))
            parts.append(orthant(Vectors(*moments, rounding), points))
        replicates = torch.cat(parts, dim=1).unflatten(1, kept.shape)
        return replicates.mean(0), replicates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        mean, covariance, kept, rounding, points = inputs
        ctx.save_for_backward(mean, covariance, kept)
        ctx.rounding, ctx.points = rounding, points
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        mean, covariance, kept = ctx.saved_tensors
        weights = torch.zeros_like(mean).scatter_add(1, kept, upstream)
        slope, curvature = gradient(mean, covariance, weights, ctx.rounding, ctx.points)
        return slope, curvature, None, None, None
