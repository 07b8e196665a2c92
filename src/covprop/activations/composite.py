"""An expression as an activation: a closed form where there is one, else quadrature.

Polynomials and piecewise-linear functions are recognised. Any other function is integrated between
its kinks; one that jumps is the sum of a continuous function and of steps.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.activations.base import Activation
from covprop.activations.closed import Polynomial
from covprop.activations.expression import (
    SUBTRACT,
    Argument,
    Expression,
    OperationKind,
    Parameter,
)
from covprop.activations.moments import REACH, Scalar, value_and_slope
from covprop.activations.piecewise import RELU, Piecewise
from covprop.activations.quadrature import Quadrature, crossings
from covprop.kernels.compiled_moments import Compiled
from covprop.kernels.rounding import JUMP, rounding

Coefficients: TypeAlias = list[float | Tensor]

MAX_DEGREE = 16
"""The largest degree of an expression that counts as a polynomial."""
ROOT = 2.0**-40
"""How far a root that bisection finds may be from the jump, relative to its size."""


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


def polynomial(expression: Expression) -> Coefficients | None:
    """The coefficients of y^0, y^1 ... of an expression that is a polynomial."""
    with suppress(_NotInFamily):
        return _polynomial(expression)
    return None


def by_quadrature(expression: Expression, mean: Tensor, stddev: Tensor) -> list[Activation]:
    """Activations whose sum is any other one, for elements of these moments (*batch, n).

    A continuous function, with its kinks, and the steps of one that jumps.
    """
    kinks = tuple(_kinks(expression, mean, stddev))
    parameters = tuple(parameter.expand_as(mean) for parameter in expression.parameters)
    jumps = _jumps(expression, mean, stddev)
    if not jumps:
        rises, known = expression.nondecreasing, _compiled(expression)
        return [
            Quadrature(
                expression, kinks, parameters=parameters, nondecreasing=rises, compiled=known
            )
        ]
    continuous = WithoutJumps(expression, tuple(jumps))
    places, heights = [jump.place for jump in jumps], [jump.height for jump in jumps]
    flat = [0.0] * (len(jumps) + 1)
    return [
        Quadrature(continuous, (*kinks, *places), parameters=parameters),
        Piecewise(continuous.steps, places, flat, 0.0, heights),
    ]


def _compiled(expression: Expression) -> Compiled | None:
    """The same function of a compiled kernel: relu(y)^2, of Primer and StarReLU."""
    powers = expression.operation.activation if expression.operation is not None else None
    polynomial = () if powers is None else powers.power_coefficients or ()
    numbers = [one for one in polynomial if not isinstance(one, Tensor)]
    if numbers != [0.0, 0.0, 1.0] and expression.kind is not OperationKind.MULTIPLY:
        return None
    ramps = [
        isinstance(one, Expression)
        and one.operation is not None
        and one.operation.activation is not None
        and one.operation.activation.segments == RELU
        and one.inner[0].operation is None
        for one in expression.arguments
    ]
    return Compiled("squared_relu") if all(ramps) else None


def _polynomial(argument: Argument) -> Coefficients:
    """The coefficients of y^0, y^1 ..., two at least where there is a power of y."""
    if not isinstance(argument, Expression):
        return [argument.values if isinstance(argument, Parameter) else argument]
    if argument.operation is None:
        return [0.0, 1.0]
    kind, activation = argument.operation.kind, argument.operation.activation
    if argument.condition or kind is OperationKind.CHOOSE:
        raise _NotInFamily
    operands = [_polynomial(one) for one in argument.arguments]
    if kind in (OperationKind.ADD, OperationKind.SUBTRACT):
        sign = 1.0 if kind is OperationKind.ADD else -1.0
        return [a + sign * b for a, b in itertools.zip_longest(*operands, fillvalue=0.0)]
    if kind is OperationKind.MULTIPLY:
        return _times(*operands)
    if kind is OperationKind.DIVIDE and len(operands[1]) == 1:
        return [a / operands[1][0] for a in operands[0]]
    if activation is None or activation.power_coefficients is None:
        raise _NotInFamily
    result: Coefficients = [0.0]
    for coefficient in reversed(activation.power_coefficients):  # Horner
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
        if activation is None or activation.segments is None:
            raise _NotInFamily
        (inner,) = argument.inner
        knots |= set(_crossings(inner, sorted(knots), activation.segments.knots))
    return knots


@dataclass(frozen=True, order=True)
class Jump:
    """A place, known to the width of a gap on either side of it, and the height of a jump there."""

    place: float
    gap: float
    height: float


@dataclass(frozen=True)
class WithoutJumps:
    """The continuous function that is left of an expression without its jumps."""

    expression: Expression
    jumps: tuple[Jump, ...]

    def __call__(self, y: Tensor, *parameters: Tensor) -> Tensor:
        """The function; within a gap, as just left of it: a jump may have a value of its own."""
        rows = torch.tensor([(j.place, j.gap, j.height) for j in self.jumps], dtype=torch.float64)
        places, gaps, heights = rows.to(y).T.contiguous()
        point = y.detach().contiguous()
        for offset in (1, 0):  # the jump before, and the one at or after
            at = (torch.searchsorted(places, point) - offset).clamp(0, len(places) - 1)
            near = (point - places[at]).abs() <= gaps[at]
            point = torch.where(near, places[at] - gaps[at], point)
        steps = pad(heights.cumsum(0), (1, 0))[torch.searchsorted(places, point)]
        return self.expression(point + (y - y.detach()), *parameters) - steps

    def steps(self, y: Tensor) -> Tensor:
        """The rest of the expression: steps, but for the values at the jumps."""
        return self.expression(y) - self(y)

    @property
    def formula(self) -> str:
        """The expression, written out."""
        return self.expression.formula


def _jumps(expression: Expression, mean: Tensor, stddev: Tensor) -> list[Jump]:
    """The jumps of an expression within reach of elements, in order.

    Those of an expression with parameters are not looked for.
    """
    jumps = []
    places = () if expression.parameters else _jump_places(expression, mean, stddev)
    for place, distance in sorted(places):
        ends = torch.tensor([place - distance, place + distance], dtype=torch.float64)
        ends = torch.nextafter(ends, ends.new_tensor([-math.inf, math.inf]))
        low, high = expression(ends).tolist()
        # A continuous function moves by its slopes times the widths on either side.
        slopes = value_and_slope(Scalar(expression), ends)[1]
        moved = (slopes * (ends - place).abs()).tolist()
        height = high - low - sum(moved)
        size = abs(low) + abs(high) + float(slopes.abs().max()) * abs(place)
        if abs(height) > rounding(JUMP, torch.float64) * size + max(map(abs, moved)):
            jumps.append(Jump(place, place - float(ends[0]), height))
    return jumps


def _jump_places(argument: Argument, mean: Tensor, stddev: Tensor) -> set[tuple[float, float]]:
    """Where an expression may jump, and the distance within which each place is known."""
    if not isinstance(argument, Expression) or argument.operation is None:
        return set()
    inner = [_jump_places(one, mean, stddev) for one in argument.arguments]
    places = set[tuple[float, float]]().union(*inner)
    activation = argument.operation.activation
    if argument.kind is OperationKind.COMPARE:
        places |= _met(Expression(SUBTRACT, argument.arguments), [0.0], mean, stddev)
    elif activation is not None and (lines := activation.segments) is not None and any(lines.jumps):
        pairs = zip(lines.knots, lines.jumps, strict=True)
        places |= _met(argument.inner[0], [knot for knot, jump in pairs if jump], mean, stddev)
    return places


def _met(
    function: Expression, levels: Sequence[float], mean: Tensor, stddev: Tensor
) -> set[tuple[float, float]]:
    """Where a function meets levels: known exactly if it is piecewise linear, else by bisection."""
    with suppress(_NotInFamily):
        knots = sorted(_knots(function))
        return {(place, 0.0) for place in (*_crossings(function, knots, levels), *knots)}
    found = set[tuple[float, float]]()
    for level in levels:
        roots = crossings(Scalar(function), level, mean, stddev)
        real = roots < (mean + REACH * stddev)[..., None]
        gaps = ROOT * (roots.abs() + stddev[..., None])
        for place, gap in sorted(zip(roots[real].tolist(), gaps[real].tolist(), strict=True)):
            # Every element finds a root of its own.
            if not any(abs(place - other) <= gap + width for other, width in found):
                found.add((place, gap))
    return found


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
    own = expression(torch.tensor(knots, dtype=torch.float64)).tolist()
    for knot, value, left, right in zip(knots, own, pieces, pieces[1:], strict=False):
        ends = [value + slope * (knot - place) for place, value, slope in (left, right)]
        sizes = [abs(value) + abs(slope * (knot - place)) for place, value, slope in (left, right)]
        jump = ends[1] - ends[0]
        if abs(jump) <= rounding(JUMP, torch.float64) * max(sizes):
            jump = 0.0
        if jump == 0 and abs(value - ends[0]) > rounding(JUMP, torch.float64) * max(sizes):
            raise _NotInFamily  # a value of its own at one place, as |sign(0)|
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
