"""Run a network on a Gaussian."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.covariance import Dense, Diagonal, Zero
from covprop.dispatch import RULES, leaves
from covprop.errors import CovpropError, MomentOverflow, TooLarge, UnsupportedOperation
from covprop.gaussian import Gaussian, SamplingError
from covprop.kernels.normal import is_finite
from covprop.lineage import LARGE, Lineage, Node
from covprop.methods import Exact, FunctionMethod, LayerwiseMethod, Method, Network
from covprop.plan import Plan, Planner, free_bytes
from covprop.progress import PointBar, ProgressBar
from covprop.tensor import GaussianTensor

EXACT = Exact()


def propagate(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: Method = EXACT,
    progress: bool = False,
    **named_inputs: Any,
) -> Any:
    """The mean and covariance of a network's output for Gaussian input.

    module: an nn.Module in evaluation mode, or any function of tensors; inputs: what to call it
    with, `Gaussian`s (independent of each other) and anything else; method: `cp.Exact()` by
    default, also as the last positional argument. The result is a `Gaussian`, or the nest of
    tuples, lists and dicts of them that the module returns, with the batch first wherever the
    module has put it. progress shows a bar. Raises `TooLarge`, with a plan, where memory would not
    suffice. Runs under the caller's autograd mode: wrap it in torch.no_grad() unless you
    want gradients.
    """
    inputs, method = _settled(module, inputs, method, named_inputs)
    if isinstance(method, FunctionMethod):
        return _evaluate(module, inputs, named_inputs, method, progress)
    lineage = Lineage(method)
    with ExitStack() as stack:
        if progress:
            steps = plan(module, *inputs, method=method, **named_inputs).steps
            lineage.watcher = stack.enter_context(ProgressBar(steps))
        return _along(lineage, module, inputs, named_inputs)


def propagate_along(
    lineage: Lineage, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> Any:
    """`propagate` with a lineage of one's own, which may have a watcher."""
    inputs, _ = _settled(module, inputs, lineage.method, named_inputs)
    return _along(lineage, module, inputs, named_inputs)


def _along(
    lineage: Lineage, module: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> Any:
    method = lineage.method
    lineage.guard = lambda: _check_memory(plan(module, *inputs, method=method, **named_inputs))
    result = _run(module, inputs, named_inputs, lambda x: _in_flight(x, lineage))
    return _unwrap(result, method)


def plan(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: Method = EXACT,
    **named_inputs: Any,
) -> Plan:
    """What `propagate` would take with the same arguments: shapes, memory and work, step by step.

    Runs the means through the module, and nothing of the covariances.
    """
    inputs, method = _settled(module, inputs, method, named_inputs)
    if not isinstance(method, LayerwiseMethod):
        raise UnsupportedOperation(
            f"a plan lists the covariances on the way through a model, and cp."
            f"{type(method).__name__} has none: it evaluates the model on plain tensors"
        )
    lineage, planner = Lineage(method), Planner(module)
    lineage.watcher = planner
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    with torch.no_grad():
        _run(module, inputs, named_inputs, lambda x: planner.wrap(x, lineage))
    return Plan(tuple(planner.steps), free_bytes(given[0].device))


def _settled(
    module: object, inputs: tuple[Any, ...], method: Any, named_inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], Method]:
    """The inputs and the method, after all that can be checked of them."""
    if inputs and isinstance(inputs[-1], Method):
        *inputs, method = inputs  # type: ignore[assignment]
    if not isinstance(method, Method):
        raise TypeError(
            f"a method is an object such as cp.Exact() or cp.Series(order=4), not {method!r}"
        )
    for function in method.activations if isinstance(method, LayerwiseMethod) else ():
        if function not in RULES:
            raise ValueError(
                f"{function!r} is no torch function with a rule, so no activation can replace it; "
                "name the function, as in {torch.sigmoid: cp.DaunizeauSigmoid()}"
            )
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    _check_inputs(given, (*inputs, *named_inputs.values()))
    if isinstance(module, nn.Module):
        check_module(module, given[0])
    return tuple(inputs), method


def _run(
    module: Any,
    inputs: tuple[Any, ...],
    named_inputs: dict[str, Any],
    wrapped: Callable[[Gaussian], GaussianTensor],
) -> Any:
    try:
        # No name for the in-flight inputs: it would keep them, and all that came of them, alive.
        return module(*_wrap(inputs, wrapped), **_wrap(named_inputs, wrapped))
    except CovpropError as error:
        path = _module_path(module, error)
        if path is None or isinstance(error, TooLarge):
            raise
        raise type(error)(f"in module {path}: {error}") from error


def _evaluate(
    module: Any,
    inputs: tuple[Any, ...],
    named_inputs: dict[str, Any],
    method: FunctionMethod,
    progress: bool,
) -> Any:
    """The result of a method that wants a function of plain tensors."""
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]

    def call(*tensors: Tensor) -> Any:
        waiting = iter(tensors)
        return module(
            *_wrap(inputs, lambda _: next(waiting)), **_wrap(named_inputs, lambda _: next(waiting))
        )

    network = Network(call, given)
    if network.draws and not method.random:
        raise UnsupportedOperation(
            f"the model draws random numbers, as dropout does, and cp.{type(method).__name__} "
            "takes it as a function; call model.eval(), or use cp.MonteCarlo() or cp.Exact()"
        )
    _check_outputs(network, method)
    if not network.outputs:
        return network.nest([])
    with ExitStack() as stack:
        advance = stack.enter_context(PointBar()) if progress else _unseen
        estimates = method.estimate(network, advance)
    results = []
    for output, (mean, covariance, error) in zip(network.outputs, estimates, strict=True):
        shape = (*network.batch_shape, *output.event_shape)
        if error is not None:
            error = SamplingError(error.samples, error.mean.reshape(shape), error.covariance)
        result = _finite(mean.reshape(shape), Dense(covariance), method, error)
        results.append(result)
    return network.nest(results)


