"""Which module of a model is running, and what to call it."""

import sys
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType

from torch import nn


def module_names(module: object) -> dict[int, str]:
    """The path of each module, by its id; a plain function has none."""
    if not isinstance(module, nn.Module):
        return {}
    return {id(layer): name for name, layer in module.named_modules()}


def path_of(layer: nn.Module, network: nn.Module) -> str | None:
    """What to call a layer of a network in a message, if it is one of its modules."""
    for name, module in network.named_modules():
        if module is layer:
            return f"{name or 'the model itself'} ({layer._get_name()})"
    return None


def running_module(names: Mapping[int, str]) -> str:
    """The path of the innermost module whose forward is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


def calling_module() -> nn.Module | None:
    """The innermost module that is being called.

    Of frames, those of torch's own call alone are looked into: what is looked into lives as long as
    its frame, and these hold their arguments anyway.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def calling_modules(until: Callable[[FrameType], bool]) -> list[nn.Module] | None:
    """The modules that are being called, the innermost first, up to a frame; None without one."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not until(frame):
        if frame.f_code is nn.Module._call_impl.__code__:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return None if frame is None else found


def raising_module(module: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """The innermost of the modules of a network whose forward raised, by its traceback."""
    layers, found = module_names(module), None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in layers:
            found = owner
        trace = trace.tb_next
    return found
