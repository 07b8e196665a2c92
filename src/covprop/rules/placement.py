"""Elements of two tensors put together, or added up, at constant places: linear in both."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch, write
from covprop.rules.affine import EXACT, affine, scaling, without_terms
from covprop.rules.joint import join
from covprop.rules.maximum import sequential_maximum
from covprop.rules.operands import batch_error, gaussians

REDUCED = "sum, mean: exact; amax, amin: exact for a pair, one after another for more"
"""Reductions of elements that a constant index sends to one place, as in graph layers."""


def linear_in_both(
    call: Callable[[Any, Any], Any], first: Any, second: Any, elementwise: bool = True
) -> GaussianTensor:
    """A function that is linear in two arguments together, of which constants are offsets."""
    if len(gaussians((first, second), {})) > 1:
        return join(call, (first, second), {})
    return (scaling if elementwise else affine)(call, first, second, strip=without_terms)


def _of_two(
    *names: str, ends: tuple[str, str], elementwise: bool = False
) -> Callable[..., GaussianTensor]:
    """The rule of a function of these arguments, linear in two; the others are constants."""

    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        both = given.pop(ends[0]), given.pop(ends[1])  # which what outlives this may not hold
        _check_constant(function, given)
        order, named = names[: len(args)], tuple(kwargs)

        @wraps(function)
        def call(first: Any, second: Any) -> Any:  # in the order that the function was given them
            now = given | {ends[0]: first, ends[1]: second}
            return function(*(now[name] for name in order), **{name: now[name] for name in named})

        return linear_in_both(call, *both, elementwise=elementwise)

    return body


def _check_constant(function: Callable[..., Any], given: dict[str, Any]) -> None:
    if gaussians(given.values(), {}):
        raise UnsupportedOperation(
            f"{name_of(function)} takes places, or a condition, that are random here: a Gaussian "
            "cannot be an index, as its value is not known, and a condition on it may only choose "
            "between functions of the same tensor and single numbers, as where(x > 0, x, 0.0)"
        )


def _choice(*names: str) -> Callable[..., GaussianTensor]:
    return _of_two(*names, ends=("input", "other"), elementwise=True)


rule(torch.where, kind=Kind.LINEAR, treatment=EXACT, name="where", batch=Batch.ANYWHERE)(
    _choice("condition", "input", "other")
)
rule(Tensor.where, kind=Kind.LINEAR, treatment=EXACT, name="where", batch=Batch.ANYWHERE)(
    _choice("input", "condition", "other")
)


@rule(*spellings("masked_fill"), kind=Kind.LINEAR, treatment=EXACT, name="masked_fill",
      batch=Batch.STEPWISE, in_place=in_place_spellings("masked_fill"))  # fmt: skip
def masked_fill(function: Callable[..., Any], input: Any, mask: Any, value: Any) -> Any:
    """A value where a constant mask is set."""
    return torch.where(mask, value, input)


def _added(name: str, *names: str) -> None:
    """One line: a function that adds a source to a tensor at constant places."""
    rule(*spellings(name), kind=Kind.LINEAR, treatment=EXACT, name=name, batch=Batch.ANYWHERE,
         in_place=in_place_spellings(name))(
        _of_two("input", *names, ends=("input", names[-1]))
    )  # fmt: skip


_added("index_add", "dim", "index", "source")
_added("scatter_add", "dim", "index", "src")


def with_items(input: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of a tensor with other elements at an index: what `input[index] = value` makes."""
    result = input.clone()
    result[index] = value
    return result


