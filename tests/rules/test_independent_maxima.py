"""Maxima as if independent (Gast & Roth 2018): right for what is independent, else wrong."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

METHODS = [cp.Exact(independent_maxima=True), cp.Series(order=4, independent_maxima=True)]
every_method = pytest.mark.parametrize("method", METHODS, ids=["exact", "series"])
PAIRS = {
    "plain": ((0.3, -0.2), (1.0, 0.5)),
    "equal": ((0.7, 0.7), (1.0, 1.0)),
    "second ahead": ((-1.0, 0.4), (0.3, 2.0)),
    "far apart": ((5.0, -5.0), (0.5, 0.5)),
}


def by_quadrature(means: tuple[float, float], stddevs: tuple[float, float]) -> tuple[float, float]:
    """Mean and variance of the larger of two independent variables, from its distribution."""
    a, b = (stats.norm(m, s) for m, s in zip(means, stddevs, strict=True))
    reach = 12 * max(stddevs)

    def moment(power: int) -> float:
        def integrand(y: float) -> float:
            return y**power * (a.pdf(y) * b.cdf(y) + b.pdf(y) * a.cdf(y))

        low, high = min(means) - reach, max(means) + reach
        return integrate.quad(integrand, low, high, points=means, limit=500, epsabs=1e-13)[0]

    return moment(1), moment(2) - moment(1) ** 2


def pair(means: tuple[float, float], stddevs: tuple[float, float], rho: float) -> cp.Gaussian:
    s = torch.tensor(stddevs, dtype=torch.float64)
    correlation = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    return cp.Gaussian(torch.tensor(means, dtype=torch.float64), s[:, None] * correlation * s)


@every_method
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_a_pair_has_the_moments_of_an_independent_one(name: str, rho: float, method) -> None:
    mean, variance = by_quadrature(*PAIRS[name])
    x = pair(*PAIRS[name], rho)
    for call in (lambda x: torch.maximum(x[0], x[1]), torch.max, lambda x: -torch.min(-x)):
        y = propagate(call, x, method)
        assert abs(float(y.mean) - mean) <= 1e-9
        assert abs(float(y.variance) - variance) <= 1e-8


@every_method
def test_covariances_are_those_of_the_mixture_of_both(method) -> None:
    """Cov_ij = (1 - p_i)(1 - p_j) A_ij + p_i p_j B_ij, and with an argument (1 - p_i) A_ij."""
    a, b = gaussian(3), gaussian(3, seed=1)
    y = propagate(lambda a, b: torch.cat([torch.maximum(a, b), a]), a, b, method)
    spread = np.sqrt((a.variance + b.variance).numpy())
    p = torch.from_numpy(stats.norm.cdf((b.mean - a.mean).numpy() / spread))
    first, second = a.covariance_matrix, b.covariance_matrix
    expected = torch.outer(1 - p, 1 - p) * first + torch.outer(p, p) * second
    off = ~torch.eye(3, dtype=torch.bool)
    assert_close(y.covariance_matrix[:3, :3][off], expected[off], atol=1e-13)
    assert_close(y.covariance_matrix[:3, 3:], (1 - p)[:, None] * first, atol=1e-13)
    exact = propagate(torch.maximum, a, b)  # they are independent here
    assert_close(y.mean[:3], exact.mean, atol=1e-12)
    assert_close(y.variance[:3], exact.variance, atol=1e-10)


def test_both_methods_keep_their_default() -> None:
    x = gaussian(1, 4, 4)
    assert not cp.Exact().independent_maxima
    assert not cp.Series().independent_maxima
    default = propagate(nn.MaxPool2d(2), x).mean
    assert not torch.allclose(default, propagate(nn.MaxPool2d(2), x, METHODS[0]).mean)


@every_method
def test_a_maximum_with_a_constant_stays_exact(method) -> None:
    x, constant = gaussian(4), torch.linspace(-1, 1, 4, dtype=torch.float64)
    for call in (torch.maximum, torch.minimum):
        y, expected = (propagate(call, x, constant, m) for m in (method, type(method)()))
        assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)


@every_method
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, 1)])
def test_the_covariance_of_windows_is_positive_semi_definite(pool: nn.Module, method) -> None:
    for seed in range(5):
        matrix = propagate(pool, gaussian(1, 4, 4, seed=seed), method).covariance_matrix
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert float(eigenvalues.min()) >= -1e-12 * float(eigenvalues.max())


def test_a_batch_broadcasts_and_is_each_of_its_elements() -> None:
    a, b = gaussian(2, 3, batch=(2,)), gaussian(3, batch=(2,), seed=1)
    y = propagate(lambda a, b: torch.maximum(a, b[:, None]), a, b, METHODS[0])
    for i in range(2):
        one = propagate(torch.maximum, a[i], b[i], METHODS[0])
        assert_close(y.mean[i], one.mean, atol=1e-13)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-13)
    with pytest.raises(cp.BatchDimensionError):
        propagate(lambda a, b: torch.maximum(a, b[0]), a, b, METHODS[0])


def test_certain_arguments_have_a_certain_maximum_and_finite_gradients() -> None:
    mean = torch.tensor([0.5, -1.0, 2.0, 0.5, -3.0, 2.0], dtype=torch.float64, requires_grad=True)
    values = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    x = cp.Gaussian.diagonal(mean, variance=values)
    y = propagate(lambda x: torch.maximum(x[:3], x[3:]), x, METHODS[0])
    assert_close(y.mean, torch.maximum(mean[:3], mean[3:]), rtol=0.0)
    assert not y.covariance_matrix.any()
    (y.mean.sum() + y.covariance_matrix.sum()).backward()
    assert bool(torch.isfinite(mean.grad).all())
    assert bool(torch.isfinite(values.grad).all())


def test_gradients_are_those_of_finite_differences() -> None:
    x = gaussian(6)
    factor = torch.linalg.cholesky(x.covariance_matrix)

    def moments(mean: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        given = cp.Gaussian(mean, factor @ factor.mT, validate_args=False)
        y = propagate(lambda x: x.reshape(3, 2).amax(0), given, METHODS[0])
        return y.mean, y.covariance_matrix

    inputs = [t.clone().requires_grad_() for t in (x.mean, factor)]
    assert torch.autograd.gradcheck(moments, inputs, fast_mode=True)


def smooth(side: int, base: float) -> cp.Gaussian:
    """Standard elements on a square grid whose correlation is base^distance."""
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    return cp.Gaussian(torch.zeros(1, side, side, dtype=torch.float64),
                       base ** torch.cdist(grid, grid))  # fmt: skip


MEASURED = [(2, 0.0), (2, 0.5), (2, 0.9), (3, 0.0), (3, 0.5), (3, 0.9)]


@pytest.mark.parametrize(("side", "base"), MEASURED)
def test_the_default_is_right_where_independence_is_wrong(side: int, base: float) -> None:
    """The figures of docs/operations.md: errors in units of the true standard deviation."""
    x = smooth(side, base)
    sample = x.sample(400_000, torch.Generator().manual_seed(0)).amax((-3, -2, -1))
    stddev, noise = float(sample.std()), 5 / math.sqrt(len(sample))
    default, independent = (propagate(nn.MaxPool2d(side), x, m) for m in (cp.Exact(), *METHODS[:1]))
    shift = [abs(float(y.mean) - float(sample.mean())) / stddev for y in (default, independent)]
    assert shift[0] <= 0.02 + noise
    assert abs(float(default.stddev) / stddev - 1) <= 0.07 + noise
    if base:
        assert shift[1] > 5 * shift[0]
        assert shift[1] > 0.15
        assert float(independent.stddev) < 0.9 * stddev
    else:
        assert_close(independent.mean, default.mean, atol=1e-12)
        assert_close(independent.stddev, default.stddev, atol=1e-10)
