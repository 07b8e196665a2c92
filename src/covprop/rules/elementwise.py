"""Element-wise operations: look up the activation, ask the method."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from covprop.activations import DECLARATIONS, Activated, Activation, Quadrature, spellings
from covprop.activations.expression import Kind, Operation
from covprop.activations.rectified import prelu
from covprop.activations.registry import INTEGRAL, Factory
from covprop.covariance import Sketch
from covprop.dispatch import BATCH, KIND, RULES, Batch, in_place, rule
from covprop.errors import (
    MomentOverflow,
    QuadratureError,
    UnsupportedOperation,
    name_of,
)
from covprop.kernels.normal import is_finite
from covprop.rules.composition import Call, composes, declared, power, register_operations
from covprop.rules.operands import check_finite
from covprop.tensor import GaussianTensor, dispatch
from covprop.transfers import Scaled

FINITE = ("alpha", "beta", "negative_slope", "scale", "input_scale", "value", "lower", "upper")
"""Options that may not be infinite; bounds may."""


def apply(
    function: Callable[..., Any], activation: Activation, x: GaussianTensor
) -> GaussianTensor:
    """Carry a Gaussian through an activation, of this function, in the way of its method."""
    flat = x.loc.reshape(*x.batch_shape, x.event_shape.numel())
    observe = x.lineage.observe
    seen = activation if observe is None else observe(activation)
    if not (x.covariance.independent or isinstance(x.covariance, Sketch)):
        x.lineage.expect(x.loc.itemsize * x.numel() * x.event_shape.numel())
    try:
        mean, covariance = x.method.activate(seen, flat, x.covariance)
    except UnsupportedOperation as error:
        raise UnsupportedOperation(f"{name_of(function)}: {error}") from error
    except QuadratureError:
        check_finite(function, x)  # it may not be the function's fault
        raise
    if not (is_finite(mean) and is_finite(covariance.diagonal())):
        check_finite(function, x)
        raise MomentOverflow(
            f"the moments of {name_of(function)} overflow {x.dtype} here; scale its input down, or "
            "convert model and Gaussian to float64"
        )
    if isinstance(covariance, Sketch) and covariance.slope is not None:
        return x.replace(mean.reshape(x.shape), covariance, transfer=Scaled(covariance.slope))
    variance = x.covariance.diagonal()
    if not x.covariance.independent:  # it is a view that would keep the whole matrix
        variance = variance.to(torch.float64, copy=True)
    activated = Activated(activation, flat, variance)
    return x.replace(
        mean.reshape(x.shape),
        covariance,
        transfer=lambda cross: activated.coefficients(1)[0].to(cross)[..., None] * cross,
        activated=activated,
    )


def _check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Blame an option for moments that are not finite, and not the input."""
    for name, value in options.items():
        if isinstance(value, float) and (
            math.isnan(value) or (math.isinf(value) and name in FINITE)
        ):
            raise UnsupportedOperation(
                f"{name_of(function)} with {name} = {value:g} has no finite moments; use a finite "
                "number"
            )


def register(
    functions: Sequence[Callable[..., Any]],
    factory: Factory,
    name: str,
    treatment: str,
    in_place_functions: Sequence[Callable[..., Any]] = (),
    kind: str = "element-wise",
) -> None:
    """Register an activation's factory under all its spellings."""
    signature = inspect.signature(factory)

    @rule(*functions, kind=kind, treatment=treatment, name=name, batch=Batch.ANYWHERE)
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
        replaced = [f for f in x.method.activations if f in functions]
        chosen = x.method.activations[replaced[0]] if replaced else factory
        if not isinstance(chosen, Activation):
            chosen = chosen(*options.args, **options.kwargs)
        _check_options(function, options.arguments)
        result = apply(function, chosen, x)
        if not changes_input:
            return result
        x.become(result)
        return x

    for function in in_place_functions:
        in_place(function, of=functions[0])
    for function in functions:
        reading = declared(function, signature, factory, functions)
        composes([function], power(reading) if name == "pow" else reading, apply)


register_operations(apply)
for _declaration in DECLARATIONS:
    register(
        _declaration.functions,
        _declaration.factory,
        _declaration.name,
        _declaration.treatment,
        _declaration.in_place,
    )


