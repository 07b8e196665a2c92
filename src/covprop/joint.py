"""The joint Gaussian of an input and its output, to condition on either."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.methods import Method
from covprop.propagate import EXACT, propagate
from covprop.tensor import GaussianTensor


def joint(module: nn.Module | Callable[..., Any], x: Gaussian, method: Method = EXACT) -> Gaussian:
    """The Gaussian of (x, f(x)), both flattened: n + m elements, of which the first n are x.

    With it, `Gaussian.condition` answers inverse problems and filters: what is x, given f(x)?
    """
    result: Gaussian = propagate(_WithInput(module, len(x.batch_shape)), x, method)
    return result


class _WithInput(nn.Module):
    """Returns a module's input beside its output."""

    def __init__(self, module: Callable[..., Any], batch_dims: int) -> None:
        super().__init__()
        self.module = module
        self.batch_dims = batch_dims

    def forward(self, x: Any) -> Any:
        y = self.module(x.clone())  # which the module may change in place
        k = self.batch_dims
        if not isinstance(y, GaussianTensor | Tensor):
            raise UnsupportedOperation(
                f"joint takes a module that returns one tensor, and this one returns a "
                f"{type(y).__name__}; wrap it in a function that picks one"
            )
        if k and isinstance(y, GaussianTensor):
            y = y.movedim(y.batch_at, 0)
        flat = [t.reshape(*t.shape[:k], t.shape[k:].numel()) for t in (x, y)]
        return torch.cat(flat, dim=-1)
