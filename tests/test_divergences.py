"""Distances of Gaussians against scipy's matrix square root and torch's own divergence."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import covprop as cp
from covprop.divergences import kl_divergence, wasserstein_distance
from tests.oracles import assert_close


def random(seed: int, *batch: int, size: int = 4, rank: int = 6) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn((*batch, size, rank), dtype=torch.float64, generator=generator) / 2
    mean = torch.randn((*batch, size), dtype=torch.float64, generator=generator)
    return cp.Gaussian(mean, factor @ factor.mT)


def by_scipy(x: cp.Gaussian, y: cp.Gaussian) -> float:
    c, d = x.covariance_matrix.numpy(), y.covariance_matrix.numpy()
    root = scipy.linalg.sqrtm(c)
    middle = scipy.linalg.sqrtm(root @ d @ root)
    shift = float((x.mean - y.mean).square().sum())
    return math.sqrt(shift + float(np.trace(c + d - 2 * np.real(middle))))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_wasserstein_agrees_with_scipys_matrix_square_root(seed: int) -> None:
    x, y = random(seed), random(seed + 100)
    assert_close(wasserstein_distance(x, y), number(by_scipy(x, y)))


@pytest.mark.parametrize("seed", range(5))
def test_kl_agrees_with_torch(seed: int) -> None:
    x, y = random(seed), random(seed + 100)
    ours = MultivariateNormal(x.mean, x.covariance_matrix)
    theirs = MultivariateNormal(y.mean, y.covariance_matrix)
    assert_close(kl_divergence(x, y), torch.distributions.kl_divergence(ours, theirs), rtol=1e-10)


def test_in_one_dimension_both_have_school_formulas() -> None:
    x = cp.Gaussian(number(1.0)[None], number(4.0)[None, None])
    y = cp.Gaussian(number(3.0)[None], number(1.0)[None, None])
    assert_close(wasserstein_distance(x, y), number(math.sqrt(2**2 + 1**2)))
    assert_close(kl_divergence(x, y), number(math.log(1 / 2) + (4 + 4) / 2 - 0.5))
    assert_close(kl_divergence(y, x), number(math.log(2) + (1 + 4) / 8 - 0.5))


def test_a_batch_is_its_elements() -> None:
    x, y = random(0, 2, 3), random(1, 2, 3)
    for measure in (wasserstein_distance, kl_divergence):
        together = measure(x, y)
        assert together.shape == (2, 3)
        apart = torch.stack([measure(x[i, j], y[i, j]) for i in range(2) for j in range(3)])
        assert_close(together.flatten(), apart)


def test_a_tiny_distance_is_not_lost_in_rounding() -> None:
    """A shift of 1e-9 and a scaling by 1 + 1e-9 of the deviations, against their first order."""
    x = random(3)
    scaled = cp.Gaussian(x.mean, x.covariance_matrix * (1 + 1e-9) ** 2)
    expected = 1e-9 * x.variance.sum().sqrt()
    assert_close(wasserstein_distance(x, scaled), expected, rtol=1e-3)  # rounding of 1 + 1e-9
    assert float(wasserstein_distance(x, x)) < 1e-14


def test_equal_gaussians_do_not_diverge() -> None:
    for x in (random(0), random(0, rank=2)):
        assert float(kl_divergence(x, x)) < 1e-12
        assert float(wasserstein_distance(x, x)) < 1e-7  # roots of eigenvalues that are rounding


def test_singular_covariances_have_a_wasserstein_distance() -> None:
    """Degenerate in other directions: for rank one, W^2 is a^2 + b^2 - 2 |a . b| (means equal)."""
    a, b = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    zero = torch.zeros(3, dtype=torch.float64)
    x, y = cp.Gaussian(zero, torch.outer(a, a)), cp.Gaussian(zero, torch.outer(b, b))
    expected = (a.square().sum() + b.square().sum() - 2 * (a @ b).abs()).sqrt()
    assert_close(wasserstein_distance(x, y), expected)
    point = cp.Gaussian(b, torch.zeros(3, 3, dtype=torch.float64))
    assert_close(wasserstein_distance(x, point), (a.square().sum() + b.square().sum()).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_of_one_support_is_that_on_the_support(dtype: torch.dtype) -> None:
    """Both live on the image of one (5, 2) matrix; in its coordinates they are regular."""
    basis = torch.linalg.qr(random(7, 5, size=2).mean).Q.to(dtype)
    x, y = random(0, size=2).to(dtype), random(1, size=2).to(dtype)
    wide = [
        cp.Gaussian(g.mean @ basis.mT, basis @ g.covariance_matrix @ basis.mT, validate_args=False)
        for g in (x, y)
    ]
    expected = kl_divergence(x, y)
    assert_close(kl_divergence(*wide), expected, rtol=1e3 * torch.finfo(dtype).eps)


def test_kl_of_different_supports_is_infinite() -> None:
    regular, flat = random(0), random(1, rank=2)
    elsewhere, shifted = random(2, rank=2), cp.Gaussian(flat.mean + 1, flat.covariance_matrix)
    for pair in ((regular, flat), (flat, regular), (flat, elsewhere), (flat, shifted)):
        assert float(kl_divergence(*pair)) == math.inf


def test_points_coincide_or_not() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    none = torch.zeros(2, 2, dtype=torch.float64)
    assert float(kl_divergence(cp.Gaussian(one, none), cp.Gaussian(one, none))) == 0
    assert float(kl_divergence(cp.Gaussian(one, none), cp.Gaussian(zero, none))) == math.inf


def test_shapes_must_agree() -> None:
    for measure in (wasserstein_distance, kl_divergence):
        with pytest.raises(ValueError, match="of one shape"):
            measure(random(0, size=3), random(0, size=4))
