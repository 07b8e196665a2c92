"""Networks with sampled weights, written without covprop: what predictions are measured by."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

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


def bilinear_covariance(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    mean: Tensor,
    covariance: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: tuple[Tensor, Tensor],
) -> Tensor:
    """Cov of f(x, W, b), linear in x and in W, from autograd's derivatives: exact to rounding.

    J S J^T + sum_w Var(w) D_w (S + mu mu^T) D_w^T + sum_b Var(b) J_b J_b^T, D_w = d^2 f / dw dx.
    """
    w, b = weight[0].detach(), bias[0].detach()
    size = mean.numel()

    def by_x(w: Tensor) -> Tensor:
        return jacobian(lambda x: function(x, w, b).flatten(), mean, create_graph=True)

    slope = by_x(w).detach().reshape(-1, size)
    mixed = jacobian(by_x, w).reshape(len(slope), size, w.numel())
    offset = jacobian(lambda b: function(mean, w, b).flatten(), b)
    second = covariance + torch.outer(mean.flatten(), mean.flatten())
    spread, spread_b = ((2 * log.detach()).exp().flatten() for log in (weight[1], bias[1]))
    from_weights = torch.einsum("oiw,ij,pjw,w->op", mixed, second, mixed, spread)
    return slope @ covariance @ slope.T + from_weights + (offset * spread_b) @ offset.T


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
