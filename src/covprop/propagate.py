"""Check the arguments, make a call of them, and have a method run it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, final, overload

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.carriers import Work
from covprop.errors import BatchWarning, UnsupportedOperation, warn_user
from covprop.flow.batch_position import FIRST
from covprop.flow.lineage import Watcher
from covprop.flow.nests import Nest
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import SUMMATION_ORDER
from covprop.methods import Auto, GaussianLayers, Method, as_method, is_method
from covprop.methods.accuracy import Estimator
from covprop.methods.call import Call, random_state_kept
from covprop.methods.names import is_name
from covprop.methods.plan import Plan, Step
from covprop.methods.progress import PointBar, ProgressBar
from covprop.modules import eager, original
from covprop.rules.noise import NOISY, warn_of_dropout, warn_of_scripted_dropout

AUTO, GAUSSIAN_LAYERS = Auto(), GaussianLayers()


K = TypeVar("K")
Model: TypeAlias = nn.Module | Callable[..., Tensor]
Input: TypeAlias = Gaussian | Nest
"""What a type checker takes for an input that varies; a tensor is none."""


# fmt: off
@overload
def propagate(
    module: Model, x: Input, /, *inputs: Any, method: Method | str = ..., progress: bool = ...,
    **named_inputs: Any,
) -> Gaussian: ...
@overload
def propagate(
    module: Callable[..., tuple[Tensor, ...]], x: Input, /, *inputs: Any,
    method: Method | str = ..., progress: bool = ..., **named_inputs: Any,
) -> tuple[Gaussian, ...]: ...
@overload
def propagate(
    module: Callable[..., list[Tensor]], x: Input, /, *inputs: Any, method: Method | str = ...,
    progress: bool = ..., **named_inputs: Any,
) -> list[Gaussian]: ...
@overload
def propagate(
    module: Callable[..., dict[K, Tensor]], x: Input, /, *inputs: Any, method: Method | str = ...,
    progress: bool = ..., **named_inputs: Any,
) -> dict[K, Gaussian]: ...
@overload
def propagate(
    module: Callable[..., object], x: Input, /, *inputs: Any, method: Method | str = ...,
    progress: bool = ..., **named_inputs: Any,
) -> Any: ...
@overload  # a constant first
def propagate(
    module: Model, constant: Tensor, x: Input | Tensor, /, *inputs: Any, method: Method | str = ...,
    progress: bool = ..., **named_inputs: Any,
) -> Gaussian: ...
@overload  # by name
def propagate(
    module: Model, /, *, method: Method | str = ..., progress: bool = ..., **named_inputs: Any
) -> Gaussian: ...
# fmt: on
def propagate(
    module: nn.Module | Callable[..., Any],
    /,
    *inputs: Any,
    method: Method | str = AUTO,
    progress: bool = False,
    **named_inputs: Any,
) -> Any:
    """The mean and covariance of a network's output for Gaussian input.

    It follows the autograd mode of the caller: use `torch.no_grad()` if you need no gradients.

    Args:
        module: An `nn.Module` in evaluation mode, or any function of tensors.
        inputs: Arguments of the module: `Gaussian`s, which are independent of each other, and other
            values, also in tuples, lists, dicts and dataclasses.
        method: A method such as `cp.Cumulants()`, or its name on the command line, such as
            "auto:0.01". A method object may also be the last positional argument. The default,
            `cp.Auto()`, chooses one.
        progress: Whether to show a progress bar.
        named_inputs: Keyword arguments of the module.

    Returns:
        A `Gaussian`, or the tuples, lists, dicts and dataclasses of them that the module returns,
        with the batch first. Its `error` estimates how far it may be off.

    Raises:
        TooLarge: If memory does not suffice; the message has a plan.
        UnsupportedOperation: If an operation has no rule and the method needs one.

    Example:
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
        y = cp.propagate(model, x)
        y.mean, y.covariance_matrix, y.error
    """
    call, method = checked_call(module, inputs, method, named_inputs, errors=True)
    warn_of_arguments(call)
    if any(x.skewness is not None for x in call.inputs):
        method.check_skewness(call.inputs)
    if call.empty:
        return call.of_no_elements(method)
    if not progress:
        return method.run(call)
    with _Bars() as bars:
        return method.run(replace(call, progress=bars))


def propagate_without_warnings(
    module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any], method: Method
) -> Any:
    """`propagate` without warnings about dropout and batches, for what is meant as it is."""
    call, method = checked_call(module, inputs, method, named_inputs)
    method.check_skewness(call.inputs)
    return call.of_no_elements(method) if call.empty else method.run(call)


def plan(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: Method | str = GAUSSIAN_LAYERS,
    **named_inputs: Any,
) -> Plan:
    """Plan a call of `propagate`: shape, memory and time of every step.

    It runs the module on means alone, without covariances.

    Args:
        module: As for `propagate`.
        inputs: As for `propagate`.
        method: A layerwise method such as `cp.GaussianLayers()`; for `cp.Auto()`, the one that it
            would choose, without the evaluations at points that it may add.
        named_inputs: As for `propagate`.

    Returns:
        A `Plan`, which prints as a table.

    Example:
        print(cp.plan(model, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)))
    """
    call, method = checked_call(module, inputs, method, named_inputs)
    return method.plan(call)


def joint(
    module: nn.Module | Callable[..., Any], x: Gaussian, method: Method | str = AUTO
) -> Gaussian:
    """The joint Gaussian of x and f(x), both flattened: n elements of x, then m of f(x).

    With it, `Gaussian.condition` answers inverse problems and filters: what is x, given f(x)?

    Args:
        module: A module or function that returns one tensor.
        x: Its input.
        method: As for `propagate`.

    Returns:
        A `Gaussian` of n + m features.

    Example:
        both = cp.joint(model, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1))
        x_given_y = both.condition([3, 4], torch.tensor([0.2, 0.1]))
    """
    check_gaussian(x)
    return propagate(_WithInput(module, len(x.batch_shape)), x, method=method)


class _WithInput(nn.Module):
    """Returns a module's input beside its output."""

    def __init__(self, module: Callable[..., Any], batch_dims: int) -> None:
        super().__init__()
        self.module = module
        self.batch_dims = batch_dims

    def forward(self, x: Any) -> Any:
        y = self.module(x.clone())  # which the module may change in place
        k = self.batch_dims
        if not isinstance(y, Tensor):
            raise UnsupportedOperation(
                f"joint takes a module that returns one tensor, and this one returns a "
                f"{type(y).__name__}; wrap it in a function that picks one"
            )
        if k and isinstance(y, GaussianTensor):
            y = y.with_batch_at(FIRST)
        flat = [t.reshape(*t.shape[:k], t.shape[k:].numel()) for t in (x, y)]
        return torch.cat(flat, dim=-1)


