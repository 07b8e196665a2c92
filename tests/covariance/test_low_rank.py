"""A few directions of noise: exact, and without a matrix of all pairs wherever that is possible."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal

import covprop as cp
from covprop.covariance import Dense, LinearMap, LowRank
from tests.gaussians import written
from tests.largest import Largest
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64


def gaussian(
    *event: int, rank: int = 2, alone: bool = False, batch: tuple[int, ...] = (), dtype: Any = D
) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn((*batch, *event), dtype=dtype, generator=generator)
    factor = torch.randn((*batch, *event, rank), dtype=dtype, generator=generator) / 3
    variance = torch.rand((*batch, *event), dtype=dtype, generator=generator) / 4
    return cp.Gaussian.low_rank(
        mean, factor, variance=None if alone else variance, batch_dims=len(batch)
    )


every_kind = pytest.mark.parametrize("alone", [False, True])


@every_kind
def test_a_low_rank_gaussian_is_factor_times_factor_and_variances(alone: bool) -> None:
    x = gaussian(2, 3, alone=alone, batch=(4,))
    assert isinstance(x.covariance, LowRank)
    factor = x.covariance.factor
    expected = torch.einsum("bik,bjk->bij", factor, factor)
    if not alone:
        expected = expected + torch.diag_embed(x.covariance.values)
    assert_close(x.covariance_matrix, expected)
    assert_close(x.variance, expected.diagonal(dim1=-2, dim2=-1).reshape(4, 2, 3))
    assert x.batch_shape == (4,)
    assert x.event_shape == (2, 3)


def test_what_does_not_fit_the_mean_is_refused() -> None:
    mean = torch.zeros(3)
    with pytest.raises(cp.InvalidGaussian, match="shape of the mean"):
        cp.Gaussian.low_rank(mean, torch.zeros(2, 1))
    with pytest.raises(cp.InvalidGaussian, match="variances have the shape"):
        cp.Gaussian.low_rank(mean, torch.zeros(3, 1), variance=torch.zeros(2))
    with pytest.raises(cp.InvalidGaussian, match="negative variance"):
        cp.Gaussian.low_rank(mean, torch.ones(3, 1), variance=-torch.ones(3) / 2)
    with pytest.raises(cp.InvalidGaussian, match="dtype"):
        cp.Gaussian.low_rank(mean, torch.zeros(3, 1, dtype=D))
    with pytest.raises(cp.InvalidGaussian, match="NaN"):
        cp.Gaussian.low_rank(mean, torch.full((3, 1), torch.nan))


def test_torch_distributions_come_and_go_in_their_structure() -> None:
    x = gaussian(5, batch=(2,))
    there = x.to_torch()
    assert isinstance(there, LowRankMultivariateNormal)
    assert_close(there.covariance_matrix, x.covariance_matrix)
    back = cp.Gaussian.from_torch(there)
    assert isinstance(back.covariance, LowRank)
    assert_close(back.covariance_matrix, x.covariance_matrix)
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        gaussian(5, alone=True).to_torch()


def test_no_directions_at_all_are_independent_noise_for_torch() -> None:
    mean, variance = torch.zeros(2, 3, dtype=D), torch.full((2, 3), 0.25, dtype=D)
    there = cp.Gaussian.low_rank(
        mean, torch.zeros(2, 3, 0, dtype=D), variance=variance, batch_dims=1
    ).to_torch()
    assert (there.batch_shape, there.event_shape) == ((2,), (3,))
    assert_close(there.variance, variance)
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        cp.Gaussian.low_rank(mean, torch.zeros(2, 3, 0, dtype=D), batch_dims=1).to_torch()


@every_kind
def test_marginal_condition_and_to_keep_the_structure(alone: bool) -> None:
    x = gaussian(6, alone=alone)
    some = x.marginal([4, 1])
    assert isinstance(some.covariance, LowRank)
    assert_close(some.covariance_matrix, x.covariance_matrix[[4, 1]][:, [4, 1]])
    value = torch.tensor([0.3, -0.2], dtype=D)
    left = x.condition([0, 3], value, variance=0.1)
    expected = written(x).condition([0, 3], value, variance=0.1)
    assert isinstance(left.covariance, LowRank)
    assert_close(left.mean, expected.mean)
    assert_close(left.covariance_matrix, expected.covariance_matrix)
    assert x.to(torch.float32).covariance.dtype == torch.float32


@every_kind
def test_samples_have_the_covariance(alone: bool) -> None:
    x, count = gaussian(4, alone=alone), 40_000
    draws = x.sample(count, torch.Generator().manual_seed(2)) - x.mean
    got, matrix = draws.mT @ draws / count, x.covariance_matrix
    spread = (x.variance[:, None] * x.variance + matrix.square()) / count
    assert bool(((got - matrix).abs() <= 5 * spread.sqrt()).all())


def test_a_factor_alone_stays_one_through_linear_maps() -> None:
    weight = torch.randn(9, 6, dtype=D, generator=torch.Generator().manual_seed(4))
    linear = LinearMap(lambda t: t @ weight.T, torch.Size((6,)))
    alone = gaussian(6, alone=True).covariance
    assert isinstance(alone.push(linear), LowRank)
    assert isinstance(gaussian(6).covariance.push(linear), Dense)
    narrow = LinearMap(lambda t: t @ weight[:2].T, torch.Size((6,)))
    assert isinstance(alone.push(narrow), Dense)  # as many numbers, and simpler
    assert isinstance(alone.take(torch.tensor([0, 0])), LowRank)
    assert isinstance(gaussian(6).covariance.take(torch.tensor([0, 0])), Dense)


METHODS = [
    cp.Exact(),
    cp.Series(order=4),
    cp.Wu2019(),
    cp.AssumedDensity(),
    cp.Linearized(),
    cp.PiecewiseLinear(),
]


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_methods_give_what_they_give_for_the_matrix(
    method: Any, alone: bool, batch: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(D)
    x = gaussian(5, alone=alone, batch=batch)
    y, z = propagate(model, x, method), propagate(model, written(x), method)
    assert_close(y.mean, z.mean)
    assert_close(y.covariance_matrix, z.covariance_matrix)


@every_kind
@pytest.mark.parametrize("options", [{}, {"antithetic": True}, {"sobol": True}], ids=repr)
def test_monte_carlo_draws_directions(options: dict[str, bool], alone: bool) -> None:
    x = gaussian(4, alone=alone)
    generator = torch.Generator().manual_seed(7)
    y = propagate(torch.square, x, cp.MonteCarlo(40_000, generator, **options))
    z = propagate(torch.square, x)
    assert bool(((y.mean - z.mean).abs() <= 5 * y.mean_stderr + 1e-12).all())
    error = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((error <= 5 * y.covariance_stderr).all())


@every_kind
def test_unscented_points_have_the_moments(alone: bool) -> None:
    x = gaussian(4, rank=2, alone=alone)
    y = propagate(torch.square, x, cp.Unscented())
    assert_close(y.mean, propagate(torch.square, x).mean)  # exact for quadratic functions
    z = propagate(lambda t: 2 * t, x, cp.Unscented())
    assert_close(z.covariance_matrix, 4 * x.covariance_matrix)


@torch.no_grad()
@pytest.mark.parametrize("method", [cp.Exact(), cp.Linearized(), cp.MonteCarlo(10)], ids=str)
def test_no_matrix_of_all_pairs_is_made_where_none_is_needed(method: Any) -> None:
    torch.manual_seed(0)
    side, rank = 100, 3
    model = nn.Sequential(
        nn.Conv2d(3, 2, 3, padding=1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5000, 4)
    )
    x = gaussian(3, side, side, rank=rank, alone=True, batch=(1,), dtype=torch.float32)
    with Largest() as largest:
        y = propagate(model, x, method)
    assert y.covariance_matrix.shape == (1, 4, 4)
    assert largest.nbytes < 100 * 3 * side**2 * 4  # a matrix would have 30,000 times as many


@torch.no_grad()
def test_what_would_become_a_matrix_too_large_is_refused_before() -> None:
    mean = torch.zeros(1, 400_000)
    x = cp.Gaussian.low_rank(mean, torch.ones(1, 400_000, 1), batch_dims=1)
    with pytest.raises(cp.TooLarge):
        propagate(torch.relu, x)


def test_gradients_reach_factor_and_variances() -> None:
    mean, factor = torch.zeros(3, dtype=D), torch.rand(3, 2, dtype=D)
    variance = torch.rand(3, dtype=D)

    def moments(mean: Tensor, factor: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        y = propagate(torch.relu, cp.Gaussian.low_rank(mean, factor, variance=variance))
        return y.mean, y.covariance_matrix

    inputs = tuple(t.requires_grad_() for t in (mean, factor, variance))
    assert torch.autograd.gradcheck(moments, inputs)


def test_more_batch_dimensions_than_there_are_and_a_singular_one_for_torch_are_refused() -> None:
    mean, factor = torch.zeros(6, dtype=D), torch.ones(6, 2, dtype=D)
    for dims in (-1, 2):
        with pytest.raises(cp.InvalidGaussian, match="batch dimensions"):
            cp.Gaussian.low_rank(mean, factor, batch_dims=dims)
        with pytest.raises(cp.InvalidGaussian, match="batch dimensions"):
            cp.Gaussian.constant(mean, batch_dims=dims)
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        cp.Gaussian.low_rank(mean, factor, variance=torch.zeros_like(mean)).to_torch()
