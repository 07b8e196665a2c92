"""Rules of element-wise functions: each has an activation, whose moments the carrier takes."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from covprop.activations import DECLARATIONS, Activation, Quadrature, spellings
from covprop.activations.base import CLOSED, INTEGRAL, Factory
from covprop.activations.expression import (
    ADD,
    CHOOSE,
    COMPARE,
    COMPARE_OR_EQUAL,
    DIVIDE,
    MULTIPLY,
    SUBTRACT,
    Operation,
    OperationKind,
)
from covprop.activations.rectifiers import prelu
from covprop.errors import (
    UnsupportedOperation,
    name_of,
)
from covprop.flow.batch_position import FIRST
from covprop.flow.table import TABLE, Batch, Kind, register_composer, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.rules.composition import (
    Application,
    Parser,
    activation_parser,
    apply,
    check_options,
    register_parser,
)
from covprop.rules.logic import is_condition
from covprop.rules.operands import gaussians


def _partial(function: Callable[[Tensor], Tensor]) -> Operation:
    return Operation(OperationKind.FUNCTION, function, partial=True)


_RECIPROCAL, _SQRT = _partial(torch.reciprocal), _partial(torch.sqrt)
_RSQRT, _LOG = _partial(torch.rsqrt), _partial(torch.log)


@lru_cache(maxsize=256)
def _power(exponent: float) -> Operation:
    return _partial(partial(torch.pow, exponent=exponent))


def power_parser(whole: Parser) -> Parser:
    """The parser of powers: whole exponents are activations, others need a positive base."""

    def parse(input: Any, exponent: Any) -> Application | None:
        single = not isinstance(exponent, Tensor) or exponent.numel() == 1
        number = float(exponent) if single else math.nan
        if number.is_integer() and number >= 0:
            return whole(input, number)
        # The rule refuses what is no number.
        return Application(_power(number), (input,)) if math.isfinite(number) else None

    return parse


def register(
    functions: Sequence[Callable[..., Any]],
    factory: Factory,
    name: str,
    treatment: str,
    in_place: Sequence[Callable[..., Any]] = (),
    kind: Kind = Kind.ELEMENTWISE,
) -> None:
    """Register an activation's factory under all its spellings."""
    signature = inspect.signature(factory)

    @rule(*functions, kind=kind, treatment=treatment, name=name, batch=Batch.ANYWHERE,
          in_place=in_place)  # fmt: skip
    def body(
        function: Callable[..., Any], x: Any = None, *args: Any, **kwargs: Any
    ) -> GaussianTensor:
        x = kwargs.pop("input", x)
        if not isinstance(x, GaussianTensor) or any(
            isinstance(other, GaussianTensor) for other in (*args, *kwargs.values())
        ):
            raise UnsupportedOperation(
                f"{name_of(function)} has a rule for a Gaussian as its first argument alone"
            )
        options = signature.bind(*args, **kwargs)
        changes_input = options.arguments.pop("inplace", False)
        replaced = [f for f in x.lineage.activations if f in functions]
        chosen = x.lineage.activations[replaced[0]] if replaced else factory
        if not isinstance(chosen, Activation):
            chosen = chosen(*options.args, **options.kwargs)
        check_options(function, options.arguments)
        result = apply(function, chosen, x)
        if not changes_input:
            return result
        x.become(result)
        return x

    for function in functions:
        parse = activation_parser(function, signature, factory, functions)
        register_parser([function], power_parser(parse) if name == "pow" else parse)


for _declaration in DECLARATIONS:
    register(
        _declaration.functions,
        _declaration.factory,
        _declaration.name,
        _declaration.treatment,
        _declaration.in_place,
    )


@rule(*spellings("prelu"), kind=Kind.ELEMENTWISE, treatment=INTEGRAL, name="prelu",
      batch=Batch.STEPWISE)  # fmt: skip
def prelu_rule(
    function: Callable[..., Any], input: GaussianTensor, weight: Tensor
) -> GaussianTensor:
    """PReLU, with one slope for all elements, or one for each entry of the second dimension."""
    input.materialize()
    function(input.shown, weight)  # torch's own check of the shapes
    shape = [1] * input.dim()
    if weight.numel() > 1:
        shape[1 if input.dim() > 1 else 0] = -1
    slopes = input.batch_at.first(weight.reshape(shape).expand(input.shape))
    slopes = slopes.reshape(*input.batch_shape, input.event_shape.numel())
    return apply(function, prelu(slopes.double()), input.with_batch_at(FIRST)).with_batch_at(
        input.batch_at
    )


