"""How far the truncated series can be from the exact covariance."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.gaussian import Gaussian
from covprop.kernels.rounding import REMAINDER, rounding
from covprop.methods.series import remainders
from covprop.rules.elementwise import find_activation


@torch.no_grad()
def series_error_bound(
    function: Callable[..., Any] | Activation, x: Gaussian, order: int, **options: Any
) -> Tensor:
    """Bound |covariance - its series of an order| for an element-wise function of a Gaussian.

    |rho|^(K+1) sqrt(R_i R_j), with R = Var[g] - sum_{k <= K} a_k^2 (Cauchy-Schwarz on the tail of
    Theorem 1), plus rounding.

    Args:
        function: A torch function, or an `Activation`.
        x: The Gaussian argument of the function.
        order: The number of terms of the series.
        options: Options of the torch function.

    Returns:
        The bound, (*batch, n, n); zero on the diagonal, where `cp.Series` puts the exact variance.

    Raises:
        ValueError: The order is below 1.

    Example:
        cp.series_error_bound(torch.tanh, cp.Gaussian(torch.zeros(3), torch.eye(3)), order=4)
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
    rounded = rounding(REMAINDER, x.dtype) * size
    bound = bound + rounded * (scale[..., :, None] * scale[..., None, :])
    return torch.diagonal_scatter(bound, torch.zeros_like(scale), dim1=-2, dim2=-1).to(x.dtype)
