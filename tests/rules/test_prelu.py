"""PReLU, whose slopes are parameters of the model."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close, moments, normal_cdf, pair_covariance
from tests.rules.test_elementwise import gaussian


def covariance_by_parts(x: cp.Gaussian, slopes: Tensor) -> Tensor:
    """PReLU is y + (1 - a) r with r = relu(-y); Stein's lemma gives Cov(y_i, r_j) = -c Phi(-m/s).

    Cov(r_i, r_j) comes from quadrature of the function itself.
    """
    rest = 1 - slopes
    stddev, rho = x.stddev, x.correlation_matrix
    below = [float(normal_cdf(-float(t))) for t in x.mean / stddev]
    both = torch.zeros_like(rho)
    for i, j in torch.cartesian_prod(*(torch.arange(len(rest)),) * 2).tolist():
        means, stddevs = x.mean[[i, j]].tolist(), stddev[[i, j]].tolist()
        both[i, j] = (
            moments(_negative_part, means[0], stddevs[0], kinks=[0.0])[1]
            if i == j
            else pair_covariance(_negative_part, means, stddevs, float(rho[i, j]), kinks=[0.0])
        )
    stein = rest * torch.tensor(below, dtype=torch.float64)
    kept = 1 - stein[:, None] - stein[None, :]
    return x.covariance_matrix * kept + rest[:, None] * rest[None, :] * both


def _negative_part(y: Tensor) -> Tensor:
    return F.relu(-y)


@pytest.mark.parametrize("call", [F.prelu, torch.prelu, lambda x, w: x.prelu(w)])
@pytest.mark.parametrize("slopes", [[0.2], [0.3, -0.5, 1.0]])
def test_each_channel_has_its_slope(call: Any, slopes: list[float]) -> None:
    weight = torch.tensor(slopes, dtype=torch.float64)
    x = gaussian(2)
    y = propagate(lambda x: call(x, weight), x)
    every = weight.expand(3)
    for one, given in zip(y, x, strict=True):
        expected = [
            moments(lambda t, s=s: torch.where(t > 0, t, s * t), float(m), float(d), kinks=[0.0])[0]
            for m, d, s in zip(given.mean, given.stddev, every.tolist(), strict=True)
        ]
        assert_close(one.mean, torch.tensor(expected, dtype=torch.float64), atol=1e-10)
        assert_close(one.covariance_matrix, covariance_by_parts(given, every), atol=1e-9)


def test_the_channel_is_the_second_dimension() -> None:
    layer = nn.PReLU(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.3, -0.5, 1.0]))
    x = gaussian(2, event=(3, 2))
    every = layer.weight.detach()[:, None].expand(3, 2).reshape(-1)
    y = propagate(layer, x)
    for one, given in zip(y, x, strict=True):
        flat = cp.Gaussian(given.mean.flatten(), given.covariance_matrix)
        assert_close(one.covariance_matrix.detach(), covariance_by_parts(flat, every), atol=1e-9)


def test_without_a_batch_torch_takes_one_slope_and_so_do_we() -> None:
    x = gaussian()
    weight = torch.tensor([0.3], dtype=torch.float64)
    y = propagate(lambda x: F.prelu(x, weight), x)
    assert_close(y.covariance_matrix, covariance_by_parts(x, weight.expand(3)), atol=1e-9)
    with pytest.raises(RuntimeError, match="channel size"):
        propagate(lambda x: F.prelu(x, weight.expand(4)), gaussian(2))


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=3)])
@pytest.mark.parametrize("slopes", [[0.25], [0.4, -0.5, 0.0]])
def test_the_gradient_reaches_the_slopes(slopes: list[float], method: Any) -> None:
    x = gaussian(2)

    def moments_of(weight: Tensor) -> tuple[Tensor, Tensor]:
        y = propagate(lambda x: F.prelu(x, weight), x, method)
        return y.mean, y.covariance_matrix

    weight = torch.tensor(slopes, dtype=torch.float64, requires_grad=True)
    assert gradcheck(moments_of, (weight,))


def test_float32_slopes_give_float32() -> None:
    x = gaussian(2).to(torch.float32)
    y = propagate(nn.PReLU(3), x)
    assert y.dtype == torch.float32
    assert_close(y.mean, propagate(nn.PReLU(3).double(), x.to(torch.float64)).mean.float())
