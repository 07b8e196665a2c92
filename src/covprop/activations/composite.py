"""The activation that an expression is.

Polynomials and piecewise-linear functions are found to be such, and have closed forms; any other
function is integrated by quadrature, between its kinks.
"""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

from covprop.activations.base import Activation
from covprop.activations.entire import Polynomial
from covprop.activations.expression import (
    ADD,
    COMPARE,
    MULTIPLY,
    SUBTRACT,
    Argument,
    Expression,
    Kind,
    Parameter,
)
from covprop.activations.grids import REACH, Scalar, leading, value_and_slope
from covprop.activations.piecewise import Piecewise
from covprop.activations.quadrature import Quadrature
from covprop.errors import QuadratureError, name_of

Coefficients: TypeAlias = list[float | Tensor]

DEGREE = 16
"""Of the largest polynomial that is taken as one."""
POINTS = 1025
"""Places where an inner function is evaluated to find where it crosses a kink of the outer one."""
CROSSINGS = 64
"""Of one element and one kink, at most."""
HALVINGS = 100
"""Steps of bisection; more than a float64 has digits, as roots may be near zero."""
ROUNDING = 64.0
"""In units of machine epsilon: a jump that is none, beside the values on both sides of it."""
HELD = 2**20
"""Values that are held at a time."""


class _Another(Exception):
    """A function that is not of the family that was asked for."""


def closed_form(expression: Expression) -> Activation | None:
    """The polynomial or the piecewise-linear function that an expression is, if it is one."""
    try:
        coefficients = _polynomial(expression)
        return Polynomial(coefficients + [0.0] * (2 - len(coefficients)))
    except _Another:
        pass
    try:
        return _piecewise(expression, sorted(_knots(expression)))
    except _Another:
        return None


def by_quadrature(expression: Expression, mean: Tensor, stddev: Tensor) -> Quadrature:
    """Any other one, with its kinks for elements of these moments (*batch, n)."""
    kinks = tuple(_kinks(expression, mean, stddev))
    parameters = tuple(parameter.expand_as(mean) for parameter in expression.parameters)
    return Quadrature(expression, kinks, parameters=parameters, rises=expression.rises)


def _polynomial(argument: Argument) -> Coefficients:
    """The coefficients of y^0, y^1 ..., two at least where there is a power of y."""
    if isinstance(argument, Parameter):
        return [argument.values]
    if not isinstance(argument, Expression):
        return [argument]
    if argument.operation is None:
        return [0.0, 1.0]
    kind, activation = argument.operation.kind, argument.operation.activation
    if kind in (Kind.COMPARE, Kind.CHOOSE):
        raise _Another
    found = [_polynomial(one) for one in argument.arguments]
    if kind in (Kind.ADD, Kind.SUBTRACT):
        sign = 1.0 if kind is Kind.ADD else -1.0
        result = [a + sign * b for a, b in itertools.zip_longest(*found, fillvalue=0.0)]
    elif kind is Kind.MULTIPLY:
        result = _times(*found)
    elif kind is Kind.DIVIDE and len(found[1]) == 1:
        result = [a / found[1][0] for a in found[0]]
    elif isinstance(activation, Polynomial):
        result = [0.0]
        for coefficient in reversed(activation.polynomial):  # Horner
            result = _times(result, found[0])
            result[0] = result[0] + coefficient
    else:
        raise _Another
    return result


def _times(a: Coefficients, b: Coefficients) -> Coefficients:
    if len(a) + len(b) - 2 > DEGREE:
        raise _Another
    result: Coefficients = [0.0] * (len(a) + len(b) - 1)
    for (i, first), (j, second) in itertools.product(enumerate(a), enumerate(b)):
        result[i + j] = result[i + j] + first * second
    return result


def _knots(argument: Argument) -> set[float]:
    """The knots of a piecewise-linear function without parameters."""
    if isinstance(argument, Parameter):
        raise _Another
    if not isinstance(argument, Expression) or argument.operation is None:
        return set()
    kind, activation = argument.operation.kind, argument.operation.activation
    if kind in (Kind.MULTIPLY, Kind.DIVIDE) and not argument.linear:
        raise _Another
    found = set[float]().union(*(_knots(one) for one in argument.arguments))
    if kind is Kind.COMPARE:
        difference = Expression(SUBTRACT, argument.arguments)
        found |= set(_crossings(difference, sorted(found), [0.0]))
    if kind is Kind.FUNCTION:
        if not isinstance(activation, Piecewise) or not activation.uniform:
            raise _Another
        (inner,) = argument.inner
        found |= set(_crossings(inner, sorted(found), activation.knots))
    return found


