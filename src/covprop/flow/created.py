"""Plain tensors that the model makes during a pass: a write in place may make them Gaussian.

Others, as buffers and what the caller holds, outlive the pass, and may not.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covprop.errors import UnsupportedOperation, name_of

FACTORIES = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("empty", "zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
) | {"clone", "to", "type", "float", "double"}
"""Names of the functions that make a tensor with memory of its own, but where they return it."""

_passes: ContextVar[tuple["Created", ...]] = ContextVar("passes", default=())


@final
class Created(TorchFunctionMode):
    """Remembers, while a model runs, the plain tensors that its calls of torch have made.

    in_flight: the class whose calls have rules, also those of Python functions that only ask.
    """

    def __init__(self, in_flight: type[Tensor]) -> None:
        """None so far."""
        super().__init__()
        self._in_flight = in_flight
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._token: Token[tuple[Created, ...]] | None = None

    def __enter__(self) -> "Created":
        """Begin to watch."""
        super().__enter__()
        self._token = _passes.set((*_passes.get(), self))
        return self

    def __exit__(self, *exception: Any) -> None:
        """Forget all."""
        assert self._token is not None
        _passes.reset(self._token)
        super().__exit__(*exception)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run torch's function."""
        if self._in_flight in types:
            result = self._in_flight.__torch_function__(func, types, args, kwargs)
        else:
            result = func(*args, **(kwargs or {}))
        made = getattr(func, "__name__", None) in FACTORIES and type(result) is Tensor
        if made and all(result is not argument for argument in args):
            self._known[id(result)] = weakref.ref(result)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether it has seen this tensor made."""
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor


def _check_writable(function: Callable[..., Any], target: Tensor) -> None:
    """Refuse to write a Gaussian into a plain tensor that outlives the pass, or into a view."""
    passes = _passes.get()
    if not (target.is_floating_point() and passes and passes[-1].knows(target)):
        raise UnsupportedOperation(
            f"{name_of(function)} would write a Gaussian into a plain tensor that is a view, or "
            "was not made by torch.zeros, torch.empty or the like while the model ran; write the "
            "out-of-place form, as in t = t + x, t = torch.where(mask, x, t) or torch.cat([t, x])"
        )


def turn_into(function: Callable[..., Any], target: Tensor, result: Any) -> None:
    """Make a plain tensor the in-flight tensor that a result is.

    What other views of its memory show, as they are plain and cannot follow, becomes NaN.
    """
    _check_writable(function, target)
    result.materialize()
    with torch.no_grad():
        target.fill_(torch.nan)
    target.__class__ = type(result)
    type(result).__init__(target, result.loc, result.carrier, batch_at=result.batch_at)
