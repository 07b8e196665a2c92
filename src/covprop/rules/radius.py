"""Roots of sums of squares, as models write norms: x * rsqrt(x.square().mean(-1, True) + eps).

By themselves they would be functions of a sum of squares that is taken for Gaussian, refused near
zero. But sqrt(|z|^2 + c) is the length of (z, sqrt c), and z and sqrt c over it are its direction:
both have exact moments at any noise (`kernels.directions`). A sum of squares remembers of what it
is one, and so does its root.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.activations.composite import polynomial
from covprop.errors import ApproximationWarning, warn_user
from covprop.flow.algebra import Groups
from covprop.flow.batch_position import FIRST
from covprop.flow.carrier import Carrier
from covprop.flow.table import TABLE, register_composer
from covprop.flow.tensor import GaussianTensor, run_rule
from covprop.rules.norms import arranged, dimensions
from covprop.rules.smooth import groups_of, lengths, normalised

SQUARE, ROOT, INVERSE = 1.0, 0.5, -0.5
"""Powers of a sum of squares."""
VARIES = 0.1
"""The deviation of an inverse length, as a share of it, up to which it is nearly linear."""


@dataclass(frozen=True)
class Radius:
    """(scale * |z|^2 + offset)^power of groups z of a tensor x, along dimensions of it.

    carrier: that of the tensor that this is, by a weak reference; direction: x and what is added,
    (*batch, N + G), over its length, and the factor that makes it x times the tensor that this is.
    """

    x: GaussianTensor
    dims: tuple[int, ...]
    scale: float
    offset: float = 0.0
    power: float = SQUARE
    direction: tuple[GaussianTensor, float] | None = None
    carrier: weakref.ref[Carrier] | None = None


def _known(x: Any) -> Radius | None:
    """The recorded radius of an evaluated tensor, if any."""
    if not isinstance(x, GaussianTensor) or x.is_pending:
        return None
    found = getattr(x.loc, "radius", None)
    same = isinstance(found, Radius) and found.carrier is not None and found.carrier() is x.carrier
    return found if same else None


def _marked(x: GaussianTensor, radius: Radius) -> GaussianTensor:
    """Record a radius on the mean of a tensor, which all its aliases share."""
    x.materialize()
    x.loc.radius = replace(radius, carrier=weakref.ref(x.carrier))  # type: ignore[attr-defined]
    return x


def _number(value: float | Tensor) -> float | None:
    """A coefficient that is the same of all elements."""
    if not isinstance(value, Tensor):
        return float(value)
    first = value.flatten()[0] if value.numel() else value.new_zeros(())
    return float(first) if bool((value == first).all()) else None


def _coefficients(x: GaussianTensor, degree: int) -> list[float] | None:
    """Coefficients of a pending function that is a polynomial of this degree."""
    if x.pending is None:
        return [0.0, 1.0] if degree == 1 else None
    found = polynomial(x.pending.expression)
    numbers = [_number(value) for value in found or ()]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    known = [number for number in numbers if number is not None]
    return known if len(known) == len(numbers) == degree + 1 else None


def _summed(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    """A composer of sums and means that records the radius of a sum of squares."""
    x, dim = args[0] if args else kwargs.get("input"), kwargs.get("dim", kwargs.get("axis"))
    dim = args[1] if len(args) > 1 else dim
    if len(tensors) > 1 or not isinstance(x, GaussianTensor) or not x.shape:
        return None
    squares = _coefficients(x, 2)
    if squares is None or squares[:2] != [0.0, 0.0] or not squares[2] > 0:
        return None
    base, dims = x.base, tuple(dimensions(x, dim))
    result = run_rule(function, args, kwargs, tensors)
    count = math.prod(x.shape[d] for d in dims) if "mean" in function.__name__ else 1
    if result.dtype != base.dtype:
        return result
    return _marked(result, Radius(base.alias(), dims, squares[2] / max(1, count)))


def _rooted(power: float | None) -> Callable[..., Any]:
    """The square root of a sum of squares and a number, or its inverse; None: pow's exponent."""

    def composer(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        del function, tensors
        x, exponent = args[0] if args else kwargs.get("input"), power
        if exponent is None:
            exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        number = not isinstance(exponent, Tensor) and exponent in (ROOT, INVERSE)
        if not number or not isinstance(x, GaussianTensor):
            return None
        line, squares = _coefficients(x, 1), _known(x.base)
        if line is None or squares is None or squares.power != SQUARE:
            return None
        offset, slope = line
        if offset < 0 or not slope > 0:
            return None
        whole = replace(squares, scale=slope * squares.scale, offset=offset)
        return _power(whole, x.base, exponent)

    return composer


def _inverted(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    """One over a root."""
    del function, tensors
    x = args[0] if args else kwargs.get("input")
    known = _known(x)
    return None if known is None or known.power != ROOT else _power(known, x, INVERSE)


def _power(radius: Radius, like: GaussianTensor, power: float) -> GaussianTensor | None:
    """(scale |z|^2 + offset)^power in the shape of its base, None where that is not known."""
    x, share = radius.x, radius.offset / radius.scale
    if power == INVERSE and share == 0:
        return None
    places = groups_of(torch.sqrt, x, arranged(list(radius.dims))).index
    size, batch = x.event_shape.numel(), x.batch_shape
    flat: Any = x.with_batch_at(FIRST).reshape(*batch, size)
    added = size + torch.arange(len(places), device=x.device)
    if share > 0:
        constant = torch.full((*batch, len(places)), share**0.5, dtype=x.dtype, device=x.device)
        flat = torch.cat([flat, constant], -1)
        places = torch.cat([places, added[:, None]], -1)
    flat.materialize()
    direction = None
    result: Any
    if power == ROOT:
        shape = torch.Size((*batch, len(places)))
        result = lengths(torch.sqrt, flat, Groups(places), shape, factor=radius.scale**0.5)
    else:
        unit = normalised(torch.rsqrt, flat, Groups(places))
        direction = unit, radius.scale**-0.5
        result = unit.index_select(-1, added) * (direction[1] * share**-0.5)
    result = result.reshape(like.template.shape)
    result.materialize()
    known = replace(radius, power=power, direction=direction)
    return _marked(result.with_batch_at(like.batch_at), known)


def _multiplied(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    """A tensor times the inverse of its length is its direction."""
    del function
    if len(tensors) != 2 or kwargs:  # noqa: PLR2004
        return None
    for x, other in (args, args[::-1]):
        known = _known(other.base)
        if known is None or known.power != INVERSE:
            continue
        pending = x.is_pending or other.is_pending
        # T5 takes the length in float32 of a tensor of any precision.
        source = x if pending or x.dtype == known.x.dtype else x.to(known.x.dtype)
        if not pending and known.direction is not None and _is_source(known, source, other):
            unit, factor = known.direction
            size = x.event_shape.numel()
            first: Any = unit.narrow(-1, 0, size).reshape(x.loc.shape) * factor
            first.materialize()
            product = first.with_batch_at(x.batch_at)
            wider = torch.promote_types(x.dtype, other.dtype)
            return product if product.dtype == wider else product.to(wider)
        _warn_of_product(other.base)
    return None


def follow(x: GaussianTensor, moved: GaussianTensor, in_order: bool) -> GaussianTensor:
    """Copy the recorded radius of a tensor to elements of it; in order: all, in another shape."""
    known = _known(x)
    if known is None or known.power != INVERSE:
        return moved
    return _marked(moved, known if in_order else replace(known, direction=None))


@torch.no_grad()
def _warn_of_product(inverse: GaussianTensor) -> None:
    """Warn where an inverse length is far from linear, and what it is multiplied by another one."""
    deviation = inverse.variances.clamp(min=0).sqrt()
    if bool((deviation > VARIES * inverse.flat.abs()).any()):
        warn_user(
            "a tensor is multiplied by the inverse length of another one, which varies by more "
            f"than {VARIES:.0%} here: they are taken for jointly Gaussian, which may be far off; "
            "compare with sampling",
            ApproximationWarning,
        )


def _divided(function: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
    """A tensor divided by its own length."""
    del function
    if len(tensors) != 2 or kwargs or any(x.is_pending for x in tensors):  # noqa: PLR2004
        return None
    x, other = args
    known = _known(other)
    if known is None or known.power != ROOT or known.offset or not _is_source(known, x, other):
        return None
    groups = groups_of(torch.div, x, arranged(list(known.dims)))
    return normalised(torch.div, x, groups, known.scale**-0.5)


def _is_source(known: Radius, x: GaussianTensor, other: GaussianTensor) -> bool:
    """Whether this is the tensor whose length another is, with its dimensions kept."""
    kept = tuple(1 if d in known.dims else size for d, size in enumerate(x.shape))
    if x.shape != known.x.shape or tuple(other.shape) != kept or x.batch_at != known.x.batch_at:
        return False
    if x.carrier is known.x.carrier:
        return torch.equal(x.loc, known.x.loc)
    rounding = 2 * torch.finfo(x.dtype).eps * x.loc.detach().abs()  # written twice: x - x.mean()
    if bool(((x.loc - known.x.loc).detach().abs() > rounding).any()):
        return False
    difference: Any = torch.sub(x, known.x)
    difference.materialize()
    return not bool(difference.variances.any())


def register_radii() -> None:
    """Register composers before those that the operations already have."""
    for names, found in (
        (("sum", "mean"), _summed),
        (("sqrt",), _rooted(ROOT)),
        (("rsqrt",), _rooted(INVERSE)),
        (("pow",), _rooted(None)),
        (("reciprocal",), _inverted),
        (("mul", "multiply"), _multiplied),
        (("div", "divide", "true_divide"), _divided),
    ):
        for function in spellings(*names):
            register_composer([function], _first(found, TABLE[function].compose))


def _first(one: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    """A composer that tries one composer, then another."""

    def composer(*call: Any) -> Any:
        result = one(*call)
        return other(*call) if result is None and other else result

    return composer