@rule(Tensor.__rpow__, kind=Kind.ELEMENTWISE, treatment=CLOSED, name="exp", batch=Batch.STEPWISE)
def power_of_number(function: Callable[..., Any], input: Any, other: float) -> Any:
    """a^x = exp(x log a), for a positive number a."""
    if not other > 0:
        raise UnsupportedOperation(f"a power of {other}, which is not positive, has no rule")
    return torch.exp(input * math.log(other))


Scalar = TypeVar("Scalar", bound=Callable[..., Tensor])


@overload
def activation(function: Scalar, *, kinks: Sequence[float] = ...) -> Scalar: ...
@overload
def activation(
    function: None = None, *, kinks: Sequence[float] = ...
) -> Callable[[Scalar], Scalar]: ...
def activation(
    function: Callable[..., Tensor] | None = None, *, kinks: Sequence[float] = ()
) -> Callable[..., Any]:
    """Make an element-wise function in plain torch code work on Gaussians, by quadrature.

    Args:
        function: A continuous function, whose first argument is the tensor and the others options.
        kinks: The points where its derivative jumps; it must be smooth elsewhere.

    Returns:
        The function to use in a model; it may also be written as a decorator.

    Example:
        @cp.activation(kinks=(0.0,))
        def squared_relu(x):
            return torch.relu(x) ** 2

        cp.propagate(squared_relu, x, cp.GaussianLayers())
    """
    if function is None:
        return partial(activation, kinks=kinks)
    plain = function

    @wraps(plain)
    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        function = wraps(plain)(lambda y: plain(y, *args, **kwargs))
        if isinstance(x, GaussianTensor):
            _check_one_function(function, x)
            return dispatch(activated, (x, function, kinks), {})
        if has_torch_function((x,)):  # something watches, which should see one operation
            return handle_torch_function(activated, (x,), x, function, kinks)
        return plain(x, *args, **kwargs)

    return wrapped


@torch.no_grad()
def _check_one_function(function: Callable[[Tensor], Tensor], x: GaussianTensor) -> None:
    """Refuse a function with a parameter for each channel or element, of which grids know none."""
    value = function(torch.zeros(1, dtype=x.dtype, device=x.device))
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape != (1,):
        raise UnsupportedOperation(
            f"{name_of(function)} has parameters of shape {tuple(value.shape)}, and an activation "
            "is one function for all elements; keep such parameters outside of it, as in "
            "tanh(slopes * x), or write it as plain torch code without cp.activation"
        )


def activated(x: Tensor, function: Callable[[Tensor], Tensor], kinks: Sequence[float]) -> Tensor:
    """The function of `cp.activation` that torch dispatches on."""
    del kinks
    return function(x)


@rule(activated, kind=Kind.ELEMENTWISE, batch=Batch.ANYWHERE)
def activated_rule(
    _: Callable[..., Any], x: GaussianTensor, function: Any, kinks: Sequence[float]
) -> GaussianTensor:
    """The rule of `cp.activation`: quadrature."""
    return apply(function, Quadrature(function, tuple(kinks)), x)


def _parse_activated(x: Any, function: Any, kinks: Sequence[float]) -> Application:
    known, places = Quadrature(function, tuple(kinks)), tuple(map(float, kinks))
    return Application(Operation(OperationKind.FUNCTION, function, known, places), (x,))


register_parser([activated], _parse_activated)


def register_activation(
    *functions: Callable[..., Any],
    activation: Factory | None = None,
    kinks: Sequence[float] = (),
    in_place: Sequence[Callable[..., Any]] = (),
) -> None:
    """Register torch functions, all spellings of one element-wise function, as an activation.

    Args:
        functions: The spellings, such as torch.lgamma and torch.Tensor.lgamma.
        activation: A factory that takes the function's options and returns an `Activation`; without
            it the first function is integrated by quadrature.
        kinks: Where the derivative of that function jumps.
        in_place: The forms that change their argument, such as torch.Tensor.lgamma_.

    Example:
        cp.register_activation(torch.sinc, torch.Tensor.sinc, in_place=[torch.Tensor.sinc_])
        cp.propagate(torch.sinc, x, cp.GaussianLayers())
    """
    if not functions:
        raise ValueError("name at least one torch function: cp.register_activation(torch.sinc)")

    def by_quadrature(*args: Any, **kwargs: Any) -> Activation:
        return Quadrature(
            wraps(functions[0])(lambda y: functions[0](y, *args, **kwargs)), tuple(kinks)
        )

    register(
        functions,
        activation or by_quadrature,
        name_of(functions[0]),
        "accurate to 1e-8: quadrature" if activation is None else "as its activation says",
        in_place,
        Kind.OTHER,
    )


