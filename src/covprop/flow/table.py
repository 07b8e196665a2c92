"""The table of rules: one row for each torch function, with all that is known of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from covprop.errors import UnsupportedOperation, name_of

BodyType = TypeVar("BodyType", bound=Callable[..., Any])


class Batch(Enum):
    """Where a rule lets the batch of its tensors be."""

    FIRST = "the first dimensions"
    ANYWHERE = "any dimension: the rule asks the function alone what goes where"
    STEPWISE = "as the operations that the rule is made of want it"


class Kind(Enum):
    """What a function does to a random vector."""

    LINEAR = auto()
    MOVEMENT = auto()
    """It moves, repeats or leaves out elements."""
    ELEMENTWISE = auto()
    PRODUCT = auto()
    JOIN = auto()
    """It puts tensors side by side."""
    MAXIMUM = auto()
    """It takes pending tensors as they are: maxima commute with monotone functions."""
    SMOOTH = auto()
    """A smooth function of several elements."""
    NOISE = auto()
    """It adds randomness of its own, and leaves the mean."""
    RANDOM_WEIGHTS = auto()
    """Linear with random weights, its second argument, of the shape that one network has."""
    ATTENTION = auto()
    RECURRENT = auto()
    CONSTANT = auto()
    """Its result does not vary."""
    OTHER = auto()


@dataclass(frozen=True)
class Rule:
    """All that is known of a torch function.

    body: (function, *args, **kwargs) -> what the model sees; name, treatment: for the table of the
    documentation; in_place_of: the function that it is the in-place form of; compose: extends a
    pending function of a tensor, (function, args, kwargs) -> a pending tensor or None; weights:
    what holds the random weights of a call, None where they may enter a pass more than once.
    """

    name: str
    body: Callable[..., Any] | None = None
    kind: Kind = Kind.OTHER
    batch: Batch = Batch.FIRST
    treatment: str = ""
    in_place_of: Callable[..., Any] | None = None
    compose: Callable[..., Any] | None = None
    weights: Callable[..., object] | None = None


UNDESCRIBED = "as its rule says"
"""The treatment of rules that are not listed in the documentation."""
TABLE: dict[Callable[..., Any], Rule] = {}
"""The rules of torch functions; every spelling has a row of its own."""
TWICE = (
    "a Bayesian layer is used twice in one pass, and its weights are the same both times, which "
    "covprop does not follow; make a layer for each use, or pass shared=True, which takes the uses "
    "as independent"
)


def rule(
    *functions: Callable[..., Any],
    kind: Kind = Kind.OTHER,
    treatment: str = UNDESCRIBED,
    name: str | None = None,
    batch: Batch = Batch.FIRST,
    weights: Callable[..., object] | None = None,
) -> Callable[[BodyType], BodyType]:
    """Register what torch functions do to a `GaussianTensor`.

    The decorated function receives the torch function and its arguments, of which at least one is
    a GaussianTensor, and returns what the model should see.

    Args:
        functions: All spellings of one function, such as torch.flip and torch.Tensor.flip.
        kind: What it does.
        treatment: How exact it is, for the table of operations.
        name: What the table calls it.
        batch: Where the batch may be. `Batch.STEPWISE` suits rules that are made of other
            operations on the tensor.
        weights: What holds the random weights of a call.

    Example:
        @cp.rule(torch.hypot, batch=cp.Batch.STEPWISE)
        def hypot(function, x, y):
            return (x.square() + y.square()).sqrt()
    """
    if not functions:
        raise ValueError("name at least one torch function: @cp.rule(torch.function)")

    def decorate(body: BodyType) -> BodyType:
        title = name or name_of(functions[0])
        row = Rule(title, body, kind, batch, treatment, weights=weights)
        for function in functions:
            _check_new(function)
        TABLE.update(dict.fromkeys(functions, row))
        return body

    return decorate


def in_place(function: Callable[..., Any], of: Callable[..., Any]) -> None:
    """Register the in-place form of a function that has a rule."""
    _check_new(function)
    TABLE[function] = Rule(name_of(function), in_place_of=of)


def composes(functions: Iterable[Callable[..., Any]], compose: Callable[..., Any]) -> None:
    """Let functions that have a rule extend the pending function of a tensor."""
    TABLE.update({function: replace(TABLE[function], compose=compose) for function in functions})


def _check_new(function: Callable[..., Any]) -> None:
    if function in TABLE:
        raise ValueError(f"{name_of(function)} has a rule already")


class Entered:
    """The random weights that have entered a pass on plain tensors: each may once."""

    def __init__(self) -> None:
        """None have."""
        self._seen: set[int] = set()

    def see(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Refuse those that have been there; other functions have none."""
        row = TABLE.get(function)
        holder = None if row is None or row.weights is None else row.weights(*args)
        if holder is None:
            return
        if id(holder) in self._seen:
            raise UnsupportedOperation(TWICE)
        self._seen.add(id(holder))


def spelled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The torch function that an operator of an exported program is another name of."""
    if function in TABLE or not isinstance(function, OpOverload | OpOverloadPacket):
        return function
    name = str(function).removeprefix("aten.").partition(".")[0].removeprefix("special_")
    homes = (torch, torch.Tensor, torch._C._nn, F, torch.special)
    known = [getattr(home, name) for home in homes if hasattr(home, name)]
    return next((found for found in known if found in TABLE), function)


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
