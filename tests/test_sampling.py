"""Samples of a Gaussian: their moments, their support and where their randomness comes from."""

import pytest
import torch

import covprop as cp
from tests.gaussians import numbers
from tests.oracles import assert_close
from tests.test_gaussian import matrix

COUNT = 100_000
SAMPLED = {
    "dense": cp.Gaussian(numbers(2, 3), matrix(2, 3)),
    "an event of two dimensions": cp.Gaussian(numbers(2, 2), matrix(4)),
    "diagonal": cp.Gaussian.diagonal(numbers(2, 3), variance=numbers(2, 3).square(), batch_dims=1),
    "rank one": cp.Gaussian(numbers(3), matrix(3, rank=1)),
    "one element constant": cp.Gaussian(numbers(3), torch.diag(torch.tensor([1.0, 0, 2])).double()),
    "certain": cp.Gaussian.isotropic(numbers(3), stddev=0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_have_the_moments(name: str) -> None:
    x = SAMPLED[name]
    draws = x.sample(COUNT, torch.Generator().manual_seed(5))
    assert draws.shape == (COUNT, *x.mean.shape)
    assert draws.dtype == x.dtype
    n = x.event_shape.numel()
    flat = (draws - x.mean).reshape(COUNT, -1, n)
    for b, covariance in enumerate(x.covariance_matrix.reshape(-1, n, n)):
        variance = covariance.diagonal()
        rounding = 1e-14
        bound = 5 * (variance / COUNT).sqrt() + rounding
        assert bool((flat[:, b].mean(0).abs() <= bound).all())
        got = flat[:, b].mT @ flat[:, b] / COUNT
        error = ((variance[:, None] * variance + covariance.square()) / COUNT).sqrt()
        assert bool(((got - covariance).abs() <= 5 * error + rounding).all())


def test_samples_of_a_singular_gaussian_stay_in_its_support() -> None:
    x = cp.Gaussian(torch.zeros(3).double(), matrix(3, rank=1))
    draws = x.sample(100, torch.Generator().manual_seed(0))
    direction = x.covariance_matrix[0] / x.covariance_matrix[0].norm()
    outside = draws - (draws @ direction)[:, None] * direction
    assert_close(outside, torch.zeros_like(outside), atol=1e-7)  # square root of rounding
    assert float(draws.std()) > 0.1


@pytest.mark.parametrize("name", SAMPLED)
def test_a_generator_reproduces_samples_and_the_global_one_is_the_default(name: str) -> None:
    x = SAMPLED[name]
    first, second = (x.sample(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    x.sample(5, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    third = x.sample(5)
    torch.manual_seed(11)
    assert torch.equal(third, x.sample(5))
