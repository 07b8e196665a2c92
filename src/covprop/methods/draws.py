"""Random numbers that a model draws itself, which one pass over Gaussians would take as constants.

Rules have no part in it: dropout of a Gaussian and Bayesian layers have moments, and draw nothing.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from covprop.errors import UnsupportedOperation, name_of
from covprop.methods.looks import random_state

Result = TypeVar("Result")

RANDOM = {
    "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli", "bernoulli_", "binomial",
    "cauchy_", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential_",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool3d",
    "geometric_", "gru", "gumbel_softmax", "log_normal_", "lstm", "multi_head_attention_forward",
    "multinomial", "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "rrelu",
    "scaled_dot_product_attention", "uniform_",
}  # fmt: skip
"""Functions that may draw, to be told from other threads that do so at the same time."""


def without_draws(call: Callable[[], Result], tensors: Sequence[Tensor]) -> Result:
    """What a call returns, unless it has drawn from torch's own generators.

    tensors: on the devices that it may draw on. Where their state has changed, the call is made
    again and watched: another thread may have drawn, and if not, the error has a name.
    """
    before = random_state(tensors)
    result = call()
    if torch.equal(random_state(tensors), before):
        return result
    with _Watch(tensors):
        call()
    if _alone():
        raise _refusal("it")
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
        before = random_state(self._tensors)
        result = func(*args, **(kwargs or {}))
        drawn = not torch.equal(random_state(self._tensors), before)
        if drawn and (_alone() or getattr(func, "__name__", "") in RANDOM):
            raise _refusal(name_of(func))
        return result


def _alone() -> bool:
    return threading.active_count() == 1


def _refusal(what: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"the model draws random numbers ({what}), and one pass would take a single draw as a "
        "constant; average over them with cp.MonteCarlo(), or pass the numbers to the model, as a "
        "cp.Gaussian if they are to vary"
    )
