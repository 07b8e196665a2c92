"""The table of rules: one row for each torch function, with all that is known of it.

Rules are written for tensors whose batch comes first (`batch_position.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from covprop.errors import UnsupportedOperation, name_of

BodyType = TypeVar("BodyType", bound=Callable[..., Any])


class Batch(Enum):
    """Where the batch dimensions of a rule's tensors may be.

    Attributes:
        FIRST: The first dimensions. A call with the batch elsewhere is refused.
        ANYWHERE: Any dimension. The rule gets tensors with the batch first, and learns from the
            function that it is given where the elements go.
        STEPWISE: Wherever the operations inside the rule accept it. The rule gets its tensors
            unchanged, also pending ones.

    Example:
        cp.rule(torch.trapezoid, batch=cp.Batch.ANYWHERE)(cp.extending.affine)
        cp.propagate(torch.trapezoid, x, cp.GaussianLayers())
    """

    FIRST = "the first dimensions"
    ANYWHERE = "any dimension: the rule runs the function itself to see what goes where"
    STEPWISE = "as the operations that the rule is made of want it"


class Kind(Enum):
    """What a function does to a random vector.

    Attributes:
        LINEAR: A linear map and a constant.
        MOVEMENT: It moves, repeats or leaves out elements.
        ELEMENTWISE: One scalar function of each element.
        PRODUCT: A sum of products, or a quotient.
        JOIN: It puts tensors side by side.
        MAXIMUM: It takes pending tensors as they are: maxima commute with monotone functions.
        SMOOTH: A smooth function of several elements.
        NOISE: It adds randomness of its own, and leaves the mean.
        RANDOM_WEIGHTS: Linear with random weights, its second argument, of the shape that one
            network has.
        ATTENTION: Attention.
        RECURRENT: A step that is repeated.
        CONSTANT: Its result does not vary.
        ORDER: It sorts elements.
        REDUCTION: It joins elements that an index gives the same place.
        OTHER: Anything else.

    Example:
        cp.rule(torch.trapezoid, kind=cp.extending.Kind.LINEAR)(cp.extending.affine)
        cp.propagate(torch.trapezoid, x, cp.GaussianLayers())
    """

    LINEAR = auto()
    MOVEMENT = auto()
    ELEMENTWISE = auto()
    PRODUCT = auto()
    JOIN = auto()
    MAXIMUM = auto()
    SMOOTH = auto()
    NOISE = auto()
    RANDOM_WEIGHTS = auto()
    ATTENTION = auto()
    RECURRENT = auto()
    CONSTANT = auto()
    ORDER = auto()
    REDUCTION = auto()
    OTHER = auto()


@dataclass(frozen=True)
class Rule:
    """All that is known of a torch function.

    body: (function, *args, **kwargs) -> what the model sees; name, treatment: for the table of the
    documentation; in_place_of: the function that it is the in-place form of; compose: extends a
    pending function of a tensor, (function, args, kwargs, those that are in flight) -> a pending
    tensor or None; weights: what holds the random weights of a call, None where they may enter a
    pass more than once.
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
"""The rules of torch functions, one row for every spelling."""
USED_TWICE = (
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
    in_place: Iterable[Callable[..., Any]] = (),
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
        in_place: The forms that change their first argument, such as torch.Tensor.flip_. Each is
            run as the function of its name, or as the first one.
        weights: What holds the random weights of a call.

    Example:
        @cp.rule(torch.hypot, in_place=[torch.Tensor.hypot_], batch=cp.Batch.STEPWISE)
        def hypot(function, x, y):
            return torch.stack([x, y], -1).norm(dim=-1)

        cp.propagate(lambda x: torch.hypot(x, x.flip(-1)), x, cp.GaussianLayers())
    """
    if not functions:
        raise ValueError("name at least one torch function: @cp.rule(torch.function)")
    forms = tuple(in_place)

    def decorate(body: BodyType) -> BodyType:
        title = name or name_of(functions[0])
        row = Rule(title, body, kind, batch, treatment, weights=weights)
        rows = dict.fromkeys(functions, row)
        for form in forms:
            rows[form] = Rule(name_of(form), in_place_of=_plain_form(form, functions))
        for function in rows:
            if function in TABLE:
                raise ValueError(f"{name_of(function)} has a rule already")
        TABLE.update(rows)
        return body

    return decorate


def _plain_form(
    form: Callable[..., Any], functions: Sequence[Callable[..., Any]]
) -> Callable[..., Any]:
    """The out-of-place function of an in-place form: the method of that name if there is one."""
    name = getattr(form, "__name__", "").removesuffix("_")
    named = [function for function in functions if getattr(function, "__name__", None) == name]
    method = getattr(torch.Tensor, name, None)
    return method if method in named else (*named, *functions)[0]


def register_composer(functions: Iterable[Callable[..., Any]], compose: Callable[..., Any]) -> None:
    """Set how functions that have a rule extend the pending function of a tensor."""
    TABLE.update({function: replace(TABLE[function], compose=compose) for function in functions})


class UsedWeights:
    """The random weights that a pass on plain tensors has used: each may be used once."""

    def __init__(self) -> None:
        """Begin without any."""
        self._seen: set[int] = set()

    def see(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Refuse a second use of the weights of a call, if the function has random weights."""
        row = TABLE.get(function)
        holder = None if row is None or row.weights is None else row.weights(*args)
        if holder is None:
            return
        if id(holder) in self._seen:
            raise UnsupportedOperation(USED_TWICE)
        self._seen.add(id(holder))


def as_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The torch function of an ATen operator, as exported programs have them; others unchanged."""
    if function in TABLE or not isinstance(function, OpOverload | OpOverloadPacket):
        return function
    name = str(function).removeprefix("aten.").partition(".")[0].removeprefix("special_")
    homes = (torch, torch.Tensor, torch._C._nn, F, torch.special)
    known = [getattr(home, name) for home in homes if hasattr(home, name)]
    return next((candidate for candidate in known if candidate in TABLE), function)


def unsupported_script() -> UnsupportedOperation:
    """The error for a program of TorchScript."""
    return UnsupportedOperation(
        "a TorchScript program runs outside of Python, where no rule sees its operations; give "
        "covprop the module or function that it was made of, or take cp.MonteCarlo()"
    )


def unsupported(function: Callable[..., Any]) -> UnsupportedOperation:
    """The error for a function without a rule."""
    if isinstance(function, torch.jit.ScriptFunction | torch._C.ScriptMethod):
        return unsupported_script()
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
    "floordiv": "floor_divide", "mod": "remainder", "rfloordiv": "__rfloordiv__",
    "rmod": "__rmod__", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "rand": "__rand__", "ror": "__ror__", "rxor": "__rxor__",
    "radd": "add", "rmul": "mul", "rsub": "__rsub__", "rtruediv": "__rtruediv__",
    "rpow": "__rpow__",
}  # fmt: skip
"""Python's operators, and the methods of torch.Tensor that they are."""
