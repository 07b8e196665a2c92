"""Derivatives: forward mode from any thread, and backward passes of first order."""

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

_forward_mode = threading.RLock()
"""torch counts the levels of forward mode for the whole process, so that two threads would take
each other's tangents or crash. Reentrant: derivatives of derivatives are nested."""


def followed(*tensors: Tensor) -> bool:
    """Whether autograd follows any of them, backwards or forwards."""
    backwards = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return backwards or any(
        is_functorch_wrapped_tensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def jvp(function: Callable[[Tensor], Any], point: Tensor, direction: Tensor) -> Any:
    """J v of a function at a point: a tensor, or the tuple of them that the function returns."""
    _import_forward_mode()
    with _forward_mode:
        return torch.func.jvp(function, (point,), (direction,))[1]


class _WarningFilters:
    """Filters of warnings, which belong to the process: changed while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._threads, self._saved = threading.Lock(), 0, warnings.catch_warnings()

    def enter(self) -> None:
        with self._lock:
            if not self._threads:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", "There is a performance drop")
                warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            self._threads += 1

    def leave(self) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._saved.__exit__(None, None, None)


_filters = _WarningFilters()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings that torch.func gives about itself."""
    _filters.enter()
    try:
        yield
    finally:
        _filters.leave()


@cache
def _import_forward_mode() -> None:
    with quiet(), suppress(ImportError):
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward pass refuse create_graph=True, where its result would lack a part."""
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this part of covprop has first derivatives only; use create_graph=False, or "
                "finite differences of the gradient"
            )
        return once(ctx, *gradients)

    return guarded
