"""Derivatives by torch's forward mode, from any number of threads.

torch counts the levels of forward mode for the whole process, so that two threads take each other's
tangents (or crash). Here one thread differentiates at a time. Filters of warnings belong to the
process as well: `quiet` changes them once for all threads that are inside.
"""

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_one_thread = threading.RLock()
"""Again by the thread that has it: derivatives of derivatives are nested."""


def jvp(function: Callable[[Tensor], Any], point: Tensor, direction: Tensor) -> Any:
    """J v of a function at a point: a tensor, or the tuple of them that the function returns."""
    _prepare()
    with _one_thread:
        return torch.func.jvp(function, (point,), (direction,))[1]


class _Filters:
    """The filters of warnings, changed while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._inside, self._saved = threading.Lock(), 0, warnings.catch_warnings()

    def enter(self) -> None:
        with self._lock:
            if not self._inside:
                self._saved = warnings.catch_warnings()
                self._saved.__enter__()
                warnings.filterwarnings("ignore", "There is a performance drop")
                warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._saved.__exit__(None, None, None)


_filters = _Filters()


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch.func has to say of itself."""
    _filters.enter()
    try:
        yield
    finally:
        _filters.leave()


@cache
def _prepare() -> None:
    """Let torch import its forward mode once, without the warnings that this gives."""
    with quiet(), suppress(ImportError):
        importlib.import_module("torch._decomp.decompositions_for_jvp")
