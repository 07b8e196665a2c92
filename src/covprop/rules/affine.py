"""Linear operations: one body for all of them, a registration line for each.

Mean: the function itself. Covariance: its linear part, that is the function with its constant
offset (a bias, a running mean, the value of a padding) left out, on the rows and on the columns.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.covariance import Layer, LinearMap
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.batch_position import FIRST, position_in
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch, is_plain
from covprop.rules.joint import bilinear, join, labels_of, matrix_product, product, weighted_sum
from covprop.rules.operands import (
    as_unary,
    at_means,
    batch_error,
    check_batch_is_separate,
    check_batch_shape,
    gaussians,
    single_gaussian,
    unary_of_slots,
    with_slots,
    without_constants,
)

Strip: TypeAlias = Callable[
    [tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]
]
"""(args, kwargs) -> the same without the function's constant offset."""

EXACT = "exact"
PRODUCT = "exact with a constant, and for jointly Gaussian factors"
QUOTIENT = "exact by a constant, approximate by a Gaussian away from zero"


def affine(
    function: Callable[..., Any],
    *args: Any,
    strip: Strip | None = None,
    layer: Callable[..., Layer | None] | None = None,
    entries: Callable[..., float | None] | None = None,
    **kwargs: Any,
) -> GaussianTensor:
    """Carry a Gaussian through a function that is linear but for a constant offset.

    Args:
        function: The torch function.
        args: Its arguments, one of them a `GaussianTensor`.
        strip: Takes the constant offset out of (args, kwargs); a linear function needs none.
        layer: For functions with a weight: what more is known of the map, from the Gaussian and
            the arguments.
        entries: Tells the one number that all nonzero entries of the matrix are, if it is one.
        kwargs: Its arguments by name.

    Example:
        cp.rule(torch.trapezoid)(cp.extending.affine)
        cp.propagate(torch.trapezoid, x, cp.GaussianLayers())
    """
    x = single_gaussian(function, args, kwargs)
    leads = is_input(x, args, kwargs)
    call = as_unary(function, args, kwargs)
    loc = call(x.loc)
    if x.batch_shape:
        check_batch_shape(function, x, loc.shape)
    linear, stripped = call, (args, kwargs)
    if strip is not None:
        stripped = strip(args, kwargs)
        if not leads and not gaussians(*stripped):
            raise UnsupportedOperation(
                f"{name_of(function)} has a rule for a Gaussian input, not for a Gaussian bias"
            )
        linear = as_unary(function, *stripped)
    known = squared = None
    if leads and layer is not None:
        squared = _with_squared_weight(function, *stripped)
        known = None if position_in(function) != FIRST else layer(x, *args, **kwargs)
    elif leads and entries is not None:
        value = entries(x, loc, *stripped[0], **stripped[1])
        squared = None if value is None else lambda vector: value * linear(vector)
    if known is None:
        check_batch_is_separate(function, linear, x, x.shape)
    return x.through(loc, LinearMap(linear, x.event_shape, layer=known, squared=squared))


