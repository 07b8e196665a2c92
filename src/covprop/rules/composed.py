"""Operations that torch offers as one: linear where one argument varies, else step by step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import UnsupportedOperation
from covprop.flow.table import Batch, Kind, in_place, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.affine import EXACT, PRODUCT, QUOTIENT, affine, scaling, without_terms
from covprop.rules.operands import gaussians
from covprop.rules.sums import join

FACTORS = {"addmm": ("mat1", "mat2"), "addmv": ("mat", "vec"), "baddbmm": ("batch1", "batch2")}
"""What torch calls the two factors of a product that is added to something."""


def _linear_in_both(call: Callable[[Any, Any], Any], first: Any, second: Any) -> GaussianTensor:
    """A function that is linear in two arguments together, of which constants are offsets."""
    if len(gaussians((first, second), {})) > 1:
        return join(call, (first, second), {})
    return scaling(call, first, second, strip=without_terms)


def _choice(condition: Any, first: Any, second: Any) -> GaussianTensor:
    if isinstance(condition, GaussianTensor):
        raise UnsupportedOperation("a Gaussian cannot be a condition: its value is random")
    return _linear_in_both(lambda a, b: torch.where(condition, a, b), first, second)


@rule(torch.where, kind=Kind.LINEAR, treatment=EXACT, name="where")
def where(
    function: Callable[..., Any], condition: Any, input: Any = None, other: Any = None
) -> GaussianTensor:
    """One tensor or the other, by a constant condition."""
    return _choice(condition, input, other)


@rule(Tensor.where, kind=Kind.LINEAR, treatment=EXACT, name="where")
def where_method(
    function: Callable[..., Any], input: Any, condition: Any, other: Any
) -> GaussianTensor:
    """The order of arguments of the method."""
    return _choice(condition, input, other)


@rule(*spellings("masked_fill"), kind=Kind.LINEAR, treatment=EXACT, name="masked_fill")
def masked_fill(function: Callable[..., Any], input: Any, mask: Any, value: Any) -> GaussianTensor:
    """A value where a constant mask is set."""
    return _choice(mask, value, input)


@rule(*spellings("lerp"), kind=Kind.PRODUCT, treatment=PRODUCT, name="lerp")
def lerp(function: Callable[..., Any], input: Any, end: Any, weight: Any) -> Any:
    """Input + weight (end - input)."""
    if isinstance(weight, GaussianTensor):
        return input + weight * (end - input)
    return _linear_in_both(lambda a, b: torch.lerp(a, b, weight), input, end)


def _sum_of_product(
    function: Callable[..., Any],
    product: Callable[[Any, Any], Any],
    terms: tuple[Any, Any, Any],
    scales: dict[str, Any],
) -> Any:
    """Beta input + alpha first * second: affine in any one of the three."""
    input, first, second = terms
    if len(gaussians(terms, {})) == 1:
        offset = 1 if isinstance(input, GaussianTensor) else 0

        def strip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kept = (torch.zeros_like(t) if i == offset else t for i, t in enumerate(args))
            return tuple(kept), kwargs

        return affine(function, *terms, strip=strip, **scales)
    total = product(first, second) * scales.get("alpha", scales.get("value", 1))
    beta = scales.get("beta", 1)
    return total + beta * input if beta else total


@rule(*spellings("addcmul"), kind=Kind.PRODUCT, treatment=PRODUCT, name="addcmul")
def addcmul(
    function: Callable[..., Any], input: Any, tensor1: Any, tensor2: Any, **scales: Any
) -> Any:
    """Input + value tensor1 tensor2."""
    return _sum_of_product(function, torch.mul, (input, tensor1, tensor2), scales)


@rule(*spellings("addcdiv"), kind=Kind.PRODUCT, treatment=QUOTIENT, name="addcdiv")
def addcdiv(
    function: Callable[..., Any], input: Any, tensor1: Any, tensor2: Any, **scales: Any
) -> Any:
    """Input + value tensor1 / tensor2."""
    if isinstance(tensor2, GaussianTensor):
        return input + scales.get("value", 1) * (tensor1 / tensor2)
    return _sum_of_product(function, torch.div, (input, tensor1, tensor2), scales)


@rule(*spellings("addmm", "addmv", "baddbmm"), kind=Kind.PRODUCT, treatment=PRODUCT,
      name="addmm, addmv, baddbmm")  # fmt: skip
def addmm(function: Callable[..., Any], input: Any, *factors: Any, **options: Any) -> Any:
    """Beta input + alpha first @ second."""
    named = [name for name in FACTORS[function.__name__] if name in options]
    first, second = (*factors, *(options.pop(name) for name in named))
    return _sum_of_product(function, torch.matmul, (input, first, second), options)


@rule(*spellings("cumprod"), kind=Kind.PRODUCT, treatment=PRODUCT, name="cumprod",
      batch=Batch.STEPWISE)  # fmt: skip
def cumprod(
    function: Callable[..., Any], input: Any, dim: int, *, dtype: torch.dtype | None = None
) -> Any:
    """One product after another: y_i = y_{i-1} x_i."""
    input = input.clone() if dtype is None else input.to(dtype)
    parts = list(input.unbind(dim)) if input.dim() else []
    for i in range(1, len(parts)):
        parts[i] = parts[i - 1] * parts[i]
    return torch.stack(parts, dim) if parts else input


for _name in ("cumprod", "masked_fill", "lerp", "addcmul", "addcdiv", "addmm", "addmv", "baddbmm"):
    for _function in spellings(f"{_name}_"):
        in_place(_function, of=getattr(Tensor, _name))
