"""The table of rules: what each torch function does to an in-flight Gaussian."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from covprop.errors import UnsupportedOperation, name_of

Rule: TypeAlias = Callable[..., Any]
RuleType = TypeVar("RuleType", bound=Rule)


@dataclass(frozen=True)
class Operation:
    """A row of the table of supported operations."""

    name: str
    kind: str
    treatment: str


RULES: dict[Callable[..., Any], Rule] = {}
IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {}
OPERATIONS: list[Operation] = []


def rule(
    *functions: Callable[..., Any],
    kind: str = "user",
    treatment: str = "as its rule says",
    name: str | None = None,
) -> Callable[[RuleType], RuleType]:
    """Register what torch functions do to a `GaussianTensor`; every spelling is a key of its own.

    The decorated function receives the torch function and its arguments, of which at least one is
    a GaussianTensor, and returns what the model should see.
    """
    if not functions:
        raise ValueError("name at least one torch function: @cp.rule(torch.function)")

    def decorate(body: RuleType) -> RuleType:
        for function in functions:
            if function in RULES or function in IN_PLACE:
                raise ValueError(f"{name_of(function)} has a rule already")
        RULES.update(dict.fromkeys(functions, body))
        OPERATIONS.append(Operation(name or name_of(functions[0]), kind, treatment))
        return body

    return decorate


def in_place(function: Callable[..., Any], of: Callable[..., Any]) -> None:
    """Register the in-place form of a function that has a rule."""
    if function in RULES or function in IN_PLACE:
        raise ValueError(f"{name_of(function)} has a rule already")
    IN_PLACE[function] = of


def unsupported(function: Callable[..., Any]) -> UnsupportedOperation:
    """The error for a function without a rule."""
    return UnsupportedOperation(
        f"covprop has no rule for {name_of(function)}; write one with @cp.rule, or cp.activation "
        "if it is element-wise"
    )


def leaves(nest: Any) -> Iterator[Any]:
    """All the leaves of nested tuples, lists and dicts."""
    if isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item)
    elif isinstance(nest, dict):
        yield from leaves(list(nest.values()))
    else:
        yield nest