def _with_squared_weight(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """A layer, as a function of its input, whose matrix has the squares of the entries."""
    if len(args) > 1:
        weight, others = args[1], args[2:]
        return lambda vector: function(vector, weight.square(), *others, **kwargs)
    slots, named = with_slots((args, kwargs))
    return lambda vector: unary_of_slots(
        function, slots, {**named, "weight": named["weight"].square()}
    )(vector)


def is_input(x: GaussianTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the Gaussian is the input of a function, and not one of its parameters."""
    return (args[0] if args else kwargs.get("input")) is x


def scaling(
    function: Callable[..., Any], *args: Any, strip: Strip | None = None, **kwargs: Any
) -> GaussianTensor:
    """An affine function that multiplies each element by a number of its own."""
    x = single_gaussian(function, args, kwargs)
    linear = as_unary(function, args, kwargs)
    loc = linear(x.loc)
    if loc.shape != x.shape:  # a constant that broadcasts the event
        return affine(function, *args, strip=strip, **kwargs)
    if strip is not None:
        linear = as_unary(function, *strip(args, kwargs))
    factor = linear(torch.ones_like(x.loc)).reshape(x.flat.shape)
    return GaussianTensor(loc, x.carrier.scale(loc, factor))


def without_argument(position: int, name: str, value: Any = None) -> Strip:
    """Set one argument, given by position or by name, to the value that makes it disappear."""

    def strip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > position:
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value} if name in kwargs else kwargs

    return strip


def without_terms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set the constant terms of a sum to zero."""

    def zero(item: Any) -> Any:
        if is_plain(item):
            return torch.zeros_like(item)
        return 0 if isinstance(item, int | float) else item

    others = {
        key: zero(item) if key in ("input", "other") else item for key, item in kwargs.items()
    }
    return tuple(zero(item) for item in args), others


def entries_of_sum(x: GaussianTensor, loc: Tensor, *args: Any, **kwargs: Any) -> float:
    """Sums and copies: every entry is one or zero."""
    return 1.0


def entries_of_mean(x: GaussianTensor, loc: Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Means over windows that divide the input evenly."""
    sizes = zip(reversed(x.event_shape), reversed(loc.shape), strict=False)
    even = loc.dim() != x.dim() or all(size % out == 0 for size, out in sizes)
    return loc.numel() / x.numel() if even else None


def register_linear(*names: str, **options: Any) -> None:
    """One line: every spelling of a torch function, linear, with options of `affine`."""

    @rule(*spellings(*names), kind=Kind.LINEAR, treatment=EXACT, name=names[0],
          batch=Batch.ANYWHERE, in_place=in_place_spellings(*names))  # fmt: skip
    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
        return affine(function, *args, **options, **kwargs)


register_linear("pad", strip=without_argument(3, "value", 0.0), entries=entries_of_sum)
register_linear("unfold", entries=entries_of_sum)
register_linear("fold", entries=entries_of_sum)
register_linear("sum", entries=entries_of_sum)
register_linear("mean", entries=entries_of_mean)
register_linear("cumsum")
register_linear("diff", strip=lambda *arguments: without_constants(arguments))
register_linear("sum_to_size")
register_linear("gather")
register_linear("take_along_dim")


@rule(*spellings("matmul", "__rmatmul__", "mm", "mv", "bmm"), kind=Kind.PRODUCT, treatment=PRODUCT,
      name="matmul", batch=Batch.ANYWHERE)  # fmt: skip
def matmul(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A matrix product: with a constant, or of two tensors that both vary."""
    if len(tensors := gaussians(args, kwargs)) <= 1:
        return affine(function, *args, **kwargs)
    if not keeps_last_dims(2, function, *tensors):
        raise batch_error(function, tensors[0])
    return matrix_product(*tensors)


def keeps_last_dims(count: int, function: Callable[..., Any], *tensors: GaussianTensor) -> bool:
    """Whether the last so many dimensions of tensors are the same as those that the model sees."""
    at = position_in(function)
    dims = {tensor.dim() - (at.share > 1) for tensor in tensors}
    return at == FIRST or (len(dims) == 1 and at.dim < dims.pop() - count)


@rule(torch.einsum, kind=Kind.PRODUCT, treatment=PRODUCT, name="einsum", batch=Batch.ANYWHERE)
def einsum(function: Callable[..., Any], equation: str, *operands: Any) -> Any:
    """A sum of products: with constants, or of two tensors that both vary."""
    if len(tensors := gaussians((equation, operands), {})) <= 1:
        return affine(function, equation, *operands)
    if position_in(function) != FIRST:
        raise batch_error(function, tensors[0])
    if not isinstance(equation, str) or len(operands) > len(tensors) or len(tensors) > 2:  # noqa: PLR2004
        raise UnsupportedOperation(
            "einsum has a rule for an equation of two tensors that depend on the input, without "
            "constants beside them; multiply step by step"
        )
    labels = labels_of(equation, [tensor.dim() for tensor in tensors])
    return bilinear(labels[0], labels[1], labels[2], *tensors)


def _scaling(*names: str, strip: Strip | None = None) -> None:
    """One line: a function that multiplies each element by a constant."""

    @rule(*spellings(*names), kind=Kind.LINEAR, treatment=EXACT, name=names[0],
          batch=Batch.ANYWHERE, in_place=in_place_spellings(*names))  # fmt: skip
    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
        return scaling(function, *args, strip=strip, **kwargs)


_scaling("neg", "negative")
_scaling("tril")
_scaling("triu")


@rule(*spellings("mul", "multiply"), kind=Kind.PRODUCT, treatment=PRODUCT, name="mul",
      batch=Batch.ANYWHERE, in_place=in_place_spellings("mul", "multiply"))  # fmt: skip
def multiply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """A product: with a constant, or with another tensor."""
    if len(tensors := gaussians(args, kwargs)) > 1:
        return product(*tensors)
    return scaling(function, *args, **kwargs)


@rule(*spellings("div", "divide", "true_divide"), kind=Kind.PRODUCT, treatment=QUOTIENT, name="div",
      batch=Batch.ANYWHERE,
      in_place=in_place_spellings("div", "divide", "true_divide"))  # fmt: skip
def divide(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Division by a constant, or by the reciprocal of a tensor that varies."""
    if kwargs.get("rounding_mode") is not None:
        raise UnsupportedOperation("division with a rounding mode is a step function without rule")
    by = args[1] if len(args) > 1 else kwargs["other"]
    if isinstance(by, GaussianTensor):
        top = args[0] if args else kwargs["input"]
        return dispatch(torch.Tensor.mul, (dispatch(torch.Tensor.reciprocal, (by,), {}), top), {})
    return scaling(function, *args, **kwargs)


@rule(torch.Tensor.__rtruediv__, kind=Kind.PRODUCT, treatment=QUOTIENT, name="div")
def divide_by(function: Callable[..., Any], by: GaussianTensor, top: Any) -> Any:
    """`number / x`, as Python writes it."""
    return divide(torch.div, top, by)


@rule(*spellings("add", "sub", "subtract", "rsub", "__rsub__"), kind=Kind.LINEAR, treatment=EXACT,
      name="add, sub", batch=Batch.ANYWHERE,
      in_place=in_place_spellings("add", "sub", "subtract"))  # fmt: skip
def shift(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """A sum: with a constant, which may only move the mean, or with another tensor."""
    if len(tensors := gaussians(args, kwargs)) > 1:
        loc = at_means(function, args, kwargs)
        if any(tensor.shape != loc.shape for tensor in tensors):
            return join(function, args, kwargs)
        first = args[0] if args else kwargs["input"]
        second = args[1] if len(args) > 1 else kwargs["other"]
        if "rsub" in function.__name__:
            first, second = second, first
        weight = float(kwargs.get("alpha", 1.0)) * (-1 if "sub" in function.__name__ else 1)
        return weighted_sum(loc, [(first, 1.0), (second, weight)])
    x = single_gaussian(function, args, kwargs)
    if is_input(x, args, kwargs) and "rsub" not in function.__name__:
        loc = as_unary(function, args, kwargs)(x.loc)
        if loc.shape == x.shape:
            return x.moved(loc)
    return scaling(function, *args, strip=without_terms, **kwargs)
