"""Element-wise operations on one tensor as one scalar function of its elements: the tree.

Taken one by one, as if Gaussian in between, they would be silently wrong: exp(-y^2) of a Gaussian
y^2 has a mean above 1. `composite` has the moments of the function as a whole.
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


class OperationKind(Enum):
    """What an operation is to the algebra of expressions."""

    ADD = "a + b"
    SUBTRACT = "a - b"
    MULTIPLY = "a * b"
    DIVIDE = "a / b"
    COMPARE = "1 where a > b, or a >= b, else 0"
    LOGIC = "1 where conditions hold together, else 0"
    CHOOSE = "b where a, else c"
    FUNCTION = "a function of one argument"


@dataclass(frozen=True)
class Operation:
    """An element-wise operation: plain torch code, and the activation that it is, if it is one.

    kinks: places where its derivative jumps; partial: it is not defined for all numbers, so that a
    Gaussian has no moments; replaced: the method has an activation of its own for it.
    """

    kind: OperationKind
    function: Callable[..., Any]
    activation: Activation | None = field(default=None, compare=False)
    kinks: tuple[float, ...] = ()
    partial: bool = False
    replaced: bool = False


ADD = Operation(OperationKind.ADD, operator.add)
SUBTRACT = Operation(OperationKind.SUBTRACT, operator.sub)
MULTIPLY = Operation(OperationKind.MULTIPLY, operator.mul)
DIVIDE = Operation(OperationKind.DIVIDE, operator.truediv)
COMPARE = Operation(OperationKind.COMPARE, lambda a, b: torch.as_tensor(a > b).to(torch.float64))
COMPARE_OR_EQUAL = Operation(
    OperationKind.COMPARE, lambda a, b: torch.as_tensor(a >= b).to(torch.float64)
)
AND = Operation(OperationKind.LOGIC, lambda a, b: a * b)
OR = Operation(OperationKind.LOGIC, lambda a, b: a + b - a * b)
EITHER = Operation(OperationKind.LOGIC, lambda a, b: a + b - 2 * a * b)
NOT = Operation(OperationKind.LOGIC, lambda a: 1 - a)
CHOOSE = Operation(
    OperationKind.CHOOSE, lambda chosen, a, b: torch.where(torch.as_tensor(chosen) != 0, a, b)
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
        values: list[Tensor] = []
        for argument in self.arguments:
            if isinstance(argument, Expression):
                values += argument.parameters
            elif isinstance(argument, Parameter):
                values.append(argument.values)
        return tuple(values)

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
    def kind(self) -> OperationKind | None:
        """That of the outermost operation; None for y itself."""
        return None if self.operation is None else self.operation.kind

    @property
    def linear(self) -> bool:
        """Whether the outermost operation is linear in what depends on y."""
        kind = self.kind
        if kind in (OperationKind.MULTIPLY, OperationKind.DIVIDE):
            return len(self.inner) == 1 and (
                kind is OperationKind.MULTIPLY or _varies(self.arguments[0])
            )
        return kind in (OperationKind.ADD, OperationKind.SUBTRACT)

    @property
    def stepwise(self) -> bool:
        """Whether rules for single operations are exact: nothing nonlinear of what is nonlinear."""
        if self.linear:
            return all(one.stepwise for one in self.inner)
        known = self.kind in (None, OperationKind.FUNCTION, OperationKind.MULTIPLY)
        return known and all(one.affine for one in self.inner)

    @property
    def replaced(self) -> bool:
        """Whether a method has an activation of its own for a function in it."""
        own = self.operation is not None and self.operation.replaced
        return own or any(one.replaced for one in self.inner)

    @property
    def nondecreasing(self) -> bool:
        """Whether it is one nondecreasing function, which commutes with maxima."""
        if self.operation is None:
            return True
        if len(self.inner) != 1 or not self.inner[0].nondecreasing or self.parameters:
            return False
        if self.operation.activation is not None:
            return self.operation.activation.nondecreasing
        if self.kind in (OperationKind.MULTIPLY, OperationKind.DIVIDE):
            others = [a for a in self.arguments if isinstance(a, float)]
            return self.linear and others[0] >= 0
        return self.kind is OperationKind.ADD or (
            self.kind is OperationKind.SUBTRACT and _varies(self.arguments[0])
        )

    @property
    def condition(self) -> bool:
        """Whether it is 1 where something holds, and 0 elsewhere."""
        return self.kind in (OperationKind.COMPARE, OperationKind.LOGIC)

    @property
    def formula(self) -> str:
        """The function, written out."""
        if self.operation is None:
            return "x"
        words = [_text(argument) for argument in self.arguments]
        signs = {
            OperationKind.ADD: "+", OperationKind.SUBTRACT: "-", OperationKind.MULTIPLY: "*",
            OperationKind.DIVIDE: "/", OperationKind.COMPARE: ">",
        }  # fmt: skip
        if self.operation.kind in signs:
            return f"({words[0]} {signs[self.operation.kind]} {words[1]})"
        name = getattr(self.operation.function, "__name__", "function")
        named = {OperationKind.CHOOSE: "where", OperationKind.LOGIC: "logic"}
        name = named.get(self.operation.kind, name)
        return f"{name}({', '.join(words)})"


def _text(argument: Argument) -> str:
    if isinstance(argument, Expression):
        return argument.formula
    return "c" if isinstance(argument, Parameter) else f"{argument:g}"


def _varies(argument: Argument) -> bool:
    return isinstance(argument, Expression)
