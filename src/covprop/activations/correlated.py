"""Activations with a Hermite series for weakly correlated pairs and a direct formula for others.

The error of the series after K terms is at most |rho|^(K+1) r_i r_j, relative to the standard
deviations, with r the root of the share of an element's variance that is left after K terms
(Cauchy-Schwarz).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from covprop.activations.base import Activated, Activation, Elements, Prepared, noting
from covprop.activations.nested import ScalarPair, pair_covariance
from covprop.kernels import compiled, compiled_moments, compiled_pairs
from covprop.kernels.normal import (
    correlation,
    in_dtype,
    inverse_deviation,
    standard_deviation,
)
from covprop.kernels.polynomials import flushed, in_units, power_series, series_units
from covprop.kernels.rounding import REMAINDER, rounding

LADDER = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
"""Orders that the series may have."""
SAMPLED_PAIRS = 2048
"""Pairs of a block from which its order is chosen."""
HELD_PAIRS = 2**16
"""Pairs of which is found at a time whether a series reaches them."""
SPLIT_COST = 8
"""Cost of computing some pairs of a block separately, in terms of the series for all of them."""
LAST_COEFFICIENTS = 8
"""How many of the last coefficients bound those beyond."""
CROSS_ORDERS = (64, 512)
"""Orders of the series of two different activations; the second where the first leaves more pairs
to integrals than there are units."""
CROSS_ACCURACY = {torch.float32: 1e-6, torch.float64: 1e-11}
"""Bound of the error of that series, relative to the standard deviations."""

Places = tuple[Tensor, ...]
"""The places of pairs in a matrix (*batch, rows, columns), one vector for each axis."""


class Correlated(Activation, ABC):
    """An activation with a direct formula for pairs, which costs more than a short series."""

    max_order: ClassVar[int] = 48
    """The order beyond which the direct formula is cheaper."""
    direct_pairs: ClassVar[int] = 2**14  # below, coefficients cost more than they save
    direct_cost: ClassVar[float] = 1000.0
    """The cost of the direct formula, in terms of the series."""
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 3e-8, torch.float64: 1e-15}
    """Bound of the error of the series, relative to the standard deviations."""

    @abstractmethod
    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] without the series; elements and covariance are broadcastable."""

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """The first order of LADDER that suffices for every pair, or `max_order`."""
        allowed = [order for order in LADDER if order <= self.max_order]
        largest = min(largest, 1.0)  # but for rounding
        enough = (k for k in allowed if largest ** (k + 1) <= self.accuracy[dtype])
        return next(enough, allowed[-1])

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """Moments, the elements of the series, then those of `direct`."""
        centre, output, coefficients = self.moments(mean, variance, max(order, 1))
        series = self.series_elements(coefficients[:order], output, variance, dtype)
        own = (element.to(dtype) for element in self.elements(mean, variance))
        return Prepared(centre, output, (*series, *own))

    def series_elements(
        self, coefficients: Tensor, output: Tensor, variance: Tensor, dtype: torch.dtype
    ) -> Elements:
        """1 / sigma, the tail after each order of LADDER, coefficients and their unit."""
        if len(coefficients) and compiled.usable(coefficients, output, variance):
            orders = [k for k in LADDER if k <= len(coefficients)]
            bound = compiled_pairs.Bound(orders, self.accuracy[dtype])
            limits = compiled_moments.SeriesLimits.of(dtype, LAST_COEFFICIENTS)
            found = compiled_moments.series_numbers(coefficients, output, variance, bound, limits)
            return in_dtype(found, dtype)
        inverse = inverse_deviation(variance)
        if not len(coefficients):
            nothing = coefficients.to(dtype)
            return inverse.to(dtype), nothing, nothing, torch.ones_like(inverse, dtype=dtype)
        largest = self.accuracy[dtype] ** (1 / (len(coefficients) + 1))  # as in `order`
        units = series_units(coefficients, dtype)
        coefficients = flushed(coefficients / units, dtype, largest)
        # In the units of the coefficients, one after the other: their squares may overflow.
        scaled = output.detach() / units / variance.detach() / units
        tails = _relative_tails(coefficients.detach(), scaled)
        return tuple(element.to(dtype) for element in (inverse, tails, coefficients, units))

    def compiled_direct(self, left: Elements, right: Elements) -> compiled_pairs.Direct | None:
        """The direct formula of the compiled kernels and its numbers, where there is one."""
        del left, right
        return None

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the cheapest order; pairs that it does not reach by `direct`."""
        if compiled.usable(covariance, *left, *right):
            rows = tuple(t.squeeze(-1) for t in left)
            columns = tuple(t.squeeze(-2) for t in right)
            found = self._compiled(rows, columns, covariance, None)
            if found is not None:
                return found
        rho = correlation(covariance, left[0], right[0])
        (tails_i, a), (tails_j, b) = left[1:3], right[1:3]
        order, beyond = self.split(rho.detach(), tails_i, tails_j) if len(a) else (0, None)
        if order == 0:
            result = self.direct(left[4:], right[4:], covariance)
            still = (left[0] == 0) | (right[0] == 0)  # one does not vary: of the gradient alone
            if len(a) and bool(still.any()):
                linear = in_units(covariance, left[3], right[3]) * (a[0] * b[0])
                result = torch.where(still, linear, result)
            return result
        result = in_units(covariance, left[3], right[3]) * power_series(rho, a[:order], b[:order])
        if beyond is None:
            return result
        index = beyond.nonzero(as_tuple=True)
        if not len(index[0]):
            return result
        rows, columns = (
            tuple(select_pairs(t, index, rho.shape) for t in side[4:]) for side in (left, right)
        )
        return result.index_put(index, self.direct(rows, columns, covariance[index]))

    def pair_matrix(
        self, elements: Sequence[Tensor], covariance: Tensor, variance: Tensor
    ) -> Tensor | None:
        """The series, tile by tile, and pairs that it does not reach by the direct formula."""
        if not compiled.usable(covariance, variance, *elements):
            return None
        own = tuple(elements)
        return self._compiled(own, own, covariance, variance)

    def _compiled(
        self, left: Elements, right: Elements, covariance: Tensor, diagonal: Tensor | None
    ) -> Tensor | None:
        """By a compiled kernel: elements (*any, *batch, n); None where it has no formula."""
        rows = compiled_pairs.Series(*left[:4])
        columns = rows if left is right else compiled_pairs.Series(*right[:4])
        own = left[4:]
        order, direct = len(left[2]), self.compiled_direct(own, own if left is right else right[4:])
        if not order and direct is None:
            return None
        orders = [k for k in LADDER if k <= order]
        bound = compiled_pairs.Bound(orders, self.accuracy[covariance.dtype])
        result, beyond = compiled_pairs.pairs(rows, columns, covariance, bound, direct, diagonal)
        if not beyond:
            return result
        self._finish(result, left, right, covariance, diagonal is not None)
        return result

    def _finish(
        self, result: Tensor, left: Elements, right: Elements, covariance: Tensor, symmetric: bool
    ) -> None:
        """Write the pairs that the longest series does not reach, some rows at a time."""
        order = max(k for k in LADDER if k <= len(left[2]))
        rows = covariance.shape[-2]
        step = max(1, HELD_PAIRS * rows // covariance.numel())
        right = tuple(t[..., None, :] for t in right)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            upper = tuple(t[..., part, None] for t in left)
            block = covariance[..., part, :]
            rho = correlation(block, upper[0], right[0])
            far = self._beyond_last(rho, upper[1], right[1], order)
            far = far.triu(start + 1) if symmetric else far
            index = far.nonzero(as_tuple=True)
            if not len(index[0]):
                continue
            first, second = (
                tuple(select_pairs(t, index, rho.shape) for t in side[4:])
                for side in (upper, right)
            )
            found = self.direct(first, second, block[index])
            *batch, row, column = index
            result[*batch, row + start, column] = found
            if symmetric:
                result[*batch, column, row + start] = found

    def observed(self, note: Callable[[int], None]) -> Self:
        """A copy that notes the order of each block of pairs, 0 for the direct formula."""
        return noting(
            self,
            note,
            _compiled=lambda args, made: None if made is None else self.terms(*args[:3]),
            split=lambda _, result: result[0] or None,
            direct=lambda *_: 0,
        )

    def terms(self, left: Elements, right: Elements, covariance: Tensor) -> int:
        """How many terms of the series `pair` would take, 0 for the direct formula alone."""
        if not len(left[2]):
            return 0
        rho = correlation(covariance, left[0][..., :, None], right[0][..., None, :]).detach()
        if left is right:
            rho = rho - torch.diag_embed(rho.diagonal(dim1=-2, dim2=-1))
        return self.split(rho, left[1][..., :, None], right[1][..., None, :])[0]

    def split(self, rho: Tensor, tails_i: Tensor, tails_j: Tensor) -> tuple[int, Tensor | None]:
        """The cheapest order of the series for a block, and which pairs are beyond it, if any."""
        if not rho.numel():
            return LADDER[0], None
        least, most = torch.aminmax(rho)
        largest = max(-float(least), float(most))
        heights = (tails_i.flatten(1).amax(1) * tails_j.flatten(1).amax(1)).tolist()
        limits = [
            (self.accuracy[rho.dtype] / max(height, 1e-300)) ** (1 / (order + 1))
            for order, height in zip(LADDER, heights, strict=False)
        ]
        enough = next((i for i, limit in enumerate(limits) if largest <= limit), len(limits))
        if enough < len(limits) and LADDER[enough] <= SPLIT_COST:  # nothing shorter would pay
            return LADDER[enough], None
        flat = rho.flatten()
        some = flat[:: max(1, flat.numel() // SAMPLED_PAIRS)].abs()
        beyond = (some[:, None] > some.new_tensor(limits[:enough])).sum(0).tolist()
        costs = {
            order: SPLIT_COST + order + self.direct_cost * max(count, 1) / len(some)
            for order, count in zip(LADDER, beyond, strict=False)
        }
        costs[0] = self.direct_cost / 2  # of all pairs: nothing has to be selected
        if enough < len(limits):
            costs[LADDER[enough]] = LADDER[enough]
        order = min(costs, key=costs.__getitem__)
        at = LADDER.index(order) if order else enough
        if at >= enough:
            return order, None
        if at < len(limits) - 1:
            return order, rho.abs() > limits[at]
        return order, self._beyond_last(rho, tails_i, tails_j, order)

    def _beyond_last(self, rho: Tensor, tails_i: Tensor, tails_j: Tensor, order: int) -> Tensor:
        """Which pairs the longest series does not reach: it has a limit for each of them."""
        root = 1 / (order + 1)
        limit = self.accuracy[rho.dtype] ** root
        return rho.abs() * (tails_i[-1] ** root) * (tails_j[-1] ** root) > limit


def select_pairs(tensor: Tensor, index: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """The entries of pairs of a tensor (*any, ...) that broadcasts to this shape in the end."""
    rows = tensor.shape[: tensor.dim() - len(shape)]
    places: tuple[Any, ...] = (..., *index)
    return tensor.expand(*rows, *shape)[places]


def _relative_tails(coefficients: Tensor, output: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    output: Var over the variance of the input, in the units of the coefficients a_k / sigma.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = torch.isfinite(output) & (output > 0)  # not where the input does not vary
    total = torch.where(positive, output, 1)
    rest = (total - squares.sum(0)).clamp(min=0) + rounding(REMAINDER, total.dtype) * total
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST_COEFFICIENTS:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])


def beyond_series(left: Activated, right: Activated, covariance: Tensor) -> tuple[int, Places]:
    """An order of the series of two activations, and the pairs for which it is too short.

    The error after K terms is at most |rho|^(K+1) r_i r_j, as for pairs of one activation.
    """
    degrees = [side.activation.degree for side in (left, right)]
    ends = [degree for degree in degrees if degree is not None]
    if ends:  # terms beyond are zero
        nothing = torch.zeros(0, dtype=torch.long, device=covariance.device)
        return min(ends), (nothing,) * covariance.dim()
    values = covariance.detach()
    inverse = [inverse_deviation(side.variance.detach()).to(values) for side in (left, right)]
    size = correlation(values, inverse[0][..., :, None], inverse[1][..., None, :]).abs_()
    for order in CROSS_ORDERS:
        root = 1 / (order + 1)
        rows, columns = (_tail(side, order).pow(root).to(values) for side in (left, right))
        limit = CROSS_ACCURACY[values.dtype] ** root
        reached = size * rows[..., :, None] * columns[..., None, :] <= limit
        pairs = (~reached).nonzero(as_tuple=True)  # also what is not a number
        if len(pairs[0]) <= left.mean.numel() + right.mean.numel():
            break
    return order, pairs


def _tail(side: Activated, order: int) -> Tensor:
    """The share of the deviation that is left after so many terms, and what rounding may hide."""
    # Not without gradients: what is computed here is kept, and used with them.
    coefficients, output = side.coefficients(order).detach(), side.output.detach()
    varies = output > 0
    explained = coefficients * (side.variance.detach() * coefficients)  # a square may overflow
    share = explained.sum(0) / torch.where(varies, output, 1)
    rest = (1 - share).clamp(min=0) + rounding(REMAINDER, share.dtype)
    return torch.where(varies, rest.sqrt(), 0)


def integrated(left: Activated, right: Activated, covariance: Tensor, pairs: Places) -> Tensor:
    """Cov[g(y_i), h(y_j)] = E[(g(y_i) - E g) (E[h(y_j) | y_i] - E h)] of pairs, in float64."""
    rows, columns = pairs[:-1], (*pairs[:-2], pairs[-1])
    inverse = inverse_deviation(left.variance)[rows], inverse_deviation(right.variance)[columns]
    rho = correlation(covariance[pairs].double(), *inverse)
    rho = rho + (rho.clamp(-1, 1) - rho).detach()  # beyond one by rounding
    stddev_1, stddev_2 = (standard_deviation(side.variance) for side in (left, right))
    one = left.mean[rows], stddev_1[rows]
    two = right.mean[columns], stddev_2[columns]
    total = torch.zeros_like(rho)
    for factor, first in left.activation.scalars(left.mean, left.variance):
        for weight, second in right.activation.scalars(right.mean, right.variance):
            share = factor[rows] * weight[columns]
            g, h = first.take(rows), second.take(columns)
            # The slope of what jumps is integrated over its own variable; a closed mean is used
            # for the other one, and before others that of waves, which it often leaves nothing of.
            closed = g.conditional_mean is not None and (g.periodic or h.conditional_mean is None)
            if h.jumps or (closed and not g.jumps):
                value = pair_covariance(ScalarPair(h, g), *two, *one, rho)
            else:
                value = pair_covariance(ScalarPair(g, h), *one, *two, rho)
            total = total + share * value
    return total


def series_cross(left: Activated, right: Activated, covariance: Tensor, order: int) -> Tensor:
    """Cov(g(y_i), h(w_j)) = c_ij sum_k rho^(k-1) (a_k / sigma)_i (b_k / sigma)_j."""

    def elements(side: Activated) -> Elements:
        found = series_elements(side.coefficients(order), side.variance, covariance.dtype)
        return tuple(element.to(covariance) for element in found)

    rows = tuple(t[..., :, None] for t in elements(left))
    columns = tuple(t[..., None, :] for t in elements(right))
    return series_pair(rows, columns, covariance)


def series_elements(coefficients: Tensor, variance: Tensor, dtype: torch.dtype) -> Elements:
    """1 / sigma, coefficients and their unit."""
    if compiled.usable(coefficients, variance):
        limits = compiled_moments.SeriesLimits.of(dtype)
        bound = compiled_pairs.Bound((), accuracy=1.0)  # every term counts
        found = compiled_moments.series_numbers(coefficients, variance, variance, bound, limits)
        return found.inverse, found.coefficients, found.units
    units = series_units(coefficients, dtype)
    return inverse_deviation(variance), flushed(coefficients / units, dtype), units


def series_pair(left: Elements, right: Elements, covariance: Tensor) -> Tensor:
    """All terms of the series, of `series_elements`."""
    if compiled.usable(covariance, *left, *right):
        rows, columns = (t.squeeze(-1) for t in left), (t.squeeze(-2) for t in right)
        return compiled_pairs.pairs(_side(*rows), _side(*columns), covariance)[0]
    rho = correlation(covariance, left[0], right[0])
    return in_units(covariance, left[2], right[2]) * power_series(rho, left[1], right[1])


def series_matrix(
    elements: Sequence[Tensor], covariance: Tensor, variance: Tensor
) -> Tensor | None:
    """The same of a symmetric matrix by a compiled kernel, None where there is none."""
    if not compiled.usable(covariance, variance, *elements):
        return None
    side = _side(*elements)
    return compiled_pairs.pairs(side, side, covariance, diagonal=variance)[0]


def _side(inverse: Tensor, coefficients: Tensor, units: Tensor) -> compiled_pairs.Series:
    return compiled_pairs.Series(inverse, None, coefficients, units)
