"""Element-wise operations that extend a function of one tensor, which is evaluated once.

Each torch function says what operation it is, on which operands; `compose` makes the expression.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce, wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.activations.composite import by_quadrature, closed_form
from covprop.activations.expression import (
    Expression,
    Operation,
    OperationKind,
    Parameter,
)
from covprop.covariance.base import is_finite
from covprop.errors import (
    ApproximationWarning,
    CovpropError,
    MomentOverflow,
    QuadratureError,
    UnsupportedOperation,
    name_of,
    warn_user,
)
from covprop.flow.batch_position import FIRST
from covprop.flow.lineage import calling_module
from covprop.flow.nests import map_leaves
from covprop.flow.pending import Pending
from covprop.flow.table import register_composer
from covprop.flow.tensor import GaussianTensor, dispatch, is_plain, run_rule
from covprop.kernels.normal import standard_deviation
from covprop.rules.operands import check_finite

FINITE = ("alpha", "beta", "negative_slope", "scale", "input_scale", "value", "lower", "upper")
"""Options that may not be infinite; bounds may."""
ITSELF = Expression()
"""The function that leaves a tensor as it is."""


class Application(NamedTuple):
    """An operation applied to operands: in-flight tensors, constant tensors and numbers."""

    operation: Operation
    operands: tuple[Any, ...]
    in_place: bool = False


Parser: TypeAlias = Callable[..., Application | None]
"""Arguments of the torch function -> the call as an operation, if it is one here."""


def register_parser(functions: Sequence[Callable[..., Any]], parse: Parser) -> None:
    """Let torch functions extend a function of a tensor, which is evaluated in the end."""

    def composer(
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[GaussianTensor],
    ) -> GaussianTensor | None:
        try:
            call = parse(*args, **kwargs)
        except (TypeError, ValueError, CovpropError):  # which the rule tells of
            return None
        return None if call is None else _composed(function, args, kwargs, tensors, call)

    register_composer(functions, composer)


def _composed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[GaussianTensor],
    call: Application,
) -> GaussianTensor | None:
    """The result of an element-wise operation on functions of one tensor, yet to be evaluated.

    None where it is not one: tensors of different origin, constants that change shape or dtype or
    that autograd follows, functions that a Gaussian has no moments of.
    """
    operands = _of_one_dtype(call)
    base = next(one for one in operands if isinstance(one, GaussianTensor)).base
    arguments = []
    for operand in operands:
        argument = _argument(operand, base)
        if argument is None:
            return None
        arguments.append(argument)
    expression = Expression(call.operation, tuple(arguments))
    if call.operation.partial and all(one.affine for one in expression.inner):
        return None
    result = _pending(function, args, kwargs, given, base, expression)
    if not call.in_place:
        return result
    given[0].become(result)
    return given[0]


def cast_pending(x: GaussianTensor, pending: Pending, like: Tensor) -> GaussianTensor:
    """A pending function with the dtype and device of `like`: the same, of a cast argument."""
    place = (like.device, like.dtype)
    base = dispatch(Tensor.to, (pending.base, *place), {})
    return _pending(Tensor.to, (x, *place), {}, [x], base, pending.expression)


def _pending(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[GaussianTensor],
    base: GaussianTensor,
    expression: Expression,
) -> GaussianTensor:
    """The result of a torch function on given tensors, yet to be evaluated.

    It remembers the modes of autograd, and holds handles of its own, which operations in place on
    the tensors do not change.
    """
    aliases = {id(tensor): tensor.alias() for tensor in given}
    held = tuple([aliases.get(id(argument), argument) for argument in args])
    named = {name: aliases.get(id(argument), argument) for name, argument in kwargs.items()}
    return GaussianTensor.pending_on(
        Pending(
            aliases.get(id(base), base),  # no program holds that of a pending function
            expression,
            _evaluated,
            partial(run_rule, function, held, named, list(aliases.values())),
            partial(_reapplied, function, held, named),
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            calling_module(),
        )
    )


def _of_one_dtype(call: Application) -> tuple[Any, ...]:
    """The operands in the dtype that torch promotes them to; in-place operations do not cast."""
    if len(call.operands) == 1:
        return call.operands
    dtypes = {
        one.dtype
        for one in call.operands
        if isinstance(one, GaussianTensor)
        or (is_plain(one) and one.dim() > 0 and one.dtype.is_floating_point)
    }
    if len(dtypes) == 1 or call.in_place:
        return call.operands
    dtype = reduce(torch.promote_types, dtypes)
    return tuple(
        dispatch(Tensor.to, (one, dtype), {}) if isinstance(one, GaussianTensor) else one
        for one in call.operands
    )


def _reapplied(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    of: Callable[[GaussianTensor], Any],
) -> Any:
    """Apply an operation again, with other tensors in place of its arguments."""
    both = map_leaves(
        (args, kwargs), lambda leaf: of(leaf) if isinstance(leaf, GaussianTensor) else leaf
    )
    return dispatch(function, *both)


def _argument(operand: Any, base: GaussianTensor) -> Expression | Parameter | float | None:
    """An operand as an expression of the base, as a constant, or None if it is neither."""
    if is_plain(operand):
        return _constant(operand, base)
    if not isinstance(operand, GaussianTensor):
        return float(operand) if isinstance(operand, int | float) else None
    if not operand.base.is_same(base):
        return None
    return ITSELF if operand.pending is None else operand.pending.expression


def _constant(operand: Tensor, base: GaussianTensor) -> Parameter | float | None:
    """A constant operand as a number or a parameter, None if it changes the shape or the dtype."""
    if operand.requires_grad and torch.is_grad_enabled():
        return None
    if operand.dim() == 0:
        return float(operand)
    shape = base.shape
    fits = torch.result_type(operand, base.template) == base.dtype and operand.dim() <= len(shape)
    if not fits or torch.broadcast_shapes(operand.shape, shape) != shape:
        return None
    values = operand.detach().expand(shape).double()
    values = base.batch_at.first(values)
    return Parameter(values.reshape(*base.batch_shape, base.event_shape.numel()))


def _evaluated(pending: Pending) -> GaussianTensor:
    """The evaluated tensor, in the modes of its creation; errors name the function's module."""
    if pending.evaluated is None:
        modes = pending.inference, pending.gradients
        if modes != (torch.is_inference_mode_enabled(), torch.is_grad_enabled()):
            with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):
                return _evaluated(pending)
        try:
            pending.evaluated = _value(pending)
            pending.evaluated.materialize()
        except CovpropError as error:
            error.layer = error.layer or pending.layer
            raise
    result: GaussianTensor = pending.evaluated
    return result


