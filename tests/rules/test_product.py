"""Products of tensors that vary: moments of products of jointly Gaussian variables."""

from collections.abc import Callable
from itertools import product as every
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from tests.oracles import assert_close
from tests.test_lineage import gaussian, weight


def hermite_moments(
    function: Callable[[Tensor], Tensor], x: cp.Gaussian, nodes: int = 5
) -> tuple[Tensor, Tensor]:
    """Mean and covariance by Gauss-Hermite quadrature over all elements of the input.

    Exact to rounding for polynomials: their squares have degree below 2 * nodes.
    """
    points, weights = torch.from_numpy(gauss_hermite(nodes))
    size = x.mean.numel()
    index = torch.tensor(list(every(range(nodes), repeat=size)))
    probability = weights[index].prod(-1)
    factor = torch.linalg.cholesky(x.covariance_matrix)
    inputs = x.mean + (points[index] @ factor.mT).reshape(-1, *x.mean.shape)
    outputs = torch.stack([function(one) for one in inputs]).reshape(len(inputs), -1)
    mean = probability @ outputs
    deviation = outputs - mean
    return mean, (deviation * probability[:, None]).mT @ deviation


def gauss_hermite(nodes: int) -> Any:
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    return np.stack([points, weights / weights.sum()])


W = weight(4, 4) / 2
PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "with itself": lambda x: x * x,
    "square": torch.square,
    "power": lambda x: x**2,
    "two maps": lambda x: F.linear(x, W) * x,
    "shifted": lambda x: (x + 1) * (2 - x),
    "function": lambda x: torch.mul(x, F.linear(x, W)),
    "method": lambda x: x.multiply(x.flip(0)),
    "in place": lambda x: F.linear(x, W).mul_(x),
    "with a view of itself": lambda x: x.reshape(2, 2) * x.reshape(2, 2).mT,
    "chunks": lambda x: torch.mul(*x.chunk(2, dim=-1)),
    "broadcast": lambda x: x.reshape(2, 2) * x[:2],
    "outer": lambda x: x[:, None] * x[None, :2],
    "gate of one": lambda x: x * x.mean(),
    "with a constant": lambda x: x * W[0] * x,
    "sum of products": lambda x: (x * F.linear(x, W)).sum() + x,
    "product and factor": lambda x: torch.cat([x * x.flip(0), x]),
    "two products": lambda x: x * x[0] - F.linear(x, W),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_exact_moments(name: str) -> None:
    x = gaussian(4)
    y = cp.propagate(PRODUCTS[name], x)
    mean, covariance = hermite_moments(PRODUCTS[name], x)
    assert y.mean.shape == PRODUCTS[name](x.mean).shape
    assert_close(y.mean.reshape(-1), mean, atol=1e-11)
    assert_close(y.covariance_matrix, covariance, atol=1e-10)


def test_a_product_with_itself_is_the_square() -> None:
    x = gaussian(5, batch=(2,))
    square, product = cp.propagate(torch.square, x), cp.propagate(lambda x: x * x, x)
    assert_close(product.mean, square.mean, atol=1e-14)
    assert_close(product.covariance_matrix, square.covariance_matrix, atol=1e-13)


def test_a_product_of_independent_inputs_has_the_textbook_moments() -> None:
    x, w = gaussian(4), gaussian(4, seed=1)
    y = cp.propagate(torch.mul, x, w)
    a, b, first, second = x.mean, w.mean, x.covariance_matrix, w.covariance_matrix
    assert_close(y.mean, a * b, rtol=0.0)
    expected = first * second + a[:, None] * second * a + b[:, None] * first * b
    assert_close(y.covariance_matrix, expected, atol=1e-13)


def test_the_variance_of_a_pair_is_the_known_formula() -> None:
    """Var(uv) = m_u^2 V + m_v^2 U + 2 m_u m_v C + U V + C^2 (Goodman 1960 and Isserlis)."""
    x = gaussian(2)
    (a, b), s = x.mean.tolist(), x.covariance_matrix.tolist()
    y = cp.propagate(lambda x: x[0] * x[1], x)
    u, v, c = s[0][0], s[1][1], s[0][1]
    assert abs(float(y.mean) - (a * b + c)) <= 1e-14
    expected = a * a * v + b * b * u + 2 * a * b * c + u * v + c * c
    assert abs(float(y.variance) - expected) <= 1e-13


def test_a_batch_of_products_is_each_of_them() -> None:
    x, w = gaussian(3, batch=(2,)), gaussian(2, 3, batch=(2,), seed=1)
    y = cp.propagate(lambda x, w: w * x[:, None] * x[:, None], x, w)
    for i in range(2):
        one = cp.propagate(lambda x, w: w * x * x, x[i], w[i])
        assert_close(y.mean[i], one.mean, atol=1e-13)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-12)


def test_a_product_that_would_mix_the_batch_is_refused() -> None:
    with pytest.raises(cp.BatchDimensionError):
        cp.propagate(lambda x: x * x.sum(-1), gaussian(3, 3, batch=(3,)))


def test_a_certain_factor_scales() -> None:
    x = gaussian(3)
    certain = cp.Gaussian.isotropic(weight(3), 0.0)
    y = cp.propagate(torch.mul, x, certain)
    assert_close(y.covariance_matrix, weight(3)[:, None] * x.covariance_matrix * weight(3))
    zero = cp.propagate(lambda x: x * (x - x), x)
    assert not zero.mean.any()
    assert not zero.covariance_matrix.any()


def test_a_gate_agrees_with_sampling() -> None:
    """x sigmoid(x): the gate is not Gaussian, so that only the mean is exact (Stein)."""
    x = cp.Gaussian(gaussian(3).mean + 1, gaussian(3).covariance_matrix / 100)
    y = cp.propagate(lambda x: x * torch.sigmoid(x), x)
    sample = F.silu(x.sample(400_000, torch.Generator().manual_seed(0)))
    standard = (sample - sample.mean(0)) / sample.std(0)
    error = ((standard.pow(4).mean(0) - 1) / (4 * len(sample))).sqrt()
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * sample.std(0) / len(sample) ** 0.5).all())
    assert bool(((y.stddev / sample.std(0) - 1).abs() <= 5 * error).all())
    assert float(error.max()) < 0.002


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x[:2] @ x[2:].mT, (5, 2)),
        (lambda x: x[0] @ x[1:].mT, (4, 3)),
        (lambda x: torch.bmm(x[:2], x[2:].mT), (4, 2, 3)),
        (lambda x: F.glu(x, -1), (2, 6)),
        (lambda x: 2.0 / (x + 9), (3,)),
        (lambda x: x[:2] / (x[2:] + 9), (4,)),
    ],
    ids=["matmul", "vector", "bmm", "glu", "reciprocal", "quotient"],
)
def test_products_and_quotients_agree_with_sampling_at_small_noise(function, shape):
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel()
    factor = 0.05 * torch.randn(size, size, dtype=torch.float64, generator=generator) / size**0.5
    mean = torch.randn(*shape, dtype=torch.float64, generator=generator)
    x = cp.Gaussian(mean, factor @ factor.mT)
    result = cp.propagate(function, x)
    samples = torch.func.vmap(function)(x.sample(100_000, generator))
    assert result.mean.shape == samples.shape[1:]
    spread = samples.std(0)
    assert float((result.stddev / spread - 1).abs().max()) < 5 / (2 * 100_000) ** 0.5 + 5e-3
    assert float(((result.mean - samples.mean(0)) / spread).abs().max()) < 5 / 100_000**0.5 + 2e-3
