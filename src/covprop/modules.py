"""Modules of a model: which one is running, what to call it, and running it uncompiled."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = "torch._dynamo"
"""The module of torch.compile."""


class EagerMode(TorchDispatchMode):
    """A dispatch mode of code that is not compiled.

    For others torch imports its compiler when they are first used, which takes 1.5 seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def module_names(module: object) -> dict[int, str]:
    """The path of each module by its id; none for a plain function."""
    if not isinstance(module, nn.Module):
        return {}
    return {id(layer): name for name, layer in module.named_modules()}


def path_of(layer: nn.Module, network: nn.Module) -> str | None:
    """The path and class of a layer for messages, None if it is no module of the network."""
    for name, module in network.named_modules():
        if module is layer:
            return f"{f'module {name}' if name else 'the model itself'} ({layer._get_name()})"
    return None


def original(module: Any) -> Any:
    """The Python function of a scripted or traced one; anything else unchanged."""
    if not isinstance(module, torch.jit.ScriptFunction):
        return module
    return getattr(module, "_torchdynamo_inline", module)


@contextmanager
def in_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the training modes of layers, and restore them afterwards."""
    now = [(layer, layer.training) for layer, _ in modes]
    try:
        for layer, training in modes:
            layer.training = training
        yield
    finally:
        for layer, training in now:
            layer.training = training


def running_module(names: Mapping[int, str]) -> str:
    """The path of the innermost module whose forward is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


def calling_modules(until: Callable[[FrameType], bool]) -> list[nn.Module] | None:
    """The modules that are being called, the innermost first, up to a frame; None without one."""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not until(frame):
        if frame.f_code is nn.Module._call_impl.__code__:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return None if frame is None else modules


def raising_module(module: nn.Module, trace: TracebackType | None) -> nn.Module | None:
    """The innermost of the modules of a network whose forward raised, by its traceback."""
    layers, innermost = module_names(module), None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in layers:
            innermost = owner
        trace = trace.tb_next
    return innermost


_lock = threading.Lock()
_stances: list[Any] = []
"""What threads have entered; the first sets torch's stance, which is one for all threads."""


@contextmanager
def eagerly() -> Iterator[None]:
    """Run what is inside without torch.compile at any depth of it."""
    if COMPILER not in sys.modules:  # nothing has been compiled, and it is slow to import
        yield
        return
    with _lock:
        _stances.append(None if _stances else _eager_stance())
    try:
        yield
    finally:
        with _lock:
            first, *others = _stances
            # Whoever leaves last gives back the stance that was set before the first.
            _stances[:] = [first, *others[:-1]] if others else []
            if not others and first is not None:
                first.__exit__(None, None, None)


def _eager_stance() -> Any:
    with suppress(RuntimeError):  # within a function that is being compiled it cannot be set
        return torch.compiler.set_stance("force_eager")
    return None


def eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, or module, without torch.compile at any depth of it."""

    @wraps(call, updated=())
    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        with eagerly():
            return call(*args, **kwargs)

    return uncompiled
