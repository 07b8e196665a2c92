"""What `propagate` is called with: checked at the gate, trusted inside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.dispatch import RULES, leaves, unsupported
from covprop.errors import BatchWarning, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.methods import LayerwiseMethod, Method
from covprop.methods.looks import randomness_kept

SLACK = 1e3
"""In units of rounding: what a row may change with those beside it, which kernels sum otherwise."""


def settled(
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
    _check_callable(module, method)
    if isinstance(module, nn.Module):
        check_module(module, given[0])
    return tuple(inputs), method


def _check_inputs(given: list[Gaussian], inputs: tuple[Any, ...]) -> None:
    """Some Gaussian, none twice, all of one batch."""
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


def _check_callable(module: object, method: Method) -> None:
    """Nothing that a method which follows operations cannot look into."""
    if isinstance(module, torch.jit.ScriptFunction) and isinstance(method, LayerwiseMethod):
        raise unsupported(module)


def check_module(module: nn.Module, x: Gaussian) -> None:
    """Nothing in a module that depends on the batch, and dtype and device those of the Gaussian."""
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


def warn_of_batch(x: Gaussian, call: Callable[[Tensor], Any]) -> None:
    """Say what will be computed of a Gaussian whose first dimension is a batch to the model.

    Where its rows are independent and the model treats each by itself, in the same way, a batch of
    Gaussians has the same numbers and none of the zeros between the rows. call: the model as a
    function of the mean.
    """
    rows = x.event_shape[0] if len(x.event_shape) > 1 else 0
    if len(x.batch_shape) or rows <= 1 or not x.covariance.independent:
        return
    if not _treats_rows_alike(call, x):
        return
    warn_user(
        f"this Gaussian has no batch, and to the model its first dimension, of {rows:,}, is one: a "
        f"joint Gaussian of all {x.event_shape.numel():,} features will be computed; give it "
        "batch_dims=1, as in cp.Gaussian.isotropic(mean, stddev, batch_dims=1), for a batch of "
        f"{rows:,} Gaussians with the same numbers",
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
    with randomness_kept([point]):
        try:
            before, after = call(point), call(changed)
        except Exception:
            return False
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    if before.dim() == 0 or before.shape != after.shape or len(before) != len(point):
        return False
    expected = torch.cat([before[-1:], before[1:]])
    slack = SLACK * torch.finfo(x.dtype).eps * before.abs().max()
    differs = bool(((before[0] - before[-1]).abs() > slack).any())
    return differs and bool(((after - expected).abs() <= slack).all())


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))
