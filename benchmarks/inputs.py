"""Random Gaussians of known character."""

import torch
from torch import Tensor

NOISE = 0.01
"""The variance that every unit of a layer has to itself, where the shared one is about 1."""

MODERATE, STRONG = 200, 10
"""Ranks of the shared variance: correlations of about 1 / sqrt(rank), 0.07 and 0.3, with tails."""


def layer(size: int, rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """A layer's mean and covariance: rank + noise, deviations of 0.5 to 1.5, means of that order.

    The work of an exact kernel depends on the correlations, and these on the rank.
    """
    factor = torch.randn(size, rank, dtype=torch.float64) / rank**0.5
    covariance = factor @ factor.mT
    covariance.diagonal().add_(NOISE)
    scale = 0.5 + torch.rand(size, dtype=torch.float64)
    covariance.mul_(scale).mul_(scale[:, None])
    mean = torch.randn(size, dtype=torch.float64) * covariance.diagonal().sqrt()
    return mean.to(dtype), covariance.to(dtype)


def paper(
    *shape: int, largest_variance: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Section 4.2: a standard normal mean, random eigenvalues, a given largest variance."""
    mean = torch.randn(shape, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(mean.numel(), mean.numel(), dtype=torch.float64))
    eigenvalues = torch.rand(mean.numel(), dtype=torch.float64)
    covariance = (basis * eigenvalues) @ basis.mT
    covariance = (covariance + covariance.mT) / 2
    covariance *= largest_variance / covariance.diagonal().max()
    return mean.to(dtype), covariance.to(dtype)
