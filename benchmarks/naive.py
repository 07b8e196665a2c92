"""The baselines: the paper's formula written term by term on full matrices, and sampling."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 75_000
CHUNK = 100
"""Samples at once: larger batches leave the cache, and take up to twice as long."""


def relu_series(mean: Tensor, covariance: Tensor, order: int = 4) -> tuple[Tensor, Tensor]:
    """ReLU's mean and covariance by Theorem 1, on full matrices, with factorials and powers."""
    stddev = covariance.diagonal().sqrt()
    a = mean / stddev
    cdf = (1 + torch.erf(a / math.sqrt(2))) / 2
    pdf = torch.exp(-a.square() / 2) / math.sqrt(2 * math.pi)
    correlation = covariance / (stddev[:, None] * stddev[None, :])
    hermite = [torch.ones_like(a), a]
    for k in range(1, order):
        hermite.append(a * hermite[k] - k * hermite[k - 1])
    result = torch.zeros_like(covariance)
    for k in range(1, order + 1):
        term = stddev * (cdf if k == 1 else (-1) ** k * hermite[k - 2] * pdf)
        result = result + correlation**k / math.factorial(k) * (term[:, None] * term[None, :])
    return mean * cdf + stddev * pdf, result


def convolve(layer: nn.Conv2d, covariance: Tensor, shape: torch.Size) -> Tensor:
    """A S A^T: the convolution of every row, then of every column, as one batch each."""

    def rows(matrix: Tensor) -> Tensor:
        images = matrix.reshape(-1, *shape)
        return F.conv2d(images, layer.weight, None, layer.stride, layer.padding).flatten(1)

    return rows(rows(covariance).mT)


def network(model: nn.Sequential, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """A chain of linear, convolutional and ReLU layers by the naive series."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            covariance = layer.weight @ covariance @ layer.weight.mT
            mean = layer(mean)
        elif isinstance(layer, nn.Conv2d):
            covariance = convolve(layer, covariance, mean.shape)
            mean = layer(mean)
        elif isinstance(layer, nn.ReLU):
            flat, covariance = relu_series(mean.flatten(), covariance)
            mean = flat.reshape(mean.shape)
        elif isinstance(layer, nn.Flatten):
            mean = mean.flatten()
        else:
            raise TypeError(f"the naive baseline has no {type(layer).__name__}")
    return mean, covariance


def sampled(
    model: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor, samples: int, chunk: int
) -> Tensor:
    """Outputs for samples of the input, (samples, outputs), in chunks."""
    factor = torch.linalg.cholesky(covariance)
    outputs = []
    for start in range(0, samples, chunk):
        noise = torch.randn(min(chunk, samples - start), len(factor), dtype=mean.dtype)
        draws = mean.flatten() + noise @ factor.mT
        outputs.append(model(draws.reshape(-1, *mean.shape)))
    return torch.cat(outputs)


def disagreement(stddev: Tensor, covariance: Tensor) -> float:
    """The largest relative difference of standard deviations from those of a covariance."""
    expected = covariance.reshape(len(stddev), len(stddev)).diagonal().sqrt()
    return float((stddev / expected - 1).abs().max())


def monte_carlo(
    model: Callable[[Tensor], Tensor],
    mean: Tensor,
    covariance: Tensor,
    samples: int = SAMPLES,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the output from samples."""
    outputs = sampled(model, mean, covariance, samples, chunk)
    return outputs.mean(0), torch.cov(outputs.mT)
