"""FastBNNs (PyPI: fastbnns 0.4.3): means and variances, units as if independent.

A network is converted with its weights as they are, without variances. Linear layers, convolutions
and average pooling have closed forms; every other layer takes three sigma points of each element,
mean and mean -+ sqrt(3) standard deviations. They are of all elements together, so that what
adaptive pooling averages counts as fully correlated. Functions that work in place would change the
mean before its sigma points are taken: they are called as if they did not.
"""

from copy import deepcopy
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import covprop as cp
from experiments.rivals.rival import Refused, imported

REQUIREMENT = "fastbnns==0.4.3"


@final
class _OutOfPlace(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        given = kwargs or {}
        return func(*args, **({**given, "inplace": False} if given.get("inplace") else given))


def propagate(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """Variances alone."""
    base = imported("fastbnns.bnn.base", REQUIREMENT)
    types = imported("fastbnns.bnn.types", REQUIREMENT)
    mean = x.mean.clone().reshape(1, *x.event_shape)
    variance = x.variance.reshape(1, *x.event_shape)
    known: dict[str, Any] = {"learn_var": False, "resample_mean": False}
    copy = deepcopy(model)
    for module in copy.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
    try:
        network = base.BNN(copy, wrapper_kwargs_global=known).to(mean.dtype).eval()
        with _OutOfPlace():
            found = network(types.MuVar(mean, variance))
        moments = found.mu, found.var
    except Exception as error:  # a package may raise anything
        raise Refused(f"it raises {type(error).__name__}: {error}") from error
    if not all(isinstance(part, torch.Tensor) for part in moments):
        raise Refused("it returns no variance of this network")
    first = slice(None) if len(x.batch_shape) else 0
    return cp.Gaussian.diagonal(
        moments[0][first], variance=moments[1][first], batch_dims=len(x.batch_shape)
    )
