"""ELU, SELU and CELU: linear above zero, exponential below.

Their conditional mean is closed, so strongly correlated pairs are a one-dimensional integral. The
closed form of the covariance itself (tilted bivariate normal cdfs) cancels for small variances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.base import Activation
from covprop.activations.quadrature import Quadrature
from covprop.activations.registry import declare
from covprop.activations.rescaled import Rescaled
from covprop.kernels.normal import SQRT_2, cumulative, partial_expectation, standardise

EXACT = "exact: one-dimensional integral"
SELU_SCALE = 1.0507009873554804934193349852946
SELU_ALPHA = 1.6732632423543772848170429916717


@declare("elu", treatment=EXACT)
def elu(
    alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Activation:
    """Scale times y above 0, and scale alpha (exp(input_scale y) - 1) below."""
    return _elu(F.elu, alpha, scale, input_scale)


def _elu(
    torchs: Callable[..., Tensor], alpha: float, scale: float, input_scale: float
) -> Quadrature:
    """The same, in the name of a function of torch."""

    def function(y: Tensor) -> Tensor:
        below = alpha * torch.expm1(input_scale * y.clamp(max=0))
        return scale * torch.where(y > 0, y, below)

    return Quadrature(
        wraps(torchs)(function),
        kinks=(0.0,),
        conditional_mean=_ExponentialMean(alpha, scale, input_scale),
        rises=scale >= 0 and alpha * input_scale >= 0,
    )


@declare("selu", treatment=EXACT)
def selu(inplace: bool = False) -> Activation:
    """ELU with the constants that keep mean 0 and variance 1."""
    return _elu(F.selu, SELU_ALPHA, SELU_SCALE, 1.0)


@declare("celu", treatment=EXACT)
def celu(alpha: float = 1.0, inplace: bool = False) -> Activation:
    """ELU with a continuous derivative for every alpha."""
    if alpha == 0:
        raise ValueError("celu needs an alpha other than 0")
    whole = _elu(F.celu, alpha, 1.0, 1 / alpha)
    if not 0 < alpha < 1:
        return whole
    return Rescaled(_elu(F.celu, 1.0, 1.0, 1.0), 1 / alpha, whole.function)


@final
@dataclass(frozen=True)
class _ExponentialMean:
    """E[g(y)] = scale { sigma m(a) + alpha (E[exp(k y) 1(y < 0)] - Phi(-a)) }, a = mu / sigma."""

    alpha: float
    scale: float
    rate: float

    def __call__(self, mean: Tensor, variance: Tensor) -> Tensor:
        stddev = variance.sqrt()
        a = standardise(mean, stddev)
        tilted = a + self.rate * stddev
        # exp(k mu + k^2 sigma^2 / 2) Phi(-tilted): both factors in one exponent.
        upper = torch.exp(-a.square() / 2) * torch.special.erfcx(tilted.clamp(min=0) / SQRT_2) / 2
        exponent = self.rate * (mean + self.rate * variance / 2)
        lower = torch.exp(exponent.clamp(max=0)) * cumulative(-tilted)
        below = torch.where(tilted > 0, upper, lower) - cumulative(-a)
        relu = mean.clamp(min=0) + stddev * partial_expectation(-a.abs())
        return self.scale * (relu + self.alpha * below)
