"""Smooth functions, and those that are smooth but for a kink at zero.

Those of the normal cdf and entire ones are in closed form, the others by quadrature. The mean of
ELU, SELU and CELU is closed, so strongly correlated pairs are a one-dimensional integral; the
closed form of their covariance (tilted bivariate normal cdfs) cancels for small variances.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.base import CLOSED, INTEGRAL, QUADRATURE, Activation, declare
from covprop.activations.closed import (
    Exponential,
    GaussianErrorLinear,
    Probit,
    Sinusoid,
    power,
)
from covprop.activations.quadrature import Quadrature, Rescaled
from covprop.errors import UnsupportedOperation
from covprop.kernels.compiled_moments import Compiled
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
ONE_INTEGRAL = "exact: one-dimensional integral"
SELU_SCALE = 1.0507009873554804934193349852946
SELU_ALPHA = 1.6732632423543772848170429916717


@declare("gelu", treatment="exact (erf form) or accurate to 1e-8 (tanh form)")
def gelu(approximate: str = "none") -> Activation:
    """y Phi(y), or its tanh approximation."""
    if approximate == "none":
        return GaussianErrorLinear()
    return Quadrature(partial(F.gelu, approximate=approximate), compiled=Compiled("gelu_tanh"))


# Functions without options.
erf = declare("erf", treatment=INTEGRAL)(lambda: Probit(SQRT_2, height=2.0, offset=-1.0))
erfc = declare("erfc", treatment=INTEGRAL)(lambda: Probit(-SQRT_2, height=2.0))
normal_cdf = declare("ndtr", treatment=INTEGRAL)(lambda: Probit())
exponential = declare("exp", treatment=CLOSED)(lambda: Exponential())
sine = declare("sin", treatment=CLOSED)(lambda: Sinusoid())
cosine = declare("cos", treatment=CLOSED)(lambda: Sinusoid(cosine=True))
square = declare("square", treatment=CLOSED)(lambda: power(2))


@declare("pow", "__pow__", treatment=CLOSED)
def integer_power(exponent: Any) -> Activation:
    """y^n for a whole number n >= 0."""
    number = exponent.item() if isinstance(exponent, Tensor) and exponent.numel() == 1 else exponent
    if isinstance(number, Tensor | complex) or not float(number).is_integer():
        raise UnsupportedOperation(
            f"pow has a rule for one whole exponent, not for {exponent}; a Gaussian has no real "
            "fractional power, so bound the base first and use cp.activation"
        )
    if number < 0:
        raise UnsupportedOperation(
            f"a Gaussian to the power {number} has no finite moments; bound the base away from 0"
        )
    return power(int(number))


sigmoid = declare("sigmoid", "expit", treatment=QUADRATURE)(
    lambda: Quadrature(torch.sigmoid, nondecreasing=True, compiled=Compiled("sigmoid"))
)
tanh = declare("tanh", treatment=QUADRATURE)(
    lambda: Quadrature(torch.tanh, nondecreasing=True, compiled=Compiled("tanh"))
)
arctangent = declare("atan", "arctan", treatment=QUADRATURE)(
    lambda: Quadrature(torch.atan, nondecreasing=True)
)

inverse_hyperbolic_sine = declare("asinh", "arcsinh", treatment=QUADRATURE)(
    lambda: Quadrature(torch.asinh, nondecreasing=True)
)


@declare("silu", treatment=QUADRATURE)
def silu(inplace: bool = False) -> Activation:
    """y sigmoid(y)."""
    return Quadrature(F.silu, compiled=Compiled("silu"))


@declare("mish", treatment=QUADRATURE)
def mish(inplace: bool = False) -> Activation:
    """y tanh(softplus(y))."""
    return Quadrature(F.mish, compiled=Compiled("mish"))


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
    sign = math.copysign(1.0, beta)
    compiled = Compiled("softplus" if beta > 0 else "logsigmoid")  # log(1 + exp(-y)) / -1
    unit = Quadrature(_softplus_of(sign), nondecreasing=True, compiled=compiled)
    if beta == sign:
        return unit
    if abs(beta) < 1:
        return Quadrature(function, nondecreasing=True)
    return Rescaled(unit, abs(float(beta)), function)


logsigmoid = declare("logsigmoid", treatment=QUADRATURE)(
    lambda: Quadrature(F.logsigmoid, nondecreasing=True, compiled=Compiled("logsigmoid"))
)
softsign = declare("softsign", treatment=QUADRATURE)(
    lambda: Quadrature(F.softsign, kinks=(0.0,), nondecreasing=True)
)


@declare("hardswish", treatment=QUADRATURE)
def hardswish(inplace: bool = False) -> Activation:
    """y relu6(y + 3) / 6."""
    return Quadrature(F.hardswish, kinks=(-3.0, 3.0), conditional_mean=_hardswish_mean)


tanhshrink = declare("tanhshrink", treatment=QUADRATURE)(
    lambda: Quadrature(wraps(F.tanhshrink)(partial(_Tanhshrink.apply)), nondecreasing=True)
)


@declare("elu", treatment=ONE_INTEGRAL)
def elu(
    alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, inplace: bool = False
) -> Activation:
    """scale times y above 0, and scale alpha (exp(input_scale y) - 1) below."""
    return _elu(F.elu, alpha, scale, input_scale)


def _elu(
    named: Callable[..., Tensor], alpha: float, scale: float, input_scale: float
) -> Quadrature:
    """ELU under the name of a torch function."""

    def function(y: Tensor) -> Tensor:
        below = alpha * torch.expm1(input_scale * y.clamp(max=0))
        return scale * torch.where(y > 0, y, below)

    return Quadrature(
        wraps(named)(function),
        kinks=(0.0,),
        conditional_mean=_ExponentialMean(alpha, scale, input_scale),
        nondecreasing=scale >= 0 and alpha * input_scale >= 0,
        compiled=Compiled("elu", (alpha, scale, input_scale)) if input_scale >= 0 else None,
    )


@declare("selu", treatment=ONE_INTEGRAL)
def selu(inplace: bool = False) -> Activation:
    """ELU with the constants that keep mean 0 and variance 1."""
    return _elu(F.selu, SELU_ALPHA, SELU_SCALE, 1.0)


@declare("celu", treatment=ONE_INTEGRAL)
def celu(alpha: float = 1.0, inplace: bool = False) -> Activation:
    """ELU with a continuous derivative for every alpha."""
    if alpha == 0:
        raise ValueError("celu needs an alpha other than 0")
    whole = _elu(F.celu, alpha, 1.0, 1 / alpha)
    if not 0 < alpha < 1:
        return whole
    return Rescaled(_elu(F.celu, 1.0, 1.0, 1.0), 1 / alpha, whole.function)


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
