"""Mean and variance of max(y, 0), together and with their derivatives written out.

Few operations for small layers, where each costs more than its numbers: a training step of a
network with random weights is made of these. With a = mu / sigma and m(a) = a Phi(a) + phi(a):
  E = sigma m(a),  Var = sigma^2 (Phi(a) - m(a) m(-a)),
  dE = Phi(a) dmu + phi(a) / (2 sigma) dsigma^2,
  dVar = 2 E Phi(-a) dmu + (Phi(a) - phi(a) m(a)) dsigma^2.
"""

from typing import Any, NamedTuple

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

ORDER = 2
"""Coefficients that are found with them."""


class _Rectified(NamedTuple):
    """Sigma, sqrt(2 pi) phi(a), Phi(a), m(-|a|), and Var / sigma^2."""

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
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        found = _Rectified.of(mean, variance)
        ctx.save_for_backward(mean, variance, found.stddev, found.height, found.above, found.lower)
        return found.moments(mean)

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
    found = _Rectified.of(mean, variance)
    rows = torch.stack([found.above, found.height.mul_(1 / (SQRT_2 * SQRT_2PI))])
    return *found.moments(mean), rows
