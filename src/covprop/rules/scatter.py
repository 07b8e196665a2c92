"""Sums, means and maxima of elements that a constant index sends to one place, as in graph layers.

Sums and means are linear. Maxima are taken one after another: the first element of each place, the
second where there is one, and so on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.maximum import tournament

REDUCED = "sum, mean: exact; amax, amin: exact for a pair, one after another for more"


@rule(*spellings("scatter_reduce"), kind=Kind.OTHER, treatment=REDUCED, name="scatter_reduce",
      batch=Batch.STEPWISE, in_place=in_place_spellings("scatter_reduce"))  # fmt: skip
def scatter_reduce(
    function: Callable[..., Any],
    input: Any,
    dim: int,
    index: Any,
    src: Any,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """What `src` has for each place along a dimension, reduced, with what is there or without."""
    _check(function, input, dim, index, reduce)
    src = src[tuple(slice(0, size) for size in index.shape)]
    count = torch.zeros(input.shape, dtype=input.dtype, device=index.device)
    count = count.scatter_add(dim, index, torch.ones_like(index, dtype=input.dtype))
    untouched = count == 0
    if reduce in ("sum", "mean"):
        start = input if include_self else torch.where(untouched, input, 0)
        total = torch.scatter_add(start, dim, index, src)
        if reduce == "sum":
            return total
        return total / (count + 1 if include_self else count.clamp(min=1))
    sign = 1 if reduce == "amax" else -1
    players = _players(sign * src, dim, index, input.shape)
    best = tournament([sign * input, *players] if include_self else players)
    return sign * best if include_self else torch.where(untouched, input, sign * best)


@rule(*spellings("index_reduce"), kind=Kind.OTHER, treatment=REDUCED, name="index_reduce",
      batch=Batch.STEPWISE, in_place=in_place_spellings("index_reduce"))  # fmt: skip
def index_reduce(
    function: Callable[..., Any],
    input: Any,
    dim: int,
    index: Any,
    source: Any,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """The same with one index for all elements of a row."""
    if isinstance(index, GaussianTensor):
        raise UnsupportedOperation(f"{name_of(function)} takes places that are random here")
    shape = [1] * len(source.shape)
    shape[dim] = -1
    index = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(input, dim, index, source, reduce, include_self=include_self)


def _check(function: Callable[..., Any], input: Any, dim: int, index: Any, reduce: str) -> None:
    """Refuse random places, products, and an index that leaves a part of the tensor out."""
    if isinstance(index, GaussianTensor):
        raise UnsupportedOperation(f"{name_of(function)} takes places that are random here")
    if reduce not in ("sum", "mean", "amax", "amin"):
        raise UnsupportedOperation(
            f"{name_of(function)} with reduce={reduce!r} has no rule; sum, mean, amax and amin have"
        )
    dim %= max(1, len(input.shape))
    others = [d for d in range(len(input.shape)) if d != dim]
    if any(index.shape[d] != input.shape[d] for d in others):
        raise UnsupportedOperation(
            f"{name_of(function)} has a rule for an index that is as large as the tensor in all "
            "dimensions but the one that it goes along; take that part of the tensor first"
        )


def _players(src: Any, dim: int, index: Tensor, shape: torch.Size) -> list[Any]:
    """The first, the second ... element for each place, minus infinity where there is none."""
    order = index.argsort(dim=dim, stable=True)
    keys = index.gather(dim, order)
    number = torch.arange(index.shape[dim], device=index.device)
    rows = [1] * index.dim()
    rows[dim] = -1
    number = number.reshape(rows).expand(index.shape)
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins.narrow(dim, 1, keys.shape[dim] - 1).copy_(keys.diff(dim=dim) != 0)
    first = torch.where(begins, number, 0).cummax(dim).values
    rank = number - first
    players = []
    for k in range(int(rank.max()) + 1 if rank.numel() else 0):
        # One place more, for elements of other ranks.
        wide = list(shape)
        wide[dim] += 1
        origin = torch.full(wide, -1, device=index.device)
        origin.scatter_(dim, torch.where(rank == k, keys, shape[dim]), order)
        origin = origin.narrow(dim, 0, shape[dim])
        taken = torch.gather(src, dim, origin.clamp(min=0))
        players.append(torch.where(origin >= 0, taken, -torch.inf))
    return players
