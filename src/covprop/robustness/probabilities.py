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

ROUNDING = 4.0
"""In units of machine epsilon: a sum that varies by less says nothing."""
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
    log-odds of class 1 against class 0. Classes whose logits are always equal share alike. Rows sum
    to 1: that their sum is known corrects each by what its error has in common with the sum's.
    Differentiable with respect to mean and covariance, also where it is singular. Of an output that
    is a mixture (`cp.Split`), the average over its components.

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
    return misclassification(given, label, Randomisation.draw(points, generator))


def misclassification(given: Logits, label: int | Tensor, points: Randomisation) -> Probabilities:
    """The same with points that are given."""
    value, replicates = _replicated(given, points)
    labels = given.labels(label)[:, None]
    lost = value.scatter(-1, labels, 0.0).sum(-1)
    of_each = replicates.scatter(-1, labels.expand(len(replicates), -1, 1), 0.0).sum(-1)
    return Probabilities(given.restored(lost), given.restored(stderr_of(of_each)))


def of_logits(given: Logits, points: Randomisation) -> Probabilities:
    """Of all classes, with points that are given."""
    value, replicates = _replicated(given, points)
    return Probabilities(given.restored(value), given.restored(stderr_of(replicates)))


def _replicated(given: Logits, points: Randomisation) -> tuple[Tensor, Tensor]:
    """Of all classes: the average (batch, classes), and each replicate of it."""
    found = _ClassProbabilities.apply(given.mean, given.covariance, given.rounding, points)
    value, replicates = (given.averaged(part) for part in found)
    return (value, replicates) if len(replicates) == 1 else _with_known_sum(value, replicates)


def _with_known_sum(value: Tensor, replicates: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates less what their error has in common with that of their sum, which is known to be 1.

    p_c - b_c (sum_k p_k - 1), b_c = Cov(p_c, sum) / Var(sum) over the replicates: a control variate
    (Lavenberg & Welch 1981). The b_c sum to 1, and so do the results.
    """
    total = replicates.sum(-1, keepdim=True)
    apart = total - total.mean(0)
    spread = apart.square().sum(0)
    varies = spread > len(replicates) * (ROUNDING * torch.finfo(spread.dtype).eps) ** 2
    together = (apart * (replicates - replicates.mean(0))).sum(0)
    share = torch.where(varies, together / torch.where(varies, spread, 1), 0)
    corrected = (value - share * (total.mean(0) - 1)).clamp(min=0)
    return corrected, replicates - share * (total - 1)


def stderr_of(replicates: Tensor) -> Tensor:
    """Of the average of the replicates; a single one is exact.

    As if two numbers had been found from them, the average and a share of the error of the sum.
    """
    count = len(replicates)
    if count == 1:
        return torch.zeros_like(replicates[0])
    squares = (replicates - replicates.mean(0)).square().sum(0)  # torch's std warns if empty
    return (squares / (count * (count - 2))).sqrt()


class _ClassProbabilities(Function):
    @staticmethod
    def forward(
        mean: Tensor, covariance: Tensor, rounding: float, points: Randomisation
    ) -> tuple[Tensor, Tensor]:
        rows, classes = mean.shape
        row = torch.arange(rows, device=mean.device).repeat_interleave(classes)
        base = torch.arange(classes, device=mean.device).repeat(rows)
        step = max(1, HELD // classes**2)
        parts = []
        for some, own in zip(row.split(step), base.split(step), strict=True):
            moments = differences(mean[some], covariance[some], own, others(own[:, None], classes))
            parts.append(orthant(Vectors(*moments, rounding), points))
        replicates = torch.cat(parts, dim=1).unflatten(1, (rows, classes))
        return replicates.mean(0), replicates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        mean, covariance, ctx.rounding, ctx.points = inputs
        ctx.save_for_backward(mean, covariance)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        mean, covariance = ctx.saved_tensors
        slope, curvature = gradient(mean, covariance, upstream, ctx.rounding, ctx.points)
        return slope, curvature, None, None
