"""Nests: tuples, lists, mappings and dataclasses, of what a model takes and returns."""

import operator
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

SEQUENCES = (list, tuple)
PLAIN = (Tensor, bool, int, float, str, type(None))
"""What is a leaf for certain: tested first, as arguments of torch functions are mostly these."""


def leaves(nest: Any, around: tuple[Any, ...] = ()) -> Iterator[Any]:
    """All the leaves of a nest, in order; of what is no nest, itself.

    around: dataclass instances that it is in; one that has itself in it is a leaf there.
    """
    if isinstance(nest, SEQUENCES):
        for item in nest:
            yield from leaves(item, around)
    elif isinstance(nest, PLAIN):
        yield nest
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from leaves(item, around)
    elif _is_record(nest, around):
        for field in fields(nest):
            yield from leaves(getattr(nest, field.name), (*around, nest))
    else:
        yield nest


def map_leaves(nest: Any, function: Callable[[Any], Any], around: tuple[Any, ...] = ()) -> Any:
    """A copy of a nest with a function of each leaf, in the order of `leaves`."""

    def inside(item: Any, *more: Any) -> Any:
        return map_leaves(item, function, (*around, *more))

    if isinstance(nest, SEQUENCES):
        items = [inside(item) for item in nest]
        return nest._make(items) if hasattr(nest, "_make") else type(nest)(items)
    if isinstance(nest, PLAIN):
        return function(nest)
    if isinstance(nest, Mapping):
        return _mapping(nest, {key: inside(item) for key, item in nest.items()})
    if _is_record(nest, around):
        return _record(nest, {f.name: inside(getattr(nest, f.name), nest) for f in fields(nest)})
    return function(nest)


def _is_record(value: Any, around: tuple[Any, ...]) -> bool:
    """Whether it is an instance of a dataclass of the user's: covprop's own are values."""
    if not is_dataclass(value) or isinstance(value, type | nn.Module):
        return False
    if any(value is one for one in around):
        return False
    return type(value).__module__.partition(".")[0] != __name__.partition(".")[0]


def _record(record: Any, values: dict[str, Any]) -> Any:
    """A copy of a dataclass instance with other values, or itself if all leaves are the same.

    Not by its constructor, which may check that its fields are tensors.
    """
    if all(map(operator.is_, leaves(record), leaves(values, (record,)))):
        return record
    result = copy(record)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result


def _mapping(mapping: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other items."""
    if type(mapping) is dict:
        return items
    if is_dataclass(mapping):  # as transformers' ModelOutput: its constructor fills the mapping
        return replace(mapping, **items)  # type: ignore[type-var]
    if hasattr(mapping, "__setitem__"):
        result = copy(mapping)
        for key, item in items.items():
            result[key] = item
        return result
    return type(mapping)(items)
