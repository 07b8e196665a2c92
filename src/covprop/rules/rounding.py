"""Rounding: piecewise constant functions, exact as sums over the jumps within reach.

A few jumps are those of one scalar function, which extends that of a tensor. More of them are found
around the mean of each element, where rounding does the same: floor(y) = m + floor(y - m).
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from covprop.activations import Piecewise, in_place_spellings, spellings
from covprop.activations.expression import Operation, OperationKind
from covprop.errors import UnsupportedOperation
from covprop.flow.table import TABLE, Batch, Kind, register_composer, rule
from covprop.flow.tensor import GaussianTensor
from covprop.kernels.normal import standard_deviation
from covprop.rules.composition import Application, apply, register_parser

REACH = 9.0
"""Standard deviations beyond which jumps do not count: a probability of 1e-19."""
MOST = 64
"""Jumps of one function: those within reach of one element, up to a standard deviation of 3.4."""
PLACES = 65
"""Where an inner function is evaluated to find its range, on either side of the mean."""
STEPS = "exact: sums over the jumps within reach, of which there are at most 64"


@lru_cache(maxsize=256)
def _stairs(name: str, first: int, last: int) -> Operation:
    """One of torch's functions between two integers, with the jumps between them."""
    function = getattr(torch, name)
    count = last - first
    if name == "round":
        knots, start = [first + i + 0.5 for i in range(count)], float(first)
    elif name == "trunc":  # which does not jump at zero
        knots = [float(k) for k in range(first, last + 1) if k]
        start = float(torch.tensor(knots[0] - 0.5).trunc())
    else:
        knots = [float(first + i) for i in range(count + 1)]
        start = first - 1.0 if name == "floor" else float(first)
    flat = [0.0] * (len(knots) + 1)
    activation = Piecewise(function, knots, flat, start, [1.0] * len(knots))

    @wraps(function)
    def plain(y: Tensor) -> Tensor:
        return activation.differentiable(function, y)

    return Operation(OperationKind.FUNCTION, plain, activation, tuple(knots))


@torch.no_grad()
def _reach(x: GaussianTensor) -> tuple[Tensor, Tensor]:
    """The least and the largest value within reach of each element, (*batch, n)."""
    base = x.base
    mean = base.flat.detach().double()
    far = REACH * standard_deviation(base.variances.detach().double())
    if x.pending is None:
        return mean - far, mean + far
    expression = x.pending.expression
    low = high = expression(mean, *expression.parameters)
    places = PLACES if not expression.affine else 2
    for step in torch.linspace(-1, 1, places, dtype=torch.float64).tolist():
        value = expression(mean + step * far, *expression.parameters)
        low, high = torch.minimum(low, value), torch.maximum(high, value)
    return low, high


def _ends(low: Tensor, high: Tensor) -> tuple[int, int] | None:
    """The integers around a range, None if it is endless or empty."""
    if not low.numel() or not bool((low.isfinite() & high.isfinite()).all()):
        return None
    return int(low.min().floor()) - 1, int(high.max().ceil()) + 1


def _parser(name: str) -> Callable[..., Application | None]:
    def parse(input: GaussianTensor, *, decimals: int = 0) -> Application | None:
        ends = _ends(*_reach(input))
        if decimals or ends is None or ends[1] - ends[0] > MOST:
            return None
        return Application(_stairs(name, *ends), (input,))

    return parse


def _around_means(name: str, x: GaussianTensor) -> GaussianTensor:
    """Round the difference from the even integer beside each mean."""
    even = 2 * (x.loc.detach() / 2).round()
    centred = x.moved(x.loc - even)
    ends = _ends(*_reach(centred))
    if ends is None or ends[1] - ends[0] > MOST:
        raise UnsupportedOperation(
            f"{name} has more than {MOST} jumps within reach of its input here; so far from them "
            "it hardly differs from a sum with independent noise of variance 1/12: leave it out, "
            "or sample with cp.MonteCarlo()"
        )
    known = _stairs(name, *ends)
    assert known.activation is not None
    result = apply(known.function, known.activation, centred)
    return result.moved(result.loc + even)


def _rounded(name: str) -> None:
    """One line: a function that jumps by one, once between any two integers."""
    functions = spellings(name)

    @rule(*functions, kind=Kind.ELEMENTWISE, treatment=STEPS, name=name, batch=Batch.ANYWHERE,
          in_place=in_place_spellings(name))  # fmt: skip
    def body(function: Callable[..., Any], input: Any, *, decimals: int = 0) -> Any:
        if decimals:
            return torch.round(input * 10.0**decimals) / 10.0**decimals
        return _around_means(name, input)

    register_parser(functions, _parser(name))


for _name in ("floor", "ceil", "round"):
    _rounded(_name)


@rule(*spellings("trunc", "fix"), kind=Kind.ELEMENTWISE, treatment=STEPS, name="trunc",
      batch=Batch.STEPWISE, in_place=in_place_spellings("trunc", "fix"))  # fmt: skip
def trunc(function: Callable[..., Any], input: Any) -> Any:
    """The floor of what is positive, and the ceiling of what is negative."""
    input.materialize()
    down, up = torch.floor(input) + (input < 0), torch.ceil(input) - (input > 0)
    return torch.where(input.shown.detach() < 0, up, down)


register_parser(spellings("trunc", "fix"), _parser("trunc"))


@rule(*spellings("frac"), kind=Kind.ELEMENTWISE, treatment=STEPS, name="frac",
      batch=Batch.STEPWISE, in_place=in_place_spellings("frac"))  # fmt: skip
def frac(function: Callable[..., Any], input: Any) -> Any:
    """The fractional part."""
    return input - torch.trunc(input)


@rule(*spellings("floor_divide"), kind=Kind.ELEMENTWISE, treatment=STEPS, name="floor_divide",
      batch=Batch.STEPWISE, in_place=in_place_spellings("floor_divide"))  # fmt: skip
def floor_divide(function: Callable[..., Any], input: Any, other: Any) -> Any:
    """The floor of a quotient."""
    return torch.floor(input / other)


@rule(*spellings("remainder"), kind=Kind.ELEMENTWISE, treatment=STEPS, name="remainder",
      batch=Batch.STEPWISE, in_place=in_place_spellings("remainder"))  # fmt: skip
def remainder(function: Callable[..., Any], input: Any, other: Any) -> Any:
    """What is left of division, with the sign of the divisor."""
    return input - other * torch.floor(input / other)


@rule(*spellings("fmod"), kind=Kind.ELEMENTWISE, treatment=STEPS, name="fmod",
      batch=Batch.STEPWISE, in_place=in_place_spellings("fmod"))  # fmt: skip
def fmod(function: Callable[..., Any], input: Any, other: Any) -> Any:
    """What is left of division, with the sign of the input."""
    return input - other * torch.trunc(input / other)


def _divided(compose: Callable[..., Any] | None) -> Callable[..., Any]:
    """Division with a rounding mode is rounding of a quotient."""

    def composer(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        mode = kwargs.get("rounding_mode")
        if mode in ("floor", "trunc"):
            exact = {name: value for name, value in kwargs.items() if name != "rounding_mode"}
            return getattr(torch, mode)(torch.div(*args, **exact))
        return compose(function, args, kwargs, tensors) if compose else None

    return composer


def register_rounded_division() -> None:
    """Let division take a rounding mode, after its parser is registered."""
    functions = spellings("div", "divide", "true_divide")
    register_composer(functions, _divided(TABLE[functions[0]].compose))
