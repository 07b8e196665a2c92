"""Normalised Hermite functions and the paper's series."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from covprop.kernels.normal import density


def hermite_functions(x: Tensor) -> Iterator[Tensor]:
    """Yield He_k(x) phi(x) / sqrt(k!) for k = 0, 1, 2 ...

    Weighted and normalised, the recurrence stays bounded at every order.
    """
    previous, current = torch.zeros_like(x), density(x)
    for k in range(2**31):
        yield current
        following = (x * current - math.sqrt(k) * previous) / math.sqrt(k + 1)
        previous, current = current, following


def power_series(correlation: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """sum_k rho^k left_k right_k by Horner's rule; left and right carry k in their first dimension.

    With left_k = a_{k+1}(i) / sigma_i, the covariance of two activated Gaussians is
    c_ij times this sum (Wright et al. 2024, Theorem 1, with one factor rho taken out so that the
    gradient is right where sigma = 0).
    """
    total = left[-1] * right[-1]
    for k in reversed(range(len(left) - 1)):
        total = total * correlation + left[k] * right[k]
    return total
