"""The expected logarithm of a scale mixture, by quadrature that the posterior's width cannot fool.

log(s N(w; 0, wide^2) + (1 - s) N(w; 0, narrow^2)) is the wide component's quadratic and a bump,
softplus(b - t w^2 / 2) with b = log((1 - s) wide / (s narrow)) and t = 1 / narrow^2 - 1 / wide^2.
The quadratic has a closed form. The bump is integrated where both it and the posterior are not
negligible, so that neither a posterior much wider than it nor a much narrower one misses it.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from covprop.kernels.gradients import first_order
from covprop.kernels.nodes import unit_interval
from covprop.kernels.normal import SQRT_2PI

NODES = 96
"""Gauss-Legendre nodes: the error is below 1e-8 for components of any two widths."""
REACH = 9.0
"""Standard deviations of the posterior on either side that are looked at."""
NEGLIGIBLE = 28.0
"""Minus the logarithm of what is left of the bump where it is no longer looked at."""
TOGETHER = 2**20
"""Evaluations at a time."""


class _ExpectedBump(Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, stddev: Tensor, height: float, decay: float) -> Tensor:
        means, stddevs = mean.detach().flatten().double(), stddev.detach().flatten().double()
        step = max(1, TOGETHER // NODES)
        parts = [
            torch.stack(_integrals(m, s, height, decay))
            for m, s in zip(means.split(step), stddevs.split(step), strict=True)
        ]
        value, by_mean, by_stddev = torch.cat(parts, -1).to(mean.dtype).unbind()
        ctx.save_for_backward(by_mean.reshape(mean.shape), by_stddev.reshape(mean.shape))
        return value.reshape(mean.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_mean, by_stddev = ctx.saved_tensors
        return gradient * by_mean, gradient * by_stddev, None, None


def _integrals(
    mean: Tensor, stddev: Tensor, height: float, decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """E[f(w)], E[f'(w)] and E[f'(w) (w - m) / s], the derivatives by m and by s."""
    nodes, weights = mean.new_tensor(unit_interval(NODES)).T[..., None]
    edge = math.sqrt(2 * (max(height, 0.0) + NEGLIGIBLE) / decay)
    low = (mean - REACH * stddev).clamp(-edge, edge)
    high = (mean + REACH * stddev).clamp(-edge, edge)
    w = low + (high - low) * nodes  # (nodes, n)
    z = (w - mean) / stddev
    mass = torch.exp(-z.square() / 2) * (weights * (high - low) / (SQRT_2PI * stddev))
    level = height - decay / 2 * w.square()
    slope = -decay * w * torch.sigmoid(level)
    return (mass * F.softplus(level)).sum(0), (mass * slope).sum(0), (mass * slope * z).sum(0)


def expected_bump(mean: Tensor, stddev: Tensor, height: float, decay: float) -> Tensor:
    """E softplus(height - decay w^2 / 2) for w ~ N(mean, stddev^2), element by element."""
    return _ExpectedBump.apply(mean, stddev, height, decay)