def find_activation(function: Callable[..., Any], **options: Any) -> Activation:
    """The activation of a torch function, or of any element-wise function by quadrature."""
    for declaration in DECLARATIONS:
        if function in declaration.functions:
            return declaration.factory(**options)
    return Quadrature(partial(function, **options) if options else function)


def _sum(operation: Operation, swapped: bool = False) -> Parser:
    def parse(input: Any, other: Any, *, alpha: float = 1) -> Application | None:
        operands = (other, input) if swapped else (input, other)
        return Application(operation, operands) if alpha == 1 else None

    return parse


def _divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Application | None:
    if rounding_mode is not None:
        return None
    if isinstance(other, GaussianTensor) and not isinstance(input, GaussianTensor):
        affine = other.pending is None or other.pending.expression.affine
        return None if affine else Application(DIVIDE, (input, other))
    return Application(DIVIDE, (input, other))


def _choose(condition: Any, input: Any, other: Any) -> Application | None:
    return Application(CHOOSE, (condition, input, other)) if is_condition(condition) else None


def register_operations() -> None:
    """Register the parsers of arithmetic, comparisons and choices."""
    parsers: dict[tuple[str, ...], Parser] = {
        ("add",): _sum(ADD),
        ("sub", "subtract"): _sum(SUBTRACT),
        ("rsub", "__rsub__"): _sum(SUBTRACT, swapped=True),
        ("mul", "multiply"): lambda input, other: Application(MULTIPLY, (input, other)),
        ("div", "divide", "true_divide"): _divide,
        ("__rtruediv__",): lambda input, other: _divide(other, input),
        ("neg", "negative"): lambda input: Application(MULTIPLY, (-1.0, input)),
        ("reciprocal",): lambda input: Application(_RECIPROCAL, (input,)),
        ("sqrt",): lambda input: Application(_SQRT, (input,)),
        ("rsqrt",): lambda input: Application(_RSQRT, (input,)),
        ("log",): lambda input: Application(_LOG, (input,)),
        ("gt",): lambda input, other: Application(COMPARE, (input, other)),
        ("lt",): lambda input, other: Application(COMPARE, (other, input)),
        ("ge",): lambda input, other: Application(COMPARE_OR_EQUAL, (input, other)),
        ("le",): lambda input, other: Application(COMPARE_OR_EQUAL, (other, input)),
    }
    for names, parse in parsers.items():
        register_parser(spellings(*names), parse)
    register_parser([torch.where], _choose)
    register_parser([Tensor.where], lambda x, chosen, other: _choose(chosen, x, other))
    register_parser(
        spellings("masked_fill"),
        lambda input, mask, value: _choose(mask, value, input),
    )


def _bounded(compose: Callable[..., Any] | None) -> Callable[..., Any]:
    """A composer of bounds that are tensors: constant ones by rectifiers, others by maxima.

    Infinite ones, which layers with limits to be learnt begin with, change nothing.
    """

    def composer(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        given = dict(zip(("input", "min", "max"), args, strict=False)) | kwargs
        if function.__name__ == "clamp_max" and len(args) > 1:
            given["max"] = given.pop("min")
        bounds = given.get("min"), given.get("max")
        if _is_absent(bounds[0], -math.inf) and _is_absent(bounds[1], math.inf):
            return given["input"].alias()
        if not any(_is_tensor(bound) for bound in bounds):
            return compose(function, args, kwargs, tensors) if compose else None
        return _between(given["input"], *bounds)

    return composer


def _is_absent(bound: Any, infinite: float) -> bool:
    if bound is None or _is_tensor(bound):
        return bound is None
    return float(bound) == infinite


def _is_tensor(bound: Any) -> bool:
    """Whether a bound is a tensor of several numbers, or one with a gradient."""
    if isinstance(bound, GaussianTensor):
        return True
    return isinstance(bound, Tensor) and (bound.numel() != 1 or bound.requires_grad)


def _between(x: Any, low: Any, high: Any) -> Any:
    """Clamp `x` between bounds that are numbers or tensors; either may be missing."""
    like = {"dtype": x.dtype, "device": x.device}
    low, high = (
        bound if bound is None or isinstance(bound, Tensor) else torch.tensor(float(bound), **like)
        for bound in (low, high)
    )
    if low is None:
        return torch.minimum(x, high)
    if high is None:
        return torch.maximum(x, low)
    if gaussians((low, high), {}):
        return torch.minimum(torch.maximum(x, low), high)
    low = torch.minimum(low, high)  # torch: min > max makes all max
    return x + torch.relu(low - x) - torch.relu(x - high)


def register_bounds() -> None:
    """Let `clamp` and its relatives take tensors as bounds; their rules are registered before."""
    for function in spellings("clamp", "clip", "clamp_min", "clamp_max"):
        register_composer([function], _bounded(TABLE[function].compose))
