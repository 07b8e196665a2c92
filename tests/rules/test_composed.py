"""Operations made of others, in more than one tensor that varies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import covprop as cp
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close
from tests.rules.test_product import hermite_moments

W = weight(4, 4) / 2
MASK = torch.tensor([True, False, True, False])
POLYNOMIALS: dict[str, Callable[[Any], Any]] = {
    "where": lambda x: torch.where(MASK, x, F.linear(x, W)),
    "where of a product": lambda x: torch.where(MASK, x * x, 2 * x),
    "where, method": lambda x: x.where(MASK, x.flip(0)),
    "where, widening": lambda x: torch.where(MASK, x[:1], x),
    "masked_fill": lambda x: x.masked_fill(MASK, x[0]),
    "lerp": lambda x: torch.lerp(x, F.linear(x, W), 0.3),
    "lerp, Gaussian weight": lambda x: torch.lerp(W[0], W[1], x),
    "lerp, all Gaussian": lambda x: x[:2].lerp(W[0, :2], x[2:]),
    "lerp, in place": lambda x: x.clone().lerp_(F.linear(x, W), W[2]),
    "addcmul": lambda x: torch.addcmul(x, x, W[0], value=0.3),
    "addcmul, factors": lambda x: torch.addcmul(W[0], x, x.flip(0), value=2),
    "addcmul, all": lambda x: x.addcmul(x, F.linear(x, W)),
    "addcmul, in place": lambda x: x.clone().addcmul_(x.flip(0), W[1], value=-1),
    "addcdiv": lambda x: torch.addcdiv(x, x.flip(0), W[0] + 3, value=2),
    "addmm": lambda x: torch.addmm(x[:2], x.reshape(2, 2), W[:2, :2], beta=2, alpha=3),
    "addmm, factors": lambda x: torch.addmm(W[:2, :2], x.reshape(2, 2), x.reshape(2, 2).mT),
    "addmm, without": lambda x: torch.addmm(
        torch.full((2, 2), torch.nan).double(), x.reshape(2, 2), x.reshape(2, 2), beta=0
    ),
    "addmv": lambda x: torch.addmv(x[:2], x.reshape(2, 2), x[2:], alpha=0.5),
    "baddbmm": lambda x: torch.baddbmm(x.reshape(1, 2, 2), x.reshape(1, 2, 2), W[None, :2, :2]),
    "tensordot": lambda x: torch.tensordot(x.reshape(2, 2), W[:2, :2], dims=1),
    "tensordot, both": lambda x: torch.tensordot(x.reshape(2, 2), x.reshape(2, 2), ([0], [1])),
    "index_add, of itself": lambda x: (x * x).index_add(0, torch.tensor([1, 1]), x[:2], alpha=-2),
    "scatter_add": lambda x: (x * x).scatter_add(0, torch.tensor([1, 1]), x[:2] * x[2:]),
    "item": lambda x: _with_item(x * x, x),
    "prod": lambda x: x.reshape(2, 2).prod(-1),
    "prod, keepdim": lambda x: torch.prod(x.reshape(2, 2), 0, keepdim=True),
    "prod of all": lambda x: x[1:3].prod(),
    "cumprod": lambda x: torch.cumprod(x.reshape(2, 2), -1),
    "cumprod, in place": lambda x: x.reshape(2, 2).clone().cumprod_(dim=0),
    "diff": lambda x: x.diff(prepend=torch.full((1,), 9.0, dtype=torch.float64)),
}
"""Functions of four elements, of degree two at most."""


def _with_item(y: Any, x: Any) -> Any:
    y[1:3] = x[:2] * x[2:]
    y[MASK] = y[0] - 3
    return y


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_moments_are_exact(name: str) -> None:
    x = gaussian(4)
    y = propagate(POLYNOMIALS[name], x)
    mean, covariance = hermite_moments(POLYNOMIALS[name], x)
    assert y.mean.shape == POLYNOMIALS[name](x.mean).shape
    assert_close(y.mean.reshape(-1), mean, atol=1e-11)
    assert_close(y.covariance_matrix, covariance, atol=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.addcdiv(x[..., :2], x[..., 2:], x[..., :2] + 9, value=3),
        lambda x: torch.addcdiv(W[0, :2], W[1, :2], x[..., :2] + 9),
    ],
)
def test_a_quotient_by_a_gaussian_agrees_with_sampling(function: Callable[[Any], Any]) -> None:
    wide = gaussian(4)
    x = cp.Gaussian(wide.mean, wide.covariance_matrix / 100)
    y = propagate(function, x)
    sample = function(x.sample(200_000, torch.Generator().manual_seed(0)))
    stddev, count = sample.std(0), len(sample)
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * stddev / count**0.5).all())
    # Second order in the noise, whose size is 1 % of the divisor.
    assert bool(((y.stddev / stddev - 1).abs() <= 5 / (2 * count) ** 0.5 + 1e-3).all())


def test_a_choice_of_independent_inputs_has_the_covariance_of_each() -> None:
    x, w = gaussian(4, batch=(2,)), gaussian(4, batch=(2,), seed=1)
    condition = torch.stack([MASK, ~MASK])
    y = propagate(lambda x, w: torch.where(condition, x, w), x, w)
    assert_close(y.mean, torch.where(condition, x.mean, w.mean), rtol=0.0)
    both, neither = (c[:, :, None] & c[:, None, :] for c in (condition, ~condition))
    expected = torch.where(both, x.covariance_matrix, 0) + torch.where(
        neither, w.covariance_matrix, 0
    )
    assert_close(y.covariance_matrix, expected, rtol=0.0)


def test_a_gaussian_is_no_condition_and_no_place() -> None:
    for call in (
        lambda x: torch.where(x, x, 0.0),
        lambda x: torch.where(x, torch.ones(4), torch.zeros(4)),
        lambda x: x.masked_fill(x, 0.0),
    ):
        with pytest.raises(cp.UnsupportedOperation, match="condition"):
            propagate(call, gaussian(4))
    image = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    with pytest.raises(cp.UnsupportedOperation, match="random places"):
        propagate(lambda x: F.grid_sample(image, x, align_corners=False), gaussian(1, 2, 2, 2))


def test_what_is_masked_by_minus_infinity_has_no_weight() -> None:
    x = gaussian(4)
    y = propagate(lambda x: torch.softmax(x.masked_fill(~MASK, -torch.inf), -1), x)
    expected = propagate(lambda x: torch.softmax(x[MASK], -1), x)
    assert_close(y.mean[MASK], expected.mean, atol=1e-14)
    assert_close(y.covariance_matrix[MASK][:, MASK], expected.covariance_matrix, atol=1e-14)
    assert not y.mean[~MASK].any()
    assert not y.variance[~MASK].any()


def test_shapes_are_taken_from_gaussians_and_lent_to_constants() -> None:
    x = gaussian(2, 3)
    for call in (
        lambda x: x.flatten().view_as(x), lambda x: x.mT.reshape_as(x).clone(),
        lambda x: x[:, :1].expand_as(x),
    ):  # fmt: skip
        y = propagate(call, x)
        assert_close(y.mean, call(x.mean), rtol=0.0)
    plain = torch.arange(6.0)
    y = propagate(lambda x: x + plain.view_as(x), x)
    assert_close(y.mean, x.mean + plain.reshape(2, 3), rtol=0.0)
    first, second = propagate(lambda x: torch.atleast_2d(x[0], plain)[::1], x)
    assert first.mean.shape == (1, 3)
    assert second.shape == (1, 6)


REDUCED: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(-1),
    "min": lambda x: x.min(0).values,
    "sum": lambda x: x.sum(-1),
    "norm": lambda x: x.norm(dim=-1),
    "var": lambda x: x.var(-1, unbiased=False),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in REDUCED for method in (cp.GaussianLayers(), cp.Cumulants())]
    + [("sum", cp.AssumedDensity())],
)
def test_a_single_number_has_one_dimension_to_reduce_as_for_torch(name: str, method: Any) -> None:
    function = REDUCED[name]
    mean = torch.tensor(3.0, dtype=torch.float64)
    y = propagate(function, cp.Gaussian.isotropic(mean, stddev=0.01), method)
    slope = float(torch.func.grad(function)(mean))
    assert y.mean.shape == ()
    assert_close(y.mean, function(mean), atol=1e-12)
    assert_close(y.stddev, torch.tensor(0.01 * abs(slope), dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6])
def test_a_product_of_independent_factors_has_their_moments(count: int) -> None:
    """E of the product is that of the means; E of its square is that of mu^2 + s^2."""
    mean, stddev = torch.linspace(-0.7, 1.5, 6).double(), torch.linspace(0.1, 0.6, 6).double()
    x = cp.Gaussian.diagonal(mean, stddev=stddev)
    y = cp.propagate(lambda x: x[:count].prod(), x, cp.GaussianLayers())
    mean, stddev = mean[:count], stddev[:count]
    expected = mean.prod()
    second = (mean.square() + stddev.square()).prod()
    torch.testing.assert_close(y.mean, expected)
    torch.testing.assert_close(y.variance, second - expected.square())


def test_a_product_over_the_batch_is_refused() -> None:
    x = cp.Gaussian.isotropic(torch.ones(2, 3), stddev=0.1, batch_dims=1)
    for over in (lambda x: x.prod(), lambda x: x.prod(0)):
        with pytest.raises(cp.BatchDimensionError):
            cp.propagate(over, x, cp.GaussianLayers())
