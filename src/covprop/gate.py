"""What `propagate` is called with: checked at the gate, trusted inside."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian


def check_inputs(given: list[Gaussian], inputs: tuple[Any, ...]) -> None:
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


def _names(items: set[Any]) -> str:
    return " and ".join(sorted(str(item) for item in items))
