"""ReLU and its relatives: declarations of piecewise-linear functions."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations.base import INTEGRAL, Activation, declare
from covprop.activations.closed import power
from covprop.activations.piecewise import Piecewise, continuous
from covprop.errors import RandomDraws, UnsupportedOperation


@declare("relu", treatment=INTEGRAL)
def relu(inplace: bool = False) -> Activation:
    """max(y, 0)."""
    return continuous(torch.relu, [0.0], [0.0, 1.0], 0.0)


@declare("leaky_relu", treatment=INTEGRAL)
def leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Activation:
    """y above 0, negative_slope y below."""
    function = partial(F.leaky_relu, negative_slope=negative_slope)
    return continuous(function, [0.0], [negative_slope, 1.0], 0.0)


@declare("rrelu", treatment=INTEGRAL)
def rrelu(
    lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Activation:
    """In evaluation, leaky ReLU with the mean of the two slopes."""
    if training:
        raise RandomDraws("rrelu in training mode draws random slopes; call model.eval() first")
    return leaky_relu((lower + upper) / 2)


@declare("relu6", treatment=INTEGRAL)
def relu6(inplace: bool = False) -> Activation:
    """min(max(y, 0), 6)."""
    return hardtanh(0.0, 6.0)


@declare("hardtanh", treatment=INTEGRAL)
def hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Activation:
    """y clamped between two values."""
    if min_val > max_val:
        raise ValueError(f"hardtanh needs min_val <= max_val, not {min_val:g} and {max_val:g}")
    return _clamped("hardtanh", float(min_val), float(max_val))


@declare("clamp", "clip", treatment=INTEGRAL)
def clamp(min: Any = None, max: Any = None) -> Activation:
    """y clamped between two numbers, either of which may be missing."""
    if min is None and max is None:
        raise ValueError("clamp needs at least one of min and max")
    low = -math.inf if min is None else _number(min)
    return _clamped("clamp", low, math.inf if max is None else _number(max))


clamp_min = declare("clamp_min", treatment=INTEGRAL)(lambda min: clamp(min=min))
clamp_max = declare("clamp_max", treatment=INTEGRAL)(lambda max: clamp(max=max))


@declare("threshold", "_threshold", treatment=INTEGRAL)
def threshold(threshold: float, value: float, inplace: bool = False) -> Activation:
    """y above the threshold, value below."""
    if threshold == -math.inf:
        return power(1)
    function = partial(F.threshold, threshold=threshold, value=value)
    return Piecewise(function, [threshold], [0.0, 1.0], value, [threshold - value])


@declare("hardsigmoid", treatment=INTEGRAL)
def hardsigmoid(inplace: bool = False) -> Activation:
    """y / 6 + 1/2 clamped between 0 and 1."""
    return continuous(F.hardsigmoid, [-3.0, 3.0], [0.0, 1 / 6, 0.0], 0.0)


absolute = declare("abs", "absolute", treatment=INTEGRAL)(
    lambda: continuous(torch.abs, [0.0], [-1.0, 1.0], 0.0)
)
sign = declare("sign", "sgn", treatment=INTEGRAL)(
    lambda: Piecewise(torch.sign, [0.0], [0.0, 0.0], -1.0, [2.0])
)


@declare("heaviside", treatment=INTEGRAL)
def heaviside(values: Tensor) -> Activation:
    """0 below 0, 1 above, `values` at 0."""
    if not isinstance(values, Tensor) or values.numel() != 1:
        raise UnsupportedOperation("heaviside has a rule for one number as its value at zero")
    at_zero = values.detach().reshape(())

    def function(y: Tensor) -> Tensor:
        # torch.heaviside has no derivative, which is zero.
        return torch.where(y == 0, at_zero.to(y), (y > 0).to(y))

    return Piecewise(function, [0.0], [0.0, 0.0], 0.0, [1.0])


@declare("softshrink", treatment=INTEGRAL)
def softshrink(lambd: float = 0.5) -> Activation:
    """y moved towards 0 by lambd."""
    if lambd < 0:
        raise ValueError(f"softshrink needs lambd >= 0, not {lambd:g}")
    return continuous(partial(F.softshrink, lambd=lambd), [-lambd, lambd], [1.0, 0.0, 1.0], 0.0)


@declare("hardshrink", treatment=INTEGRAL)
def hardshrink(lambd: float = 0.5) -> Activation:
    """y where |y| > lambd, 0 elsewhere."""
    if lambd < 0:  # no number is as small
        return power(1)
    function = partial(F.hardshrink, lambd=lambd)
    return Piecewise(function, [-lambd, lambd], [1.0, 0.0, 1.0], -lambd, [lambd, lambd])


def _clamped(name: str, low: float, high: float) -> Activation:
    """y between two bounds, of which an infinite one is none."""
    if not (low < math.inf and high > -math.inf):  # which NaN fails too
        raise UnsupportedOperation(
            f"{name} between {low:g} and {high:g} has no finite moments; use bounds that are "
            "numbers, or infinities with numbers between them"
        )
    if high == math.inf:
        if low == -math.inf:
            return power(1)
        return continuous(partial(torch.clamp, min=low), [low], [0.0, 1.0], low)
    if low == -math.inf:
        return continuous(partial(torch.clamp, max=high), [high], [1.0, 0.0], high)
    low = min(low, high)  # torch: min > max makes all max
    function = partial(torch.clamp, min=low, max=high)
    return continuous(function, [low, high], [0.0, 1.0, 0.0], low)


def prelu(weight: Tensor) -> Activation:
    """y above 0, weight y below; a weight for each element, of shape (*batch, n) or ()."""

    def function(y: Tensor) -> Tensor:
        return torch.where(y >= 0, y, weight * y)

    return continuous(function, [0.0], [weight, torch.ones_like(weight)], 0.0)


def _number(bound: Any) -> float:
    if isinstance(bound, Tensor) and (bound.numel() != 1 or bound.requires_grad):
        raise UnsupportedOperation("clamp has a rule for numbers as bounds, not for tensors")
    return float(bound)
