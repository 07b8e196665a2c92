"""FastBNNs (PyPI: fastbnns 0.4.3): means and variances, units as if independent.

A network is converted with its weights as they are, without variances. Linear layers, convolutions
and average pooling have closed forms; every other layer takes three sigma points of each element,
mean and mean -+ sqrt(3) standard deviations.
"""

from typing import Any

import torch
from torch import nn

import covprop as cp
from experiments.rivals.rival import Refused, imported

REQUIREMENT = "fastbnns==0.4.3"


def propagate(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """Variances alone."""
    base = imported("fastbnns.bnn.base", REQUIREMENT)
    types = imported("fastbnns.bnn.types", REQUIREMENT)
    mean = x.mean.reshape(1, *x.event_shape)
    variance = x.variance.reshape(1, *x.event_shape)
    known: dict[str, Any] = {"learn_var": False, "resample_mean": False}
    try:
        network = base.BNN(model, wrapper_kwargs_global=known).to(mean.dtype).eval()
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
