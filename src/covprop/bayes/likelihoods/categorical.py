"""Classes: softmax of Gaussian logits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.bayes.likelihoods.base import Likelihood, Prediction, flat_mean
from covprop.bayes.likelihoods.cubature import Cubature, with_gradient
from covprop.gaussian import Gaussian

BLOCK = 2**22
"""Logits, of all points together, that are held at a time."""


@final
@dataclass(frozen=True)
class Delta:
    """The second order of the Taylor expansion at the mean: cheap, and right for narrow logits."""


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """P(t = c | f) = softmax(f)_c for logits f, one for each class; targets are class numbers.

    expectation: how E[log p] is found: `Cubature()` or `Delta()`; predictive: the points for
    E[p] and what is predicted from it.
    """

    expectation: Cubature | Delta = field(default_factory=Cubature)
    predictive: Cubature = field(default_factory=lambda: Cubature(1024))

    def outputs(self, targets: int) -> int:
        """A logit for each class."""
        return targets

    def log_prob(self, values: Tensor, target: Tensor) -> Tensor:
        """log softmax(f)_t."""
        return _chosen(values.log_softmax(-1), target)

    def expected_log_prob(self, output: Gaussian, target: Tensor) -> Tensor:
        """mu_t - E[log sum_c exp(f_c)].

        Delta: E[...] ~ lse(mu) + tr(S H) / 2 with p = softmax(mu), H = diag(p) - p p^T.
        """
        mean, matrix = flat_mean(output), output.covariance_matrix
        at = _chosen(mean, target)
        if isinstance(self.expectation, Delta):
            p = mean.softmax(-1)
            trace = (p * matrix.diagonal(dim1=-2, dim2=-1)).sum(-1)
            trace = trace - (p[..., None, :] @ matrix @ p[..., :, None])[..., 0, 0]
            return at - mean.logsumexp(-1) - trace / 2
        rows = _by_rows(self.expectation, mean, matrix, None, _log_sum)
        return at - with_gradient(rows.value, mean, matrix, rows.slope, rows.curvature)

    def log_predictive(self, output: Gaussian, target: Tensor) -> Tensor:
        """log E[softmax(f)_t] by cubature, with positive weights: never the log of a negative."""
        mean, matrix = flat_mean(output), output.covariance_matrix
        chosen = torch.zeros_like(mean).scatter(-1, _index(target, mean), 1.0)
        rows = _by_rows(self.predictive, mean, matrix, chosen, _log_average)
        return with_gradient(rows.value, mean, matrix, rows.slope, rows.curvature)

    @torch.no_grad()
    def predict(self, output: Gaussian) -> Prediction:
        """Probabilities E[p], variances E[p (1 - p)] and Var[p], entropies; without gradients."""
        mean, matrix = flat_mean(output), output.covariance_matrix
        size = mean.shape[-1]
        flat, matrices = mean.reshape(-1, size), _centred(matrix).reshape(-1, size, size)
        step = _rows(self.predictive, size)
        parts = [
            self.predict_draws(self.predictive.around(m, s))
            for m, s in zip(flat.split(step), matrices.split(step), strict=True)
        ]
        return _joined(parts, mean)

    def predict_draws(self, values: Tensor) -> Prediction:
        """The same from draws of the logits."""
        p = values.softmax(-1)
        mean = p.mean(0)
        return Prediction(
            mean,
            (p * (1 - p)).mean(0),
            p.var(0, correction=0),
            entropy(mean),
            entropy(p).mean(0),
        )


def entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c, in nats."""
    return torch.special.entr(probabilities).sum(-1)


class _Average(NamedTuple):
    """An average over points, and its derivatives by mean and by half the covariance."""

    value: Tensor
    slope: Tensor
    curvature: Tensor


def _log_sum(values: Tensor, _: Tensor | None) -> _Average:
    """lse(f): its gradient is p, its Hessian diag(p) - p p^T."""
    p = values.softmax(-1)
    slope = p.mean(0)
    return _Average(
        values.logsumexp(-1).mean(0),
        slope,
        torch.diag_embed(slope) - torch.einsum("s...i,s...j->...ij", p, p) / len(p),
    )


