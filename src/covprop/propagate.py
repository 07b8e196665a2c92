"""Check the arguments, make a call of them, and have a method run it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, final, overload

import torch
from torch import Tensor, nn

from covprop.carriers import Work
from covprop.errors import UnsupportedOperation
from covprop.flow.batch_position import FIRST
from covprop.flow.lineage import Watcher
from covprop.flow.nests import Nest
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian, check_gaussian
from covprop.methods import Auto, GaussianLayers, Method
from covprop.methods.arguments import checked, warn_of_arguments
from covprop.methods.plan import Plan, Step
from covprop.methods.progress import PointBar, ProgressBar

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
    call, method = checked(module, inputs, method, named_inputs, errors=True)
    warn_of_arguments(call)
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
    call, method = checked(module, inputs, method, named_inputs)
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
            would choose.
        named_inputs: As for `propagate`.

    Returns:
        A `Plan`, which prints as a table.

    Example:
        print(cp.plan(model, cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)))
    """
    call, method = checked(module, inputs, method, named_inputs)
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
