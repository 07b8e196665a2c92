"""The standard normal distribution: the one place where its functions are written."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

SQRT_2 = math.sqrt(2)
SQRT_PI = math.sqrt(math.pi)
SQRT_2PI = math.sqrt(2 * math.pi)

SATURATION = 100.0
"""Standard deviations beyond which density and tail are zero in float64: nothing changes there."""


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


def is_finite(tensor: Tensor) -> bool:
    """A finite sum tells it in one pass; finite numbers may yet have an infinite one."""
    numbers = tensor.detach()
    return math.isfinite(float(numbers.sum())) or bool(torch.isfinite(numbers).all())


def standard_deviation(variance: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, where the limits carry no information."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), 0)


ROUNDING = 100.0
"""In units of machine epsilon and of the largest variance: a negative variance that is zero."""


def known_deviation(variance: Tensor) -> Tensor:
    """Standard deviations (..., n) for people to read: NaN where a variance is negative or NaN.

    A variance that is negative by rounding, beside the largest of the n, is zero.
    """
    if not variance.numel():
        return variance
    largest = variance.detach().nan_to_num(nan=0.0).amax(-1, keepdim=True)
    least = -ROUNDING * torch.finfo(variance.dtype).eps * largest.clamp(min=0)
    return torch.where(variance >= least, standard_deviation(variance), torch.nan)


def standardise(distance: Tensor, stddev: Tensor) -> Tensor:
    """Distance / stddev, held at +-SATURATION where it is larger (also for stddev = 0)."""
    near = distance.abs() < SATURATION * stddev
    far = torch.where(distance >= 0, SATURATION, -SATURATION).to(distance.dtype)
    return torch.where(near, distance / torch.where(near, stddev, 1), far)


def inverse_deviation(variance: Tensor) -> Tensor:
    """1 / sigma, and 0 where nothing varies, or by less than a normal number."""
    # Not rsqrt: its gradient is a third power, which overflows from a deviation of 1e-103 on.
    positive = variance >= torch.finfo(variance.dtype).tiny
    return torch.where(positive, torch.where(positive, variance, 1).sqrt().reciprocal(), 0)


def correlation(covariance: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """rho = c / (sigma_i sigma_j) from the inverse deviations of i and of j."""
    return covariance * left * right
