"""Maxima: Clark's moments for a pair, sampling for windows, torch's shapes for everything."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close, normal_cdf, normal_pdf


def clark(means: list[float], stddevs: list[float], rho: float) -> tuple[float, float]:
    """Mean and variance of max(X1, X2) (Clark 1961), in high precision."""
    (m1, m2), (s1, s2) = means, stddevs
    spread = math.sqrt(max(s1 * s1 + s2 * s2 - 2 * rho * s1 * s2, 0.0))
    if spread < 1e-12:  # the larger mean always wins
        return max(m1, m2), s1 * s1
    alpha = (m1 - m2) / spread
    first, second, density = normal_cdf(alpha), normal_cdf(-alpha), normal_pdf(alpha)
    mean = m1 * first + m2 * second + spread * density
    square = (m1 * m1 + s1 * s1) * first + (m2 * m2 + s2 * s2) * second
    square += (m1 + m2) * spread * density
    return float(mean), float(square - mean * mean)


PAIRS: dict[str, tuple[list[float], list[float], float]] = {
    "plain": ([0.3, -0.2], [1.0, 0.5], 0.4),
    "negative": ([0.3, -0.2], [1.0, 0.5], -0.9),
    "equal means": ([0.7, 0.7], [1.0, 2.0], 0.0),
    "equal": ([0.7, 0.7], [1.0, 1.0], 0.5),
    "opposite": ([0.1, -0.4], [1.5, 1.5], -1.0),
    "comonotone": ([0.1, -0.4], [1.5, 0.5], 1.0),
    "identical but for the mean": ([0.1, -0.4], [1.0, 1.0], 1.0),
    "far apart": ([5.0, -5.0], [0.5, 0.5], 0.3),
    "one certain": ([0.2, 0.5], [1.0, 0.0], 0.0),
    "both certain": ([0.2, 0.5], [0.0, 0.0], 0.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_clarks_moments(name: str) -> None:
    means, stddevs, rho = PAIRS[name]
    s1, s2 = stddevs
    matrix = torch.tensor([[s1 * s1, rho * s1 * s2], [rho * s1 * s2, s2 * s2]]).double()
    x = cp.Gaussian(torch.tensor(means, dtype=torch.float64), matrix)
    mean, variance = clark(means, stddevs, float(matrix[0, 1]) / (s1 * s2 or 1.0))
    calls = (
        lambda x: torch.maximum(x[0], x[1]), lambda x: x[1].fmax(x[0]), lambda x: x.amax(),
        torch.max, lambda x: torch.max(x, dim=0).values, lambda x: x.max(0)[0],
        lambda x: torch.max(x[0], x[1]), lambda x: -torch.minimum(-x[0], -x[1]),
        lambda x: -(-x).amin(), lambda x: -torch.min(-x), lambda x: -(-x).min(0).values,
        lambda x: -torch.min(-x[0], -x[1]), lambda x: F.max_pool1d(x[None], 2)[0, 0],
    )  # fmt: skip
    for call in calls:
        y = propagate(call, x)
        assert y.mean.shape == ()
        assert abs(float(y.mean) - mean) <= 1e-9
        assert abs(float(y.variance) - variance) <= 1e-8


def test_the_larger_of_two_equal_tensors_is_either() -> None:
    x = gaussian(4)
    for call in (lambda x: torch.maximum(x, x), lambda x: torch.minimum(x, x.clone())):
        y = propagate(call, x)
        assert_close(y.mean, x.mean, rtol=0.0)
        assert_close(y.covariance_matrix, x.covariance_matrix, rtol=0.0)


def test_the_maximum_with_a_constant_is_a_shifted_relu() -> None:
    x, constant = gaussian(4), torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    expected = propagate(lambda x: constant + torch.relu(x - constant), x)
    for call in (torch.maximum, lambda x, c: torch.maximum(c, x), lambda x, c: torch.max(x, c)):
        y = propagate(call, x, constant)
        assert_close(y.mean, expected.mean, atol=1e-13)
        assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-12)
    lower = propagate(torch.minimum, x, constant)
    assert_close(lower.mean + expected.mean, x.mean + constant, atol=1e-13)


def test_covariances_of_maxima_agree_with_sampling() -> None:
    """Two maxima that share an element, and a third tensor beside them."""
    x = gaussian(3)

    def call(x: Any) -> Any:
        return torch.stack([torch.maximum(x[..., 0], x[..., 1]),
                            torch.maximum(x[..., 1], x[..., 2]), x[..., 0]], -1)  # fmt: skip

    y = propagate(call, x)
    sample = call(x.sample(400_000, torch.Generator().manual_seed(0)))
    deviation = sample - sample.mean(0)
    products = deviation[:, :, None] * deviation[:, None, :]
    error = products.std(0) / len(sample) ** 0.5
    assert bool(((y.covariance_matrix - products.mean(0)).abs() <= 5 * error).all())


def separated(shape: tuple[int, ...], stddev: float) -> cp.Gaussian:
    """Means at least 0.1 apart in an order without pattern: a few neighbours can overtake."""
    size = math.prod(shape)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).double()
    return cp.Gaussian.isotropic((order / 10 - size / 20).reshape(shape), stddev=stddev)


POOLS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.MaxPool1d(3), (1, 2, 9)),
    "1d stride padding": (nn.MaxPool1d(3, 2, 1), (1, 2, 8)),
    "1d ceil": (nn.MaxPool1d(3, 2, ceil_mode=True), (2, 8)),
    "2d": (nn.MaxPool2d(2), (1, 1, 4, 6)),
    "2d overlapping": (nn.MaxPool2d(3, 2, 1), (1, 1, 6, 6)),
    "2d tuple": (nn.MaxPool2d((2, 3), (1, 2), (0, 1)), (1, 5, 5)),
    "2d dilation": (nn.MaxPool2d(2, 1, 1, dilation=2), (1, 1, 5, 5)),
    "2d ceil padding": (nn.MaxPool2d(2, 2, 1, ceil_mode=True), (1, 1, 6, 5)),
    "3d": (nn.MaxPool3d(2), (1, 1, 2, 4, 4)),
    "3d stride": (nn.MaxPool3d(2, 1, 1), (1, 1, 2, 2, 3)),
    "adaptive 1d": (nn.AdaptiveMaxPool1d(2), (1, 2, 6)),
    "adaptive 2d": (nn.AdaptiveMaxPool2d((2, 1)), (1, 1, 4, 3)),
    "adaptive 2d kept": (nn.AdaptiveMaxPool2d((None, 2)), (1, 1, 3, 4)),
    "adaptive 1d uneven": (nn.AdaptiveMaxPool1d(3), (1, 2, 7)),
    "adaptive 1d wider": (nn.AdaptiveMaxPool1d(5), (2, 3)),
    "adaptive 2d uneven": (nn.AdaptiveMaxPool2d((2, 3)), (1, 1, 5, 4)),
    "adaptive 2d uneven in one": (nn.AdaptiveMaxPool2d((None, 3)), (1, 1, 2, 5)),
    "adaptive 3d uneven": (nn.AdaptiveMaxPool3d(2), (1, 1, 2, 3, 3)),
    "adaptive 3d": (nn.AdaptiveMaxPool3d(1), (1, 1, 2, 2, 2)),
}


@pytest.mark.parametrize("name", POOLS)
def test_max_pooling_agrees_with_sampling_where_windows_are_clear(name: str) -> None:
    pool, shape = POOLS[name]
    x = separated(shape, 0.02)
    y = propagate(pool, x)
    assert y.mean.shape == pool(x.mean).shape
    draws = x.sample(20_000, torch.Generator().manual_seed(0))
    channels = 1 + int(name.removeprefix("adaptive ")[0])  # and dimensions of space
    sample = pool(draws.reshape(len(draws), *shape[-channels:]))
    assert_moments(y, sample.reshape(len(draws), *y.mean.shape))


def assert_moments(y: cp.Gaussian, sample: Tensor) -> None:
    count = len(sample)
    stddev = sample.std(0)
    standard = (sample - sample.mean(0)) / stddev
    error = stddev * ((standard.pow(4).mean(0) - 1) / (4 * count)).sqrt()
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * stddev / count**0.5).all())
    assert bool(((y.stddev - stddev).abs() <= 5 * error).all())


@pytest.mark.parametrize("name", POOLS)
def test_certain_input_is_pooled_as_torch_pools_it(name: str) -> None:
    pool, shape = POOLS[name]
    generator = torch.Generator().manual_seed(2)
    for scale in (1.0, 1e4):
        mean = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
        y = propagate(pool, cp.Gaussian.isotropic(mean, stddev=0.0))
        assert_close(y.mean, pool(mean), atol=1e-12 * scale)
        assert not y.covariance_matrix.any()


@pytest.mark.parametrize("name", POOLS)
def test_each_maximum_of_certain_input_has_the_gradient_of_its_one_winner(name: str) -> None:
    """Beside padding too, whose distance is in standard deviations of what does not vary."""
    pool, shape = POOLS[name]
    mean = separated(shape, 0.0).mean.requires_grad_()
    variance = torch.zeros_like(mean).requires_grad_()
    y = propagate(pool, cp.Gaussian.diagonal(mean, variance=variance))
    (of_mean,) = torch.autograd.grad(y.mean.sum(), mean, retain_graph=True)
    (of_variance,) = torch.autograd.grad(y.variance.sum(), variance)
    (expected,) = torch.autograd.grad(pool(mean).sum(), mean)
    assert_close(of_mean, expected)
    assert_close(of_variance, expected)


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(1),
    "amax keepdim": lambda x: torch.amax(x, -1, keepdim=True),
    "amax of two": lambda x: torch.amax(x, (0, 2)),
    "amax of two keepdim": lambda x: torch.amax(x, dim=(0, -1), keepdim=True),
    "amax of all": torch.amax,
    "amin": lambda x: x.amin(dim=(1, 2)),
    "max": lambda x: x.max(),
    "max dim": lambda x: torch.max(x, 2, True).values,
    "max keyword": lambda x: x.max(dim=1, keepdim=True)[0],
    "min": torch.min,
    "min dim": lambda x: x.min(2, True).values,
    "min keyword": lambda x: torch.min(x, dim=1, keepdim=True)[0],
    "min of two": lambda x: torch.min(x[0], x[1]),
    "min of two, keyword": lambda x: x[0].min(other=x[1]),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_agree_with_sampling_where_one_is_clearly_largest(name: str) -> None:
    x = separated((2, 3, 4), 0.02)
    y = propagate(REDUCTIONS[name], x)
    assert y.mean.shape == REDUCTIONS[name](x.mean).shape
    draws = x.sample(10_000, torch.Generator().manual_seed(0))
    assert_moments(y, torch.func.vmap(REDUCTIONS[name])(draws))


@pytest.mark.parametrize(
    ("side", "mean_bound", "stddev_bound"), [(2, 0.005, 0.03), (3, 0.02, 0.085)]
)
def test_a_tournament_of_equals_has_its_measured_error(
    side: int, mean_bound: float, stddev_bound: float
) -> None:
    """The hardest case: independent elements of one mean. Relative to the standard deviation."""
    x = cp.Gaussian.isotropic(torch.zeros(1, side, side, dtype=torch.float64), stddev=1.0)
    y = propagate(nn.MaxPool2d(side), x)
    sample = torch.randn(400_000, side * side, generator=torch.Generator().manual_seed(0)).amax(-1)
    stddev = float(sample.std())
    assert abs(float(y.mean) - float(sample.mean())) <= mean_bound * stddev
    assert abs(float(y.stddev) - stddev) <= stddev_bound * stddev


def test_a_batch_of_poolings_is_each_of_them() -> None:
    x = gaussian(1, 4, 4, batch=(3,))
    y = propagate(nn.MaxPool2d(3, 2, 1), x)
    for i in range(3):
        one = propagate(nn.MaxPool2d(3, 2, 1), x[i])
        assert_close(y.mean[i], one.mean, atol=1e-12)
        assert_close(y.covariance_matrix[i], one.covariance_matrix, atol=1e-11)


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2, 1), nn.MaxPool2d(3, 1), nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(3)],
)
def test_overlapping_windows_have_a_positive_semi_definite_covariance(pool: nn.Module) -> None:
    for seed in range(5):
        matrix = propagate(pool, gaussian(1, 4, 4, seed=seed)).covariance_matrix
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert float(eigenvalues.min()) >= -1e-12 * float(eigenvalues.max())


def test_there_are_no_indices() -> None:
    image = gaussian(1, 1, 4, 5)
    for pool in (
        nn.AdaptiveMaxPool2d(1, True),
        nn.AdaptiveMaxPool2d(3, True),
    ):
        with pytest.raises(cp.UnsupportedOperation, match="indices"):
            propagate(pool, image)
    assert propagate(lambda x: x.max(-1), image).indices is None
    values, indices = propagate(nn.MaxPool2d(2, return_indices=True), image)
    assert indices is None
    assert_close(values.mean, propagate(nn.MaxPool2d(2), image).mean, rtol=0)


def test_a_maximum_over_the_batch_is_refused() -> None:
    for call in (lambda x: x.amax(0), torch.max, lambda x: x.max(0), lambda x: x.amax((0, 1))):
        with pytest.raises(cp.BatchDimensionError):
            propagate(call, gaussian(3, batch=(3,)))


def test_an_axis_is_a_dimension() -> None:
    x = gaussian(2, 4)
    for name in ("max", "min"):
        by_axis = propagate(lambda x, n=name: getattr(x, n)(axis=1).values, x)
        by_dim = propagate(lambda x, n=name: getattr(x, n)(dim=1).values, x)
        assert_close(by_axis.mean, by_dim.mean, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loser_that_varies_far_more_leaves_the_winner_its_variance(dtype: torch.dtype) -> None:
    mean = torch.tensor([-50.0, 0.0, 3.0, -60.0], dtype=dtype)
    x = cp.Gaussian.diagonal(mean, variance=torch.tensor([1.0, 1e-10, 1e-9, 2.0], dtype=dtype))
    expected = torch.tensor([1e-10, 1e-9], dtype=dtype)
    for function in (
        lambda x: torch.maximum(x[::2], x[1::2]),
        lambda x: torch.maximum(x[1::2], x[::2]),
        lambda x: -torch.minimum(-x[::2], -x[1::2]),
    ):
        assert_close(propagate(function, x).variance, expected, rtol=1e-5)


EXTREMES: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "maximum": lambda x: torch.maximum(x[..., :3], x[..., 3:]),
    "minimum": lambda x: torch.minimum(x[..., :3], x[..., 3:]),
    "pooling": lambda x: F.max_pool1d(x, 2),
    "adaptive pooling": lambda x: F.adaptive_max_pool1d(x, 4),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("method", [cp.GaussianLayers(), cp.Cumulants(), cp.AssumedDensity()])
def test_the_extreme_of_certain_elements_is_one_of_them_to_the_last_bit(
    method: Any, name: str
) -> None:
    """Not a + (b - a), which rounds, and is 0 beside a = -1e20."""
    mean = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean[0, 0] = -1e20
    x = cp.Gaussian.isotropic(mean, stddev=0.0, batch_dims=1)
    y = propagate(EXTREMES[name], x, method)
    assert torch.equal(y.mean, EXTREMES[name](mean))


def test_a_winner_keeps_its_mean_beside_a_loser_that_is_far_below() -> None:
    x = cp.Gaussian.isotropic(torch.tensor([-1e20, 0.3], dtype=torch.float64), stddev=0.1)
    level = torch.tensor(0.7, dtype=torch.float64)
    assert float(propagate(lambda x: torch.maximum(x[0], x[1]), x).mean) == 0.3
    assert float(propagate(lambda x: torch.maximum(x[0], level), x).mean) == 0.7
    assert float(propagate(lambda x: torch.minimum(-x[0], level).square(), x).mean) == 0.7**2


def test_the_gradient_of_a_maximum_of_equal_means_is_shared() -> None:
    mean = torch.tensor([0.4, 0.4], dtype=torch.float64, requires_grad=True)
    y = propagate(lambda x: x.amax(), cp.Gaussian.isotropic(mean, stddev=0.5))
    (gradient,) = torch.autograd.grad(y.mean, mean)
    assert_close(gradient, torch.full((2,), 0.5, dtype=torch.float64))


LOW, HIGH = torch.tensor([0.3, -1.0, 2.0]).double(), torch.tensor([0.9, -1.5, 2.5]).double()


@pytest.mark.parametrize(
    ("bounded", "low", "high"),
    [
        (lambda x: x.clamp(LOW, HIGH), LOW, HIGH),
        (lambda x: torch.clamp(x, min=LOW), LOW, None),
        (lambda x: torch.clip(x, max=HIGH), None, HIGH),
        (lambda x: x.clamp_max(HIGH), None, HIGH),
        (lambda x: x.clone().clamp_(LOW, HIGH), LOW, HIGH),
        (lambda x: torch.clamp(x, LOW, torch.tensor([2.75]).double()), LOW, 0 * LOW + 2.75),
    ],
)
def test_tensor_bounds_are_those_of_each_element(
    bounded: Callable[[Any], Any], low: Tensor | None, high: Tensor | None
) -> None:
    x = gaussian(3)
    y = propagate(bounded, x)
    for i in range(3):
        ends = [None if bound is None else float(bound[i]) for bound in (low, high)]
        alone = propagate(lambda x, i=i, ends=ends: x[i : i + 1].clamp(*ends), x)
        assert_close(y.mean[i : i + 1], alone.mean, atol=1e-13)
        assert_close(y.variance[i : i + 1], alone.variance, atol=1e-13)


def test_tensor_bounds_of_a_function_are_one_function_with_it() -> None:
    x = gaussian(3)
    y = propagate(lambda x: torch.relu(x).clamp(LOW, HIGH), x)
    sample = torch.relu(x.sample(200_000, torch.Generator().manual_seed(0))).clamp(LOW, HIGH)
    error = sample.std(0) / len(sample) ** 0.5
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * error + 1e-8).all())
    spread = (sample - sample.mean(0)).square()
    error = spread.std(0) / len(sample) ** 0.5
    assert bool(((y.variance - spread.mean(0)).abs() <= 5 * error + 1e-8).all())


def test_gaussian_bounds_are_maxima() -> None:
    x = gaussian(3)
    y = propagate(lambda x: torch.clamp(LOW, min=x, max=x.flip(0) + 1), x)
    z = propagate(lambda x: torch.minimum(torch.maximum(x, LOW), x.flip(0) + 1), x)
    assert_close(y.mean, z.mean, atol=1e-13)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-13)
