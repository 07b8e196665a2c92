"""Operations on tensors whose batch is not their first dimension, or no longer.

Rules are written for tensors whose batch comes first. `with_batch_first` gives a rule such tensors,
and a function of them that is the given one with the batch moved before and after it. Where the
function has put the batch is found by trying, because rules check that it is never mixed.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from covprop.errors import BatchDimensionError, name_of
from covprop.flow.nests import leaves, map_leaves


class Placed(Protocol):
    """What is asked of an in-flight Gaussian."""

    batch_at: int
    loc: Tensor
    carrier: Any

    @property
    def batch_shape(self) -> torch.Size:
        """One dimension."""

    @property
    def shape(self) -> torch.Size:
        """As the model sees it."""

    def with_batch_at(self, batch_at: int) -> "Placed":
        """The same with its batch shown at another dimension."""

    def seen_from(self, batch_at: int) -> "Placed":
        """The same with another of its dimensions of one as its batch."""

    def become(self, other: Any) -> None:
        """Take another's value in place."""


def _with_batches_of_one(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Placed]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Placed]]:
    """Any dimension of one may be the batch of one: choose one that all have."""
    common = [
        dim
        for dim in range(min(len(tensor.shape) for tensor in tensors))
        if all(tensor.shape[dim] == 1 for tensor in tensors)
    ]
    if not common:
        return args, kwargs, list(tensors)
    changed = {id(tensor): tensor.seen_from(common[0]) for tensor in tensors}
    args, kwargs = map_leaves((args, kwargs), lambda leaf: changed.get(id(leaf), leaf))
    return args, kwargs, list(changed.values())


def is_moved(function: Callable[..., Any]) -> bool:
    """Whether a rule sees a function whose batch is elsewhere, through `with_batch_first`."""
    return hasattr(function, "__wrapped__")


def with_batch_first(
    function: Callable[..., Any],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Placed],
) -> Any:
    """Run the rule of a function of these tensors, which are among its arguments."""
    at = tensors[0].batch_at
    if tensors[0].batch_shape.numel() == 1 and any(tensor.batch_at != at for tensor in tensors):
        args, kwargs, tensors = _with_batches_of_one(args, kwargs, tensors)
        at = tensors[0].batch_at
    if any(tensor.batch_at != at for tensor in tensors):
        raise BatchDimensionError(
            f"{name_of(function)} joins tensors whose batches are different dimensions; move them "
            "to the first with .movedim"
        )
    ours = {id(tensor) for tensor in tensors}
    varies = [id(leaf) in ours for leaf in leaves((args, kwargs))]

    def changed(nest: Any, change: Callable[[Any], Any]) -> Any:
        flags = iter(varies)
        return map_leaves(nest, lambda leaf: change(leaf) if next(flags) else leaf)

    def moved_function(to: int) -> Callable[..., Any]:
        @wraps(function)
        def of_first(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = changed((args, kwargs), lambda leaf: leaf.movedim(0, at))
            return map_leaves(function(*args, **kwargs), lambda leaf: leaf.movedim(to, 0))

        return of_first

    def attempt(to: int) -> Any:
        first = {id(tensor): tensor.with_batch_at(0) for tensor in tensors}
        first_args, first_kwargs = changed((args, kwargs), lambda x: first[id(x)])
        result = body(moved_function(to), *first_args, **first_kwargs)
        for tensor in tensors:
            if first[id(tensor)].carrier is not tensor.carrier:  # changed in place
                tensor.become(first[id(tensor)].with_batch_at(to))
        # A constant, such as constant.expand_as(x), has been moved with the rest.
        return map_leaves(
            result, lambda y: y.movedim(0, to) if isinstance(y, Tensor) else y.with_batch_at(to)
        )

    mean_args, mean_kwargs = changed((args, kwargs), lambda x: x.loc.movedim(0, at))
    shapes = [out.shape for out in leaves(function(*mean_args, **mean_kwargs))]
    size = tensors[0].batch_shape[0]
    likely = at if size > 1 else 0  # dimensions of one are all the same
    for to in sorted(range(min(map(len, shapes))), key=lambda dim: dim != likely):
        if all(shape[to] == size for shape in shapes):
            with suppress(BatchDimensionError):
                return attempt(to)
    raise BatchDimensionError(
        f"{name_of(function)} mixes, splits or drops the batch of shape "
        f"{tuple(tensors[0].batch_shape)}, which is dimension {at} of a tensor of shape "
        f"{tuple(tensors[0].shape)}"
    )
