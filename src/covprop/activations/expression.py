"""Element-wise operations on one tensor as one scalar function of its elements.

Taken one by one, as if Gaussian in between, they would be silently wrong: exp(-y^2) of a Gaussian
y^2 has a mean above 1. Polynomials and piecewise-linear functions are recognised, and have closed
forms; any other function is integrated by quadrature, between its kinks.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from covprop.activations.base import Activation
from covprop.activations.closed import Polynomial
from covprop.activations.moments import REACH, Scalar, value_and_slope
from covprop.activations.piecewise import Piecewise
from covprop.activations.quadrature import Quadrature, crossings
from covprop.kernels.rounding import JUMP, rounding

Coefficients: TypeAlias = list[float | Tensor]

MAX_DEGREE = 16
"""The largest degree of an expression that counts as a polynomial."""


class OperationKind(Enum):
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
    def known(self) -> Activation | None:
        """The activation that it is, as written, of y itself."""
        if self.operation is None or self.operation.replaced or len(self.arguments) != 1:
            return None
        argument = self.arguments[0]
        of_itself = isinstance(argument, Expression) and argument.operation is None
        return self.operation.activation if of_itself else None

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
    def written(self) -> str:
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
        name = "where" if self.operation.kind is OperationKind.CHOOSE else name
        return f"{name}({', '.join(words)})"


def _text(argument: Argument) -> str:
    if isinstance(argument, Expression):
        return argument.written
    return "c" if isinstance(argument, Parameter) else f"{argument:g}"


def _varies(argument: Argument) -> bool:
    return isinstance(argument, Expression)


class _NotInFamily(Exception):
    """A function is not a polynomial, or not piecewise linear."""


def closed_form(expression: Expression) -> Activation | None:
    """The polynomial or the piecewise-linear function that an expression is, if it is one."""
    with suppress(_NotInFamily):
        coefficients = _polynomial(expression)
        return Polynomial(coefficients + [0.0] * (2 - len(coefficients)))
    with suppress(_NotInFamily):
        return _piecewise(expression, sorted(_knots(expression)))
    return None


def by_quadrature(expression: Expression, mean: Tensor, stddev: Tensor) -> Quadrature:
    """Any other one, with its kinks for elements of these moments (*batch, n)."""
    kinks = tuple(_kinks(expression, mean, stddev))
    parameters = tuple(parameter.expand_as(mean) for parameter in expression.parameters)
    return Quadrature(
        expression, kinks, parameters=parameters, nondecreasing=expression.nondecreasing
    )


def _polynomial(argument: Argument) -> Coefficients:
    """The coefficients of y^0, y^1 ..., two at least where there is a power of y."""
    if not isinstance(argument, Expression):
        return [argument.values if isinstance(argument, Parameter) else argument]
    if argument.operation is None:
        return [0.0, 1.0]
    kind, activation = argument.operation.kind, argument.operation.activation
    if kind in (OperationKind.COMPARE, OperationKind.CHOOSE):
        raise _NotInFamily
    operands = [_polynomial(one) for one in argument.arguments]
    if kind in (OperationKind.ADD, OperationKind.SUBTRACT):
        sign = 1.0 if kind is OperationKind.ADD else -1.0
        return [a + sign * b for a, b in itertools.zip_longest(*operands, fillvalue=0.0)]
    if kind is OperationKind.MULTIPLY:
        return _times(*operands)
    if kind is OperationKind.DIVIDE and len(operands[1]) == 1:
        return [a / operands[1][0] for a in operands[0]]
    if not isinstance(activation, Polynomial):
        raise _NotInFamily
    result: Coefficients = [0.0]
    for coefficient in reversed(activation.polynomial):  # Horner
        result = _times(result, operands[0])
        result[0] = result[0] + coefficient
    return result


def _times(a: Coefficients, b: Coefficients) -> Coefficients:
    if len(a) + len(b) - 2 > MAX_DEGREE:
        raise _NotInFamily
    result: Coefficients = [0.0] * (len(a) + len(b) - 1)
    for (i, first), (j, second) in itertools.product(enumerate(a), enumerate(b)):
        result[i + j] = result[i + j] + first * second
    return result


def _knots(argument: Argument) -> set[float]:
    """The knots of a piecewise-linear function without parameters."""
    if isinstance(argument, Parameter):
        raise _NotInFamily
    if not isinstance(argument, Expression) or argument.operation is None:
        return set()
    kind, activation = argument.operation.kind, argument.operation.activation
    if kind in (OperationKind.MULTIPLY, OperationKind.DIVIDE) and not argument.linear:
        raise _NotInFamily
    knots = set[float]().union(*(_knots(one) for one in argument.arguments))
    if kind is OperationKind.COMPARE:
        difference = Expression(SUBTRACT, argument.arguments)
        knots |= set(_crossings(difference, sorted(knots), [0.0]))
    if kind is OperationKind.FUNCTION:
        if not isinstance(activation, Piecewise) or not activation.uniform:
            raise _NotInFamily
        (inner,) = argument.inner
        knots |= set(_crossings(inner, sorted(knots), activation.knots))
    return knots


def steps_of(expression: Expression) -> Expression | None:
    """The jumps of an expression without parameters, as a sum of steps; None if it has none."""
    steps: Expression | None = None
    for place in sorted(() if expression.parameters else _comparisons(expression)):
        ends = torch.tensor([place, place], dtype=torch.float64)
        ends = torch.nextafter(ends, ends.new_tensor([-math.inf, math.inf]))
        low, high = expression(ends).tolist()
        # A continuous function may move by its slope times the two roundings between the ends.
        slope = float(value_and_slope(Scalar(expression), ends)[1].abs().max())
        limit = rounding(JUMP, torch.float64) * (abs(low) + abs(high) + slope * abs(place))
        if abs(high - low) > limit + slope * float(ends[1] - ends[0]):
            step = Expression(COMPARE, (Expression(), place))
            one = Expression(MULTIPLY, (high - low, step))
            steps = one if steps is None else Expression(ADD, (steps, one))
    return steps


def _comparisons(argument: Argument) -> set[float]:
    """Where comparisons of piecewise-linear functions change, in an expression."""
    if not isinstance(argument, Expression) or argument.operation is None:
        return set()
    places = set[float]().union(*(_comparisons(one) for one in argument.arguments))
    if argument.kind is OperationKind.COMPARE:
        with suppress(_NotInFamily):
            difference = Expression(SUBTRACT, argument.arguments)
            knots = sorted(_knots(difference))
            places |= set(_crossings(difference, knots, [0.0])) | set(knots)
    return places


def _segments(function: Expression, knots: Sequence[float]) -> list[tuple[float, float, float]]:
    """A place within each segment, and value and slope there."""
    edges = sorted(set(knots))
    size = 1 + max((abs(edge) for edge in edges), default=0.0)
    inner = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    places = [edges[0] - size, *inner, edges[-1] + size] if edges else [0.0]
    y = torch.tensor(places, dtype=torch.float64)
    value, slope = value_and_slope(Scalar(function), y)
    return list(zip(places, value.tolist(), slope.tolist(), strict=True))


def _crossings(
    function: Expression, knots: Sequence[float], levels: Sequence[float]
) -> list[float]:
    """Where a piecewise-linear function meets one of some values, beside its knots."""
    crossings = []
    edges = itertools.pairwise([-math.inf, *knots, math.inf])
    for (place, value, slope), (low, high) in zip(_segments(function, knots), edges, strict=True):
        if slope != 0:
            roots = (place + (level - value) / slope for level in levels)
            crossings += [root for root in roots if low < root < high]
    return crossings


def _piecewise(expression: Expression, knots: Sequence[float]) -> Activation:
    """A piecewise-linear function by its pieces; knots where nothing changes are left out."""
    pieces = _segments(expression, knots)
    kept: list[tuple[float, float, float]] = []
    start = 0.0
    slopes = [pieces[0][2]]
    for knot, left, right in zip(knots, pieces, pieces[1:], strict=False):
        ends = [value + slope * (knot - place) for place, value, slope in (left, right)]
        sizes = [abs(value) + abs(slope * (knot - place)) for place, value, slope in (left, right)]
        jump = ends[1] - ends[0]
        if abs(jump) <= rounding(JUMP, torch.float64) * max(sizes):
            jump = 0.0
        if jump == 0 and left[2] == right[2]:
            continue
        start = start if kept else ends[0]
        kept.append((knot, ends[0], jump))
        slopes.append(right[2])
    if not kept:
        place, value, slope = pieces[0]
        return Polynomial([value - slope * place, slope])
    jumps = [jump for _, _, jump in kept]
    return Piecewise(expression, [knot for knot, _, _ in kept], slopes, start, jumps)


def _kinks(expression: Argument, mean: Tensor, stddev: Tensor) -> list[float | Tensor]:
    """The places where the derivative of an expression may jump, for every element."""
    if not isinstance(expression, Expression) or expression.operation is None:
        return []
    kinks = [kink for one in expression.arguments for kink in _kinks(one, mean, stddev)]
    if expression.kind is OperationKind.COMPARE:
        kinks += _preimages(Expression(SUBTRACT, expression.arguments), 0.0, mean, stddev)
    for kink in expression.operation.kinks:
        kinks += _preimages(expression.inner[0], kink, mean, stddev)
    numbers = dict.fromkeys(kink for kink in kinks if not isinstance(kink, Tensor))
    return [*numbers, *(kink for kink in kinks if isinstance(kink, Tensor))]


def _preimages(
    expression: Expression, level: float, mean: Tensor, stddev: Tensor
) -> list[float | Tensor]:
    """Where an expression meets a value."""
    if expression.affine:
        offset, slope = _polynomial(expression)
        if not isinstance(offset, Tensor) and not isinstance(slope, Tensor):
            return [] if slope == 0 else [(level - offset) / slope]
        flat = torch.as_tensor(slope == 0, device=mean.device)
        root = (level - offset) / torch.where(flat, 1, torch.as_tensor(slope).to(mean))
        return [torch.where(flat, mean + REACH * stddev, root).expand_as(mean)]
    roots = crossings(Scalar(expression, parameters=expression.parameters), level, mean, stddev)
    return [roots[..., i] for i in range(roots.shape[-1])]