@final
class _Bars(ExitStack):
    """The bars of one propagation, closed at its end."""

    _points: PointBar | None = None

    def operations(self, steps: Sequence[Step], rates: Work) -> Watcher:
        return self.enter_context(ProgressBar(steps, rates))

    def points(self, more: int, total: int) -> None:
        self._points = self._points or self.enter_context(PointBar())
        self._points(more, total)


def checked_call(
    module: object,
    inputs: Sequence[Any],
    method: Any,
    named_inputs: dict[str, Any],
    errors: bool = False,
) -> tuple[Call, Method]:
    """The call and its method, after all that can be checked of them.

    errors: whether results from layer to layer estimate theirs when they are asked for.
    """
    if inputs and (isinstance(inputs[-1], Method) or is_method(inputs[-1])):
        *inputs, method = inputs
    elif inputs and is_name(inputs[-1]):
        raise TypeError(
            f"{inputs[-1]!r} would be given to the model; a method by its name is a keyword: write "
            f"method={inputs[-1]!r}"
        )
    if not isinstance(method, Method):
        method = as_method(method)
    if not callable(module) and not isinstance(module, Gaussian):
        raise TypeError(
            f"the model is a torch module or a function of tensors, not {type(module).__name__}; "
            "cp.from_sklearn(model) makes one of a fitted model of scikit-learn"
        )
    if isinstance(module, torch.jit.ScriptFunction):
        module = original(module)
    method.check_model(module)
    call = Call(module, tuple(inputs), named_inputs, estimator=Estimator if errors else None)
    _check_inputs(call)
    check_module(call.layers, call.inputs[0])
    return call, method


def _check_inputs(call: Call) -> None:
    """Some Gaussian, none twice, all of one batch."""
    inputs = call.inputs
    if inputs and torch.is_autocast_enabled(call.device.type):
        raise UnsupportedOperation(
            "covprop computes in float32 or float64; call it outside of torch.autocast"
        )
    if not inputs:
        items = (*call.arguments, *call.named_arguments.values())
        kinds = ", ".join(type(item).__name__ for item in items) or "nothing"
        raise TypeError(f"propagate takes a cp.Gaussian, not {kinds}; {_how_to_make(items[:1])}")
    if len({id(x) for x in inputs}) < len(inputs):
        raise ValueError(
            "the same Gaussian is given twice; for one variable in two places use "
            "propagate(lambda x: f(x, x), x), for two independent ones make a second Gaussian"
        )
    if len({x.covariance.batch_shape for x in inputs}) > 1:
        shapes = ", ".join(str(tuple(x.batch_shape)) for x in inputs)
        raise ValueError(f"all Gaussians need one batch shape, and these have {shapes}")


