"""Sorting by the order of the means, which is exact while no two elements can change places."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import ApproximationWarning, name_of, warn_user
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor

BY_MEANS = "approximate: in the order of the means, with a warning where it may be another"
SURE = 5.0
"""Standard deviations between neighbours that keep their order."""


class Ordered(NamedTuple):
    """What torch.sort and torch.topk return; the indices are those of the means."""

    values: Any
    indices: Tensor


def _taken(function: Callable[..., Any], x: Any, dim: int, count: int, descending: bool) -> Ordered:
    """The first elements in the order of the means."""
    x.materialize()
    means, order = x.shown.detach().sort(dim=dim, descending=descending, stable=True)
    deviations = x.batch_at.shown(x.variances.detach().clamp(min=0).sqrt().reshape(x.loc.shape))
    deviations = deviations.gather(dim, order)
    edges = min(count, means.shape[dim] - 1) if means.dim() else 0
    if edges > 0:
        gaps = means.diff(dim=dim).abs().narrow(dim, 0, edges)
        first, second = deviations.narrow(dim, 0, edges), deviations.narrow(dim, 1, edges)
        # Equal means of constants keep their order.
        if bool(((gaps < SURE * (first + second)) & (first + second > 0)).any()):
            warn_user(
                f"{name_of(function)} takes elements in the order of their means, and here some "
                f"are within {SURE:g} standard deviations of each other, so that their order is "
                "random; compare with sampling",
                ApproximationWarning,
            )
    order = order.narrow(dim, 0, count) if means.dim() else order
    return Ordered(torch.gather(x, dim, order) if means.dim() else x, order)


@rule(*spellings("sort", "msort"), kind=Kind.OTHER, treatment=BY_MEANS, name="sort",
      batch=Batch.STEPWISE)  # fmt: skip
def sort(
    function: Callable[..., Any],
    input: GaussianTensor,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> Any:
    """All elements along a dimension."""
    if function.__name__ == "msort":
        return _taken(function, input, 0, input.shape[0], descending=False).values
    return _taken(function, input, dim, input.shape[dim] if input.dim() else 1, descending)


@rule(*spellings("topk"), kind=Kind.OTHER, treatment=BY_MEANS, name="topk",
      batch=Batch.STEPWISE)  # fmt: skip
def topk(
    function: Callable[..., Any],
    input: GaussianTensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> Ordered:
    """The first few."""
    return _taken(function, input, dim, k, largest)