def _value(pending: Pending) -> GaussianTensor:
    """Evaluate step by step where that is exact, else the whole expression as one function."""
    expression, base, stepwise = pending.expression, pending.base, pending.stepwise
    operation = expression.operation
    first = base.with_batch_at(FIRST)
    alone = operation is not None and expression.arguments == (ITSELF,) and not operation.replaced
    if operation is not None and alone and operation.activation is not None:
        base.lineage.collect()
        return apply(operation.function, operation.activation, first).with_batch_at(base.batch_at)
    # A function of a Gaussian, or a product of two: coefficients of y^k would cancel far from zero.
    plain = operation is not None and operation.kind in (
        OperationKind.FUNCTION,
        OperationKind.MULTIPLY,
    )
    of_gaussians = plain and all(one.affine for one in expression.inner)
    scaled = expression.linear and len(expression.inner) == 1
    if expression.affine or expression.replaced or of_gaussians or scaled:
        return stepwise()
    activation = closed_form(expression)
    if activation is None and expression.stepwise:
        return stepwise()
    try:
        if activation is not None:
            return apply(expression, activation, first).with_batch_at(base.batch_at)
        return _integrated(expression, first).with_batch_at(base.batch_at)
    except (QuadratureError, UnsupportedOperation):
        result = stepwise()
        warn_user(
            f"{name_of(expression)} has no moments that could be found for the function as a "
            "whole; its operations are taken one by one, as if Gaussian in between, which may be "
            "far off; compare with sampling",
            ApproximationWarning,
        )
        return result


