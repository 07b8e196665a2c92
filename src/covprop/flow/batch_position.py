"""The place of the batch in a model's tensors, and rules for tensors whose batch is not first.

Rules are written for tensors whose batch comes first. `with_batch_first` gives a rule such tensors,
and a function of them that is the given one with the batch moved before and after it. Where the
function has put the batch is determined by trials, because rules check that it is never mixed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from covprop.errors import BatchDimensionError, name_of
from covprop.flow.nests import leaves, map_leaves


class Position(NamedTuple):
    """A dimension of the tensor that the model sees, of which the batch is all or a factor.

    Models merge the batch with tokens, heads or windows, as in x.view(-1, features): the dimension
    has then before * batch * after elements. What it is merged with is, with the batch first, a
    dimension of its own.

    Args:
        dim: The dimension.
        before: How many elements of it have the same place in each Gaussian, before the batch.
        after: How many, after it.
    """

    dim: int = 0
    before: int = 1
    after: int = 1

    @property
    def share(self) -> int:
        """Elements of the dimension for each Gaussian."""
        return self.before * self.after

    def first(self, tensor: Tensor) -> Tensor:
        """A tensor as the model sees it, with its batch first."""
        if self.share > 1:
            size = tensor.shape[self.dim] // self.share
            split = tensor.unflatten(self.dim, (self.before, size, self.after))
            return split.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)
        return tensor.movedim(self.dim, 0) if self.dim else tensor

    def shown(self, tensor: Tensor) -> Tensor:
        """A tensor with its batch first, as the model sees it."""
        if self.share > 1:
            split = tensor.unflatten(self.dim + 1, (self.before, self.after))
            return split.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)
        return tensor.movedim(0, self.dim) if self.dim else tensor

    def shape(self, first: torch.Size) -> torch.Size:
        """The shape that the model sees, of one with the batch first."""
        if self == FIRST:
            return first
        size, *rest = first
        if self.share > 1:
            rest[self.dim] *= size
        else:
            rest.insert(self.dim, size)
        return torch.Size(rest)


FIRST = Position()
"""The first dimension."""


class BatchedTensor(Protocol):
    """The part of an in-flight Gaussian that this module uses."""

    batch_at: Position
    loc: Tensor
    carrier: Any

    @property
    def batch_shape(self) -> torch.Size:
        """One dimension."""

    @property
    def shape(self) -> torch.Size:
        """As the model sees it."""

    @property
    def shown(self) -> Tensor:
        """The mean as the model sees it."""

    def with_batch_at(self, batch_at: Position) -> "BatchedTensor":
        """The same with its batch shown elsewhere."""

    def seen_from(self, batch_at: Position) -> "BatchedTensor":
        """The same with another dimension as its batch of one."""

    def become(self, other: Any) -> None:
        """Take another's value in place."""


def position_in(function: Callable[..., Any]) -> Position:
    """The batch position of the arguments of a function that was passed to a rule."""
    position: Position = getattr(function, "batch_at", FIRST)
    return position


def with_batch_first(
    function: Callable[..., Any],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[BatchedTensor],
) -> Any:
    """Run a rule on the arguments with their batch moved to the front, and move it back."""
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

    def moved_function(to: Position) -> Callable[..., Any]:
        @wraps(function)
        def of_first(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = changed((args, kwargs), at.shown)
            return map_leaves(function(*args, **kwargs), to.first)

        of_first.__dict__["batch_at"] = at
        return of_first

    def attempt(to: Position) -> Any:
        first = {id(tensor): tensor.with_batch_at(FIRST) for tensor in tensors}
        first_args, first_kwargs = changed((args, kwargs), lambda x: first[id(x)])
        result = body(moved_function(to), *first_args, **first_kwargs)
        if hasattr(result, "batch_at") and to.shape(result.shape) != shapes[0]:
            raise error
        for tensor in tensors:
            if first[id(tensor)].carrier is not tensor.carrier:  # changed in place
                tensor.become(first[id(tensor)].with_batch_at(to))
        # A constant, such as constant.expand_as(x), has been moved with the rest.
        return map_leaves(
            result, lambda y: y.with_batch_at(to) if hasattr(y, "batch_at") else to.shown(y)
        )

    mean_args, mean_kwargs = changed((args, kwargs), lambda x: x.shown)
    shapes = [out.shape for out in leaves(function(*mean_args, **mean_kwargs))]
    error = BatchDimensionError(
        f"{name_of(function)} mixes, splits or drops the batch of shape "
        f"{tuple(tensors[0].batch_shape)}, which is in dimension {at.dim} of a tensor of shape "
        f"{tuple(tensors[0].shape)}"
    )
    for to in _positions(shapes, tensors[0].batch_shape[0], at):
        with suppress(BatchDimensionError):
            return attempt(to)
    raise error


def _positions(shapes: Sequence[torch.Size], size: int, before: Position) -> Iterator[Position]:
    """Candidates for the batch position in results of these shapes, the most likely first."""
    likely = before if size > 1 or before.share > 1 else FIRST  # dimensions of one are all the same
    sizes = [{shape[dim] for shape in shapes} for dim in range(min(map(len, shapes)))]
    common = {dim: next(iter(found)) for dim, found in enumerate(sizes) if len(found) == 1}
    places = [Position(dim) for dim, length in common.items() if length == size]
    for dim, length in common.items():
        share = length // size if size and length > size and length % size == 0 else 0
        factors = (k for k in range(1, share + 1) if share % k == 0)
        places += [Position(dim, k, share // k) for k in factors]
    return iter(sorted(places, key=lambda place: place != likely))


def _with_batches_of_one(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[BatchedTensor]
) -> tuple[tuple[Any, ...], dict[str, Any], list[BatchedTensor]]:
    """Choose a dimension of equal size in all tensors as their batch of one."""
    shapes = {tensor.shape for tensor in tensors}
    sizes = [{shape[dim] for shape in shapes} for dim in range(min(map(len, shapes)))]
    alike = {dim: next(iter(found)) for dim, found in enumerate(sizes) if len(found) == 1}
    if not alike:
        return args, kwargs, list(tensors)
    dim = min(alike, key=lambda dim: alike[dim] != 1)
    common = Position(dim, after=alike[dim])
    changed = {id(tensor): tensor.seen_from(common) for tensor in tensors}
    args, kwargs = map_leaves((args, kwargs), lambda leaf: changed.get(id(leaf), leaf))
    return args, kwargs, list(changed.values())
