"""Compiled models run as they were written: torch.compile would trace covprop along with them."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

_lock = threading.Lock()
_stances: list[Any] = []
"""What threads have entered; the first sets torch's stance, which is one for all threads."""


@contextmanager
def _eagerly() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and it is slow to import
        yield
        return
    with _lock:
        _stances.append(None if _stances else _eager_stance())
    try:
        yield
    finally:
        with _lock:
            first, *others = _stances
            # Whoever leaves last gives back the stance that the first has found.
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
        with _eagerly():
            return call(*args, **kwargs)

    return uncompiled