def apply(
    function: Callable[..., Any], activation: Activation, x: GaussianTensor
) -> GaussianTensor:
    """Carry a Gaussian through the activation of a function, by its carrier."""
    try:
        mean, carrier = x.carrier.activation(activation, x.flat)
    except UnsupportedOperation as error:
        raise UnsupportedOperation(f"{name_of(function)}: {error}") from error
    except QuadratureError:
        check_finite(function, x)  # it may not be the function's fault
        raise
    if not (is_finite(mean) and is_finite(carrier.variances())):
        check_finite(function, x)
        raise MomentOverflow(
            f"the moments of {name_of(function)} overflow {x.dtype} here; scale its input down, or "
            "convert model and Gaussian to float64"
        )
    shape = x.loc.shape
    return GaussianTensor(mean if mean.shape == shape else mean.reshape(shape), carrier)


def _integrated(expression: Expression, x: GaussianTensor) -> GaussianTensor:
    """Evaluate by quadrature; a function that jumps is a continuous one plus steps."""
    mean = x.flat.detach().double()
    stddev = standard_deviation(x.variances.detach().double())
    first, *rest = [apply(expression, one, x) for one in by_quadrature(expression, mean, stddev)]
    for other in rest:
        first = dispatch(torch.add, (first, other), {})
        first.materialize()
    return first


def activation_parser(
    function: Callable[..., Any],
    signature: inspect.Signature,
    factory: Callable[..., Activation],
    spelled: Sequence[Callable[..., Any]],
) -> Parser:
    """The parser of calls of an activation: its first argument, and options."""
    names = list(signature.parameters)
    place = names.index("inplace") if "inplace" in names else len(names)

    def parse(*args: Any, **kwargs: Any) -> Application | None:
        x, options = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
        in_place = kwargs.pop("inplace", False) if place < len(names) else False
        if len(options) > place:
            in_place, options = options[place], options[:place] + options[place + 1 :]
        varies = False
        if given := (*options, *kwargs.values()):
            if any(isinstance(value, float) and math.isnan(value) for value in given):
                return None  # NaN, which the rule refuses
            varies = any(isinstance(value, Tensor) for value in given)
        own = x.lineage.activations
        replaced = bool(own) and any(other in own for other in spelled)
        make = _operation.__wrapped__ if varies else _operation
        operation = make(function, factory, replaced, options, tuple(kwargs.items()))
        return Application(operation, (x,), bool(in_place))

    return parse


@lru_cache(maxsize=1024)
def _operation(
    function: Callable[..., Any],
    factory: Callable[..., Activation],
    replaced: bool,
    options: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
) -> Operation:
    """The operation of an activation with options, cached so that equal calls are equal."""
    activation = factory(*options, **dict(named))
    given = inspect.signature(factory).bind(*options, **dict(named))
    check_options(function, given.arguments)

    @wraps(function)
    def plain(y: Tensor) -> Tensor:
        return activation.differentiable(lambda y: function(y, *options, **dict(named)), y)

    kinks = tuple(float(kink) for kink in activation.kinks)
    return Operation(OperationKind.FUNCTION, plain, activation, kinks, replaced=replaced)


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options for which moments are not finite, before the input is blamed."""
    for name, value in options.items():
        if isinstance(value, float) and (
            math.isnan(value) or (math.isinf(value) and name in FINITE)
        ):
            raise UnsupportedOperation(
                f"{name_of(function)} with {name} = {value:g} has no finite moments; use a finite "
                "number"
            )
