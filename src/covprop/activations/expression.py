"""Element-wise operations on one tensor as one scalar function of its elements.

Taken one by one, as if Gaussian in between, they would be silently wrong: exp(-y^2) of a Gaussian
y^2 has a mean above 1.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from covprop.activations.base import Activation


class Kind(Enum):
    """What an operation is to the algebra of expressions."""

    ADD = "a + b"
    SUBTRACT = "a - b"
    MULTIPLY = "a * b"
    DIVIDE = "a / b"
    COMPARE = "1 where a > b, or a >= b, else 0"
    CHOOSE = "b where a, else c"
    FUNCTION = "a function of one argument"


@dataclass(frozen=True)
class Operation:
    """An element-wise operation: plain torch code, and the activation that it is, if it is one.

    kinks: places where its derivative jumps; partial: it is defined for some numbers alone, so that
    a Gaussian has no moments there; replaced: the method has an activation of its own for it.
    """

    kind: Kind
    function: Callable[..., Any]
    activation: Activation | None = field(default=None, compare=False)
    kinks: tuple[float, ...] = ()
    partial: bool = False
    replaced: bool = False


ADD = Operation(Kind.ADD, operator.add)
SUBTRACT = Operation(Kind.SUBTRACT, operator.sub)
MULTIPLY = Operation(Kind.MULTIPLY, operator.mul)
DIVIDE = Operation(Kind.DIVIDE, operator.truediv)
COMPARE = Operation(Kind.COMPARE, lambda a, b: torch.as_tensor(a > b).to(torch.float64))
COMPARE_OR_EQUAL = Operation(Kind.COMPARE, lambda a, b: torch.as_tensor(a >= b).to(torch.float64))
CHOOSE = Operation(
    Kind.CHOOSE, lambda chosen, a, b: torch.where(torch.as_tensor(chosen) != 0, a, b)
)


@dataclass(frozen=True, eq=False)
class Parameter:
    """A number of each element, (*batch, n) in float64."""

    values: Tensor


Argument: TypeAlias = "Expression | Parameter | float"


@dataclass(frozen=True)
class Expression:
    """A scalar function of y: y itself, or an operation on expressions, parameters and numbers."""

    operation: Operation | None = None
    arguments: tuple[Argument, ...] = ()

    def __call__(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """The function as plain torch code; parameters as `parameters` has them."""
        return self._value(y, iter(parameters))

    def _value(self, y: Tensor, parameters: Iterator[Tensor]) -> Tensor:
        if self.operation is None:
            return y
        values: list[Any] = []
        for argument in self.arguments:
            if isinstance(argument, Expression):
                values.append(argument._value(y, parameters))
            else:
                values.append(next(parameters) if isinstance(argument, Parameter) else argument)
        result: Tensor = self.operation.function(*values)
        return result

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """The numbers of each element, in the order in which they are used."""
        found: list[Tensor] = []
        for argument in self.arguments:
            if isinstance(argument, Expression):
                found += argument.parameters
            elif isinstance(argument, Parameter):
                found.append(argument.values)
        return tuple(found)

    @property
    def inner(self) -> list["Expression"]:
        """The arguments that depend on y."""
        return [argument for argument in self.arguments if isinstance(argument, Expression)]

    @cached_property
    def affine(self) -> bool:
        """Whether it is a y + b, as written."""
        if self.operation is None:
            return True
        return self.linear and all(one.affine for one in self.inner)

    @property
    def linear(self) -> bool:
        """Whether the outermost operation is linear in what depends on y."""
        kind = None if self.operation is None else self.operation.kind
        if kind in (Kind.MULTIPLY, Kind.DIVIDE):
            return len(self.inner) == 1 and (kind is Kind.MULTIPLY or _varies(self.arguments[0]))
        return kind in (Kind.ADD, Kind.SUBTRACT)

    @property
    def stepwise(self) -> bool:
        """Whether rules for single operations are exact: nothing nonlinear of what is nonlinear."""
        if self.linear:
            return all(one.stepwise for one in self.inner)
        kind = None if self.operation is None else self.operation.kind
        known = kind in (None, Kind.FUNCTION, Kind.MULTIPLY)
        return known and all(one.affine for one in self.inner)

    @property
    def replaced(self) -> bool:
        """Whether a method has an activation of its own for a function in it."""
        own = self.operation is not None and self.operation.replaced
        return own or any(one.replaced for one in self.inner)

    @property
    def rises(self) -> bool:
        """Whether it is one nondecreasing function, which commutes with maxima."""
        if self.operation is None:
            return True
        if len(self.inner) != 1 or not self.inner[0].rises or self.parameters:
            return False
        if self.operation.activation is not None:
            return self.operation.activation.rises
        others = [a for a in self.arguments if isinstance(a, float)]
        kind = self.operation.kind
        if kind in (Kind.MULTIPLY, Kind.DIVIDE):
            return self.linear and others[0] >= 0
        return kind is Kind.ADD or (kind is Kind.SUBTRACT and _varies(self.arguments[0]))

    @property
    def written(self) -> str:
        """The function, written out."""
        if self.operation is None:
            return "x"
        words = [
            a.written
            if isinstance(a, Expression)
            else "c"
            if isinstance(a, Parameter)
            else f"{a:g}"
            for a in self.arguments
        ]
        signs = {Kind.ADD: "+", Kind.SUBTRACT: "-", Kind.MULTIPLY: "*", Kind.DIVIDE: "/",
                 Kind.COMPARE: ">"}  # fmt: skip
        if self.operation.kind in signs:
            return f"({words[0]} {signs[self.operation.kind]} {words[1]})"
        name = getattr(self.operation.function, "__name__", "function")
        name = "where" if self.operation.kind is Kind.CHOOSE else name
        return f"{name}({', '.join(words)})"


def _varies(argument: Argument) -> bool:
    return isinstance(argument, Expression)
