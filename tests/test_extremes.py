"""Activations far from their middle, and with correlations of exactly one, through propagate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from tests.cases import CASES
from tests.layers import propagate
from tests.oracles import assert_close

FAR = torch.tensor([0.0, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30], dtype=torch.float64)
STDDEVS = [1e-8, 1e-6, 1e-4, 1e-2, 0.1, 1.0, 3.0]

every_activation = pytest.mark.parametrize("name", CASES)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_saturated_unit_has_moments(name: str, dtype: torch.dtype) -> None:
    mean = torch.cat([FAR, -FAR]).expand(len(STDDEVS), -1).to(dtype)
    variance = torch.tensor(STDDEVS, dtype=dtype)[:, None].square().expand_as(mean)
    x = cp.Gaussian.diagonal(mean, variance=variance, batch_dims=2)
    y = propagate(CASES[name].function, x)
    assert bool(torch.isfinite(y.mean).all())
    assert bool(torch.isfinite(y.variance).all())
    assert bool((y.variance >= 0).all())
    for order in (1, 4):
        series = propagate(CASES[name].function, x, cp.Series(order=order))
        assert_close(series.mean, y.mean, rtol=0.0)
        assert_close(series.variance, y.variance, rtol=1e-6)


@every_activation
def test_perfectly_correlated_units_have_a_symmetric_covariance(name: str) -> None:
    for stddev in (1e-4, 0.1, 2.0):
        generator = torch.Generator().manual_seed(0)
        direction = stddev * torch.randn((6, 1), dtype=torch.float64, generator=generator)
        mean = 2 * torch.randn(6, dtype=torch.float64, generator=generator)
        y = propagate(CASES[name].function, cp.Gaussian(mean, direction @ direction.mT))
        matrix = y.covariance_matrix
        assert torch.equal(matrix, matrix.mT)
        bound = y.stddev[:, None] * y.stddev[None, :]
        assert bool((matrix.abs() <= bound * (1 + 1e-8)).all())


@every_activation
def test_a_copy_of_a_unit_has_its_variance_as_covariance(name: str) -> None:
    mean = torch.tensor([-1.5, -0.2, 0.6, 2.0], dtype=torch.float64)
    x = cp.Gaussian.diagonal(
        mean, variance=torch.tensor([1.0, 0.3, 0.05, 2.0], dtype=torch.float64)
    )
    y = propagate(lambda x: CASES[name].function(x[[0, 0, 1, 1, 2, 2, 3, 3]]), x)
    between = y.covariance_matrix.diagonal(offset=1)[::2]
    scale = torch.where(y.variance > 0, y.variance, 1)[::2]
    assert_close(between / scale, y.variance[::2] / scale, atol=1e-8)


@pytest.mark.parametrize("function", [torch.sigmoid, F.elu, F.mish, F.softplus])
def test_units_deep_in_saturation_keep_their_correlations_in_float32(
    function: Callable[[Tensor], Tensor],
) -> None:
    """float64 is tested against integrals elsewhere; thirty deviations down, float32 had zeros."""
    matrix = torch.tensor([[1.0, 0.6, -0.5], [0.6, 1.0, -0.4], [-0.5, -0.4, 1.0]])
    x = cp.Gaussian(torch.tensor([0.0, -30.0, -28.0]), matrix)
    double = propagate(function, x.to(torch.float64)).correlation_matrix
    assert bool((double.abs() > 0.1).all())
    assert_close(propagate(function, x).correlation_matrix.double(), double, atol=1e-5)


@every_activation
def test_denormal_variances_have_moments_and_gradients(name: str) -> None:
    mean = torch.tensor([0.0, -1e-300, 1e-160, 0.3], dtype=torch.float64, requires_grad=True)
    matrix = torch.full((4, 4), 1e-320, dtype=torch.float64).requires_grad_()
    y = propagate(CASES[name].function, cp.Gaussian(mean, matrix))
    assert bool((y.variance >= 0).all())
    if CASES[name].jumps:  # means and gradients there depend on the digits of the deviation
        return
    assert_close(y.mean, CASES[name].function(mean), atol=1e-15)
    assert float(y.covariance_matrix.detach().abs().max()) < 1e-300
    loss = y.mean.sum() + y.covariance_matrix.sum() + 0 * mean.sum()
    for gradient in torch.autograd.grad(loss, [mean, matrix], allow_unused=True):
        assert gradient is None or bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=8)])
@pytest.mark.parametrize(("dtype", "variance"), [(torch.float64, 1e-310), (torch.float32, 1e-40)])
@pytest.mark.parametrize("function", [torch.sign, torch.relu, torch.abs, F.leaky_relu])
def test_denormal_variances_have_correlations(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, variance: float, method: Any
) -> None:
    """Those were taken as zero: covariances of copies of a ReLU were a quarter too small.

    The functions are homogeneous: all covariances are those of variance 1, scaled.
    """
    matrix = torch.tensor([[1.0, 1.0, 0.5], [1.0, 1.0, 0.5], [0.5, 0.5, 1.0]], dtype=dtype)
    mean = torch.zeros(3, dtype=dtype)
    small = propagate(function, cp.Gaussian(mean, variance * matrix), method).covariance_matrix
    ordinary = propagate(function, cp.Gaussian(mean, matrix), method).covariance_matrix
    scale = 1.0 if function is torch.sign else variance
    # Numbers of this size have a step of tiny * eps: rho is off by four of them, of which arcsin at
    # a jump and a correlation of one takes the root, and c by four.
    step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps / variance
    part = (2 * 4 * step) ** 0.5 if function is torch.sign else 8 * step
    assert_close(small.double() / scale, ordinary.double(), atol=part)


def test_different_activations_of_a_denormal_variance_have_their_covariance() -> None:
    """Cov(sign(y), relu(y)) = E|y| / 2 = sigma / sqrt(2 pi): coefficients of the sign are large."""
    variance = torch.tensor([1e-310], dtype=torch.float64)
    x = cp.Gaussian.diagonal(torch.zeros(1, dtype=torch.float64), variance=variance)
    y = propagate(lambda t: torch.cat([torch.sign(t), torch.relu(t)]), x)
    expected = variance[0].sqrt() / (2 * torch.pi) ** 0.5
    assert_close(
        y.covariance_matrix[0, 1] / expected, torch.ones((), dtype=torch.float64), rtol=1e-8
    )
