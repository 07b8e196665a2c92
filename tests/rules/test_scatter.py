"""Reductions at constant places, against the operations that they are made of and samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

INDEX = torch.tensor([1, 0, 1, 1])
START = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
PLACES = torch.nn.functional.one_hot(INDEX, 3).double()
COUNT = PLACES.sum(0)


def reduced(reduce: str, include_self: bool = True) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        start = START.expand(*x.shape[:-1], 3)
        index = INDEX.expand(x.shape)
        return start.scatter_reduce(-1, index, x, reduce, include_self=include_self)

    return function


LINEAR: dict[str, tuple[Callable[[Any], Any], Tensor]] = {
    "sum": (reduced("sum"), PLACES),
    "sum without": (reduced("sum", include_self=False), PLACES),
    "mean": (reduced("mean"), PLACES / (COUNT + 1)),
    "mean without": (reduced("mean", include_self=False), PLACES / COUNT.clamp(min=1)),
    "index_reduce": (
        lambda x: START.expand(*x.shape[:-1], 3).index_reduce(-1, INDEX, x, "mean"),
        PLACES / (COUNT + 1),
    ),
    "scatter with reduce": (
        lambda x: START.expand(*x.shape[:-1], 3).scatter(-1, INDEX.expand(x.shape), x,
                                                         reduce="add"), PLACES,
    ),
    "in place": (
        lambda x: torch.zeros(*x.shape[:-1], 3, dtype=x.dtype).scatter_reduce_(
            -1, INDEX.expand(x.shape), x, "sum"), PLACES,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The reduce argument", "ignore:index_reduce")
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", LINEAR)
def test_sums_and_means_are_linear(name: str, batch: tuple[int, ...]) -> None:
    function, matrix = LINEAR[name]
    x = gaussian(4, batch=batch)
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean), atol=1e-14)
    assert_close(y.covariance_matrix, matrix.mT @ x.covariance_matrix @ matrix, atol=1e-13)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_extremes_are_those_of_their_elements(reduce: str, include_self: bool) -> None:
    x = gaussian(2, 4)  # the rows are scattered by themselves
    y = propagate(reduced(reduce, include_self), x)
    over = getattr(torch, reduce)

    def by_hand(x: Any) -> Any:
        rows = []
        for row in x.unbind(0):
            first, second = row[1:2], torch.stack([row[0], row[2], row[3]])
            if include_self:
                first = torch.cat([START[:1], first])
                second = torch.cat([START[1:2], second])
            rows.append(torch.stack([over(first, 0), over(second, 0), 0 * row[0] + START[2]]))
        return torch.stack(rows)

    z = propagate(by_hand, x)
    assert_close(y.mean, z.mean, atol=1e-13)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-13)


def test_what_has_no_rule_says_so() -> None:
    x = gaussian(4)
    with pytest.raises(cp.UnsupportedOperation, match="'prod' has no rule"):
        propagate(reduced("prod"), x)
    with pytest.raises(cp.UnsupportedOperation, match="reduce='multiply' has no rule"):
        propagate(lambda x: START.scatter(0, INDEX, x, reduce="multiply"), x)
    with pytest.raises(cp.UnsupportedOperation, match="random here"):
        propagate(lambda x: START.scatter_reduce(0, x, x, "sum"), x)
