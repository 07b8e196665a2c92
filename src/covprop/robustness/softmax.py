"""The average of softmax over Gaussian logits, and entropies."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.gaussian import Gaussian
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import standard_deviation
from covprop.propagate import propagate
from covprop.robustness.logits import Logits, differences
from covprop.robustness.probabilities import Probabilities, stderr_of
from covprop.robustness.randomisation import POINTS, Randomisation

TWO = 2
HELD = 2**21
"""Logits of all points together that are held at a time."""


def expected_softmax(
    logits: Gaussian, *, points: int = POINTS, generator: torch.Generator | None = None
) -> Probabilities:
    """E[softmax(y)], (*batch, classes), for Gaussian logits.

    Two classes (or one logit, the log-odds of class 1): E[sigmoid] of the difference by quadrature,
    to 1e-8. More: the average over scrambled Sobol points, with the standard error of 32
    independent scramblings; every point's softmax sums to 1, and so does the average.
    Differentiable with respect to mean and covariance by Price's theorem, which is right where it
    is singular too. points, generator: as for `class_probabilities`.
    """
    given = Logits.of(logits)
    if given.classes == TWO:
        return _of_two(given)
    value, replicates = _ExpectedSoftmax.apply(
        given.mean, given.covariance, Randomisation.draw(points, generator)
    )
    spread = stderr_of(given.averaged(replicates))
    return Probabilities(given.restored(given.averaged(value)), given.restored(spread))


def _of_two(given: Logits) -> Probabilities:
    second = torch.ones(len(given.mean), dtype=torch.long, device=given.mean.device)
    mean, matrix, _ = differences(given.mean, given.covariance, second, 1 - second[:, None])
    odds = Gaussian(mean, matrix.clamp(min=0), validate_args=False)
    parts = [propagate(torch.sigmoid, one).mean for one in (_negated(odds), odds)]
    value = given.restored(given.averaged(torch.cat(parts, dim=-1)))
    return Probabilities(value, torch.zeros_like(value))


def _negated(odds: Gaussian) -> Gaussian:
    return Gaussian(-odds.mean, odds.covariance, validate_args=False)


def entropy(probability: Probabilities | Tensor) -> Tensor:
    """-sum_c p_c log p_c in nats, (*batch,).

    Of `class_probabilities` it is the entropy of the decision under noise, zero where the noise
    never changes it; of `expected_softmax` the predictive entropy, which also has what the network
    itself doubts.
    """
    p = probability.probability if isinstance(probability, Probabilities) else probability
    positive = p > 0  # where p = 0 the derivative is infinite and of no use
    return torch.where(positive, torch.special.entr(torch.where(positive, p, 1)), 0).sum(-1)


class _ExpectedSoftmax(Function):
    """E[p] and, for L = sum_c g_c p_c, dL/dmu = E[grad L], dL/dS = E[hess L] / 2 (Price 1958)."""

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, points: Randomisation) -> tuple[Tensor, Tensor]:
        parts = [
            rows.softmax(-1).unflatten(0, (points.replicates, points.each)).mean(1)
            for rows in _logits(mean, covariance, points)
        ]
        replicates = torch.cat(parts, dim=1)
        return replicates.mean(0), replicates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        mean, covariance, ctx.points = inputs
        ctx.save_for_backward(mean, covariance)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        mean, covariance = ctx.saved_tensors
        slopes, curvatures = [], []
        step = _step(mean, ctx.points)
        for values, weights in zip(
            _logits(mean, covariance, ctx.points), upstream.split(step), strict=True
        ):
            p = values.softmax(-1)  # (points, rows, classes)
            away = p * (weights - (weights * p).sum(-1, keepdim=True))  # the gradient of L
            slope = away.mean(0)
            cross = torch.einsum("sri,srj->rij", away, p) / len(p)
            slopes.append(slope)
            curvatures.append((torch.diag_embed(slope) - cross - cross.mT) / 2)
        return torch.cat(slopes), torch.cat(curvatures), None


def _step(mean: Tensor, points: Randomisation) -> int:
    return max(1, HELD // (points.replicates * points.each * mean.shape[-1]))


def _logits(mean: Tensor, covariance: Tensor, points: Randomisation) -> Any:
    """Logits (points, rows, classes), some rows at a time; points come replicate by replicate.

    What all logits share is no matter to softmax: without it, points are spread over less.
    """
    size = mean.shape[-1]
    centred = covariance - covariance.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    normal = torch.special.ndtri(points.uniform(size, mean.device)).mT  # (points, classes)
    step = _step(mean, points)
    for m, s in zip(mean.split(step), centred.split(step), strict=True):
        eigenvalues, vectors = torch.linalg.eigh(s)
        # The widest direction takes Sobol's first coordinate, the most even of them.
        root = (vectors * standard_deviation(eigenvalues)[:, None, :]).flip(-1)
        yield m + (normal @ root.mT).movedim(-2, 0)
