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
from covprop.robustness.logits import differences, marginal_differences, others
from covprop.robustness.orthant import DEGENERATE, Vectors, orthant_slope
from covprop.robustness.randomisation import Randomisation

HELD = 2**21
"""Entries of covariances at a boundary that are held at a time."""


def gradient(
    mean: Tensor, covariance: Tensor, weights: Tensor, rounding: float, points: Randomisation
) -> tuple[Tensor, Tensor]:
    """dL/dmu (rows, classes) and dL/dS (rows, classes, classes) for weights g (rows, classes)."""
    slope, curvature = torch.zeros_like(mean), torch.zeros_like(covariance)
    step = max(1, HELD // mean.shape[-1] ** 2)
    every = _boundaries(mean, covariance, weights, rounding)
    for row, pair in zip(*(part.split(step) for part in every), strict=True):
        tie = Tie.of(mean[row], covariance[row], pair, rounding)
        change = weights[row].gather(1, pair)
        change = (change[:, 0] - change[:, 1])[:, None]  # g_i - g_j
        boundary, by_mean = _density(tie, points)
        direction = torch.zeros_like(by_mean)  # e_i - e_j
        direction.scatter_(1, pair[:, :1], 1.0).scatter_(1, pair[:, 1:], -1.0)
        slope.index_add_(0, row, change * boundary[:, None] * direction)
        outer = change[:, :, None] * direction[:, :, None] * by_mean[:, None, :]
        curvature.index_add_(0, row, outer)
    return slope, (curvature + curvature.mT) / 4


def _boundaries(
    mean: Tensor, covariance: Tensor, weights: Tensor, rounding: float
) -> tuple[Tensor, Tensor]:
    """Rows (pairs,) and pairs (pairs, 2) of classes between which something changes.

    Their weights differ, so does what varies, and by a bound the density is more than rounding to
    the densest of the row: B_ij sigma <= phi(m / sigma) min_k P(y_i > y_k | y_i = y_j).
    """
    rows, classes = mean.shape
    pairs = torch.combinations(torch.arange(classes, device=mean.device))
    row = torch.arange(rows, device=mean.device).repeat_interleave(len(pairs))
    pair = pairs.repeat(rows, 1)
    chosen = weights[row].gather(1, pair)
    kept = chosen[:, 0] != chosen[:, 1]
    row, pair = row[kept], pair[kept]
    every = torch.arange(classes, device=mean.device).expand(len(row), classes)
    shift, variance, across, size = marginal_differences(mean, covariance, row, pair, every)
    variance = torch.where(variance > DEGENERATE * rounding * size, variance, 0)
    own, apart = variance.gather(1, pair[:, 1:]), shift.gather(1, pair[:, 1:])
    gain = across * inverse_deviation(own).square()
    rest = (variance - gain * across).clamp(min=0)
    z = standardise(shift - gain * apart, standard_deviation(rest))
    chance = cumulative(z).scatter(1, pair, 1.0).amin(-1)
    bound = density(standardise(apart, standard_deviation(own)))[:, 0] * chance
    bound = torch.where(own[:, 0] > 0, bound, 0)
    largest = bound.new_zeros(rows).scatter_reduce(0, row, bound, "amax")
    dense = bound > torch.finfo(bound.dtype).eps * largest[row]
    return row[dense], pair[dense]


class Tie(NamedTuple):
    """Pairs of classes (i, j): moments of their difference, and all else where they tie."""

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

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor, pair: Tensor, rounding: float) -> "Tie":
        """From the moments (pairs, classes) of all logits."""
        rivals = others(pair, mean.shape[-1])
        order = torch.cat([pair[:, 1:], rivals], dim=1)
        shift, matrix, size = differences(mean, covariance, pair[:, 0], order)
        variance, across = matrix[:, 0, 0], matrix[:, 1:, 0]
        gain = across / variance[:, None]
        rest = Vectors(
            shift[:, 1:] - gain * shift[:, :1],
            matrix[:, 1:, 1:] - gain[:, :, None] * across[:, None, :],
            size[:, 1:],
            rounding,
        )
        return cls(pair, shift[:, 0], variance, rivals, gain, rest)


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