def _log_average(values: Tensor, chosen: Tensor | None) -> _Average:
    """log of the average of p_t, e_t = chosen.

    p_t has the gradient p_t (e_t - p) and the Hessian
    p_t [(e_t - p)(e_t - p)^T - diag(p) + p p^T].
    """
    assert chosen is not None
    logs = (values.log_softmax(-1) * chosen).sum(-1)  # (count, rows)
    weight = logs.softmax(0)[..., None]
    p = values.softmax(-1)
    away = chosen - p
    mean = (weight * p).sum(0)
    curvature = torch.einsum("s...i,s...j->...ij", weight * away, away)
    curvature = curvature + torch.einsum("s...i,s...j->...ij", weight * p, p)
    value = logs.logsumexp(0) - torch.tensor(len(logs), dtype=logs.dtype).log()
    return _Average(value, (weight * away).sum(0), curvature - torch.diag_embed(mean))


@torch.no_grad()
def _by_rows(
    rule: Cubature,
    mean: Tensor,
    matrix: Tensor,
    chosen: Tensor | None,
    average: Callable[[Tensor, Tensor | None], _Average],
) -> _Average:
    """An average over the points of each element of the batch, some elements at a time."""
    batch, size = mean.shape[:-1], mean.shape[-1]
    flat, matrices = mean.reshape(-1, size), _centred(matrix).reshape(-1, size, size)
    # What all logits share is no matter to softmax: without it, points are spread over less.
    shift = (chosen if chosen is not None else torch.zeros_like(mean)).reshape(-1, size).double()
    step = _rows(rule, size)
    parts = [
        average(rule.around(m, s), c)
        for m, s, c in zip(flat.split(step), matrices.split(step), shift.split(step), strict=True)
    ]
    value, slope, curvature = (torch.cat(column) for column in zip(*parts, strict=True))
    return _Average(
        value.reshape(batch), slope.reshape(mean.shape), curvature.reshape(*batch, size, size)
    )


def _rows(rule: Cubature, size: int) -> int:
    return max(1, BLOCK // (len(rule.nodes(size)) * size))


def _centred(matrix: Tensor) -> Tensor:
    """The covariance of logits less their average."""
    rows = matrix - matrix.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def _joined(parts: list[Prediction], like: Tensor) -> Prediction:
    """Predictions for the rows of a batch, as one in its shape and dtype."""
    shape = like.shape
    vectors = [(part.mean, part.aleatoric, part.epistemic) for part in parts]
    mean, aleatoric, epistemic = (
        torch.cat(column).reshape(shape).to(like) for column in zip(*vectors, strict=True)
    )
    numbers = [(part.entropy, part.expected_entropy) for part in parts]
    total, expected = (
        torch.cat([one for one in column if one is not None]).reshape(shape[:-1]).to(like)
        for column in zip(*numbers, strict=True)
    )
    return Prediction(mean, aleatoric, epistemic, total, expected)


def _index(target: Tensor, values: Tensor) -> Tensor:
    """Class numbers as an index (*batch, 1) of the last dimension."""
    batch = values.shape[:-1]
    if target.dtype.is_floating_point or target.dtype == torch.bool:
        raise ValueError(f"targets are class numbers (torch.long), not {target.dtype}")
    if target.dim() > len(batch) or target.shape != batch[len(batch) - target.dim() :]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} are not one class for each element of a batch "
            f"{tuple(batch)}"
        )
    if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < values.shape[-1]:
        raise ValueError(
            f"targets are class numbers from 0 to {values.shape[-1] - 1}, one for each logit, and "
            f"here are {int(target.min())} to {int(target.max())}"
        )
    return target.long().expand(batch)[..., None]


def _chosen(values: Tensor, target: Tensor) -> Tensor:
    return values.gather(-1, _index(target, values))[..., 0]
