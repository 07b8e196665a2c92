"""Former ways to call a function, which still work and say what to write instead."""

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def positional_deprecated(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take keyword arguments by position as well, with a `DeprecationWarning` at the caller's line.

    Args:
        names: The keyword arguments, in the order that they could once be given in after the
            positional ones.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = [item.kind for item in inspect.signature(function).parameters.values()]
        count = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            named = dict(zip(names, args[count:], strict=False))
            if not named or len(args) > count + len(names) or named.keys() & kwargs.keys():
                return function(*args, **kwargs)  # right, or Python's own error
            words = ", ".join(f"{keyword}=..." for keyword in named)
            warnings.warn(
                f"cp.{name} takes {' and '.join(named)} by keyword: write {words}",
                DeprecationWarning,
                stacklevel=2,
            )
            return function(*args[:count], **kwargs, **named)  # type: ignore[arg-type]

        return wrapped

    return decorate
