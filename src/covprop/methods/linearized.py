"""The network replaced by its tangent at the mean."""

from dataclasses import dataclass
from typing import final

import torch

from covprop.methods.base import Advance, Estimate, FunctionMethod
from covprop.methods.jacobian import check_varies, linearize, pushed
from covprop.methods.network import Network


@final
@dataclass(frozen=True)
class Linearized(FunctionMethod):
    """J S J^T at the mean, as in an extended Kalman filter.

    The mean of the output is the output at the mean. Right where the network is nearly linear over
    the spread of its input; it sees neither the bias of a mean nor what saturates. An output whose
    derivatives are all zero, but which varies, is refused. Differentiable.
    """

    def entry_bytes(self, dtype: torch.dtype) -> int:
        """A product, and its symmetric part."""
        return 2 * dtype.itemsize

    def estimate(self, network: Network, advance: Advance) -> list[Estimate]:
        """Jacobians by torch.func."""
        values, jacobians = linearize(network)
        check_varies(network, values, jacobians)
        advance(1, 1)
        return [
            (value, pushed(jacobian, network.inputs).to(value.dtype), None)
            for value, jacobian in zip(values, jacobians, strict=True)
        ]
