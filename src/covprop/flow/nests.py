"""Nests: tuples, lists, mappings and dataclasses, of what a model takes and returns."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from torch import Tensor, nn

Kind = TypeVar("Kind")

PLAIN = (Tensor, bool, int, float, str, type(None))
"""What is a leaf for certain."""
NO_NESTS = frozenset((*PLAIN, nn.Parameter))
"""The same as types, of which an argument mostly is."""
LEAF, SEQUENCE, MAPPING, RECORD = range(4)


class Record(Protocol):
    """A dataclass, to a type checker."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Nest: TypeAlias = list[Any] | tuple[Any, ...] | Mapping[Any, Any] | Record


@lru_cache(maxsize=256)
def _sort(kind: type) -> int:
    """The sort of nest that a type is, cached because every operation classifies its arguments.

    Dataclasses of the user's are records; covprop's own are values, and modules are leaves.
    """
    if issubclass(kind, list | tuple):
        return SEQUENCE
    if issubclass(kind, PLAIN):
        return LEAF
    if issubclass(kind, Mapping):
        return MAPPING
    own = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    record = is_dataclass(kind) and not own and not issubclass(kind, type | nn.Module)
    return RECORD if record else LEAF


def leaves(nest: Any, around: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The leaves of a nest in order; a leaf is a nest of one.

    around: the enclosing dataclass instances; one that contains itself is a leaf there.
    """
    found: list[Any] = []
    _collect((nest,), around, found)
    return iter(found)


def parts(nest: Any) -> dict[str, Any]:
    """The items of a nest by key, number or field name; none for a leaf."""
    sort = _sort(nest.__class__)
    if sort == SEQUENCE:
        return {str(number): item for number, item in enumerate(nest)}
    if sort == MAPPING:
        return {str(key): item for key, item in nest.items()}
    return {} if sort == LEAF else {f.name: getattr(nest, f.name) for f in fields(nest)}


def instances(kind: type[Kind], args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Kind]:
    """The leaves of this type among the arguments of a function, in order."""
    found: list[Any] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(item, kind):
            found.append(item)
        elif item.__class__ not in NO_NESTS:
            among: list[Any] = []
            _collect((item,), (), among)
            found += [leaf for leaf in among if isinstance(leaf, kind)]
    return found


def _collect(items: Iterable[Any], around: tuple[Any, ...], found: list[Any]) -> None:
    """Append the leaves of several nests to a list, which is faster than nested generators."""
    for item in items:
        sort = _sort(item.__class__)
        if sort == LEAF:
            found.append(item)
        elif sort == SEQUENCE:
            _collect(item, around, found)
        elif sort == MAPPING:
            _collect(item.values(), around, found)
        elif any(item is one for one in around):
            found.append(item)
        else:
            values = [getattr(item, field.name) for field in fields(item)]
            _collect(values, (*around, item), found)


def map_leaves(nest: Any, function: Callable[[Any], Any], around: tuple[Any, ...] = ()) -> Any:
    """A copy of a nest with a function of each leaf, in the order of `leaves`."""
    sort = _sort(nest.__class__)
    if sort == LEAF:
        return function(nest)
    if sort == SEQUENCE:
        items = [map_leaves(item, function, around) for item in nest]
        return nest._make(items) if hasattr(nest, "_make") else type(nest)(items)
    if sort == MAPPING:
        values = {key: map_leaves(item, function, around) for key, item in nest.items()}
        return _mapping(nest, values)
    if any(nest is one for one in around):
        return function(nest)
    inside = (*around, nest)
    names = [field.name for field in fields(nest)]
    return _record(nest, {n: map_leaves(getattr(nest, n), function, inside) for n in names})


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