def steps_of(expression: Expression) -> Expression | None:
    """The jumps of an expression without parameters, as a sum of steps; None if it has none."""
    steps: Expression | None = None
    for place in sorted(() if expression.parameters else _comparisons(expression)):
        ends = torch.tensor([place, place], dtype=torch.float64)
        ends = torch.nextafter(ends, ends.new_tensor([-math.inf, math.inf]))
        low, high = expression(ends).tolist()
        # A continuous function may move by its slope times the two roundings between the ends.
        slope = float(value_and_slope(Scalar(expression), ends)[1].abs().max())
        limits = torch.finfo(torch.float64).eps * (abs(low) + abs(high) + slope * abs(place))
        if abs(high - low) > ROUNDING * limits + slope * float(ends[1] - ends[0]):
            step = Expression(COMPARE, (Expression(), place))
            one = Expression(MULTIPLY, (high - low, step))
            steps = one if steps is None else Expression(ADD, (steps, one))
    return steps


def _comparisons(argument: Argument) -> set[float]:
    """Where comparisons of piecewise-linear functions change, in an expression."""
    if not isinstance(argument, Expression) or argument.operation is None:
        return set()
    found = set[float]().union(*(_comparisons(one) for one in argument.arguments))
    if argument.operation.kind is Kind.COMPARE:
        with suppress(_Another):
            difference = Expression(SUBTRACT, argument.arguments)
            knots = sorted(_knots(difference))
            found |= set(_crossings(difference, knots, [0.0])) | set(knots)
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
    edges = [-math.inf, *knots, math.inf]
    found = []
    for (place, value, slope), (low, high) in zip(
        _segments(function, knots), itertools.pairwise(edges), strict=True
    ):
        if slope != 0:
            roots = (place + (level - value) / slope for level in levels)
            found += [root for root in roots if low < root < high]
    return found


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
        if abs(jump) <= ROUNDING * torch.finfo(torch.float64).eps * max(sizes):
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
    found = [kink for one in expression.arguments for kink in _kinks(one, mean, stddev)]
    operation, inner = expression.operation, expression.inner
    if operation.kind is Kind.COMPARE:
        found += _preimages(Expression(SUBTRACT, expression.arguments), 0.0, mean, stddev)
    for kink in operation.kinks:
        found += _preimages(inner[0], kink, mean, stddev)
    numbers = dict.fromkeys(kink for kink in found if not isinstance(kink, Tensor))
    return [*numbers, *(kink for kink in found if isinstance(kink, Tensor))]


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
    roots = _roots(expression, level, mean, stddev)
    return [roots[..., i] for i in range(roots.shape[-1])]


def _roots(expression: Expression, level: float, mean: Tensor, stddev: Tensor) -> Tensor:
    """Crossings (*batch, n, count) by bisection; those that an element lacks are out of reach."""
    shape = mean.shape
    scalar = Scalar(expression, parameters=expression.parameters)
    parameters = [p.expand_as(mean).flatten() for p in scalar.parameters]
    scalar = scalar.having(parameters)
    mean, stddev = mean.detach().flatten(), stddev.detach().flatten()
    step = max(1, HELD // POINTS)
    parts = [
        _crossed(scalar.take(slice(i, i + step)), level, mean[i : i + step], stddev[i : i + step])
        for i in range(0, len(mean), step)
    ]
    count = max((part.shape[-1] for part in parts), default=0)
    beyond = mean + REACH * stddev
    rows = [
        torch.cat(
            [part, beyond[i * step : (i + 1) * step, None].expand(-1, count - part.shape[-1])], -1
        )
        for i, part in enumerate(parts)
    ]
    return torch.cat(rows).reshape(*shape, count) if rows else mean.new_zeros(*shape, 0)


@torch.no_grad()
def _crossed(scalar: Scalar, level: float, mean: Tensor, stddev: Tensor) -> Tensor:
    grid = torch.linspace(-REACH, REACH, POINTS, dtype=mean.dtype, device=mean.device)
    near = 2.0 ** torch.arange(-20, 21, dtype=mean.dtype, device=mean.device)
    fixed = torch.cat([-near.flip(0), near.new_zeros(1), near]).expand(len(mean), -1)
    low, high = (mean + side * REACH * stddev for side in (-1, 1))
    y = torch.cat([mean[:, None] + stddev[:, None] * grid, fixed], -1)
    y = y.maximum(low[:, None]).minimum(high[:, None]).sort(-1).values
    above = scalar(y) > level
    changes = above[:, 1:] != above[:, :-1]
    count = int(changes.sum(-1).max()) if changes.numel() else 0
    if count > CROSSINGS:
        raise QuadratureError(
            f"{name_of(scalar.function)} has more than {CROSSINGS} kinks within reach"
        )
    # The first `count` places of each row, changes first.
    order = changes.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    real = changes.gather(-1, order)
    left, right = y.gather(-1, order), y.gather(-1, order + 1)
    rising = above.gather(-1, order + 1)
    for _ in range(HALVINGS if count else 0):
        middle = (left + right) / 2
        beyond = (scalar(middle) > level) == rising
        left, right = torch.where(beyond, left, middle), torch.where(beyond, middle, right)
    return torch.where(real, (left + right) / 2, leading(high, right))
