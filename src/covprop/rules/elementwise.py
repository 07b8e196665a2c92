"""Rules of element-wise functions: each has an activation, whose moments the carrier takes."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from covprop.activations import DECLARATIONS, Activation, Quadrature, expression, spellings
from covprop.activations.base import CLOSED, INTEGRAL, Factory
from covprop.activations.rectifiers import prelu
from covprop.errors import (
    MomentOverflow,
    QuadratureError,
    UnsupportedOperation,
    name_of,
)
from covprop.flow.batch_position import FIRST
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.kernels.normal import is_finite
from covprop.rules.composition import (
    Application,
    activation_reading,
    check_options,
    power_reading,
    register_reading,
)
from covprop.rules.operands import check_finite


def apply(
    function: Callable[..., Any], activation: Activation, x: GaussianTensor
) -> GaussianTensor:
    """Carry a Gaussian through an activation, of this function, as its carrier does."""
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
        reading = activation_reading(function, signature, factory, functions)
        register_reading([function], power_reading(reading) if name == "pow" else reading, apply)


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
    """One slope for all elements, or one for each entry of the second dimension."""
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
    """A function of the user, as all operations see it."""
    del kinks
    return function(x)


@rule(activated, kind=Kind.ELEMENTWISE, batch=Batch.ANYWHERE)
def activated_rule(
    _: Callable[..., Any], x: GaussianTensor, function: Any, kinks: Sequence[float]
) -> GaussianTensor:
    """By quadrature."""
    return apply(function, Quadrature(function, tuple(kinks)), x)


def _read_activated(x: Any, function: Any, kinks: Sequence[float]) -> Application:
    known, places = Quadrature(function, tuple(kinks)), tuple(map(float, kinks))
    return Application(
        expression.Operation(expression.OperationKind.FUNCTION, function, known, places), (x,)
    )


register_reading([activated], _read_activated, apply)


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
