"""The standard normal distribution, and the moments of a rectified normal variable."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.rounding import NEGATIVE_VARIANCE, rounding

SQRT_2 = math.sqrt(2)
SQRT_PI = math.sqrt(math.pi)
SQRT_2PI = math.sqrt(2 * math.pi)

SATURATION = 100.0
"""Standard deviations beyond which density and tail are zero in float64: nothing changes there."""
RECTIFIED_ORDER = 2
"""Coefficients that `rectified_coefficients` gives."""


def density(z: Tensor) -> Tensor:
    """phi(z) = exp(-z^2 / 2) / sqrt(2 pi)."""
    return torch.exp(-z.square() / 2) / SQRT_2PI


def cumulative(z: Tensor) -> Tensor:
    """Phi(z) = P(xi < z), accurate relative to itself in the lower tail (torch's ndtr is not)."""
    return torch.erfc(-z / SQRT_2) / 2


def cumulative_difference(high: Tensor, low: Tensor) -> Tensor:
    """Phi(high) - Phi(low), taken in the tail where both are small."""
    flip = torch.where(high + low > 0, -1.0, 1.0).to(high.dtype)
    return flip * (cumulative(flip * high) - cumulative(flip * low))


class _PartialExpectation(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        tail = z.abs() / SQRT_2
        # z Phi(z) + phi(z) cancels for z << 0; erfcx keeps what is left.
        below = density(z) * (1 - SQRT_PI * tail * torch.special.erfcx(tail))
        return below + z.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return gradient * cumulative(z)


def partial_expectation(z: Tensor) -> Tensor:
    """m(z) = E[relu(z + xi)] = z Phi(z) + phi(z), accurate relative to itself for every z."""
    return _PartialExpectation.apply(z)


def in_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tensors of a dtype; those that have it are not touched, which takes time as well."""
    return tuple(t if t.dtype is dtype else t.to(dtype) for t in tensors)


def standard_deviation(variance: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, where the limits carry no information."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), 0)


def known_deviation(variance: Tensor) -> Tensor:
    """Standard deviations (..., n) for display: NaN where a variance is negative or NaN.

    A variance that is negative by rounding, relative to the largest of the n, is zero.
    """
    if not variance.numel():
        return variance
    largest = variance.detach().nan_to_num(nan=0.0).amax(-1, keepdim=True)
    least = -rounding(NEGATIVE_VARIANCE, variance.dtype) * largest.clamp(min=0)
    return torch.where(variance >= least, standard_deviation(variance), torch.nan)


def standardise(distance: Tensor, stddev: Tensor) -> Tensor:
    """distance / stddev, clamped to +-SATURATION where it is larger (also for stddev = 0)."""
    near = distance.abs() < SATURATION * stddev
    far = torch.where(distance >= 0, SATURATION, -SATURATION).to(distance.dtype)
    return torch.where(near, distance / torch.where(near, stddev, 1), far)


def inverse_deviation(variance: Tensor) -> Tensor:
    """1 / sigma, and 0 where the variance is zero; where it is denormal, without a gradient.

    Its square may overflow: multiply twice.
    """
    # The gradient of a correlation is one over the variance, which overflows there.
    followed = torch.where(
        variance >= torch.finfo(variance.dtype).tiny, variance, variance.detach()
    )
    positive = variance > 0
    # Not rsqrt: its gradient is a third power, which overflows from a deviation of 1e-103 on.
    return torch.where(positive, torch.where(positive, followed, 1).sqrt().reciprocal(), 0)


def correlation(covariance: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """rho = c / (sigma_i sigma_j) from the inverse deviations of i and of j."""
    return covariance * left * right


class _Rectified(NamedTuple):
    """sigma, sqrt(2 pi) phi(a), Phi(a), m(-|a|) and Var / sigma^2 of max(y, 0), a = mu / sigma.

    E = sigma m(a),  Var = sigma^2 (Phi(a) - m(a) m(-a)),  m(a) = a Phi(a) + phi(a),
    dE = Phi(a) dmu + phi(a) / (2 sigma) dsigma^2,
    dVar = 2 E Phi(-a) dmu + (Phi(a) - phi(a) m(a)) dsigma^2.
    """

    stddev: Tensor
    height: Tensor
    above: Tensor
    lower: Tensor
    share: Tensor

    @classmethod
    def of(cls, mean: Tensor, variance: Tensor) -> "_Rectified":
        stddev = variance.clamp(min=0).sqrt_()
        # As `standardise` has it: 0 / 0 counts as above.
        a = (mean / stddev).clamp_(-SATURATION, SATURATION).nan_to_num_(nan=SATURATION)
        size = a.abs()
        height = a.square().mul_(-0.5).exp_()  # sqrt(2 pi) phi(a)
        mills = torch.special.erfcx(size * (1 / SQRT_2)).mul_(0.5)  # Phi(-|a|) over that
        tail = height * mills
        lower = (size * mills).neg_().add_(1 / SQRT_2PI).mul_(height)  # m(-|a|), not cancelled
        above = torch.where(a > 0, 1 - tail, tail)
        # Rounding must not make the variance of a constant negative.
        share = torch.addcmul(above, lower, size.add_(lower), value=-1).clamp_(min=0)
        return cls(stddev, height, above, lower, share)

    def moments(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        first = mean.clamp(min=0).addcmul_(self.stddev, self.lower)
        return first, self.stddev.square().mul_(self.share)


class _RectifiedMoments(Function):
    """In few operations, for small layers, where each costs more than its numbers."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        parts = _Rectified.of(mean, variance)
        ctx.save_for_backward(mean, variance, *parts[:4])
        return parts.moments(mean)

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance, stddev, height, above, lower = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: what was saved has no graph
            stddev = standard_deviation(variance)
            a = standardise(mean, stddev)
            height, above = density(a), cumulative(a)
            first = stddev * partial_expectation(a)
        else:
            height = height * (1 / SQRT_2PI)
            first = mean.clamp(min=0).addcmul_(stddev, lower)
        # The density is zero wherever the deviation is.
        slope = height / stddev.clamp(min=torch.finfo(stddev.dtype).tiny)
        by_mean = above * of_mean + 2 * first * (1 - above) * of_variance
        return by_mean, slope * (0.5 * of_mean - first * of_variance) + above * of_variance


def rectified_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E and Var of max(y, 0) for y ~ N(mean, variance), element by element."""
    if mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    return _RectifiedMoments.apply(mean, variance)


@torch.no_grad()
def rectified_coefficients(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E, Var, and as rows a_1 / sigma = Phi(a), a_2 / sigma = phi(a) / sqrt(2); no gradients."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    parts = _Rectified.of(mean, variance)
    rows = torch.stack([parts.above, parts.height.mul_(1 / (SQRT_2 * SQRT_2PI))])
    return *parts.moments(mean), rows
