"""The public value: its constructors, properties, samples and conversions."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Beta,
    Distribution,
    Independent,
    Laplace,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
)

import covprop as cp
from covprop.covariance import Dense, Diagonal, LowRank
from tests.gaussians import numbers
from tests.oracles import assert_close


def matrix(*shape: int, rank: int | None = None) -> Tensor:
    """A covariance (*batch, n, n)."""
    factor = numbers(*shape, rank or shape[-1], seed=2)
    product = factor @ factor.mT
    return (product + product.mT) / 2


def test_the_parts_are_those_that_were_given() -> None:
    mean, covariance = numbers(2, 3, 4), matrix(2, 12)
    x = cp.Gaussian(mean, covariance)
    assert x.mean is mean
    assert x.covariance_matrix is covariance
    assert isinstance(x.covariance, Dense)
    assert x.batch_shape == (2,)
    assert x.event_shape == (3, 4)
    assert (x.dtype, x.device) == (torch.float64, torch.device("cpu"))
    assert x.method is None


def test_variance_stddev_and_correlation_are_those_of_the_matrix() -> None:
    x = cp.Gaussian(numbers(2, 3, 4), matrix(2, 12))
    for b in range(2):
        variance = torch.diag(x.covariance_matrix[b])
        assert_close(x.variance[b], variance.reshape(3, 4), rtol=0.0)
        assert_close(x.stddev[b], variance.reshape(3, 4).sqrt(), rtol=1e-15)
        scaled = torch.diag(1 / variance.sqrt())
        expected = scaled @ x.covariance_matrix[b] @ scaled
        assert_close(x.correlation_matrix[b], expected, atol=1e-15)
        assert torch.equal(torch.diag(x.correlation_matrix[b]), torch.ones(12).double())


def test_what_does_not_vary_is_correlated_with_itself_alone() -> None:
    x = cp.Gaussian(torch.zeros(3), torch.tensor([[4.0, 0.0, 2.0], [0.0] * 3, [2.0, 0.0, 1.0]]))
    expected = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    assert_close(x.correlation_matrix, expected, rtol=0.0)
    assert_close(x.stddev, torch.tensor([2.0, 0.0, 1.0]), rtol=0.0)


def test_a_scalar_event_is_a_gaussian() -> None:
    one = cp.Gaussian(torch.tensor(1.0), torch.tensor([[4.0]]))
    assert (one.batch_shape, one.event_shape) == ((), ())
    assert_close(one.stddev, torch.tensor(2.0), rtol=0.0)
    many = cp.Gaussian(torch.ones(5), torch.full((5, 1, 1), 4.0))
    assert (many.batch_shape, many.event_shape) == ((5,), ())
    assert_close(many.stddev, torch.full((5,), 2.0), rtol=0.0)


def test_isotropic_has_one_standard_deviation() -> None:
    x = cp.Gaussian.isotropic(numbers(2, 3), 0.5)
    assert (x.batch_shape, x.event_shape) == ((), (2, 3))
    assert_close(x.covariance_matrix, 0.25 * torch.eye(6).double(), rtol=0.0)
    each = cp.Gaussian.isotropic(numbers(2, 3), torch.tensor([0.5, 2.0]), batch_dims=1)
    assert (each.batch_shape, each.event_shape) == ((2,), (3,))
    expected = torch.stack([0.25 * torch.eye(3), 4 * torch.eye(3)]).double()
    assert_close(each.covariance_matrix, expected, rtol=0.0)
    whole = cp.Gaussian.isotropic(numbers(2, 3), 0.5, batch_dims=2)
    assert (whole.batch_shape, whole.event_shape) == ((2, 3), ())


def test_diagonal_has_the_variances_given() -> None:
    mean, variance = numbers(2, 3, 4), numbers(2, 3, 4).square()
    x = cp.Gaussian.diagonal(mean, variance, batch_dims=1)
    assert isinstance(x.covariance, Diagonal)
    assert (x.batch_shape, x.event_shape) == ((2,), (3, 4))
    assert_close(x.variance, variance, rtol=0.0)
    assert_close(x.covariance_matrix, torch.diag_embed(variance.flatten(1)), rtol=0.0)
    assert_close(x.correlation_matrix, torch.eye(12).double().expand(2, 12, 12), rtol=0.0)


def test_gaussians_come_from_torch_and_go_back() -> None:
    mean, covariance = numbers(2, 3), matrix(2, 3) + torch.eye(3).double()
    dense = MultivariateNormal(mean, covariance)
    factor, noise = numbers(2, 3, 1), numbers(2, 3).square()
    low_rank = LowRankMultivariateNormal(mean, factor, noise)
    independent = Independent(Normal(numbers(2, 3, 4), numbers(2, 3, 4).exp()), 2)
    expected = {
        dense: covariance,
        low_rank: factor @ factor.mT + torch.diag_embed(noise),
        independent: torch.diag_embed(independent.variance.flatten(1)),
    }
    for distribution, full in expected.items():
        x = cp.Gaussian.from_torch(distribution)
        assert (x.batch_shape, x.event_shape) == (
            distribution.batch_shape,
            distribution.event_shape,
        )
        assert_close(x.mean, distribution.mean, rtol=0.0)
        assert_close(x.covariance_matrix, full, rtol=1e-14)
        back = x.to_torch()
        assert (back.batch_shape, back.event_shape) == (x.batch_shape, x.event_shape)
        value = distribution.sample()
        assert_close(back.log_prob(value), distribution.log_prob(value), rtol=1e-9)


def test_the_event_of_a_dense_torch_distribution_is_flat() -> None:
    x = cp.Gaussian(numbers(2, 3, 4), matrix(2, 12) + torch.eye(12).double())
    assert x.to_torch().event_shape == (12,)
    assert_close(x.to_torch().mean, x.mean.flatten(1), rtol=0.0)


@pytest.mark.parametrize("checked", [True, False])  # torch.compile turns torch's own checks off
def test_a_singular_gaussian_has_no_torch_distribution(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", checked)
    with pytest.raises(cp.InvalidGaussian, match=r"positive definite .* singular"):
        cp.Gaussian(numbers(3), matrix(3, rank=1)).to_torch()
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        cp.Gaussian.isotropic(numbers(3), 0.0).to_torch()
    with pytest.raises(cp.InvalidGaussian, match="singular"):
        cp.Gaussian(numbers(3), LowRank(numbers(3, 1), torch.zeros(3).double())).to_torch()


@pytest.mark.parametrize(
    "distribution",
    [
        Laplace(0.0, 1.0),
        Normal(torch.zeros(3), torch.ones(3)),
        Independent(Beta(torch.ones(3), 2.0), 1),
    ],
    ids=lambda distribution: type(distribution).__name__,
)
def test_other_distributions_are_refused(distribution: torch.distributions.Distribution) -> None:
    with pytest.raises(TypeError, match="is not one of MultivariateNormal"):
        cp.Gaussian.from_torch(distribution)


@pytest.mark.parametrize("structure", [Dense, Diagonal])
def test_to_changes_mean_and_covariance_together(structure: type) -> None:
    values = matrix(2, 3) if structure is Dense else numbers(2, 3).square()
    x = cp.Gaussian(numbers(2, 3), structure(values))
    y = x.to(torch.float32)
    assert (y.dtype, y.mean.dtype, y.covariance_matrix.dtype) == (torch.float32,) * 3
    assert type(y.covariance) is type(x.covariance)
    assert_close(y.mean, x.mean.float(), rtol=0.0)
    assert_close(y.covariance_matrix, x.covariance_matrix.float(), rtol=0.0)
    away = x.to("meta")
    assert away.device == away.covariance.device == torch.device("meta")
    assert x.dtype == torch.float64


def test_the_batch_is_indexed_like_a_tensor() -> None:
    for x in (
        cp.Gaussian(numbers(3, 2, 4), matrix(3, 2, 4)),
        cp.Gaussian.diagonal(numbers(3, 2, 4), numbers(3, 2, 4).square(), batch_dims=2),
    ):
        assert len(x) == 3
        for index in (
            0,
            -1,
            (1, 0),
            slice(1, None),
            (slice(None), 1),
            [2, 0],
            torch.tensor([1, 1]),
        ):
            y = x[index]
            assert type(y.covariance) is type(x.covariance)
            assert y.event_shape == (4,)
            assert_close(y.mean, x.mean[index], rtol=0.0)
            assert_close(y.covariance_matrix, x.covariance_matrix[index], rtol=0.0)


def test_what_is_not_in_the_batch_is_not_indexed() -> None:
    x = cp.Gaussian(numbers(3, 4), matrix(3, 4))
    with pytest.raises(
        IndexError, match=r"2 indices for a batch of shape \(3,\); the event is not"
    ):
        x[0, 1]
    with pytest.raises(IndexError, match="index the batch with integers"):
        x[..., 0]
    with pytest.raises(IndexError, match=r"batch of shape \(\)"):
        x[0][0]
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        x[5]
    with pytest.raises(TypeError, match="a single Gaussian has no length"):
        len(x[0])


def test_a_batch_is_walked_through_and_a_single_gaussian_is_not() -> None:
    x = cp.Gaussian(numbers(3, 4), matrix(3, 4))
    for got, mean in zip(x, x.mean, strict=True):
        assert_close(got.mean, mean, rtol=0.0)
    with pytest.raises(TypeError, match="single Gaussian"):
        list(x[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_gaussian_is_copied_and_pickled(copied: Callable[[cp.Gaussian], cp.Gaussian]) -> None:
    x = cp.propagate(torch.relu, cp.Gaussian(numbers(3, 4), matrix(3, 4)), cp.Series(order=2))
    y = copied(x)
    assert_close(y.mean, x.mean, rtol=0.0)
    assert_close(y.covariance_matrix, x.covariance_matrix, rtol=0.0)
    assert y.method == x.method


def test_a_gaussian_does_not_change() -> None:
    x = cp.Gaussian(numbers(3), matrix(3))
    for name in ("mean", "covariance", "variance", "anything"):
        with pytest.raises(AttributeError):
            setattr(x, name, numbers(3))


def test_detach_leaves_the_graph() -> None:
    x = cp.Gaussian(numbers(3).requires_grad_(), matrix(3).requires_grad_())
    assert not x.detach().mean.requires_grad
    assert not x.detach().covariance_matrix.requires_grad
    assert x.stddev.requires_grad


def test_it_says_what_it_is_without_numbers() -> None:
    text = repr(cp.Gaussian(numbers(2, 3), matrix(2, 3)))
    assert text == (
        "Gaussian(batch_shape=(2,), event_shape=(3,), covariance=Dense, dtype=torch.float64)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_negative_variance_has_no_deviation_unless_it_is_rounding(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    variance = torch.tensor([4.0, -1e-3, -4 * eps, 0.0, torch.nan], dtype=dtype)
    x = cp.Gaussian(torch.zeros(5, dtype=dtype), torch.diag(variance), validate_args=False)
    assert x.stddev[0] == 2
    assert x.stddev[[1, 4]].isnan().all()
    assert x.stddev[2] == x.stddev[3] == 0
    alone = cp.Gaussian(torch.zeros((), dtype=dtype), -variance[:1, None], validate_args=False)
    assert alone.stddev.isnan()
    nothing = torch.zeros(2, 0, dtype=dtype)
    assert cp.Gaussian.diagonal(nothing, nothing, 1).stddev.shape == (2, 0)