def _placed(*functions: Callable[..., Any], names: tuple[str, ...], name: str) -> None:
    """One line: a function that puts elements of its last argument at constant places.

    Run on numbers, it tells which element goes where: one of those that a place is given twice.
    """
    last = names[-1]

    @rule(*functions, kind=Kind.LINEAR, treatment=EXACT, name=name, batch=Batch.ANYWHERE,
          in_place=in_place_spellings(name))  # fmt: skip
    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (reduce := kwargs.pop("reduce", None)) is not None:  # of torch.scatter, deprecated
            if reduce != "add":
                raise UnsupportedOperation(
                    f"{name_of(function)} with reduce={reduce!r} has no rule; multiply by a tensor "
                    "of factors instead"
                )
            return torch.scatter_add(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        name_of_source = "value" if "value" in given else last
        input, source = given.pop("input"), given.pop(name_of_source)
        _check_constant(function, given)
        x = gaussians((input, source), {})[0]

        def call(first: Any, second: Any) -> Tensor:
            now = given | {"input": first, name_of_source: second}
            result: Tensor = function(
                *(now[name] for name in names[: len(args)]), **{name: now[name] for name in kwargs}
            )
            return result

        like = input.loc if isinstance(input, GaussianTensor) else input
        nothing = torch.full_like(like, -1, dtype=torch.long)
        if not isinstance(source, Tensor):
            return torch.where(call(nothing, 0) == 0, source, input)
        numbers = torch.arange(source.numel(), device=source.device)
        held = source.loc if isinstance(source, GaussianTensor) else source
        origin = call(nothing, numbers.reshape(held.shape))
        kept = input if isinstance(input, GaussianTensor) else call(input, torch.zeros_like(held))
        return torch.where(origin >= 0, _taken(function, source, origin, x.batch_shape), kept)


def _taken(function: Callable[..., Any], source: Any, origin: Tensor, batch: torch.Size) -> Any:
    """Elements of a source by their numbers; any element for numbers below zero."""
    if not isinstance(source, GaussianTensor):
        return source.reshape(-1)[origin.clamp(min=0)]
    size, count = source.event_shape.numel(), batch.numel()
    rows = origin.reshape(count, -1)
    owner = torch.arange(count, device=rows.device)[:, None]
    if bool(((rows >= 0) & (rows // max(1, size) != owner)).any()):
        raise batch_error(function, source)
    index = (rows % max(1, size)).reshape(*batch, -1)
    return torch.gather(source.reshape(*batch, size), len(batch), index).reshape(origin.shape)


_placed(*spellings("index_copy"), names=("input", "dim", "index", "source"), name="index_copy")
_placed(*spellings("scatter"), names=("input", "dim", "index", "src"), name="scatter")
_placed(*spellings("masked_scatter"), names=("input", "mask", "source"), name="masked_scatter")
_placed(with_items, names=("input", "index", "value"), name="__setitem__")


@rule(Tensor.__setitem__, kind=Kind.LINEAR, treatment=EXACT, name="__setitem__",
      batch=Batch.STEPWISE)  # fmt: skip
def set_item(function: Callable[..., Any], input: Any, index: Any, value: Any) -> None:
    """Elements at a constant index become others; a boolean mask may be the index.

    A condition on the tensor's own elements, as in `x[x < 0] = 0`, chooses between numbers.
    """
    if (
        isinstance(index, GaussianTensor)
        and index.shape == input.shape
        and (not isinstance(value, Tensor) or value.dim() == 0)
    ):
        chosen: Any = torch.where(index, value, input)
        write(function, input, chosen)
        return
    _check_constant(function, {"index": index})
    for tensor in gaussians((input, value), {}):
        tensor.evaluate()
    spread = _spread(input, index, value)
    if spread is None:
        made = dispatch(with_items, (input, index, value), {})
    else:
        places = torch.zeros(input.shape, dtype=torch.bool, device=input.device)
        places[index] = True
        made = torch.where(places, spread, input)
    write(function, input, made)


def _spread(input: Any, index: Any, value: Any) -> Any:
    """A value in the shape of what it is written into, None where its batch is not moved by that.

    A model that collects steps, `out[t] = y`, has the batch first in y and second in out.
    """
    both = isinstance(input, GaussianTensor) and isinstance(value, GaussianTensor)
    if not both or input.batch_at == value.batch_at:
        return None
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        whole = (slice(None),) * (len(input.shape) - len(index) + 1)
        index = (*index[:at], *whole, *index[at + 1 :])
    if not all(isinstance(one, int) or one == slice(None) for one in index):
        return None
    numbered = [d for d, one in enumerate(index) if isinstance(one, int)]
    value = value.expand([size for d, size in enumerate(input.shape) if d not in numbered])
    for d in numbered:
        value = value.unsqueeze(d)
    return value.expand(input.shape)


def copied(input: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    """The result of `input.copy_(src)`."""
    return torch.as_tensor(src).expand(input.shape).to(input)


@rule(copied, kind=Kind.LINEAR, treatment=EXACT, name="copy_", batch=Batch.STEPWISE,
      in_place=[Tensor.copy_])  # fmt: skip
def copy_rule(
    function: Callable[..., Any], input: Any, src: Any, non_blocking: bool = False
) -> Any:
    """The source, in the shape and dtype of what it is copied into."""
    everywhere = torch.ones(input.shape, dtype=torch.bool, device=input.device)
    return torch.where(everywhere, src, input).to(input.dtype)


@rule(*spellings("index_put"), kind=Kind.LINEAR, treatment=EXACT, name="index_put",
      batch=Batch.STEPWISE, in_place=in_place_spellings("index_put"))  # fmt: skip
def index_put(
    function: Callable[..., Any], input: Any, indices: Any, values: Any, accumulate: bool = False
) -> Any:
    """`input[indices] = values`, or with accumulate, a sum at places along one dimension."""
    if not accumulate:
        return dispatch(with_items, (input, tuple(indices), values), {})
    if len(indices) != 1:
        raise UnsupportedOperation(
            f"{name_of(function)} with accumulate=True has a rule for one index; use index_add"
        )
    return torch.index_add(input, 0, indices[0], values)


@rule(*spellings("scatter_reduce"), kind=Kind.REDUCTION, treatment=REDUCED, name="scatter_reduce",
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
    """Reduce the elements of `src` for each place along a dimension, with those of input or not."""
    _check_reduction(function, input, dim, index, reduce)
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
    terms = _by_rank(sign * src, dim, index, input.shape)
    best = sequential_maximum([sign * input, *terms] if include_self else terms)
    return sign * best if include_self else torch.where(untouched, input, sign * best)


@rule(*spellings("index_reduce"), kind=Kind.REDUCTION, treatment=REDUCED, name="index_reduce",
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
    """`scatter_reduce` with one index for all elements of a row."""
    if isinstance(index, GaussianTensor):
        raise UnsupportedOperation(f"{name_of(function)} takes places that are random here")
    shape = [1] * len(source.shape)
    shape[dim] = -1
    index = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(input, dim, index, source, reduce, include_self=include_self)


def _check_reduction(
    function: Callable[..., Any], input: Any, dim: int, index: Any, reduce: str
) -> None:
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


def _by_rank(src: Any, dim: int, index: Tensor, shape: torch.Size) -> list[Any]:
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
    terms = []
    for k in range(int(rank.max()) + 1 if rank.numel() else 0):
        # One place more, for elements of other ranks.
        wide = list(shape)
        wide[dim] += 1
        origin = torch.full(wide, -1, device=index.device)
        origin.scatter_(dim, torch.where(rank == k, keys, shape[dim]), order)
        origin = origin.narrow(dim, 0, shape[dim])
        taken = torch.gather(src, dim, origin.clamp(min=0))
        terms.append(torch.where(origin >= 0, taken, -torch.inf))
    return terms