@rule(*spellings("prelu"), kind="element-wise", treatment=INTEGRAL, name="prelu",
      batch=Batch.STEPWISE)  # fmt: skip
def prelu_rule(
    function: Callable[..., Any], input: GaussianTensor, weight: Tensor
) -> GaussianTensor:
    """One slope for all elements, or one for each entry of the second dimension."""
    input.materialize()
    function(input.shown, weight)  # torch's own check of the shapes
    shape = [1] * input.dim()
    if weight.numel() > 1:
        shape[1 if input.dim() > 1 else 0] = -1
    slopes = weight.reshape(shape).expand(input.shape).movedim(input.batch_at, 0)
    slopes = slopes.reshape(*input.batch_shape, input.event_shape.numel())
    return apply(function, prelu(slopes.double()), input.laid(0)).laid(input.batch_at)


@overload
def activation(
    function: Callable[..., Tensor], *, kinks: Sequence[float] = ...
) -> Callable[..., Any]: ...
@overload
def activation(
    function: None = None, *, kinks: Sequence[float] = ...
) -> Callable[..., Callable[..., Any]]: ...
def activation(
    function: Callable[..., Tensor] | None = None, *, kinks: Sequence[float] = ()
) -> Callable[..., Any]:
    """Make an element-wise function, given as plain torch code, work on Gaussians by quadrature.

    Use the result in a model in place of the function, or write @cp.activation above its
    definition. The first argument is the tensor, the others are options. kinks: places where the
    function bends; it must be continuous and smooth elsewhere.
    """
    if function is None:
        return partial(activation, kinks=kinks)
    plain = function

    @wraps(plain)
    def wrapped(x: Any, *args: Any, **kwargs: Any) -> Any:
        function = wraps(plain)(partial(_call, plain, args, kwargs))
        if isinstance(x, GaussianTensor):
            return dispatch(activated, (x, function, kinks), {})
        if has_torch_function((x,)):  # something watches, which should see one operation
            return handle_torch_function(activated, (x,), x, function, kinks)
        return plain(x, *args, **kwargs)

    return wrapped


def _call(function: Callable[..., Tensor], args: Any, kwargs: Any, y: Tensor) -> Tensor:
    return function(y, *args, **kwargs)


def activated(x: Tensor, function: Callable[[Tensor], Tensor], kinks: Sequence[float]) -> Tensor:
    """A function of the user, as all operations see it."""
    del kinks
    return function(x)


RULES[activated] = lambda _, x, function, kinks: apply(
    function, Quadrature(function, tuple(kinks)), x
)
BATCH[activated], KIND[activated] = Batch.ANYWHERE, "element-wise"


def _read_activated(x: Any, function: Any, kinks: Sequence[float]) -> Call:
    known = Quadrature(function, tuple(kinks))
    return Call(Operation(Kind.FUNCTION, function, known, tuple(map(float, kinks))), (x,))


composes([activated], _read_activated, apply)


def register_activation(
    *functions: Callable[..., Any],
    activation: Factory | None = None,
    kinks: Sequence[float] = (),
) -> None:
    """Register torch functions, all spellings of one element-wise function, as an activation.

    activation: a factory that takes the function's options and returns an `Activation`; left away,
    the first function itself is integrated by quadrature, with its kinks.
    """
    if not functions:
        raise ValueError("name at least one torch function: cp.register_activation(torch.atan)")

    def by_quadrature(*args: Any, **kwargs: Any) -> Activation:
        return Quadrature(
            wraps(functions[0])(lambda y: functions[0](y, *args, **kwargs)), tuple(kinks)
        )

    register(
        functions,
        activation or by_quadrature,
        name_of(functions[0]),
        "accurate to 1e-8: quadrature" if activation is None else "as its activation says",
        kind="user",
    )


def find_activation(function: Callable[..., Any], **options: Any) -> Activation:
    """The activation of a torch function, or of any element-wise function by quadrature."""
    for declaration in DECLARATIONS:
        if function in declaration.functions:
            return declaration.factory(**options)
    return Quadrature(partial(function, **options) if options else function)
