"""How far the truncated series can be from the exact covariance."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.gaussian import Gaussian
from covprop.methods.series import ROUNDING, remainders
from covprop.rules.elementwise import find_activation


@torch.no_grad()
def series_error_bound(
    function: Callable[..., Any] | Activation, x: Gaussian, order: int, **options: Any
) -> Tensor:
    """A bound on |covariance - its series of this order| for an element-wise function of x.

    |rho|^(K+1) sqrt(R_i R_j), with R = Var[g] - sum_{k <= K} a_k^2 (Cauchy-Schwarz on the tail of
    Theorem 1), plus what rounding adds. Shape (*batch, n, n); zero on the diagonal, where
    `cp.Series` puts the exact variance. options: those of the torch function.
    """
    if order < 1:
        raise ValueError(f"the order of a series is a whole number from 1, not {order}")
    activation = (
        function if isinstance(function, Activation) else find_activation(function, **options)
    )
    variance = x.covariance.diagonal().double()
    mean = x.mean.double().reshape(variance.shape)
    output = activation.variance(mean, variance)
    share = remainders(activation, mean, variance, order)[-1]
    size = x.correlation_matrix.double().abs()
    tail = (share * output).sqrt()
    scale = output.sqrt()
    bound = size ** (order + 1) * (tail[..., :, None] * tail[..., None, :])
    rounding = ROUNDING * torch.finfo(x.dtype).eps * size
    bound = bound + rounding * (scale[..., :, None] * scale[..., None, :])
    return torch.diagonal_scatter(bound, torch.zeros_like(scale), dim1=-2, dim2=-1).to(x.dtype)
