"""Random numbers that a model draws itself, which one pass over Gaussians would take as constants.

Rules have no part in it: dropout of a Gaussian and Bayesian layers have moments, and draw nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from covprop.errors import RandomDraws, name_of
from covprop.methods.looks import random_state

Result = TypeVar("Result")


def without_draws(call: Callable[[], Result], tensors: Sequence[Tensor]) -> Result:
    """What a call returns, unless it has drawn from torch's own generators.

    tensors: on the devices that it may draw on. Where their state has changed, the call is made
    again and watched: another thread may have drawn, and if not, the error has a name.
    """
    before = random_state(tensors)
    result = call()
    if not torch.equal(random_state(tensors), before):
        with _Watch(tensors):
            call()
    return result


class _Watch(TorchFunctionMode):
    """Refuses the first function that draws; torch's modes are of one thread."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        with _Draws(self._tensors) as draws:
            result = func(*args, **(kwargs or {}))
        if draws.seen:
            raise RandomDraws(
                f"the model draws random numbers ({name_of(func)}), and one pass would take a "
                "single draw as a constant; average over them with cp.MonteCarlo(), or pass the "
                "numbers to the model, as a cp.Gaussian if they are to vary"
            )
        return result


class _Draws(TorchDispatchMode):
    """Sees whether an operator that may draw has done so."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen, self._tensors = False, tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = random_state(self._tensors)
        result = func(*args, **(kwargs or {}))
        self.seen |= not torch.equal(random_state(self._tensors), before)
        return result
