"""Every spelling that torch has of an element-wise function, found by its names alone."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covprop.activations import DECLARATIONS, Declaration
from tests.cases import CASES


class Function(NamedTuple):
    """An element-wise function: its names, its options in torch's order, its layer."""

    names: str
    options: dict[str, Any]
    layer: type[nn.Module] | None = None
    kinks: tuple[float, ...] = ()


LISTED = [
    Function("relu", {}, nn.ReLU, (0.0,)),
    Function("leaky_relu", {"negative_slope": 0.2}, nn.LeakyReLU, (0.0,)),
    Function("rrelu", {"lower": 0.1, "upper": 0.5}, nn.RReLU, (0.0,)),
    Function("relu6", {}, nn.ReLU6, (0.0, 6.0)),
    Function("hardtanh", {"min_val": -0.5, "max_val": 2.0}, nn.Hardtanh, (-0.5, 2.0)),
    Function("clamp clip", {"min": -0.7, "max": 1.2}, None, (-0.7, 1.2)),
    Function("clamp clip", {"min": 0.3}, None, (0.3,)),
    Function("clamp_min", {"min": 0.3}, None, (0.3,)),
    Function("clamp_max", {"max": 0.3}, None, (0.3,)),
    Function("threshold", {"threshold": 0.5, "value": -1.0}, nn.Threshold, (0.5,)),
    Function("hardsigmoid", {}, nn.Hardsigmoid, (-3.0, 3.0)),
    Function("hardswish", {}, nn.Hardswish, (-3.0, 3.0)),
    Function("abs absolute", {}, None, (0.0,)),
    Function("sign sgn", {}, None, (0.0,)),
    Function("heaviside", {"values": torch.ones(1, dtype=torch.float64)}, None, (0.0,)),
    Function("softshrink", {"lambd": 0.7}, nn.Softshrink, (-0.7, 0.7)),
    Function("hardshrink", {"lambd": 0.7}, nn.Hardshrink, (-0.7, 0.7)),
    Function("gelu", {}, nn.GELU),
    Function("gelu", {"approximate": "tanh"}, nn.GELU),
    Function("erf", {}),
    Function("erfc", {}),
    Function("ndtr", {}),
    Function("sigmoid expit", {}, nn.Sigmoid),
    Function("tanh", {}, nn.Tanh),
    Function("silu", {}, nn.SiLU),
    Function("mish", {}, nn.Mish),
    Function("softplus", {"beta": 2.0, "threshold": 30.0}, nn.Softplus),
    Function("logsigmoid", {}, nn.LogSigmoid),
    Function("softsign", {}, nn.Softsign, (0.0,)),
    Function("tanhshrink", {}, nn.Tanhshrink),
    Function("elu", {"alpha": 0.7}, nn.ELU, (0.0,)),
    Function("selu", {}, nn.SELU, (0.0,)),
    Function("celu", {"alpha": 0.7}, nn.CELU, (0.0,)),
    Function("exp", {}),
    Function("sin", {}),
    Function("cos", {}),
    Function("square", {}),
    Function("pow", {"exponent": 3}),
    Function("pow", {"exponent": torch.tensor(2)}),
]
"""Those with options or a layer, and names that are known here without asking covprop."""


def _names(row: Declaration) -> str:
    return " ".join(dict.fromkeys([row.name, *(f.__name__ for f in row.functions)]))


_KINKS = {case.declaration: case.kinks for case in CASES.values()}
_LISTED = {name for row in LISTED for name in row.names.split()}
FUNCTIONS = [
    *LISTED,
    *(
        Function(_names(row), {}, None, _KINKS.get(row.name, ()))
        for row in DECLARATIONS
        if row.name not in _LISTED
    ),
]
"""And every other declared activation, under the names of its declaration."""
HOMES = {"torch": torch, "F": F, "Tensor": torch.Tensor, "special": torch.special}
OPERATORS: dict[str, Callable[[Any], Any]] = {"abs": abs, "pow": lambda x: x**3}
"""What Python writes for a function; the power is that of the first row of its name."""


def spellings(row: Function) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(label, call) for functions, methods, layers, options by position and by name, in place."""
    by_position, by_name = tuple(row.options.values()), row.options
    for name in [base + end for base in row.names.split() for end in ("", "_")]:
        for where, home in HOMES.items():
            if not hasattr(home, name):
                continue
            yield f"{where}.{name}", _call(where, name, (), by_name)
            if by_name and "approximate" not in by_name:  # which torch takes by name alone
                yield f"{where}.{name}, by position", _call(where, name, by_position, {})
            if _has_inplace(getattr(home, name)):
                yield (
                    f"{where}.{name}, inplace",
                    _call(where, name, (), {**by_name, "inplace": True}),
                )
    if row.layer is not None:
        yield row.layer.__name__, row.layer(**by_name).eval()
        if _has_inplace(row.layer):
            yield f"{row.layer.__name__}, inplace", row.layer(**by_name, inplace=True).eval()


def _call(where: str, name: str, args: Any, kwargs: Any) -> Callable[[Any], Any]:
    if where == "Tensor":
        return lambda x: getattr(x, name)(*args, **kwargs)
    return lambda x: getattr(HOMES[where], name)(x, *args, **kwargs)


def _has_inplace(function: Any) -> bool:
    try:
        return "inplace" in inspect.signature(function).parameters
    except ValueError:  # written in C, without a signature; none of them has the option
        return False


def plain(row: Function) -> Callable[[Tensor], Tensor]:
    """The function on tensors, in its first spelling."""
    return next(spellings(row))[1]