def _unseen(more: int, total: int) -> None:
    """No bar."""


def _check_outputs(network: Network, method: FunctionMethod) -> None:
    """Raise if what the method holds for the covariances of the outputs would not fit."""
    sizes = [output.event_shape.numel() for output in network.outputs]
    each = [method.entry_bytes(output.dtype) for output in network.outputs]
    needed = network.batch_shape.numel() * sum(
        bytes_ * size**2 for bytes_, size in zip(each, sizes, strict=True)
    )
    if needed > LARGE and needed > (free := free_bytes(network.means[0].device)):
        raise TooLarge(
            f"the covariances of {sum(sizes):,} outputs would need {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; return fewer outputs, or propagate parts of the batch"
        )


def _check_memory(planned: Plan) -> None:
    if planned.fits:
        return
    largest = max(planned.steps, key=lambda step: step.peak_bytes)
    raise TooLarge(
        f"the covariances would need {planned.peak_bytes / 1e9:.1f} GB at {largest.operation} "
        f"({largest.module or 'the function'}, {largest.features:,} features), and "
        f"{planned.free_bytes / 1e9:.1f} GB are free. A batch of inputs needs batch_dims=1, and "
        "may be propagated in parts; float32 takes half of float64; wide layers between narrower "
        "ones are streamed; else sample: cp.MonteCarlo(). The plan:\n"
        f"{planned}"
    )


def _check_inputs(given: list[Gaussian], inputs: tuple[Any, ...]) -> None:
    if not given:
        kinds = ", ".join(type(item).__name__ for item in inputs) or "nothing"
        raise TypeError(f"propagate takes a cp.Gaussian, not {kinds}")
    if len({id(x) for x in given}) < len(given):
        raise ValueError(
            "the same Gaussian is given twice; for one variable in two places use "
            "propagate(lambda x: f(x, x), x), for two independent ones make a second Gaussian"
        )
    if len({x.batch_shape for x in given}) > 1:
        shapes = ", ".join(str(tuple(x.batch_shape)) for x in given)
        raise ValueError(f"all Gaussians need one batch shape, and these have {shapes}")


def _in_flight(x: Gaussian, lineage: Lineage) -> GaussianTensor:
    return GaussianTensor(x.mean, Node(lineage.method.begin(x.covariance)), lineage)


def _wrap(nest: Any, wrapped: Callable[[Gaussian], Any]) -> Any:
    if isinstance(nest, Gaussian):
        return wrapped(nest)
    if isinstance(nest, list | tuple) and not hasattr(nest, "_fields"):
        return type(nest)(_wrap(item, wrapped) for item in nest)
    if isinstance(nest, dict):
        return {key: _wrap(item, wrapped) for key, item in nest.items()}
    return nest


def check_module(module: nn.Module, x: Gaussian) -> None:
    """Raise if it would learn from its input, or has other dtypes or devices than it."""
    kinds: set[tuple[torch.dtype, torch.device]] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedOperation(
                f"batch norm {name or type(layer).__name__} would use the statistics of the batch; "
                "call model.eval(), and keep its running statistics"
            )
        own = layer.parameters(recurse=False)
        kinds.update((p.dtype, p.device) for p in own if p.is_floating_point())
    dtypes, devices = {dtype for dtype, _ in kinds}, {device for _, device in kinds}
    if kinds and x.dtype not in dtypes:
        raise ValueError(
            f"the model's parameters are {_names(dtypes)} and the Gaussian is {x.dtype}; convert "
            "one with .to(dtype)"
        )
    if kinds and x.device not in devices:
        raise ValueError(
            f"the model is on {_names(devices)} and the Gaussian on {x.device}; move one with "
            ".to(device)"
        )


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))


def _module_path(module: object, error: BaseException) -> str | None:
    """The innermost module of the network whose forward was running."""
    if not isinstance(module, nn.Module):
        return None
    names = {id(layer): name for name, layer in module.named_modules()}
    path, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            path = f"{names[id(owner)] or 'the model itself'} ({type(owner).__name__})"
        trace = trace.tb_next
    return path


def _unwrap(result: Any, method: LayerwiseMethod) -> Any:
    if isinstance(result, GaussianTensor):
        result.check_current()
        covariance = result.covariance
        if not isinstance(covariance, Dense | Diagonal | Zero):
            covariance = Dense(covariance.matrix())
        return _finite(result.loc, covariance, method)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_unwrap(item, method) for item in result))
    if isinstance(result, list | tuple):
        return type(result)(_unwrap(item, method) for item in result)
    if isinstance(result, dict):
        return {key: _unwrap(item, method) for key, item in result.items()}
    if result is None or isinstance(result, Tensor | bool | int | float | str):
        return result
    raise UnsupportedOperation(
        f"the model returns a {type(result).__name__}; covprop unwraps tensors, tuples, lists and "
        "dicts"
    )


def _finite(
    mean: Tensor,
    covariance: Dense | Diagonal | Zero,
    method: Method,
    error: SamplingError | None = None,
) -> Gaussian:
    """The result, unless it has overflown."""
    if not (is_finite(mean) and is_finite(covariance.values)):
        raise MomentOverflow(
            f"the output's moments are not finite in {mean.dtype}; look for NaN or infinity "
            "in the model's weights, or convert model and Gaussian to float64"
        )
    return Gaussian(mean, covariance, validate_args=False, method=method, sampling=error)