def check_gaussian(x: object) -> None:
    """Refuse an input that is no Gaussian."""
    if not isinstance(x, Gaussian):
        raise TypeError(f"the input is a cp.Gaussian, not {type(x).__name__}; {_how_to_make([x])}")


def _how_to_make(given: Sequence[object]) -> str:
    """How to make a Gaussian of what was given in its place."""
    if given and isinstance(given[0], Distribution):
        return "cp.Gaussian.from_torch(x) makes one of a normal distribution of torch"
    if given and isinstance(getattr(given[0], "state", None), Gaussian):
        return "pass its .state"
    return "make one of a tensor with cp.Gaussian.isotropic(x, stddev=...)"


def check_module(layers: Iterable[tuple[str, nn.Module]], x: Gaussian) -> None:
    """Nothing in a module that depends on the batch, and dtype and device those of the Gaussian.

    layers: as its `named_modules()` has them.
    """
    dtype, device = x.mean.dtype, x.mean.device
    dtypes: set[torch.dtype] = set()
    devices: set[torch.device] = set()
    for name, layer in layers:
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedOperation(
                f"batch norm {name or type(layer).__name__} would use the statistics of the batch; "
                "call model.eval(), and keep its running statistics"
            )
        if dtype in dtypes and device in devices:
            continue
        own = [p for p in layer._parameters.values() if p is not None and p.is_floating_point()]
        dtypes.update(p.dtype for p in own)
        devices.update(p.device for p in own)
    if dtypes and dtype not in dtypes:
        half = not dtypes & {torch.float32, torch.float64}
        raise ValueError(
            f"the model's parameters are {_names(dtypes)} and "
            + ("covprop computes in float32 or float64; convert the model with .float()" if half
               else f"the Gaussian is {dtype}; convert one, the Gaussian with "
               f".to({_names(dtypes)}) or the model with .to({dtype})")
        )  # fmt: skip
    if devices and device not in devices:
        raise ValueError(
            f"the model is on {_names(devices)} and the Gaussian on {device}; move one with "
            ".to(device)"
        )


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))


def warn_of_arguments(call: Call) -> None:
    """Warn of what is computed as it is given, and is rarely meant."""
    if not isinstance(call.module, nn.Module):
        return
    if any(layer.training and isinstance(layer, NOISY) for _, layer in call.layers):
        warn_of_dropout(call.layers)
    if any(isinstance(layer, torch.jit.ScriptModule) for _, layer in call.layers):
        warn_of_scripted_dropout(call.layers)
    if len(call.inputs) == 1:
        _warn_of_batch(call)


def _warn_of_batch(call: Call) -> None:
    """Say what will be computed of a Gaussian whose first dimension is a batch to the model.

    Where its rows are independent and the model treats each by itself, in the same way, a batch of
    Gaussians has the same numbers and none of the zeros between the rows.
    """
    (x,) = call.inputs
    rows = x.mean.shape[0] if x.mean.dim() > 1 else 0
    if len(x.covariance.batch_shape) or rows <= 1 or not x.covariance.independent:
        return
    if not _treats_rows_alike(eager(call.on_tensors), x):
        return
    warn_user(
        "the Gaussian has no batch dimension, but the model seems to treat its first dimension, of "
        f"{rows:,}, as a batch. The result is one joint Gaussian of all "
        f"{x.event_shape.numel():,} features, with the same numbers as {rows:,} separate ones. For "
        "these, which are cheaper, write cp.Gaussian.isotropic(mean, stddev=..., batch_dims=1), or "
        "--batch-dims 1 on the command line",
        BatchWarning,
    )


@torch.no_grad()
def _treats_rows_alike(call: Callable[[Tensor], Any], x: Gaussian) -> bool:
    """Whether the last row in place of the first changes the first row of the result to its last.

    And nothing else: two passes on plain tensors, of which random ones agree on nothing.
    """
    waves = torch.cos(torch.arange(x.mean.numel(), dtype=x.dtype, device=x.device))
    point = x.mean + (x.stddev + 1) * waves.reshape(x.mean.shape)
    changed = torch.cat([point[-1:], point[1:]])
    with random_state_kept([point]):
        try:
            before, after = call(point), call(changed)
        except Exception:
            return False
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    if before.dim() == 0 or before.shape != after.shape or len(before) != len(point):
        return False
    expected = torch.cat([before[-1:], before[1:]])
    slack = SUMMATION_ORDER * torch.finfo(x.dtype).eps * before.abs().max()
    differs = bool(((before[0] - before[-1]).abs() > slack).any())
    return differs and bool(((after - expected).abs() <= slack).all())
