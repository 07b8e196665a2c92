"""Networks with sampled weights, written without covprop: what predictions are measured by."""

from collections.abc import Callable

import torch
from torch import Tensor

STANDARD_ERRORS = 5.5
"""How far an estimate may be off; of some thousand entries none should be beyond."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed))


def drawn(mean: Tensor, log_stddev: Tensor, count: int, seed: int) -> Tensor:
    """Parameters (count, ...), every draw its own."""
    noise = normal(count, *mean.shape, seed=seed)
    return mean.detach() + log_stddev.detach().exp() * noise


def outputs(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: tuple[Tensor, Tensor],
    seed: int = 1,
) -> Tensor:
    """function(x, W, b) for inputs (count, ...) and as many draws of W and b."""
    count = len(inputs)
    weights = drawn(*weight, count, seed)
    biases = drawn(*bias, count, seed + 1)
    return torch.func.vmap(function)(inputs, weights, biases)


def assert_moments(mean: Tensor, covariance: Tensor, samples: Tensor) -> None:
    """Mean (m,) and covariance (m, m) are those of samples (count, m), within sampling error."""
    count = len(samples)
    deviation = samples - samples.mean(0)
    products = deviation[:, :, None] * deviation[:, None, :]
    error = deviation.std(0) / count**0.5
    assert bool(((mean - samples.mean(0)).abs() <= STANDARD_ERRORS * error + 1e-12).all())
    estimate, spread = products.sum(0) / (count - 1), products.std(0) / count**0.5
    off = (covariance.detach() - estimate).abs() / (spread + 1e-12)
    assert float(off.max()) <= STANDARD_ERRORS, f"{float(off.max()):.1f} standard errors"
