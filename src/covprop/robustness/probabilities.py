"""Which class has the largest of Gaussian logits, with what probability, and its derivatives.

With B_ij the density of y_i = y_j > all others (Plackett 1954), for L = sum_c g_c p_c

    dL/dmu = sum over pairs i < j of (g_i - g_j) B_ij (e_i - e_j)
    dL/dS  = (1/2) d^2 L / dmu dmu^T                                     (Price 1958)

and the derivatives of B_ij = density(y_i - y_j = 0) P(y_i > y_k for all k | y_i = y_j) follow from
those of an orthant probability with respect to its mean. Only the standard deviation of y_i - y_j
is divided by, so that singular covariances are allowed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.gaussian import Gaussian
from covprop.kernels.gradients import first_order
from covprop.kernels.normal import (
    cumulative,
    density,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.kernels.rounding import CONSTANT_SUM, DIFFERENCE_VARIANCE
from covprop.robustness.estimates import Probabilities
from covprop.robustness.logits import (
    POINTS,
    Logits,
    Randomisation,
    differences,
    others,
    standard_error,
)
from covprop.robustness.orthant import Vectors, orthant, orthant_slope
from covprop.robustness.pairs import normal_scores, score_errors, score_slopes

SAFETY, COPULA = 1.5, 0.5
"""Factors of the estimated error of a score, and of what the skewness moves it by, for the copula
that ties margins together: set so that nine of ten errors are smaller
(docs/robustness-reference.md)."""
CHUNK, BACKWARD_CHUNK = 2**22, 2**21
"""Entries of covariances of differences in memory at a time, forward and backward."""


def class_probabilities(
    logits: Gaussian, *, points: int = POINTS, generator: torch.Generator | None = None
) -> Probabilities:
    """P(class c has the largest logit), (*batch, classes), for Gaussian logits.

    p_c = P(y_c - y_j > 0 for all j != c). It is exact for two classes (Phi(m / sigma) of the
    difference) and accurate to rounding for three (Plackett 1954). More classes use sequential
    conditioning (Genz 1992) at scrambled Sobol points, with the standard error of 32 independent
    scramblings. Classes whose logits are always equal share equally. Rows sum to 1, which serves as
    a control variate. Differentiable with respect to mean and covariance, also where it is
    singular. For a mixture (`cp.Split`), it is the average over the components.

    If the skewness of the logits is known, each difference y_c - y_j has a Pearson type III
    distribution, and a Gaussian copula joins them (docs/robustness-reference.md); gradients are
    then those without skewness. `assumption` follows from the estimated error of the logits, if
    there is one.

    Args:
        logits: A Gaussian with event (classes,); one logit is the log-odds of class 1.
        points: Number of points in all, rounded up.
        generator: Draws the scramblings; torch's global one by default.

    Example:
        y = cp.propagate(nn.Linear(4, 3), cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1))
        print(cp.robustness.class_probabilities(y).probability)
    """
    return classes_of(Logits.of(logits), Randomisation.draw(points, generator))


def classes_of(moments: Logits, points: Randomisation) -> Probabilities:
    """P(class c has the largest logit), at fixed points."""
    value, replicates = _estimates(moments, points)
    return moments.restored(value, standard_error(replicates), _assumption(moments, value))


def misclassification_probability(
    logits: Gaussian,
    label: int | Tensor,
    *,
    points: int = POINTS,
    generator: torch.Generator | None = None,
) -> Probabilities:
    """P(a class other than the label has the largest logit), (*batch,).

    It sums the probabilities of the other classes, so small values have a small relative error.

    Args:
        logits: A Gaussian with event (classes,); one logit is the log-odds of class 1.
        label: A class number, or one for each of the batch.
        points: Number of points in all, rounded up.
        generator: Draws the scramblings; torch's global one by default.

    Example:
        y = cp.Gaussian.isotropic(torch.tensor([2.0, 0.0, 0.0]), stddev=0.5)
        print(cp.robustness.misclassification_probability(y, 0).probability)
    """
    return misclassification(Logits.of(logits), label, Randomisation.draw(points, generator))


def misclassification(moments: Logits, label: int | Tensor, points: Randomisation) -> Probabilities:
    """P(another class than the label has the largest logit), at fixed points."""
    value, replicates = _estimates(moments, points)
    labels = moments.labels(label)[:, None]
    wrong = value.scatter(-1, labels, 0.0).sum(-1)
    of_each = replicates.scatter(-1, labels.expand(len(replicates), -1, 1), 0.0).sum(-1)
    assumption = _assumption(moments, value)
    if assumption is not None:
        assumption = torch.minimum(
            assumption.gather(-1, labels)[:, 0], torch.maximum(wrong, 1 - wrong)
        )
    return moments.restored(wrong, standard_error(of_each), assumption)


def _estimates(moments: Logits, points: Randomisation) -> tuple[Tensor, Tensor]:
    """All classes' probabilities: the average (batch, classes), and each replicate of it.

    Where they are estimated, p_c - b_c (sum_k p_k - 1), b_c = Cov(p_c, sum) / Var(sum) over the
    replicates: the sum, known to be 1, is a control variate (Lavenberg & Welch 1981). The b_c sum
    to 1, and so do the results.
    """
    rounding = torch.finfo(moments.dtype).eps
    value, replicates = _ClassProbabilities.apply(
        moments.mean, moments.covariance, rounding, points
    )
    if moments.skewness is not None:
        value, replicates = _skewed(moments, value, points)
    value, replicates = moments.averaged(value), moments.averaged(replicates)
    if len(replicates) == 1:
        return value, replicates
    total = replicates.sum(-1, keepdim=True)
    deviation = total - total.mean(0)
    spread = deviation.square().sum(0)
    varies = spread > len(replicates) * (CONSTANT_SUM * torch.finfo(spread.dtype).eps) ** 2
    cross = (deviation * (replicates - replicates.mean(0))).sum(0)
    coefficient = torch.where(varies, cross / torch.where(varies, spread, 1), 0)
    corrected = (value - coefficient * (total.mean(0) - 1)).clamp(min=0)
    return corrected, replicates - coefficient * (total - 1)


@torch.no_grad()
def _skewed(moments: Logits, gaussian: Tensor, points: Randomisation) -> tuple[Tensor, Tensor]:
    """The same with skewed differences: u_j > 0 for u ~ N(a, R), Phi(a_j) = P(y_c - y_j > 0).

    What is assumed of one class contradicts a little what is assumed of another: the sum is made 1.
    gaussian: the probabilities without skewness, whose gradients the result has.
    """
    parts = []
    for some, vectors in _margins(moments):
        assert moments.skewness is not None
        stddev = standard_deviation(vectors.variance)
        scores = normal_scores(vectors.standardised, some.of(moments.skewness))
        shift = torch.where(stddev > 0, scores * stddev, vectors.mean)
        parts.append(orthant(vectors._replace(mean=shift), points))
    replicates = torch.cat(parts, dim=1).unflatten(1, moments.mean.shape)
    total = replicates.mean(0).sum(-1, keepdim=True)
    replicates = replicates / torch.where(total > 0, total, 1)
    with torch.enable_grad():
        return gaussian + (replicates.mean(0) - gaussian).detach(), replicates


@torch.no_grad()
def _assumption(moments: Logits, value: Tensor) -> Tensor | None:
    """Estimated errors of probabilities (batch, classes), None where nothing is known.

    By how far scores may be off, times how much a probability changes with each at most.
    """
    if moments.error is None or moments.weights is not None:
        return None
    parts = []
    for some, vectors in _margins(moments):
        scores = gaussian = vectors.standardised
        if moments.skewness is not None:
            scores = normal_scores(gaussian, some.of(moments.skewness))
        inverse = inverse_deviation(vectors.variance)
        correlation = vectors.covariance * inverse[:, :, None] * inverse[:, None, :]
        moved = score_errors(scores, moments.error.map(some.of))
        moved = SAFETY * (moved + COPULA * (scores - gaussian).abs())
        slopes = score_slopes(scores, correlation)
        varies = (vectors.variance > 0) & (slopes > 0)
        parts.append(torch.where(varies, moved * slopes, 0).sum(-1))
    found = torch.cat(parts).reshape(value.shape)
    return torch.minimum(found, torch.maximum(value, 1 - value))


@final
@dataclass(frozen=True)
class _Chunk:
    """Rows of the logits (n,), the class (n,) of each, and its rivals (n, classes - 1)."""

    row: Tensor
    base: Tensor
    rivals: Tensor

    def of(self, pairs: Tensor) -> Tensor:
        """From (rows, classes, classes): what belongs to the class and each rival."""
        return pairs[self.row, self.base].gather(1, self.rivals)


def _margins(moments: Logits) -> Iterator[tuple[_Chunk, Vectors]]:
    """The differences of every class from its rivals, row by row, some at a time."""
    rounding = torch.finfo(moments.dtype).eps
    return _differences(moments.mean, moments.covariance, rounding)


def _differences(
    mean: Tensor, covariance: Tensor, rounding: float
) -> Iterator[tuple[_Chunk, Vectors]]:
    rows, classes = mean.shape
    row = torch.arange(rows, device=mean.device).repeat_interleave(classes)
    base = torch.arange(classes, device=mean.device).repeat(rows)
    step = max(1, CHUNK // classes**2)
    for some, own in zip(row.split(step), base.split(step), strict=True):
        rivals = others(own[:, None], classes)
        shift, matrix, size = differences(mean[some], covariance[some], own, rivals)
        vanishing = DIFFERENCE_VARIANCE * rounding * size
        yield _Chunk(some, own, rivals), Vectors(shift, matrix, vanishing)


class _ClassProbabilities(Function):
    @staticmethod
    def forward(
        mean: Tensor, covariance: Tensor, rounding: float, points: Randomisation
    ) -> tuple[Tensor, Tensor]:
        parts = [
            orthant(vectors, points) for _, vectors in _differences(mean, covariance, rounding)
        ]
        replicates = torch.cat(parts, dim=1).unflatten(1, mean.shape)
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
        slope, curvature = torch.zeros_like(mean), torch.zeros_like(covariance)
        step = max(1, BACKWARD_CHUNK // mean.shape[-1] ** 2)
        boundaries = _boundaries(mean, covariance, upstream, ctx.rounding)
        for row, pair in zip(*(part.split(step) for part in boundaries), strict=True):
            boundary, by_mean = _boundary_density(
                mean[row], covariance[row], pair, ctx.rounding, ctx.points
            )
            weights = upstream[row].gather(1, pair)
            change = (weights[:, 0] - weights[:, 1])[:, None]  # g_i - g_j
            direction = torch.zeros_like(by_mean)  # e_i - e_j
            direction.scatter_(1, pair[:, :1], 1.0).scatter_(1, pair[:, 1:], -1.0)
            slope.index_add_(0, row, change * boundary[:, None] * direction)
            outer = change[:, :, None] * direction[:, :, None] * by_mean[:, None, :]
            curvature.index_add_(0, row, outer)
        return slope, (curvature + curvature.mT) / 4, None, None


def _boundaries(
    mean: Tensor, covariance: Tensor, weights: Tensor, rounding: float
) -> tuple[Tensor, Tensor]:
    """Rows (pairs,) and pairs (pairs, 2) of classes whose common boundary matters.

    Their weights differ, so do their logits, and by a bound the density is more than rounding to
    the densest of the row: B_ij sigma <= phi(m / sigma) min_k P(y_i > y_k | y_i = y_j).
    """
    rows, classes = mean.shape
    pairs = torch.combinations(torch.arange(classes, device=mean.device))
    row = torch.arange(rows, device=mean.device).repeat_interleave(len(pairs))
    pair = pairs.repeat(rows, 1)
    chosen = weights[row].gather(1, pair)
    kept = chosen[:, 0] != chosen[:, 1]
    row, pair = row[kept], pair[kept]
    first, second = pair.T
    own = covariance[row, first, first][:, None]
    to_first, to_second = covariance[row, first], covariance[row, second]
    others_own = covariance.diagonal(dim1=-2, dim2=-1)[row]
    # Moments of y_i - y_k for all k, its covariance with y_i - y_j, and what cancels: (pairs, k).
    shift = mean[row, first][:, None] - mean[row]
    variance = own - 2 * to_first + others_own
    cross = own - covariance[row, first, second][:, None] - to_first + to_second
    size = own.abs() + 2 * to_first.abs() + others_own.abs()
    variance = torch.where(variance > DIFFERENCE_VARIANCE * rounding * size, variance, 0)
    between, margin = variance.gather(1, pair[:, 1:]), shift.gather(1, pair[:, 1:])
    inverse = inverse_deviation(between)
    gain = cross * inverse * inverse
    rest = (variance - gain * cross).clamp(min=0)
    z = standardise(shift - gain * margin, standard_deviation(rest))
    chance = cumulative(z).scatter(1, pair, 1.0).amin(-1)
    bound = density(standardise(margin, standard_deviation(between)))[:, 0] * chance
    bound = torch.where(between[:, 0] > 0, bound, 0)
    largest = bound.new_zeros(rows).scatter_reduce(0, row, bound, "amax")
    dense = bound > torch.finfo(bound.dtype).eps * largest[row]
    return row[dense], pair[dense]


def _boundary_density(
    mean: Tensor, covariance: Tensor, pair: Tensor, rounding: float, points: Randomisation
) -> tuple[Tensor, Tensor]:
    """B_ij (pairs,) and its derivative with respect to all means (pairs, classes).

    With m = mu_i - mu_j, v its variance, the gain of y_i - y_k on y_i - y_j and
    T_k = dB/d(mu_i - mu_k): dB/dm = -(m / v) B - sum_k gain_k T_k.
    """
    rivals = others(pair, mean.shape[-1])
    order = torch.cat([pair[:, 1:], rivals], dim=1)
    shift, matrix, size = differences(mean, covariance, pair[:, 0], order)
    margin, variance, cross = shift[:, 0], matrix[:, 0, 0], matrix[:, 1:, 0]
    gain = cross / variance[:, None]
    conditional = Vectors(
        shift[:, 1:] - gain * shift[:, :1],
        matrix[:, 1:, 1:] - gain[:, :, None] * cross[:, None, :],
        DIFFERENCE_VARIANCE * rounding * size[:, 1:],
    )
    value, by_rest = orthant_slope(conditional, points)
    inverse = inverse_deviation(variance)
    height = density(margin * inverse) * inverse
    boundary, triple = height * value, height[:, None] * by_rest
    own = -margin * inverse * (inverse * boundary) - (gain * triple).sum(-1)
    by_mean = torch.zeros_like(mean)
    by_mean.scatter_(1, rivals, -triple)
    by_mean.scatter_(1, pair[:, 1:], -own[:, None])
    by_mean.scatter_(1, pair[:, :1], (own + triple.sum(-1))[:, None])
    return boundary, by_mean
