"""propagate: what it takes and what it returns."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close, normal_rule

METHODS = [cp.Exact(), cp.Series(order=3), cp.Series(tolerance=1e-3)]


def gaussian(*batch: int, size: int = 4, rank: int = 4) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn((*batch, size, rank), dtype=torch.float64, generator=generator) / 2
    mean = torch.randn((*batch, size), dtype=torch.float64, generator=generator)
    return cp.Gaussian(mean, factor @ factor.mT)


def network(activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), activation or nn.GELU(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)
    return nn.Sequential(*layers).double().requires_grad_(requires_grad=False)


def assert_same(actual: cp.Gaussian, expected: cp.Gaussian, rounding: float = 0.0) -> None:
    assert_close(actual.mean, expected.mean, atol=rounding)
    assert_close(actual.covariance_matrix, expected.covariance_matrix, atol=rounding)


Pair = namedtuple("Pair", "first second")  # as many models return


def test_outputs_come_back_in_the_nest_they_came_in() -> None:
    constant = torch.ones(2)

    def model(x: Any) -> Any:
        y = torch.relu(x)
        return {
            "pair": Pair(x, y),
            "list": [y, (x, constant)],
            "ordered": OrderedDict(a=x, b=None),
            "plain": (1, "name", 2.5, True),
        }

    x = gaussian()
    y = propagate(torch.relu, x)
    result = propagate(model, x)
    assert list(result) == ["pair", "list", "ordered", "plain"]
    assert isinstance(result["pair"], Pair)
    assert_same(result["pair"].first, x)
    assert_same(result["pair"].second, y)
    assert isinstance(result["list"], list)
    assert_same(result["list"][0], y)
    assert_same(result["list"][1][0], x)
    assert result["list"][1][1] is constant
    assert list(result["ordered"]) == ["a", "b"]
    assert_same(result["ordered"]["a"], x)
    assert result["ordered"]["b"] is None
    assert result["plain"] == (1, "name", 2.5, True)


class Method:
    """A model that is a method of something else."""

    def forward(self, x: Any) -> Any:
        return torch.tanh(x)


@pytest.mark.parametrize(
    "function", [nn.Tanh(), torch.tanh, lambda x: x.tanh(), partial(torch.tanh), Method().forward]
)
def test_modules_and_functions_are_models(function: Callable[[Any], Any]) -> None:
    x = gaussian(2)
    assert_same(propagate(function, x), propagate(nn.Tanh(), x))


def test_the_default_is_exact_and_the_result_says_so() -> None:
    x = gaussian()
    model = network()
    assert propagate(model, x).method == cp.Exact()
    assert_same(propagate(model, x), propagate(model, x, method=cp.Exact()))
    series = propagate(model, x, method=cp.Series(order=2))
    assert series.method == cp.Series(order=2)
    difference = series.covariance_matrix - propagate(model, x).covariance_matrix
    assert float(difference.abs().max()) > 1e-6


@pytest.mark.parametrize("method", METHODS[:2])
def test_a_batch_is_a_loop(method: Any) -> None:
    x = gaussian(2, 3)
    y = propagate(network(), x, method)
    assert (y.batch_shape, y.event_shape) == ((2, 3), (2,))
    for i in range(2):
        for j in range(3):
            alone = propagate(network(), x[i, j], method)
            assert_same(y[i, j], alone, rounding=1e-13)


def test_the_order_of_a_batch_does_not_matter() -> None:
    x, order = gaussian(4), [2, 0, 3, 1]
    y = propagate(network(), x)
    assert_same(propagate(network(), x[order]), y[order], rounding=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_without_variance_the_output_is_the_networks(method: Any) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Softsign(), nn.Hardshrink(), nn.Linear(4, 3), nn.ELU()
    )
    model.double()
    mean = gaussian(3).mean
    for covariance in (
        torch.zeros(3, 4, 4).double(),
        cp.covariance.Diagonal(torch.zeros_like(mean)),
    ):
        y = propagate(model, cp.Gaussian(mean, covariance), method)
        assert_close(y.mean, model(mean), rtol=1e-14)
        assert_close(y.covariance_matrix, torch.zeros(3, 3, 3).double(), atol=0.0)


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, torch.sign])
def test_a_rank_one_covariance_is_an_integral_over_one_number(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = gaussian(size=4, rank=1)
    direction = x.stddev * x.covariance_matrix[0].sign()
    kinks = (-x.mean / direction).tolist()
    nodes, weights = (torch.from_numpy(t) for t in normal_rule(0.0, 1.0, kinks))
    values = function(x.mean + nodes[:, None] * direction)
    mean = weights @ values
    covariance = (values - mean).mT @ (weights[:, None] * (values - mean))
    y = propagate(function, x)
    assert_close(y.mean, mean, atol=1e-10)
    assert_close(y.covariance_matrix, covariance, atol=1e-8)


def test_a_duplicated_feature_stays_a_duplicate() -> None:
    copied = [0, 1, 1, 2, 3]
    model = network()  # it draws its weights, which a model that is propagated may not
    y = propagate(lambda x: model(x[..., copied][..., [0, 1, 3, 4]]), gaussian(2))
    z = propagate(lambda x: nn.functional.gelu(x[..., copied]), gaussian(2)).covariance_matrix
    assert_same(y, propagate(network(), gaussian(2)), rounding=1e-14)
    assert_close(z[..., 1, :], z[..., 2, :], rtol=1e-9)  # one is on the diagonal, one by its pair


def test_the_model_and_the_gaussian_are_untouched() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.ReLU(inplace=True)).double().eval()
    x = gaussian(2)
    kept = {**model.state_dict(), "mean": x.mean, "covariance": x.covariance_matrix}
    before = {key: value.clone() for key, value in kept.items()}
    propagate(model, x)
    assert all(torch.equal(before[key], value) for key, value in kept.items())
    assert list(model.state_dict()) == list(kept)[:-2]


def test_float32_stays_float32_and_is_near_float64() -> None:
    x = gaussian(2)
    y = propagate(network().float(), x.to(torch.float32))
    assert y.dtype == y.covariance_matrix.dtype == torch.float32
    exact = propagate(network(), x)
    scale = float(exact.variance.max())
    assert_close(y.covariance_matrix.double(), exact.covariance_matrix, atol=1e-5 * scale)
