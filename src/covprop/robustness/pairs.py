"""Differences of every two logits: their skewness, their errors, and what these do to decisions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.error_estimate import Deferred, ErrorEstimate
from covprop.gaussian import Gaussian
from covprop.kernels import pearson
from covprop.kernels.normal import SATURATION, cumulative, density

FARTHEST = 4.0
"""Scores from which on an expansion in cumulants is taken as it is there."""


@final
@dataclass(frozen=True)
class PairError:
    """Estimated errors of y_i - y_j for all pairs of classes, (rows, classes, classes) each.

    mean: of the means, in standard deviations of the difference; stddev: relative; skewness and
    kurtosis: how far these are from what is assumed, where it was checked.
    """

    mean: Tensor
    stddev: Tensor
    skewness: Tensor | None = None
    kurtosis: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "PairError":
        """Apply a function to every tensor."""
        rest = (None if part is None else function(part) for part in (self.skewness, self.kurtosis))
        return PairError(function(self.mean), function(self.stddev), *rest)


def known_error(output: Gaussian) -> ErrorEstimate | None:
    """The estimated error of a result, unless it has yet to be made."""
    error = output._error
    return output.error if not isinstance(error, Deferred) or error.known else None


def _pairs(covariance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Standard deviations of y_i as a column and of y_j as a row, and variances of y_i - y_j."""
    variance = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    between = variance[:, :, None] + variance[:, None, :] - 2 * covariance
    stddev = variance.sqrt()
    return stddev[:, :, None], stddev[:, None, :], between


def pair_skewness(covariance: Tensor, skewness: Tensor) -> Tensor:
    """The skewness of y_i - y_j that a Gaussian copula implies, to first order in that of each.

    For y_i = m_i + s_i (z_i + g_i (z_i^2 - 1) / 6) with z_i standard normal and correlated by r,
    the cumulants of third order are k_iij = s_i^2 s_j (2 r g_i + r^2 g_j) / 3. At most that of
    either logit: beyond, it is what rounding leaves of a difference.
    """
    first, second, between = _pairs(covariance)
    product = first * second
    r = torch.where(product > 0, covariance / torch.where(product > 0, product, 1), 0)
    own, other = skewness[:, :, None], skewness[:, None, :]
    third = (
        first**3 * own - first.square() * second * (2 * r * own + r.square() * other)
        - second**3 * other + first * second.square() * (2 * r * other + r.square() * own)
    )  # fmt: skip
    limit = torch.maximum(own.abs(), other.abs())
    varies = between > 0
    scaled = third / torch.where(varies, between, 1) ** 1.5
    return torch.where(varies, torch.maximum(torch.minimum(scaled, limit), -limit), 0)


def pair_error(covariance: Tensor, mean: Tensor, stddev: Tensor) -> PairError:
    """Errors of y_i - y_j from those of each logit, as if these were independent of each other."""
    first, second, between = _pairs(covariance)
    safe = torch.where(between > 0, between, 1)
    shift = torch.hypot(first * mean[:, :, None], second * mean[:, None, :]) / safe.sqrt()
    width = torch.hypot(first.square() * stddev[:, :, None], second.square() * stddev[:, None, :])
    varies = between > 0
    return PairError(torch.where(varies, shift, 0), torch.where(varies, width / safe, 0))


def normal_scores(z: Tensor, skewness: Tensor) -> Tensor:
    """The score a with Phi(a) = P(d > 0) for a d of mean z, variance 1 and this skewness.

    Of Pearson's type III. The smaller of both tails is computed, and accurate relative to itself.
    """
    sign = torch.where(z > 0, 1.0, -1.0)
    tail = pearson.cumulative(-z.abs(), sign * skewness)
    return (-sign * torch.special.ndtri(tail)).clamp(-SATURATION, SATURATION)


def score_errors(scores: Tensor, error: PairError) -> Tensor:
    """How far scores may be off, by errors of the moments and by cumulants that are not assumed.

    d + |a| e + |g| |a^2 - 1| / 6 + |k| |a^3 - 3 a| / 24 (Cornish & Fisher 1938).
    """
    a = scores.clamp(-FARTHEST, FARTHEST)
    moved = error.mean + a.abs() * error.stddev
    if error.skewness is not None:
        moved = moved + error.skewness * (a.square() - 1).abs() / 6
    if error.kurtosis is not None:
        moved = moved + error.kurtosis * (a**3 - 3 * a).abs() / 24
    return moved


def score_slopes(scores: Tensor, correlation: Tensor) -> Tensor:
    """Bounds of d P(all u_j > 0) / d a_j for u ~ N(a, R), (rows, k).

    phi(a_j) P(all others > 0 | u_j = 0), which is at most the least probability of one of them.
    """
    r = correlation.clamp(-1, 1)
    rest = (1 - r.square()).sqrt()  # [row, k, j]: of u_k given u_j
    given = scores[:, :, None] - r * scores[:, None, :]
    z = (given / rest.clamp(min=torch.finfo(rest.dtype).tiny)).clamp(-SATURATION, SATURATION)
    chance = cumulative(z)
    own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    return density(scores) * torch.where(own, 1.0, chance).amin(-2)
