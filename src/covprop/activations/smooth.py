"""Smooth functions: normal-cdf and entire ones in closed form, the others by quadrature."""

import math
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.base import Activation
from covprop.activations.entire import Exponential, Sinusoid, power
from covprop.activations.gaussian_error import GaussianErrorLinear, Probit
from covprop.activations.quadrature import Quadrature
from covprop.activations.registry import CLOSED, INTEGRAL, QUADRATURE, declare
from covprop.activations.rescaled import Rescaled
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import (
    SQRT_2,
    cumulative,
    density,
    partial_expectation,
    standard_deviation,
    standardise,
)

SMOOTH_THRESHOLD = 20.0
"""At torch's default threshold its softplus jumps by 2e-9; below it by more than is promised."""


@declare("gelu", treatment="exact (erf form) or accurate to 1e-8 (tanh form)")
def gelu(approximate: str = "none") -> Activation:
    """Y Phi(y), or its tanh approximation."""
    if approximate == "none":
        return GaussianErrorLinear()
    return Quadrature(partial(F.gelu, approximate=approximate))


@declare("erf", treatment=INTEGRAL)
def erf() -> Activation:
    """The error function, 2 Phi(sqrt2 y) - 1."""
    return Probit(rate=SQRT_2, height=2.0, offset=-1.0)


@declare("ndtr", treatment=INTEGRAL)
def normal_cdf() -> Activation:
    """Phi(y)."""
    return Probit()


@declare("exp", treatment=CLOSED)
def exponential() -> Activation:
    """The log-normal variable."""
    return Exponential()


@declare("sin", treatment=CLOSED)
def sine() -> Activation:
    """sin(y)."""
    return Sinusoid()


@declare("cos", treatment=CLOSED)
def cosine() -> Activation:
    """cos(y)."""
    return Sinusoid(cosine=True)


@declare("square", treatment=CLOSED)
def square() -> Activation:
    """y^2."""
    return power(2)


@declare("pow", "__pow__", treatment=CLOSED)
def integer_power(exponent: Any) -> Activation:
    """y^n for a whole number n >= 0."""
    number = exponent.item() if isinstance(exponent, Tensor) and exponent.numel() == 1 else exponent
    if isinstance(number, Tensor) or number != int(number):
        raise UnsupportedOperation(
            f"pow has a rule for one whole exponent, not for {exponent}; a Gaussian has no real "
            "fractional power, so bound the base first and use cp.activation"
        )
    if number < 0:
        raise UnsupportedOperation(
            f"a Gaussian to the power {number} has no finite moments; bound the base away from 0"
        )
    return power(int(number))


@declare("sigmoid", "expit", treatment=QUADRATURE)
def sigmoid() -> Activation:
    """The logistic function."""
    return Quadrature(torch.sigmoid, rises=True)


@declare("tanh", treatment=QUADRATURE)
def tanh() -> Activation:
    """The hyperbolic tangent."""
    return Quadrature(torch.tanh, rises=True)


@declare("silu", treatment=QUADRATURE)
def silu(inplace: bool = False) -> Activation:
    """Y sigmoid(y)."""
    return Quadrature(F.silu)


@declare("mish", treatment=QUADRATURE)
def mish(inplace: bool = False) -> Activation:
    """Y tanh(softplus(y))."""
    return Quadrature(F.mish)


@declare("softplus", treatment=f"{QUADRATURE} (threshold from 20)")
def softplus(beta: float = 1.0, threshold: float = 20.0) -> Activation:
    """log(1 + exp(beta y)) / beta; torch's switch to y at the threshold is a detail of its own."""
    if threshold < SMOOTH_THRESHOLD:
        raise UnsupportedOperation(
            f"softplus with threshold {threshold} jumps where it becomes linear; use one of "
            f"at least {SMOOTH_THRESHOLD:g}"
        )
    if beta == 0:
        raise ValueError("softplus needs a beta other than 0")
    function = _softplus_of(float(beta))
    if abs(beta) <= 1:
        return Quadrature(function, rises=True)
    unit = Quadrature(_softplus_of(math.copysign(1.0, beta)), rises=True)
    return Rescaled(unit, abs(float(beta)), function)


@declare("logsigmoid", treatment=QUADRATURE)
def logsigmoid() -> Activation:
    """log(sigmoid(y))."""
    return Quadrature(F.logsigmoid, rises=True)


@declare("softsign", treatment=QUADRATURE)
def softsign() -> Activation:
    """Y / (1 + |y|)."""
    return Quadrature(F.softsign, kinks=(0.0,), rises=True)


@declare("hardswish", treatment=QUADRATURE)
def hardswish(inplace: bool = False) -> Activation:
    """Y relu6(y + 3) / 6."""
    return Quadrature(F.hardswish, kinks=(-3.0, 3.0), conditional_mean=_hardswish_mean)


@declare("tanhshrink", treatment=QUADRATURE)
def tanhshrink() -> Activation:
    """Y - tanh(y)."""
    return Quadrature(wraps(F.tanhshrink)(partial(_Tanhshrink.apply)), rises=True)


@lru_cache
def _softplus_of(rate: float) -> Callable[[Tensor], Tensor]:
    """The same object for the same rate, so that activations of two branches have one key."""
    return wraps(F.softplus)(partial(_softplus, rate=rate))


def _softplus(y: Tensor, rate: float) -> Tensor:
    return torch.logaddexp(rate * y, torch.zeros_like(y)) / rate


def _hardswish_mean(mean: Tensor, variance: Tensor) -> Tensor:
    """By y relu6(y + 3) / 6 = [q(y + 3) - 3 r(y + 3) - q(y - 3) - 3 r(y - 3)] / 6, q = r^2."""
    upper, lower = _truncated(mean + 3, variance), _truncated(mean - 3, variance)
    return (upper[1] - lower[1] - 3 * (upper[0] + lower[0])) / 6


def _truncated(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[relu(y)] and E[relu(y)^2], the far side by what the tail lacks."""
    stddev = standard_deviation(variance)
    tail = -standardise(mean, stddev).abs()
    beyond = variance * ((1 + tail.square()) * cumulative(tail) + tail * density(tail))
    square = torch.where(mean > 0, mean.square() + variance - beyond, beyond)
    return mean.clamp(min=0) + stddev * partial_expectation(tail), square


class _Tanhshrink(torch.autograd.Function):
    """y - tanh(y) and its derivative tanh(y)^2 without cancellation near zero."""

    CLOSE = 0.3
    TAYLOR = (1 / 3, -2 / 15, 17 / 315, -62 / 2835, 1382 / 155925, -21844 / 6081075,
              929569 / 638512875, -6404582 / 10854718875, 443861162 / 1856156927625)  # fmt: skip

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        square, series = y.square(), torch.zeros_like(y)
        for coefficient in reversed(_Tanhshrink.TAYLOR):
            series = series * square + coefficient
        return torch.where(y.abs() < _Tanhshrink.CLOSE, series * square * y, y - torch.tanh(y))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * torch.tanh(y).square()
