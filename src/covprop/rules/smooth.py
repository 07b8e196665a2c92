"""Smooth functions of several elements: by the delta method, and lengths of groups.

By the delta method the mean is of second order, E f(x) ~ f(mu) + 1/2 sum_kl d_k d_l f(mu) Cov_kl,
and the covariance of first order, J Cov J^T with the Jacobian at the mean. That is an approximation
for small noise; docs/operations.md has measured errors.

The elements of an event that have a length together are a group. Within a group the moments are
exact for Gaussian input (`kernels.directions`); between groups, and with all other tensors, the
dependence is that of the expected slope.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.covariance import LinearMap
from covprop.errors import (
    ApproximationWarning,
    OutsideDomain,
    name_of,
    warn_user,
)
from covprop.flow.algebra import Groups
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.kernels.gradients import jvp
from covprop.rules.operands import (
    as_unary,
    batch_error,
    check_batch_is_separate,
    check_batch_shape,
    check_finite,
    single_gaussian,
)

AWAY_FROM_ZERO = 5.0
"""Standard deviations between a divisor and zero."""
NONLINEARITY = 0.25
"""The share of a slope that may be wrong a standard deviation away without a warning."""
CHUNK = 2**24
"""Entries of directions that are differentiated along at a time."""
APPROXIMATE = "approximate: second-order mean, first-order covariance"
FAR = 0.1
"""The share of a variance that may be not linear without a warning."""
WITHIN = "approximate: exact within each group for Gaussian input, linear between groups"


def delta(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Carry a Gaussian through a smooth function of several elements by the delta method.

    Args:
        function: A torch function that autograd can differentiate twice.
        args: Its arguments, one of them a `GaussianTensor`.
        kwargs: Its arguments by name.

    Example:
        cp.rule(torch.logcumsumexp)(cp.extending.delta)
        cp.propagate(lambda x: torch.logcumsumexp(x, -1), x, cp.GaussianLayers())
    """
    x = single_gaussian(function, args, kwargs)
    call = as_unary(function, args, kwargs)
    value = call(x.loc)
    check_batch_shape(function, x, value.shape)
    # In float64, as p (1 - p) of a probability near one cancels. And not x itself, which what
    # outlives this operation must not hold.
    point, dtype = x.loc.double(), value.dtype

    def tangent(direction: Tensor) -> Tensor:
        result: Tensor = jvp(call, point, direction.double())
        return result.to(dtype)

    check_batch_is_separate(function, tangent, x, x.shape)

    def second_derivative(direction: Tensor, row: Tensor) -> Tensor:
        def slope(y: Tensor) -> Tensor:
            inner: Tensor = jvp(call, y, direction.double())
            return inner

        result: Tensor = jvp(slope, point, row.double())
        return result.to(dtype)

    curvature = _summed(second_derivative, x)
    _check_linear(function, call, x, value.detach(), tangent)
    return x.through(value + curvature / 2, LinearMap(tangent, x.event_shape))


