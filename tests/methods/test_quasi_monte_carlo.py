"""Fixed points that have the mean and covariance of the input."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.methods.quasi_monte_carlo import REPLICATES, standard_points
from covprop.methods.root import Root
from tests.gaussians import covariance_matrix, gaussian, numbers

EPSILON = torch.finfo(torch.float64).eps


@pytest.mark.parametrize("width", [1, 2, 5, 8, 9, 40, 60])
@pytest.mark.parametrize("seed", [0, 7])
def test_points_have_mean_zero_and_covariance_one(width: int, seed: int) -> None:
    points, weights = standard_points(width, 16 * width, seed)
    assert points.shape == (32 * width, width)
    assert bool((weights > 0).all())
    assert abs(float(weights.sum()) - 1) <= len(weights) * EPSILON
    rounding = len(points) * EPSILON * float(points.abs().max()) ** 2
    mean = weights @ points
    covariance = points.mT @ (weights[:, None] * points)
    assert float(mean.abs().max()) <= rounding
    assert float((covariance - torch.eye(width, dtype=torch.float64)).abs().max()) <= rounding


@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_wider_half_covers_the_tails(width: int) -> None:
    """Without it, 512 normal points reach 3.4 or so along an axis."""
    points, weights = standard_points(width, 512, 0)
    far = points[:, 0].abs() > 4
    assert int(far.sum()) >= 2
    probability = math.erfc(4 / math.sqrt(2))
    assert 0.1 * probability < float(weights[far].sum()) < 10 * probability


@pytest.mark.parametrize("covariance", ["full", "singular", "diagonal"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_linear_networks_are_exact(covariance: str, batch: tuple[int, ...]) -> None:
    size = 6
    mean = numbers(*batch, size, seed=1)
    if covariance == "diagonal":
        x = cp.Gaussian.diagonal(
            mean, variance=numbers(*batch, size, seed=2).square(), batch_dims=len(batch)
        )
    else:
        rank = size if covariance == "full" else 2
        factor = numbers(*batch, size, rank, seed=3)
        x = cp.Gaussian(mean, factor @ factor.mT)
    weight = numbers(4, size, seed=4)
    y = cp.propagate(lambda t: t @ weight.mT + 1, x, cp.QuasiMonteCarlo(512))
    scale = float(weight.abs().sum(-1).max() ** 2 * x.covariance_matrix.abs().max())
    # A singular covariance is known to its roundings, whose roots are the columns that are lost.
    bound = 100 * EPSILON * scale * (1 if covariance != "singular" else size)
    assert float((y.mean - (mean @ weight.mT + 1)).abs().max()) <= bound + 100 * EPSILON * scale
    expected = weight @ x.covariance_matrix @ weight.mT
    assert float((y.covariance_matrix - expected).abs().max()) <= bound
    assert y.covariance_stderr is not None
    assert float(y.covariance_stderr.max()) <= bound


MOMENTS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "relu": (torch.relu, 1 / math.sqrt(2 * math.pi), 0.5 - 1 / (2 * math.pi)),
    "exp": (torch.exp, math.exp(0.5), math.exp(2) - math.exp(1)),
    "square": (torch.square, 1.0, 2.0),
    "sin": (torch.sin, 0.0, (1 - math.exp(-2)) / 2),
    "heaviside": (lambda x: (x > 0).double(), 0.5, 0.25),
}


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("points", [256, 4096])
def test_moments_are_right_within_their_standard_errors(name: str, points: int) -> None:
    """Of functions of one of six directions; seven degrees of freedom: 5.4 is one in a thousand."""
    function, mean, variance = MOMENTS[name]
    turn = torch.linalg.qr(numbers(6, 6, seed=5)).Q

    def model(x: Tensor) -> Tensor:
        return function((x @ turn)[..., :1])

    x = cp.Gaussian.isotropic(torch.zeros(6, dtype=torch.float64), stddev=1.0)
    y = cp.propagate(model, x, cp.QuasiMonteCarlo(points, seed=3))
    assert y.mean_stderr is not None
    assert y.covariance_stderr is not None
    rounding = 1e3 * EPSILON
    assert abs(float(y.mean) - mean) <= 5.4 * float(y.mean_stderr) + rounding
    assert abs(float(y.variance) - variance) <= 5.4 * float(y.covariance_stderr) + rounding
    assert float(y.covariance_stderr) < (0.3 if points == 256 else 0.05) * variance
    assert y.samples == points


@pytest.mark.parametrize(("size", "share"), [(1, 0.03), (5, 0.2), (8, 0.5)])
def test_rare_events_count(size: int, share: float) -> None:
    """Nearly all of the variance comes from 3e-5 of the points of a plain sample."""

    def model(x: Tensor) -> Tensor:
        return x[..., :1] + 1e3 * torch.relu(x[..., :1] - 4)

    x = cp.Gaussian.isotropic(torch.zeros(size, dtype=torch.float64), stddev=1.0)
    density, tail = math.exp(-8) / math.sqrt(2 * math.pi), math.erfc(4 / math.sqrt(2)) / 2
    first, second = density - 4 * tail, 17 * tail - 4 * density
    variance = 1 + 1e6 * (second - first**2) + 2e3 * tail
    y = cp.propagate(model, x, cp.QuasiMonteCarlo(2**15))
    assert y.covariance_stderr is not None
    assert float(y.covariance_stderr) < share * variance
    assert abs(float(y.variance) - variance) <= 5.4 * float(y.covariance_stderr)


def test_a_batch_is_its_elements() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = gaussian(4, batch=(5,))
    y = cp.propagate(model, x, cp.QuasiMonteCarlo(256))
    for i, element in enumerate(x):
        alone = cp.propagate(model, element, cp.QuasiMonteCarlo(256))
        torch.testing.assert_close(y[i].mean, alone.mean)
        torch.testing.assert_close(y[i].covariance_matrix, alone.covariance_matrix)


def test_two_inputs_are_independent() -> None:
    x, w = gaussian(3), gaussian(3, seed=4)
    y = cp.propagate(lambda a, b: torch.cat([a, b], -1), x, w, cp.QuasiMonteCarlo(256))
    expected = torch.block_diag(x.covariance_matrix, w.covariance_matrix)
    assert float((y.covariance_matrix - expected).abs().max()) <= 1e3 * EPSILON * 10


def test_numbers_are_those_of_the_seed_and_leave_the_generator_alone() -> None:
    x = gaussian(4)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = cp.propagate(torch.relu, x, cp.QuasiMonteCarlo(64))
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(5)
    again = cp.propagate(torch.relu, x, cp.QuasiMonteCarlo(64))
    other = cp.propagate(torch.relu, x, cp.QuasiMonteCarlo(64, seed=1))
    assert torch.equal(first.covariance_matrix, again.covariance_matrix)
    assert not torch.equal(first.covariance_matrix, other.covariance_matrix)


def test_skewed_inputs_keep_their_moments() -> None:
    x = cp.Skewed.gamma(torch.full((3,), 2.0, dtype=torch.float64), stddev=1.0)
    y = cp.propagate(lambda t: t, x, cp.QuasiMonteCarlo(1024))
    torch.testing.assert_close(y.mean, x.mean)
    torch.testing.assert_close(y.variance, x.variance)
    cubes = cp.propagate(lambda t: (t - x.mean) ** 3, x, cp.QuasiMonteCarlo(2**15))
    assert cubes.mean_stderr is not None
    off = (cubes.mean - x.skewness * x.variance**1.5).abs()
    # Each set is given mean and variance again, a bias of the size of a standard error.
    assert bool((off <= 8 * cubes.mean_stderr).all())


def test_dropout_is_averaged() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3)).double().requires_grad_(False)
    x = gaussian(4)
    y = cp.propagate(model, x, cp.QuasiMonteCarlo(2**14))
    exact = cp.propagate(model, x, cp.Exact())
    assert y.covariance_stderr is not None
    off = (y.covariance_matrix - exact.covariance_matrix).abs() / y.covariance_stderr
    assert float(off.max()) < 6


def test_the_rank_is_found_whatever_the_units() -> None:
    scale = torch.tensor([1e-6, 1.0, 1e6, 1e3, 1e-3], dtype=torch.float64)
    full = covariance_matrix(size=5) * scale[:, None] * scale
    root = Root.of_full_rank(cp.Gaussian(scale, full))
    assert root.width == 5
    columns = root.structure.columns(0, 5)
    torch.testing.assert_close(columns @ columns.mT / scale[:, None] / scale,
                               covariance_matrix(size=5))  # fmt: skip
    factor = numbers(5, 2) * scale[:, None]
    assert Root.of_full_rank(cp.Gaussian(scale, factor @ factor.mT)).width == 2
    still = torch.tensor([0.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    assert (
        Root.of_full_rank(cp.Gaussian.diagonal(torch.zeros_like(still), variance=still)).width == 2
    )


@pytest.mark.parametrize("options", [{"points": 8}, {"points": 100.0}, {"seed": 0.5}])
def test_numbers_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is a whole number"):
        cp.QuasiMonteCarlo(**options)  # type: ignore[arg-type]


def test_points_are_rounded_up_to_equal_sets() -> None:
    y = cp.propagate(torch.relu, gaussian(2), cp.QuasiMonteCarlo(2 * REPLICATES + 1))
    assert y.samples == 4 * REPLICATES


SKEWNESSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "linear": (lambda x: 2 * x, 0.0),
    "square": (torch.square, 8**0.5),
    "exp": (lambda x: torch.exp(x / 2), (math.exp(0.25) + 2) * math.sqrt(math.expm1(0.25))),
}


@pytest.mark.parametrize("name", SKEWNESSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_results_have_the_skewness_of_the_points(
    name: str, dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    function, expected = SKEWNESSES[name]
    x = cp.Gaussian.isotropic(
        torch.zeros(*batch, 3, dtype=dtype), stddev=1.0, batch_dims=len(batch)
    )
    y = cp.propagate(lambda t: function(t[..., :1]), x, cp.QuasiMonteCarlo(16384))
    assert y.skewness is not None
    assert y.skewness.shape == y.mean.shape
    assert y.skewness.dtype == dtype
    assert float((y.skewness - expected).abs().max()) < 0.03 * (1 + expected)


@pytest.mark.parametrize("method", [cp.QuasiMonteCarlo, cp.MonteCarlo])
def test_errors_of_samples_follow_from_their_standard_errors(method: Callable[..., Any]) -> None:
    """Nineteen of twenty are within; of 100, fewer than 85 are one time in a thousand."""
    mean, stddev = 1 / math.sqrt(2 * math.pi), math.sqrt(0.5 - 1 / (2 * math.pi))
    x = cp.Gaussian.isotropic(torch.zeros(10, dtype=torch.float64), stddev=1.0)
    turn = torch.linalg.qr(numbers(10, 10, seed=5)).Q
    within = 0
    for seed in range(50):
        given = seed if method is cp.QuasiMonteCarlo else torch.Generator().manual_seed(seed)
        y = cp.propagate(lambda t: torch.relu(t @ turn[0])[..., None], x, method(1536, given))
        assert y.error is not None
        within += float((y.mean - mean).abs()) <= float(y.error.mean) * stddev
        within += float((y.stddev / stddev - 1).abs()) <= float(y.error.stddev)
    assert within >= 85
    assert "estimated error" in str(y)
    copied = pickle.loads(pickle.dumps(y))
    assert torch.equal(copied.error.stddev, y.error.stddev)


def test_heavy_tails_are_found() -> None:
    """Of exp(4 z), a few of the points have all of the variance, and miss nearly all of it."""
    unit = torch.ones(50, dtype=torch.float64) / 50**0.5
    x = cp.Gaussian.isotropic(torch.zeros_like(unit), stddev=1.0)
    for power, heavy in ((4.0, True), (0.2, False)):
        y = cp.propagate(
            lambda z, power=power: torch.exp(power * (z @ unit))[..., None], x, cp.QuasiMonteCarlo()
        )
        assert y.error is not None
        assert (y.error.largest == math.inf) == heavy
        assert ("a few have most of a variance" in str(y.error)) == heavy
    assert float(y.stddev / math.sqrt(math.expm1(0.04) * math.exp(0.04)) - 1) < y.error.largest
