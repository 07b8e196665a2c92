"""The table of rules: what each torch function does to an in-flight Gaussian."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from covprop.errors import UnsupportedOperation, name_of

Rule: TypeAlias = Callable[..., Any]
RuleType = TypeVar("RuleType", bound=Rule)


class Batch(Enum):
    """Where a rule lets the batch of its tensors be."""

    FIRST = "the first dimensions"
    ANYWHERE = "any dimension: the rule asks the function alone what goes where"
    STEPWISE = "as the operations that the rule is made of want it"


@dataclass(frozen=True)
class Operation:
    """A row of the table of supported operations."""

    name: str
    kind: str
    treatment: str


RULES: dict[Callable[..., Any], Rule] = {}
BATCH: dict[Callable[..., Any], Batch] = {}
IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {}
COMPOSERS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Element-wise operations extend the function of a tensor that their argument is: (function, args,
kwargs) -> a tensor that is yet to be evaluated, or None."""
OPERATIONS: list[Operation] = []
KIND: dict[Callable[..., Any], str] = {}
RANDOM_WEIGHTS = "random weights"
"""The kind of linear functions whose weights, their second argument, are of one network's shape."""
AT_MEANS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What functions that draw random numbers do on average, for a plan, which must not draw."""
SOURCE: dict[Callable[..., Any], Callable[..., object]] = {}
"""What holds the random weights of a call, None where it may enter a pass more than once."""
TWICE = (
    "a Bayesian layer is used twice in one pass, and its weights are the same both times, which "
    "covprop does not follow; make a layer for each use, or pass shared=True, which takes the uses "
    "as independent"
)


class Entered:
    """The random weights that have entered a pass on plain tensors: each may once."""

    def __init__(self) -> None:
        """None have."""
        self._seen: set[int] = set()

    def see(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Refuse those that have been there; other functions have none."""
        holder = SOURCE[function](*args) if function in SOURCE else None
        if holder is None:
            return
        if id(holder) in self._seen:
            raise UnsupportedOperation(TWICE)
        self._seen.add(id(holder))


def rule(
    *functions: Callable[..., Any],
    kind: str = "user",
    treatment: str = "as its rule says",
    name: str | None = None,
    batch: Batch = Batch.FIRST,
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
        BATCH.update(dict.fromkeys(functions, batch))
        KIND.update(dict.fromkeys(functions, kind))
        OPERATIONS.append(Operation(name or name_of(functions[0]), kind, treatment))
        return body

    return decorate


def in_place(function: Callable[..., Any], of: Callable[..., Any]) -> None:
    """Register the in-place form of a function that has a rule."""
    if function in RULES or function in IN_PLACE:
        raise ValueError(f"{name_of(function)} has a rule already")
    IN_PLACE[function] = of


def spelled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The torch function that an operator of an exported program is another name of."""
    if function in RULES or not isinstance(function, OpOverload | OpOverloadPacket):
        return function
    name = str(function).removeprefix("aten.").partition(".")[0].removeprefix("special_")
    homes = (torch, torch.Tensor, torch._C._nn, F, torch.special)
    known = [getattr(home, name) for home in homes if hasattr(home, name)]
    return next((found for found in known if found in RULES or found in IN_PLACE), function)


def unsupported(function: Callable[..., Any]) -> UnsupportedOperation:
    """The error for a function without a rule."""
    if isinstance(function, torch.jit.ScriptFunction | torch._C.ScriptMethod):
        return UnsupportedOperation(
            "a TorchScript program runs outside of Python, where no rule sees its operations; give "
            "covprop the module or function that it was made of, or take cp.MonteCarlo()"
        )
    return UnsupportedOperation(
        f"covprop has no rule for {name_of(function)}; write one with @cp.rule, or cp.activation "
        "if it is element-wise, or sample with cp.MonteCarlo()"
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


def map_leaves(nest: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a nest with a function of each leaf, in the order of `leaves`."""
    if isinstance(nest, list | tuple):
        items = [map_leaves(item, function) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if isinstance(nest, dict):
        return {key: map_leaves(item, function) for key, item in nest.items()}
    return function(nest)


OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "matmul": "matmul", "pow": "pow",
    "neg": "neg", "pos": "positive", "abs": "abs",
    "getitem": "__getitem__", "setitem": "__setitem__",
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_",
    "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
    "bool": "__bool__", "float": "__float__", "int": "__int__", "index": "__index__",
    "floordiv": "floor_divide", "mod": "remainder",
    "radd": "add", "rmul": "mul", "rsub": "__rsub__", "rtruediv": "__rtruediv__",
    "rpow": "__rpow__",
}  # fmt: skip
"""Python's operators, and the methods of torch.Tensor that they are."""
