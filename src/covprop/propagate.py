"""Run a network on a Gaussian."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.errors import CovpropError, UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Exact, LayerwiseMethod
from covprop.tensor import GaussianTensor

EXACT = Exact()


def propagate(
    module: nn.Module | Callable[..., Any], x: Gaussian, method: LayerwiseMethod = EXACT
) -> Any:
    """The mean and covariance of a network's output for a Gaussian input.

    module: an nn.Module in evaluation mode, or any function of tensors; method: `cp.Exact()` by
    default. The result is a `Gaussian`, or the nest of tuples, lists and dicts of them that the
    module returns. Runs under the caller's autograd mode: wrap it in torch.no_grad() unless you
    want gradients.
    """
    if not isinstance(x, Gaussian):
        raise TypeError(f"propagate takes a cp.Gaussian, not {type(x).__name__}")
    if not isinstance(method, LayerwiseMethod):
        raise TypeError(
            f"a method is an object such as cp.Exact() or cp.Series(order=4), not {method!r}"
        )
    if isinstance(module, nn.Module):
        _check_module(module, x)
    start = GaussianTensor(x.mean, x.covariance, method)
    try:
        result = module(start)
    except CovpropError as error:
        path = _module_path(module, error)
        if path is None:
            raise
        raise type(error)(f"in module {path}: {error}") from error
    return _unwrap(result, method)


def _check_module(module: nn.Module, x: Gaussian) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedOperation(
                f"batch norm {name or type(layer).__name__} would use the statistics of the batch; "
                "call model.eval(), and keep its running statistics"
            )
    numbers = [p for p in module.parameters() if p.is_floating_point()]
    dtypes, devices = {p.dtype for p in numbers}, {p.device for p in numbers}
    if numbers and x.dtype not in dtypes:
        raise ValueError(
            f"the model's parameters are {_names(dtypes)} and the Gaussian is {x.dtype}; convert "
            "one with .to(dtype)"
        )
    if numbers and x.device not in devices:
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
        return Gaussian(result.loc, result.covariance, validate_args=False, method=method)
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
