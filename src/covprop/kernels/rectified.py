"""Mean and variance of max(y, 0), together and with their derivatives written out.

Few operations for small layers, where each costs more than its numbers: a training step of a
network with random weights is made of these. With a = mu / sigma and m(a) = a Phi(a) + phi(a):
  E = sigma m(a),  Var = sigma^2 (Phi(a)^2 + K),  K = Phi(a) Phi(-a) - m(a) m(-a),
  dE = Phi(a) dmu + phi(a) / (2 sigma) dsigma^2,
  dVar = 2 E Phi(-a) dmu + (Phi(a) - phi(a) m(a)) dsigma^2.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.normal import (
    SATURATION,
    SQRT_2,
    SQRT_2PI,
    cumulative,
    density,
    partial_expectation,
    standard_deviation,
    standardise,
)

SQRT_HALF_PI = math.sqrt(math.pi / 2)


class _RectifiedMoments(Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        spread = variance.clamp(min=0)
        stddev = spread.sqrt()
        # As `standardise` has it: 0 / 0 counts as above.
        a = (mean / stddev).clamp_(-SATURATION, SATURATION).nan_to_num_(nan=SATURATION)
        size, upwards = a.abs(), a > 0
        height = (size.square() * -0.5).exp_().mul_(1 / SQRT_2PI)
        mills = torch.special.erfcx(size / SQRT_2).mul_(SQRT_HALF_PI)  # Phi(-|a|) / phi(a)
        tail = height * mills
        lower = height * (1 - size * mills)  # m(-|a|), which a Phi + phi would cancel
        excess = lower + a.clamp(min=0)
        above = torch.where(upwards, 1 - tail, tail)
        share = above.square().add_(tail * (1 - tail) - lower * (lower + size))
        ctx.save_for_backward(mean, variance, stddev, height, above, excess)
        # Rounding must not make the variance of a constant negative.
        return mean.clamp(min=0) + stddev * lower, spread * share.clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance, stddev, height, above, excess = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: what was saved has no graph
            stddev = standard_deviation(variance)
            a = standardise(mean, stddev)
            height, above, excess = density(a), cumulative(a), partial_expectation(a)
        by_mean = above * of_mean + (2 * stddev * excess) * (1 - above) * of_variance
        # The density is zero wherever the deviation is.
        slope = height / (2 * stddev).clamp(min=torch.finfo(stddev.dtype).tiny)
        return by_mean, slope * of_mean + (above - height * excess) * of_variance


def rectified_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E and Var of max(y, 0) for y ~ N(mean, variance), element by element."""
    if mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    return _RectifiedMoments.apply(mean, variance)
