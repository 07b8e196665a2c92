"""Activations of a sketch: exact moments of each unit, and what enters beyond the tangents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.carriers.innovation import Innovation, random_signs
from covprop.carriers.sketch import Product, SharedSigns, Sketch, random_products
from covprop.kernels.normal import inverse_deviation, standard_deviation
from covprop.kernels.rounding import DIFFERENCE, rounding

ORDERS = (1, 2)
WIDENED = 6
"""|xi|^2 of the points where functions of few directions are looked at is so much larger than that
of normal numbers, as |xi|^6 is what the square of the third order asks for."""
BLOCK = 2**15
"""Elements whose moments are found at a time."""


@final
@dataclass(frozen=True)
class SketchSettings:
    """How many tangents there are, and what of nonlinearities they carry.

    tangents: how many; order: 1 or 2, of the dependence that a nonlinearity adds; directions: how
    many of an input are carried exactly at most; kept: tangents that each nonlinearity remembers,
    all if None; signs: random signs that the nonlinearities of one run share.
    """

    tangents: int
    order: int
    directions: int
    generator: torch.Generator | None
    kept: int | None = None
    signs: SharedSigns = field(default_factory=SharedSigns)


def activated(
    activation: Activation, mean: Tensor, sketch: Sketch, settings: SketchSettings
) -> tuple[Tensor, Tensor, Sketch]:
    """Mean, E[g'] and sketch of an activation."""
    variance = sketch.variances()
    found = _moments(activation, mean, variance, sketch.uncertainty(), settings.order)
    moved = sketch.scale(found.slope)
    left = (found.carried - found.second.square()).clamp(min=0)
    if settings.order == 1:
        return found.mean, found.slope, moved.innovated(Innovation(found.seen, left=left))
    # In units of the deviations: a_2 / sigma^2 overflows where hardly anything varies.
    scaled = sketch.scale(inverse_deviation(variance))
    product = Product(found.second, scaled, scaled)
    shared, layout = random_products([product], settings.signs), product.layout()
    seen, columns = found.seen, None
    if sketch.exact:
        # Few directions: there is hardly any chance in what is above, and what is beyond the second
        # order counts. Outputs see random directions of it, whose diagonal is known already.
        higher = _beyond_second(activation, mean, variance, scaled)
        seen = seen - higher.square().sum(-2)
        columns = _first(higher, settings.kept)
        higher = higher * random_signs(higher[..., :1].shape, higher, settings.generator)
        higher, left = _within(higher, left)
        shared = shared + higher
    innovation = Innovation(seen, (product.pairs(),), columns, left, layout)
    return found.mean, found.slope, moved.innovated(innovation, shared)


class _ActivationMoments(NamedTuple):
    """E[g], E[g'], a_2 (or zeros), and R_ii twice.

    seen: Var(g) - E[g']^2 sigma^2 for the outputs, less sigma^2 Var(D) for D that is E[g'] and an
    error, as outputs see the square of D; carried: Var(g) - D^2 v, so that tangents have Var(g).
    """

    mean: Tensor
    slope: Tensor
    second: Tensor
    seen: Tensor
    carried: Tensor


def _moments(
    activation: Activation, mean: Tensor, variance: Tensor, uncertainty: Tensor, order: int
) -> _ActivationMoments:
    """Moments in float64 until the last; few elements at a time, which stay in cache.

    A variance v that is known to +- s would bias what is not linear in it, in every run and layer
    the same way, by s^2 h''(v) / 2; that is taken away (`_unbiased`).
    """
    found = []
    for part in _blocks(activation, mean):
        point, spread, error = (t[..., part].double() for t in (mean, variance, uncertainty))
        error = torch.minimum(error, spread)
        three = [
            _at(activation, point, each, order) for each in (spread, spread + error, spread - error)
        ]
        found.append([one.to(mean.dtype) for one in _known(spread, *three)])
    result, *others = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
    return _ActivationMoments(result, *map(_without_dust, others))


def _known(
    variance: Tensor, here: Sequence[Tensor], above: Sequence[Tensor], below: Sequence[Tensor]
) -> _ActivationMoments:
    """What moments at v, v + s and v - s say of those at the variance that v estimates."""
    each = zip(here, above, below, strict=True)
    mean, output, slope, rest, second = (_unbiased(*three) for three in each)
    doubt = (above[2] - below[2]).square() / 4  # of the slope
    seen = (rest - doubt * variance).clamp(min=0)
    carried = (output - slope.square() * variance).clamp(min=0)
    return _ActivationMoments(mean, slope, second, seen, carried)


def _unbiased(here: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """h(v) less the bias h(v +- s) - h(v) on average, for h at v, v + s and v - s.

    Where that is more than h itself, as in the tails, h^2 over the average: right for exponentials,
    and what is positive stays so.
    """
    average = (above + below) / 2
    share = here.abs() / average.abs().clamp(min=torch.finfo(here.dtype).tiny)
    bias = (average - here) * share.clamp(max=1)
    return torch.where(torch.isfinite(bias), here - bias, here)  # v + s may be too large alone


def _at(activation: Activation, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, ...]:
    """E[g], Var(g), E[g'], R_ii and a_2 where variances are known."""
    result, output, coefficients = activation.moments(mean, variance, order)
    rest = (output - coefficients[0].square() * variance).clamp(min=0)
    second = coefficients[order - 1] * standard_deviation(variance) * (order - 1)
    return result, output, coefficients[0], rest, second


def _beyond_second(
    activation: Activation, mean: Tensor, variance: Tensor, scaled: Sketch
) -> Tensor:
    """Random directions (*batch, q, n) with sum_{k>=3} a_k a_k^T o rho^k, all orders of it.

    Values of r(xi) = g(mu + sigma xi) - sum_{k<=2} a_k He_k(xi) / sqrt(k!), as E[r_i r_j] is that
    for normal xi_i, xi_j with the correlations rho of the sketch (Mehler).
    """
    points, weight = _points(scaled)
    xi = scaled.mixed(points.to(scaled.dtype), 0, scaled.count)
    parts = [
        _residual(activation, mean[..., part].double(), variance[..., part].double(), xi[..., part])
        for part in _blocks(activation, mean, scaled.count)
    ]
    return torch.cat(parts, -1) * weight.sqrt()[..., None].to(mean.dtype)


def _points(scaled: Sketch) -> tuple[Tensor, Tensor]:
    """Points (*batch, q, rows of the sketch), and weights (*batch, q): a normal distribution.

    Each coordinate has one point in each of q equally likely intervals (a Latin hypercube). Those
    of exact directions are drawn from a wider distribution and weighted for it: a mean over normal
    numbers would depend on whether a few of them are far out.
    """
    known = sum(rows.shape[-2] for rows in scaled.exact.values())
    shape = (*scaled.batch_shape, scaled.count, scaled.count + known)
    order, within = torch.rand(
        (2, *shape), dtype=torch.float64, device=scaled.device, generator=scaled.generator
    )
    points = torch.special.ndtri((order.argsort(-2) + within) / scaled.count)
    wide = 1 + WIDENED / max(1, known)  # the variance
    exact = points[..., scaled.count :].mul_(math.sqrt(wide))
    logarithm = known * math.log(wide) - exact.square().sum(-1) * (1 - 1 / wide)
    return points, (logarithm / 2).exp() / scaled.count


def _residual(activation: Activation, mean: Tensor, variance: Tensor, xi: Tensor) -> Tensor:
    """What g has beyond its second order at points (*batch, q, n), where rounding leaves any."""
    centre, _, coefficients = activation.moments(mean, variance, max(ORDERS))
    deviation = standard_deviation(variance)
    first, second = (coefficients * deviation)[..., None, :].unbind(0)
    here, points = mean[..., None, :], xi.double()
    there = here + deviation[..., None, :] * points
    value = torch.zeros_like(there)  # of g, but for a constant
    for factor, scalar in activation.scalars(mean, variance):
        rise = scalar(there.mT) - scalar(here.mT)  # (*batch, n, q)
        value += factor[..., None, :] * rise.mT
    shift = (centre - activation.mean(mean, torch.zeros_like(mean)))[..., None, :]
    result = value - shift - first * points - second * (points.square() - 1) / math.sqrt(2)
    size = centre[..., None, :].abs() + value.abs() + (first * points).abs()
    known = result.abs() > rounding(DIFFERENCE, result.dtype) * size
    return torch.where(known, result, 0).to(xi.dtype)


def _within(rows: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Directions that have no more than these variances (*batch, n), and what is left of them."""
    taken = rows.square().sum(-2)
    least = torch.minimum(taken, variance)
    share = least / torch.where(taken > 0, taken, 1)
    return rows * share.sqrt()[..., None, :], variance - least


def _first(rows: Tensor, kept: int | None) -> Tensor:
    """So many of random directions alone, which have what all have."""
    return rows if kept is None else rows[..., :kept, :] * math.sqrt(rows.shape[-2] / kept)


def _blocks(activation: Activation, mean: Tensor, rows: int = 1) -> list[slice]:
    """Features (*batch, n) that are treated at a time, if so many numbers of each are held."""
    size = mean.shape[-1]
    each = rows * max(1, mean.numel() // max(1, size))
    step = max(1, BLOCK // each) if activation.uniform else max(1, size)
    return [slice(start, start + step) for start in range(0, max(1, size), step)]


def _without_dust(values: Tensor) -> Tensor:
    """Zeros for what no sum with the largest would show: denormal numbers are slow."""
    least = torch.finfo(values.dtype).eps ** 2 * values.abs().amax(-1, keepdim=True)
    return torch.where(values.abs() < least, 0, values)
