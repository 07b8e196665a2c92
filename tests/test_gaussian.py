"""The public value: its constructors, properties, samples and conversions."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from scipy import stats
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
from tests.layers import propagate
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
    x = cp.Gaussian.isotropic(numbers(2, 3), stddev=0.5)
    assert (x.batch_shape, x.event_shape) == ((), (2, 3))
    assert_close(x.covariance_matrix, 0.25 * torch.eye(6).double(), rtol=0.0)
    each = cp.Gaussian.isotropic(numbers(2, 3), stddev=torch.tensor([0.5, 2.0]), batch_dims=1)
    assert (each.batch_shape, each.event_shape) == ((2,), (3,))
    expected = torch.stack([0.25 * torch.eye(3), 4 * torch.eye(3)]).double()
    assert_close(each.covariance_matrix, expected, rtol=0.0)
    whole = cp.Gaussian.isotropic(numbers(2, 3), stddev=0.5, batch_dims=2)
    assert (whole.batch_shape, whole.event_shape) == ((2, 3), ())


def test_diagonal_has_the_variances_given() -> None:
    mean, variance = numbers(2, 3, 4), numbers(2, 3, 4).square()
    x = cp.Gaussian.diagonal(mean, variance=variance, batch_dims=1)
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
        cp.Gaussian.isotropic(numbers(3), stddev=0.0).to_torch()
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
        cp.Gaussian.diagonal(numbers(3, 2, 4), variance=numbers(3, 2, 4).square(), batch_dims=2),
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
    x = propagate(torch.relu, cp.Gaussian(numbers(3, 4), matrix(3, 4)), cp.Series(order=2))
    y = copied(x)
    assert_close(y.mean, x.mean, rtol=0.0)
    assert_close(y.covariance_matrix, x.covariance_matrix, rtol=0.0)
    assert y.method == x.method


@torch.no_grad()
def test_copies_estimate_their_error_and_files_say_that_it_is_missing() -> None:
    x = cp.Gaussian(numbers(3), matrix(3))
    y = cp.propagate(lambda x: torch.relu(x).sum(-1, keepdim=True), x, cp.GaussianLayers())
    read = pickle.loads(pickle.dumps(y))
    assert read.error is None
    assert "its error was not estimated before it was saved" in read.notes
    for copied in (copy.copy(y), copy.deepcopy(y)):
        assert copied.error is not None
        assert copied.notes == y.notes
    assert y.error is not None
    read = pickle.loads(pickle.dumps(y))
    assert torch.equal(read.error.stddev, y.error.stddev)
    assert read.notes == y.notes


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
    assert cp.Gaussian.diagonal(nothing, variance=nothing, batch_dims=1).stddev.shape == (2, 0)


def skewed_result(*batch: int, dtype: torch.dtype = torch.float64) -> cp.Gaussian:
    """A result of which the skewness is known, in a batch with two elements (2, 2) each."""
    shape = (*batch, 2, 2)
    return cp.Gaussian(
        numbers(*shape, dtype=dtype),
        matrix(*batch, 4).to(dtype),
        skewness=0.5 * numbers(*shape, seed=4, dtype=dtype),
        notes=["one note"],
    )


def test_skewness_and_notes_go_where_the_moments_go() -> None:
    x = skewed_result(2, 3)
    assert x.skewness is not None
    assert x.notes == ("one note",)
    flat = x.skewness.reshape(2, 3, 4)
    parts = {
        "marginal": (x.marginal([3, 0]), flat[..., [3, 0]]),
        "to": (x.to(torch.float32), x.skewness.float()),
        "reshape_batch": (x.reshape_batch((6,)), x.skewness.reshape(6, 2, 2)),
        "item": (x[1, 2], x.skewness[1, 2]),
        "with_moments": (x.with_moments(mean=x.mean + 1), x.skewness),
    }
    for name, (y, expected) in parts.items():
        assert y.skewness is not None, name
        assert torch.equal(y.skewness, expected), name
        assert y.notes == x.notes
    known = cp.Gaussian(x.mean, x.covariance, skewness=x.skewness.clone().requires_grad_())
    assert known.detach().skewness is not None
    assert not known.detach().skewness.requires_grad
    assert x.condition([0], flat[..., :1]).skewness is None
    assert x.condition([0], flat[..., :1]).notes == x.notes
    plain = cp.Gaussian(x.mean, x.covariance)
    assert plain.skewness is None
    assert plain[0].to(torch.float32).skewness is None
    assert plain.notes == ()


@pytest.mark.parametrize(
    ("skewness", "message"),
    [
        (0.3, "the skewness must be a tensor, not float"),
        (torch.zeros(2), r"the skewness has the shape of the mean \(3,\), not \(2,\)"),
        (
            torch.zeros(3).double(),
            "the mean has dtype torch.float32 and the skewness",
        ),
        (torch.full((3,), torch.nan), "the skewness has NaN or infinite entries"),
    ],
)
def test_a_skewness_that_cannot_be_is_refused(skewness: Tensor, message: str) -> None:
    with pytest.raises(cp.InvalidGaussian, match=message):
        cp.Gaussian(torch.zeros(3), torch.eye(3), skewness=skewness)


def test_other_moments_fit_the_ones_that_stay() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2, 3), stddev=0.1, batch_dims=1)
    for moments in (
        {"mean": torch.zeros(2, 4)}, {"mean": torch.zeros(3, 2)},
        {"covariance": Dense(torch.eye(3))}, {"mean": torch.zeros(2, 3).double()},
    ):  # fmt: skip
        with pytest.raises(cp.InvalidGaussian):
            x.with_moments(**moments)
    with pytest.raises(cp.InvalidGaussian, match="float16"):
        x.to(torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_skewness_distribution_functions_are_normal(dtype: torch.dtype) -> None:
    x = cp.Gaussian(numbers(3, 4, dtype=dtype), matrix(3, 4).to(dtype))
    normal = Normal(x.mean.double(), x.stddev.double())
    at = numbers(4, seed=7)
    assert x.cdf(at).dtype == dtype
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    assert_close(x.cdf(at).double(), normal.cdf(at), rtol=rtol, atol=1e-15)
    assert_close(
        x.icdf(0.3).double(), normal.icdf(torch.tensor(0.3, dtype=torch.float64)), rtol=rtol
    )
    low, high = x.interval(0.9)
    assert low.shape == x.mean.shape
    assert_close((x.cdf(high) - x.cdf(low)).double(), torch.full((3, 4), 0.9).double(), rtol=1e-5)
    assert bool((x.icdf(0.0) == -torch.inf).all())


def test_with_a_skewness_they_are_those_of_pearsons_type_iii() -> None:
    x = skewed_result()
    assert x.skewness is not None
    known = stats.pearson3(x.skewness.numpy(), x.mean.numpy(), x.stddev.numpy())
    at = x.mean + x.stddev * numbers(2, 2, seed=9)
    assert_close(x.cdf(at), torch.as_tensor(known.cdf(at.numpy())), rtol=1e-9)
    assert_close(x.icdf(0.025), torch.as_tensor(known.ppf(0.025)), rtol=1e-9)
    low, high = x.interval()
    assert_close(low, x.icdf(0.025), rtol=1e-12)
    assert_close(high, torch.as_tensor(known.ppf(0.975)), rtol=1e-9)
    single = skewed_result(dtype=torch.float32)
    assert_close(single.icdf(0.9).double(), x.icdf(0.9), rtol=1e-5)


def test_what_does_not_vary_is_at_its_mean_with_certainty() -> None:
    for skewness in (None, torch.ones(2)):
        x = cp.Gaussian(torch.tensor([1.0, 2.0]), torch.zeros(2, 2), skewness=skewness)
        assert x.cdf(1.5).tolist() == [1.0, 0.0]
        assert x.cdf(torch.tensor([1.0, 2.0])).tolist() == [1.0, 1.0]
        for p in (0.0, 0.2, 1.0):
            assert x.icdf(p).tolist() == [1.0, 2.0]
        assert [end.tolist() for end in x.interval()] == [[1.0, 2.0]] * 2


def test_levels_and_probabilities_that_cannot_be_are_refused() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0)
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match="level is a probability between 0 and 1"):
            x.interval(level)
    with pytest.raises(ValueError, match="icdf takes probabilities, from 0 to 1"):
        x.icdf(torch.tensor([0.5, 1.5]))


@pytest.mark.parametrize("skewed", [False, True])
def test_distribution_functions_are_differentiable(skewed: bool) -> None:
    def of(mean: Tensor, deviation: Tensor, skewness: Tensor) -> tuple[Tensor, ...]:
        x = cp.Gaussian(mean, torch.diag(deviation.square()), skewness=skewness if skewed else None)
        return x.cdf(0.4), x.icdf(0.2), *x.interval(0.8)

    mean, deviation = numbers(3).requires_grad_(), (1 + numbers(3).square()).requires_grad_()
    skewness = torch.tensor([-0.7, 0.0, 0.3]).double().requires_grad_()
    assert torch.autograd.gradcheck(of, (mean, deviation, skewness), eps=1e-5, atol=1e-7)
