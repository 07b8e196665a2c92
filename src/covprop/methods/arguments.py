"""What can be checked of the arguments of a call before it is run, and what to warn of."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.errors import BatchWarning, UnsupportedOperation, warn_user
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import SUMMATION_ORDER
from covprop.methods.accuracy import Estimator
from covprop.methods.base import Method
from covprop.methods.call import Call, random_state_kept
from covprop.methods.names import as_method, is_method, is_name
from covprop.modules import eager, original
from covprop.rules.noise import warn_of_dropout


def checked(
    module: object,
    inputs: Sequence[Any],
    method: Any,
    named_inputs: dict[str, Any],
    errors: bool = False,
) -> tuple[Call, Method]:
    """The call and its method, after all that can be checked of them.

    errors: whether results from layer to layer estimate theirs when they are asked for.
    """
    if inputs and is_method(inputs[-1]):
        *inputs, method = inputs
    elif inputs and is_name(inputs[-1]):
        raise TypeError(
            f"{inputs[-1]!r} would be given to the model; a method by its name is a keyword: write "
            f"method={inputs[-1]!r}"
        )
    method = as_method(method)
    if not callable(module) and not isinstance(module, Gaussian):
        raise TypeError(
            f"the model is a torch module or a function of tensors, not {type(module).__name__}; "
            "cp.from_sklearn(model) makes one of a fitted model of scikit-learn"
        )
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
        raise TypeError(
            f"propagate takes a cp.Gaussian, not {kinds}; make one of a tensor with "
            "cp.Gaussian.isotropic(x, stddev=...)"
        )
    if len({id(x) for x in inputs}) < len(inputs):
        raise ValueError(
            "the same Gaussian is given twice; for one variable in two places use "
            "propagate(lambda x: f(x, x), x), for two independent ones make a second Gaussian"
        )
    if len({x.batch_shape for x in inputs}) > 1:
        shapes = ", ".join(str(tuple(x.batch_shape)) for x in inputs)
        raise ValueError(f"all Gaussians need one batch shape, and these have {shapes}")


def check_module(layers: Iterable[tuple[str, nn.Module]], x: Gaussian) -> None:
    """Nothing in a module that depends on the batch, and dtype and device those of the Gaussian.

    layers: as its `named_modules()` has them.
    """
    dtypes: set[torch.dtype] = set()
    devices: set[torch.device] = set()
    for name, layer in layers:
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise UnsupportedOperation(
                f"batch norm {name or type(layer).__name__} would use the statistics of the batch; "
                "call model.eval(), and keep its running statistics"
            )
        if x.dtype in dtypes and x.device in devices:
            continue
        own = [p for p in layer._parameters.values() if p is not None and p.is_floating_point()]
        dtypes.update(p.dtype for p in own)
        devices.update(p.device for p in own)
    if dtypes and x.dtype not in dtypes:
        half = not dtypes & {torch.float32, torch.float64}
        raise ValueError(
            f"the model's parameters are {_names(dtypes)} and "
            + ("covprop computes in float32 or float64; convert the model with .float()" if half
               else f"the Gaussian is {x.dtype}; convert one, the Gaussian with "
               f".to({_names(dtypes)}) or the model with .to({x.dtype})")
        )  # fmt: skip
    if devices and x.device not in devices:
        raise ValueError(
            f"the model is on {_names(devices)} and the Gaussian on {x.device}; move one with "
            ".to(device)"
        )


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))


def warn_of_arguments(call: Call) -> None:
    """Warn of what is computed as it is given, and is rarely meant."""
    if not isinstance(call.module, nn.Module):
        return
    warn_of_dropout(call.layers)
    if len(call.inputs) == 1:
        _warn_of_batch(call)


def _warn_of_batch(call: Call) -> None:
    """Say what will be computed of a Gaussian whose first dimension is a batch to the model.

    Where its rows are independent and the model treats each by itself, in the same way, a batch of
    Gaussians has the same numbers and none of the zeros between the rows.
    """
    (x,) = call.inputs
    rows = x.event_shape[0] if len(x.event_shape) > 1 else 0
    if len(x.batch_shape) or rows <= 1 or not x.covariance.independent:
        return
    if not _treats_rows_alike(eager(call.on_tensors), x):
        return
    warn_user(
        f"this Gaussian has no batch, and to the model its first dimension, of {rows:,}, is one: a "
        f"joint Gaussian of all {x.event_shape.numel():,} features will be computed; give it "
        "batch_dims=1 (--batch-dims 1 on the command line), as in "
        "cp.Gaussian.isotropic(mean, stddev=..., batch_dims=1), for a batch of "
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
