"""Weights of a layer that vary along common directions, against the covariance of all weights."""

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes

ROUNDING = 1e-12
"""Of some hundred terms of size one in float64."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias)).double()
    variance = {name: numbers(*value.shape).square() for name, value in model.named_parameters()}
    return bayes.with_posterior(model, model.state_dict(), variance)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_the_moments_of_its_weights(bias: bool) -> None:
    """Cov(y_i, y_j) = sum over weights of Cov(W_ik, W_jl) E[x_k x_l], and W S W^T."""
    model = network(bias)
    (base,) = model
    factors = {"0.weight": numbers(4, 3, 2, seed=1)}
    if bias:
        factors["0.bias"] = numbers(4, 2, seed=2)
    x = cp.Gaussian(numbers(3, seed=3), torch.eye(3).double() + 0.3)
    mean, weight = x.mean, base.weight_mean.detach()
    second = x.covariance_matrix + mean[:, None] * mean
    expected = weight @ x.covariance_matrix @ weight.T
    expected = expected + torch.diag(base.weight_variance.detach() @ second.diagonal())
    rows = (
        torch.cat([factors["0.weight"], factors["0.bias"][:, None]], 1)
        if bias
        else factors["0.weight"]
    )
    if bias:
        expected = expected + torch.diag(base.bias_variance.detach())
        second = torch.cat(
            [torch.cat([second, mean[:, None]], 1), torch.cat([mean, numbers(1) * 0 + 1])[None]]
        )
    expected = expected + torch.einsum("ikr,kl,jlr->ij", rows, second, rows)
    made = bayes.with_factor(model, factors)
    with torch.no_grad():
        found = cp.propagate(made, x, method="gaussian-layers")
    torch.testing.assert_close(found.covariance_matrix, expected, rtol=ROUNDING, atol=ROUNDING)


def test_swag_of_a_last_layer_has_the_variances_of_its_draws() -> None:
    """Low rank beside a diagonal (Maddox et al. 2019): D z / sqrt(2 (K - 1)) for K deviations D.

    A known input: the output is linear in the weights.
    """
    model, x = network(), numbers(1, 3, seed=4)
    deviations = numbers(4, 3, 6, seed=5)
    made = bayes.with_factor(model, {"0.weight": deviations / (2 * 5) ** 0.5})
    torch.manual_seed(0)
    with torch.no_grad():
        found = bayes.predict(made, x)
        drawn = made(x.expand(4000, 3))  # each with weights of its own
        single = torch.stack([made(x[0]) for _ in range(400)])
    scale = found.covariance_matrix[0].diagonal().sqrt()
    # A covariance of n draws has a standard error of at most sqrt(2 / n) deviations.
    for draws in (drawn, single):
        error = (torch.cov(draws.T) - found.covariance_matrix[0]) / scale[:, None] / scale
        assert float(error.abs().max()) < 5 * (2 / len(draws)) ** 0.5


def test_what_does_not_fit_is_refused() -> None:
    model = network()
    with pytest.raises(cp.UnsupportedOperation, match="weights of 2 layers"):
        bayes.with_factor(model, {"0.weight": numbers(4, 3, 1), "1.weight": numbers(4, 3, 1)})
    with pytest.raises(cp.UnsupportedOperation, match="is a Sequential"):
        bayes.with_factor(model, {"weight": numbers(4, 3, 1)})
    with pytest.raises(ValueError, match="of one rank"):
        bayes.with_factor(model, {"0.weight": numbers(4, 3, 2), "0.bias": numbers(4, 1)})
    with pytest.raises(ValueError, match="are finite numbers of shape"):
        bayes.with_factor(model, {"0.weight": numbers(3, 4, 1)})
