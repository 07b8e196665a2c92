"""How class probabilities change with the moments of the logits: what happens at the boundaries.

With B_ij the density of y_i = y_j > all others (Plackett 1954), for L = sum_c g_c p_c

    dL/dmu = sum over pairs i < j of (g_i - g_j) B_ij (e_i - e_j)
    dL/dS  = (1/2) d^2 L / dmu dmu^T                                     (Price 1958)

and the derivatives of B_ij = density(y_i - y_j = 0) P(y_i > y_k for all k | y_i = y_j) follow from
those of an orthant probability with respect to its mean. Nothing is divided by a standard deviation
but that of y_i - y_j, so that singular covariances are no obstacle.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from covprop.kernels.normal import (
    cumulative,
    density,
    inverse_deviation,
    standard_deviation,
    standardise,
)
from covprop.robustness.logits import differences, others
from covprop.robustness.orthant import Vectors, orthant_slope
from covprop.robustness.randomisation import Randomisation


class Tie(NamedTuple):
    """Pairs of classes (i, j), in some rows: moments of their difference, and all else at a tie."""

    row: Tensor
    """(pairs,)"""
    pair: Tensor
    """(pairs, 2)"""
    mean: Tensor
    """Of y_i - y_j, (pairs,)."""
    variance: Tensor
    rivals: Tensor
    """The other classes k, (pairs, classes - 2)."""
    gain: Tensor
    """Of y_i - y_k on y_i - y_j, (pairs, classes - 2)."""
    rest: Vectors
    """y_i - y_k, given that y_i = y_j."""

    def only(self, kept: Tensor) -> "Tie":
        """Some of them."""
        return Tie(
            self.row[kept], self.pair[kept], self.mean[kept], self.variance[kept],
            self.rivals[kept], self.gain[kept], self.rest[kept],
        )  # fmt: skip


def gradient(
    mean: Tensor, covariance: Tensor, weights: Tensor, rounding: float, points: Randomisation
) -> tuple[Tensor, Tensor]:
    """dL/dmu (rows, classes) and dL/dS (rows, classes, classes) for weights g (rows, classes)."""
    tie = _significant(_ties(mean, covariance, weights, rounding))
    slope, curvature = torch.zeros_like(mean), torch.zeros_like(covariance)
    if not len(tie.row):
        return slope, curvature
    change = weights[tie.row].gather(1, tie.pair)
    change = (change[:, 0] - change[:, 1])[:, None]  # g_i - g_j
    boundary, by_mean = _density(tie, points)
    direction = torch.zeros_like(by_mean)  # e_i - e_j
    direction.scatter_(1, tie.pair[:, :1], 1.0).scatter_(1, tie.pair[:, 1:], -1.0)
    slope = slope.index_add(0, tie.row, change * boundary[:, None] * direction)
    outer = change[:, :, None] * direction[:, :, None] * by_mean[:, None, :]
    curvature = curvature.index_add(0, tie.row, outer)
    return slope, (curvature + curvature.mT) / 4


def _ties(mean: Tensor, covariance: Tensor, weights: Tensor, rounding: float) -> Tie:
    """Every pair of classes with different weights whose difference varies."""
    rows, classes = mean.shape
    pairs = torch.combinations(torch.arange(classes, device=mean.device))
    row = torch.arange(rows, device=mean.device).repeat_interleave(len(pairs))
    pair = pairs.repeat(rows, 1)
    chosen = weights[row].gather(1, pair)
    kept = chosen[:, 0] != chosen[:, 1]
    row, pair = row[kept], pair[kept]
    rivals = others(pair, classes)
    order = torch.cat([pair[:, 1:], rivals], dim=1)
    shift, matrix, size = differences(mean[row], covariance[row], pair[:, 0], order)
    variance = Vectors(shift, matrix, size, rounding).variance[:, 0]
    across = matrix[:, 1:, 0]
    gain = across * inverse_deviation(variance)[:, None].square()
    rest = Vectors(
        shift[:, 1:] - gain * shift[:, :1],
        matrix[:, 1:, 1:] - gain[:, :, None] * across[:, None, :],
        size[:, 1:],
        rounding,
    )
    tie = Tie(row, pair, shift[:, 0], variance, rivals, gain, rest)
    return tie.only(variance > 0)


def _significant(tie: Tie) -> Tie:
    """Without the boundaries that, by a bound, are rounding to the densest one of their row.

    B_ij sigma <= phi(m / sigma) min_k P(y_i > y_k | y_i = y_j).
    """
    if not len(tie.row):
        return tie
    bound = density(standardise(tie.mean, standard_deviation(tie.variance)))
    if tie.rivals.shape[1]:
        rest = standardise(tie.rest.mean, standard_deviation(tie.rest.variance))
        bound = bound * cumulative(rest).amin(-1)
    count = int(tie.row.max()) + 1
    largest = torch.zeros(count, dtype=bound.dtype, device=bound.device)
    largest = largest.scatter_reduce(0, tie.row, bound, "amax")
    return tie.only(bound > torch.finfo(bound.dtype).eps * largest[tie.row])


def _density(tie: Tie, points: Randomisation) -> tuple[Tensor, Tensor]:
    """B_ij (pairs,) and its derivative with respect to all means (pairs, classes).

    With m = mu_i - mu_j, v its variance and T_k = dB/d(mu_i - mu_k):
    dB/dm = -(m / v) B - sum_k gain_k T_k.
    """
    value, by_rest = orthant_slope(tie.rest, points)
    inverse = inverse_deviation(tie.variance)
    height = density(tie.mean * inverse) * inverse
    boundary, triple = height * value, height[:, None] * by_rest
    own = -tie.mean * inverse.square() * boundary - (tie.gain * triple).sum(-1)
    by_mean = torch.zeros(len(own), tie.rivals.shape[1] + 2, dtype=own.dtype, device=own.device)
    by_mean.scatter_(1, tie.rivals, -triple)
    by_mean.scatter_(1, tie.pair[:, 1:], -own[:, None])
    by_mean.scatter_(1, tie.pair[:, :1], (own + triple.sum(-1))[:, None])
    return boundary, by_mean
