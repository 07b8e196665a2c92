"""Common Gaussians: numbers from a seed, covariances whose elements all depend on each other."""

import torch
from torch import Tensor

import covprop as cp


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same for a seed in every dtype."""
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed)).to(dtype)


def covariance_matrix(*batch: int, size: int, seed: int = 0) -> Tensor:
    """F F^T / size (*batch, size, size), symmetric to the last bit."""
    factor = numbers(*batch, size, size, seed=seed)
    product = factor @ factor.mT / size
    return (product + product.mT) / 2


def weight(*shape: int, seed: int = 1) -> Tensor:
    """Numbers of their own, for the weights of a layer."""
    return numbers(*shape, seed=seed)


def gaussian(
    *event: int,
    batch: tuple[int, ...] = (),
    rank: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> cp.Gaussian:
    """A mean (*batch, *event) of standard normal numbers; variances are about `scale`."""
    size, generator = torch.Size(event).numel(), seeded(seed)
    rank = rank or size
    factor = torch.randn((*batch, size, rank), dtype=torch.float64, generator=generator)
    mean = torch.randn((*batch, *event), dtype=torch.float64, generator=generator)
    return cp.Gaussian(mean.to(dtype), (scale * (factor @ factor.mT) / rank).to(dtype))


def written(x: cp.Gaussian) -> cp.Gaussian:
    """The same Gaussian with its covariance written out as a matrix."""
    return cp.Gaussian(x.mean, x.covariance_matrix)
