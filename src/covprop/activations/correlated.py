"""Covariances of pairs: the Hermite series where a short one is exact, a direct formula elsewhere.

The error after K terms is at most |rho|^(K+1) r_i r_j, relative to the standard deviations, with
r the root of the share of an element's variance that is left after K terms (Cauchy-Schwarz).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements, Prepared
from covprop.kernels.hermite import flushed, in_units, power_series, series_units
from covprop.kernels.normal import correlation, inverse_deviation

LADDER = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
"""Orders that the series may have."""
SAMPLED = 2048
"""Pairs of a block that are looked at to choose its order."""
SPLIT = 8
"""What it costs to treat some pairs of a block apart, in terms of the series for all of them."""
LAST = 8
"""How many of the last coefficients tell the size of those beyond."""


class Correlated(Activation, ABC):
    """An activation with a formula for pairs that is dearer than a few terms of the series."""

    longest: ClassVar[int] = 48
    """The order beyond which the direct formula is cheaper."""
    few: ClassVar[int] = 2**14  # below, coefficients cost more than they save
    dear: ClassVar[float] = 1000.0
    """What the direct formula costs, in terms of the series."""
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 3e-8, torch.float64: 1e-15}
    """Bound of the error of the series, relative to the standard deviations."""

    @abstractmethod
    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] without the series; elements and covariance are broadcastable."""

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """The first order of LADDER that suffices for every pair, or the longest."""
        allowed = [order for order in LADDER if order <= self.longest]
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
        inverse = inverse_deviation(variance)
        if not len(coefficients):
            nothing = coefficients.to(dtype)
            return inverse.to(dtype), nothing, nothing, torch.ones_like(inverse, dtype=dtype)
        largest = self.accuracy[dtype] ** (1 / (len(coefficients) + 1))  # as `order` has it
        units = series_units(coefficients, dtype)
        coefficients = flushed(coefficients / units, dtype, largest)
        tails = _relative_tails((coefficients * units).detach(), output.detach(), variance.detach())
        elements = inverse, tails, coefficients, units
        return tuple(element.to(dtype) for element in elements)

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the first order whose bound suffices; what it cannot do directly."""
        rho = correlation(covariance, left[0], right[0])
        (tails_i, a), (tails_j, b) = left[1:3], right[1:3]
        if not len(a):
            return self.direct(left[4:], right[4:], covariance)
        order, hard = self.split(rho.detach(), tails_i, tails_j)
        if order == 0:
            return self.direct(left[4:], right[4:], covariance)
        result = in_units(covariance, left[3], right[3]) * power_series(rho, a[:order], b[:order])
        if hard is None:
            return result
        index = hard.nonzero(as_tuple=True)
        if not len(index[0]):
            return result
        rows, columns = (
            tuple(picked(t, index, rho.shape) for t in side[4:]) for side in (left, right)
        )
        return result.index_put(index, self.direct(rows, columns, covariance[index]))

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
        if enough < len(limits) and LADDER[enough] <= SPLIT:  # nothing shorter would pay
            return LADDER[enough], None
        flat = rho.flatten()
        some = flat[:: max(1, flat.numel() // SAMPLED)].abs()
        beyond = (some[:, None] > some.new_tensor(limits[:enough])).sum(0).tolist()
        costs = {
            order: SPLIT + order + self.dear * max(count, 1) / len(some)
            for order, count in zip(LADDER, beyond, strict=False)
        }
        costs[0] = self.dear / 2  # of all pairs: nothing has to be picked
        if enough < len(limits):
            costs[LADDER[enough]] = LADDER[enough]
        order = min(costs, key=costs.__getitem__)
        at = LADDER.index(order) if order else enough
        if at >= enough:
            return order, None
        if at < len(limits) - 1:
            return order, rho.abs() > limits[at]
        root = 1 / (order + 1)  # the last has a limit for each pair
        limit = self.accuracy[rho.dtype] ** root
        return order, rho.abs() * (tails_i[-1] ** root) * (tails_j[-1] ** root) > limit


def picked(tensor: Tensor, index: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """The entries of pairs of a tensor (*any, ...) that broadcasts to this shape in the end."""
    rows = tensor.shape[: tensor.dim() - len(shape)]
    places: tuple[Any, ...] = (..., *index)
    return tensor.expand(*rows, *shape)[places]


def _relative_tails(coefficients: Tensor, output: Tensor, variance: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = (variance > 0) & (output > 0)
    total = torch.where(positive, output / torch.where(positive, variance, 1), 1)
    rest = (total - squares.sum(0)).clamp(min=0) + 8 * torch.finfo(total.dtype).eps * total
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])
