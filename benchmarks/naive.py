"""The baselines: the paper's formula written term by term, and sampling."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

SAMPLES = 75_000
CHUNK = 5_000


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


def network(model: nn.Sequential, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """A chain of Linear and ReLU layers by the naive series."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            mean = layer(mean)
            covariance = layer.weight @ covariance @ layer.weight.mT
        elif isinstance(layer, nn.ReLU):
            mean, covariance = relu_series(mean, covariance)
        else:
            raise TypeError(f"the naive baseline has no {type(layer).__name__}")
    return mean, covariance


def monte_carlo(
    model: Callable[[Tensor], Tensor], mean: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the output from samples, in chunks."""
    factor = torch.linalg.cholesky(covariance)
    outputs = []
    for _ in range(SAMPLES // CHUNK):
        noise = torch.randn(CHUNK, len(factor), dtype=mean.dtype, device=mean.device)
        outputs.append(model(mean + noise @ factor.mT))
    samples = torch.cat(outputs)
    return samples.mean(0), torch.cov(samples.mT)