def _summed(function: Callable[[Tensor, Tensor], Tensor], x: GaussianTensor) -> Tensor | float:
    """E[function(dx, dx)], some directions of the covariance at a time."""
    step = max(1, CHUNK // max(1, x.numel()))
    total: Tensor | float = 0.0
    for left, right in x.carrier.directions(step):
        both = (rows.reshape(len(rows), *x.shape) for rows in (left, right))
        total = total + torch.func.vmap(function)(*both).sum(0)
    return total


@torch.no_grad()
def _check_linear(
    function: Callable[..., Any],
    call: Callable[[Tensor], Tensor],
    x: GaussianTensor,
    value: Tensor,
    tangent: Callable[[Tensor], Tensor],
) -> None:
    """Warn where the function is not nearly linear within one standard deviation.

    Of its change along a step and back, the odd part is compared with the tangent, the even with 0.
    """
    point = x.loc.detach()
    stddev = x.variances.detach().clamp(min=0).sqrt().reshape(x.shape)
    signs = torch.cos(2.0 * torch.arange(x.event_shape.numel(), device=x.device)).sign()
    step = stddev * signs.reshape(x.event_shape).to(stddev)
    along = tangent(step)
    up, down = call(point + step) - value, value - call(point - step)
    dims = tuple(range(len(x.batch_shape), along.dim()))
    odd, even = (up + down) / 2 - along, (up - down) / 2
    size, error = along.square().sum(dims), (odd.square() + even.square()).sum(dims)
    if bool((error > NONLINEARITY**2 * size).any()):
        warn_user(
            f"{name_of(function)} is nonlinear within a standard deviation of its input here, so "
            "its first-order covariance may be far off; compare with sampling",
            ApproximationWarning,
        )


@rule(*spellings("reciprocal"), kind=Kind.SMOOTH, treatment=APPROXIMATE, name="reciprocal",
      batch=Batch.ANYWHERE)  # fmt: skip
def reciprocal(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """1 / x for x that stays away from zero: elsewhere it has no moments."""
    if bool((_distance(input) < AWAY_FROM_ZERO).any()):
        raise OutsideDomain(
            "division by a Gaussian has no finite moments where it may be zero, and here its mean "
            f"is within {AWAY_FROM_ZERO:g} standard deviations of it; bound the divisor first"
        )
    return delta(function, input)


@rule(*spellings("sqrt", "rsqrt", "log"), kind=Kind.SMOOTH, treatment=APPROXIMATE,
      name="sqrt, rsqrt, log", batch=Batch.ANYWHERE)  # fmt: skip
def of_positive(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Functions of positive numbers, for x that stays away from zero."""
    if bool(((_distance(input) < AWAY_FROM_ZERO).reshape(input.shape) | (input.loc < 0)).any()):
        raise OutsideDomain(
            f"{name_of(function)} is defined for positive numbers, and here a mean is within "
            f"{AWAY_FROM_ZERO:g} standard deviations of zero or below; bound its argument first"
        )
    return delta(function, input)


@rule(*spellings("asin", "arcsin", "acos", "arccos"), kind=Kind.SMOOTH, treatment=APPROXIMATE,
      name="asin, acos", batch=Batch.ANYWHERE)  # fmt: skip
def of_cosine(function: Callable[..., Any], input: GaussianTensor) -> GaussianTensor:
    """Angles of numbers between -1 and 1, for x that stays between them."""
    stddev = input.variances.detach().clamp(min=0).sqrt().reshape(input.loc.shape)
    if bool((input.loc.detach().abs() + AWAY_FROM_ZERO * stddev > 1).any()):
        raise OutsideDomain(
            f"{name_of(function)} is defined from -1 to 1, and here a mean is within "
            f"{AWAY_FROM_ZERO:g} standard deviations of an end or beyond; bound its argument first"
        )
    return delta(function, input)


@rule(*spellings("atan2", "arctan2"), kind=Kind.SMOOTH, treatment=APPROXIMATE, name="atan2",
      batch=Batch.STEPWISE, in_place=in_place_spellings("atan2", "arctan2"))  # fmt: skip
def angle(function: Callable[..., Any], input: Any, other: Any) -> Any:
    """The angle of a point (other, input) that stays away from zero and from the cut below it."""
    pair: Any = torch.stack(torch.broadcast_tensors(input, other), -1)
    pair.materialize()
    mean = pair.shown.detach()
    variance = pair.variances.detach().clamp(min=0).reshape(pair.loc.shape)
    variance = pair.batch_at.shown(variance)
    reach = AWAY_FROM_ZERO * variance.sqrt()
    at_zero = mean.square().sum(-1) < AWAY_FROM_ZERO**2 * variance.sum(-1)
    crosses = (mean[..., 1] < 0) & (mean[..., 0].abs() < reach[..., 0])
    if bool((at_zero | crosses).any()):
        raise OutsideDomain(
            f"{name_of(function)} jumps where a point passes zero or the negative axis, and here "
            f"one is within {AWAY_FROM_ZERO:g} standard deviations of them; turn the points first, "
            "or use their sine and cosine, as F.normalize gives them"
        )
    return dispatch(_angle, (pair,), {})


def _angle(pair: Tensor) -> Tensor:
    """The angles of points (*any, 2), y first."""
    return torch.atan2(pair[..., 0], pair[..., 1])


rule(_angle, kind=Kind.SMOOTH, batch=Batch.ANYWHERE)(delta)


def _distance(x: GaussianTensor) -> Tensor:
    """Standard deviations between each mean and zero, (*batch, n)."""
    mean = x.flat.detach().abs()
    stddev = x.variances.detach().clamp(min=0).sqrt()
    return torch.where(stddev > 0, mean / torch.where(stddev > 0, stddev, 1), math.inf)


def _smooth(*names: str) -> None:
    rule(*spellings(*names), kind=Kind.SMOOTH, treatment=APPROXIMATE, name=names[0],
         batch=Batch.ANYWHERE)(delta)  # fmt: skip


_smooth("softmax")
_smooth("log_softmax")
_smooth("logsumexp")


def groups_of(
    function: Callable[..., Any],
    x: GaussianTensor,
    arrange: Callable[[Tensor], Tensor],
    centred: bool = False,
    offset: float = 0.0,
) -> Groups:
    """Groups by `arrange`, which gives (groups, n) of a tensor in the model's layout."""
    batch = [max(1, size) for size in x.batch_shape]
    size = max(1, x.event_shape.numel())
    places = torch.arange(math.prod((*batch, *x.event_shape)), device=x.device)
    places = places.reshape((*batch, *x.event_shape))
    rows = arrange(x.batch_at.shown(places))
    owner = rows // size
    if bool((owner != owner[:, :1]).any()):
        raise batch_error(function, x)
    return Groups(rows[(owner == 0).all(-1)], centred, offset)


def normalised(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    weight: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
) -> GaussianTensor:
    """weight * z / sqrt(|z|^2 + offset) + bias of every group z, in the shape of x.

    weight, bias: as the model would multiply and add them.
    """
    check_finite(function, x)
    factor, shift = (_of_event(x, value) for value in (weight, bias))
    moments = x.carrier.normalized(groups, x.flat, factor[groups.index])
    _warn(function, moments.extra, moments.variance)
    loc = (groups.put(moments.mean) * factor + shift).to(x.dtype).reshape(x.loc.shape)
    return GaussianTensor(loc, moments.carrier).with_batch_at(x.batch_at)


def lengths(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    shape: torch.Size,
    dropped: Sequence[int] = (),
    factor: float = 1.0,
) -> GaussianTensor:
    """factor * |z| of every group z; shape: of the result, without the dropped dimensions."""
    check_finite(function, x)
    at = x.batch_at._replace(dim=x.batch_at.dim - sum(d < x.batch_at.dim for d in dropped))
    shape = at.first(torch.empty(shape, device="meta")).shape if x.batch_shape else shape
    moments = x.carrier.lengths(x.loc.new_empty(()).expand(shape), groups, x.flat, factor)
    _warn(function, moments.extra[..., None], moments.variance[..., None])
    return GaussianTensor(moments.mean.to(x.dtype).reshape(shape), moments.carrier, batch_at=at)


@torch.no_grad()
def _warn(function: Callable[..., Any], extra: Tensor, variance: Tensor) -> None:
    """Warn where too much of the variance of a group, (*batch, G, n) each, is not linear."""
    if bool((extra.sum(-1) > FAR * variance.sum(-1)).any()):
        between = "" if extra.shape[-2] == 1 else " within each group, and only linear between them"
        warn_user(
            f"more than {FAR:.0%} of the variance of {name_of(function)} is not linear in its "
            f"input here: its own mean and covariance are good{between}, but its result is far "
            "from Gaussian for what comes next; compare with sampling",
            ApproximationWarning,
        )


def _of_event(x: GaussianTensor, value: Tensor | float) -> Tensor:
    """A constant that the model broadcasts, as a number for each element of the flat event."""
    value = torch.as_tensor(value, dtype=torch.float64, device=x.device).expand(x.shape)
    value = x.batch_at.first(value)
    return value[(0,) * len(x.batch_shape)].reshape(-1)
