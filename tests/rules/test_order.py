"""Sorting by the means: exact where the order is certain, a warning where it is not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close

MEAN = torch.tensor([[3.0, -1.0, 9.0, 4.0], [0.0, 7.0, -5.0, 2.0]], dtype=torch.float64)
SORTED: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: torch.sort(x, -1)[0],
    "sort, first dimension": lambda x: x.sort(0, descending=True).values,
    "msort": torch.msort,
    "topk": lambda x: torch.topk(x, 2).values,
    "topk, smallest": lambda x: x.topk(1, dim=0, largest=False).values,
    "topk of all": lambda x: x.topk(4, sorted=True)[0],
}


def correlated(stddev: float) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(0)
    factor = stddev * torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return cp.Gaussian(MEAN, factor @ factor.mT)


@pytest.mark.parametrize("name", SORTED)
def test_a_certain_order_is_a_permutation(name: str) -> None:
    function, x = SORTED[name], correlated(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = propagate(function, x)
    slope = torch.autograd.functional.jacobian(function, MEAN).reshape(-1, 8)
    assert_close(y.mean, function(MEAN), rtol=0.0)
    assert_close(y.covariance_matrix, slope @ x.covariance_matrix @ slope.mT, atol=1e-18)


@pytest.mark.parametrize("name", SORTED)
def test_a_random_order_warns(name: str) -> None:
    with pytest.warns(cp.ApproximationWarning, match="order of their means"):
        propagate(SORTED[name], correlated(1.0))


def test_only_the_edge_of_the_first_few_matters() -> None:
    """The two smallest may change places: they are not among the first two."""
    x = cp.Gaussian.isotropic(torch.tensor([9.0, 5.0, 0.0, 0.1]), stddev=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        propagate(lambda x: x.topk(2).values, x)
    with pytest.warns(cp.ApproximationWarning, match="topk"):
        propagate(lambda x: x.topk(3).values, x)


def test_each_of_a_batch_has_its_own_order() -> None:
    """Which moves elements to other places in each: a gather."""
    x = cp.Gaussian.isotropic(MEAN, stddev=0.01, batch_dims=1)
    y = propagate(lambda x: x.sort(-1).values * torch.arange(1.0, 5.0).double(), x)
    for i in range(2):
        alone = propagate(lambda x: x.sort(-1).values * torch.arange(1.0, 5.0).double(), x[i])
        assert_close(y[i].mean, alone.mean, rtol=0.0)
        assert_close(y[i].covariance_matrix, alone.covariance_matrix, rtol=1e-14)


@pytest.mark.parametrize("dim", [0, -2])
def test_an_order_among_the_elements_of_a_batch_is_refused(dim: int) -> None:
    """Also where all means are equal, so that the order at the means moves nothing."""
    x = cp.Gaussian.isotropic(torch.zeros(3, 4, dtype=torch.float64), stddev=1.0, batch_dims=1)
    for function in (lambda x: x.sort(dim).values, lambda x: x.topk(3, dim).values):
        with pytest.raises(cp.BatchDimensionError, match="batch"):
            cp.propagate(function, x)
    apart = x + 100 * torch.arange(4.0, dtype=torch.float64)
    assert_close(propagate(lambda x: x.mT.topk(1, 0).values, apart).mean, 300 + x.mean[:, :1])
    with pytest.raises(cp.BatchDimensionError, match="batch"):
        cp.propagate(lambda x: x.mT.sort(1).values, x)
