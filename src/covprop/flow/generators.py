"""Random numbers that a model draws from generators of its own, as `torch.randn(generator=g)`.

Torch's global generators are watched by their state. A generator that the model holds is seen where
it is given to a function.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, final

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from covprop.errors import RandomDraws, name_of

Result = TypeVar("Result")
_in_rule: ContextVar[bool] = ContextVar("in_rule", default=False)


def as_rule(run: Callable[[], Result]) -> Result:
    """Run a rule: what it draws, or a carrier for it, is not drawn by the model."""
    token = _in_rule.set(True)
    try:
        return run()
    finally:
        _in_rule.reset(token)


@final
class GeneratorDraws:
    """The states in which a model's generators were before each draw, in order.

    A generator that the model seeds anew in every call draws constants: it is in the same state
    before the same draw of another call.
    """

    def __init__(self, constants: "GeneratorDraws | None" = None) -> None:
        """constants: draws of another call, of which others are refused."""
        self._constants = constants
        self._first: dict[int, tuple[Generator, Tensor]] = {}
        self._states: list[Tensor] = []

    def __bool__(self) -> bool:
        """Whether there were any."""
        return bool(self._states)

    def see(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Note the generator that a function is given, if any, before it draws."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Generator) and not _in_rule.get():
                state = value.get_state()
                if self._constants is not None and not self._constants._has(self._states, state):
                    raise random_draws(function)
                self._first.setdefault(id(value), (value, state))
                self._states.append(state)

    def constant_in(self, other: "GeneratorDraws") -> list[bool]:
        """Of each draw, whether it is the same in another call."""
        return [other._has(self._states[:i], state) for i, state in enumerate(self._states)]

    def rewind(self) -> None:
        """Put all generators back into the state before the first of these draws."""
        for generator, state in self._first.values():
            generator.set_state(state)

    def _has(self, before: list[Tensor], state: Tensor) -> bool:
        """Whether the draw after so many others began in this state."""
        return len(before) < len(self._states) and torch.equal(self._states[len(before)], state)


@final
class KeptGenerators(TorchFunctionMode):
    """A mode that puts the generators which functions are given back into their states."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = GeneratorDraws()

    def __exit__(self, *exception: Any) -> None:
        """Put them back."""
        super().__exit__(*exception)
        self._drawn.rewind()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run torch's function."""
        del types
        named = kwargs or {}
        self._drawn.see(func, args, named)
        return func(*args, **named)


def random_draws(function: Callable[..., Any]) -> RandomDraws:
    """The error of a model that draws random numbers where one pass has to do."""
    return RandomDraws(
        f"the model draws random numbers ({name_of(function)}), and one pass would take a "
        "single draw as a constant; average over them with cp.MonteCarlo(), or pass the "
        "numbers to the model, as a cp.Gaussian if they are to vary"
    )
