"""Covariances of pairs: the Hermite series where a short one is exact, a direct formula elsewhere.

The error after K terms is at most |rho|^(K+1) r_i r_j, relative to the standard deviations, with
r the root of the share of an element's variance that is left after K terms (Cauchy-Schwarz).
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements, Prepared
from covprop.kernels.hermite import flushed, power_series
from covprop.kernels.normal import correlation, inverse_deviation

LADDER = (4, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
"""Orders that the series may have."""
LAST = 8
"""How many of the last coefficients tell the size of those beyond."""


class Correlated(Activation, ABC):
    """An activation with a formula for pairs that is dearer than a few terms of the series."""

    longest: ClassVar[int] = 48
    """The order beyond which the direct formula is cheaper."""
    few: ClassVar[int] = 2**14  # below, coefficients cost more than they save
    most: ClassVar[float] = 0.25
    """The share of pairs beyond the series above which the direct formula takes all of a block."""
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 3e-8, torch.float64: 1e-15}
    """Bound of the error of the series, relative to the standard deviations."""

    @abstractmethod
    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """Cov[g(y_i), g(y_j)] without the series; elements and covariance are broadcastable."""

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """The first order of LADDER that suffices for every pair, or the longest."""
        allowed = [order for order in LADDER if order <= self.longest]
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
        """1 / sigma, the tail after each order of LADDER, coefficients."""
        largest = self.accuracy[dtype] ** (1 / (len(coefficients) + 1))  # as `order` has it
        coefficients = flushed(coefficients, dtype, largest)
        tails = _relative_tails(coefficients.detach(), output.detach(), variance.detach())
        return inverse_deviation(variance).to(dtype), tails.to(dtype), coefficients.to(dtype)

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the first order whose bound suffices; what it cannot do directly."""
        rho = correlation(covariance, left[0], right[0])
        (tail_i, a), (tail_j, b) = left[1:3], right[1:3]
        position = self._rung(rho.detach(), tail_i, tail_j)
        if position is not None:
            return covariance * power_series(rho, a[: LADDER[position]], b[: LADDER[position]])
        if not len(a):
            return self.direct(left[3:], right[3:], covariance)
        hard = self._beyond(rho.detach(), tail_i[-1], tail_j[-1], len(a))
        share = int(hard.sum()) / hard.numel()
        if share > self.most:
            return self.direct(left[3:], right[3:], covariance)
        result = covariance * power_series(rho, a, b)
        if share == 0:
            return result
        spread = torch.broadcast_tensors(*left[3:], *right[3:], covariance)
        picked = [tensor[hard] for tensor in spread]
        count = len(left) - 3
        direct = self.direct(tuple(picked[:count]), tuple(picked[count:-1]), picked[-1])
        return result.masked_scatter(hard, direct)

    def _rung(self, rho: Tensor, tail_i: Tensor, tail_j: Tensor) -> int | None:
        """The place on LADDER of the first order that suffices for all of the block."""
        if not len(tail_i) or not rho.numel():
            return None if rho.numel() else 0
        least, most = torch.aminmax(rho)
        size = max(-float(least), float(most))
        heights = tail_i.flatten(1).amax(1) * tail_j.flatten(1).amax(1)
        for position, height in enumerate(heights.tolist()):
            if size ** (LADDER[position] + 1) * height <= self.accuracy[rho.dtype]:
                return position
        return None

    def _beyond(self, rho: Tensor, tail_i: Tensor, tail_j: Tensor, order: int) -> Tensor:
        """|rho|^(K+1) r_i r_j > accuracy, with the root of it taken of vectors and not of pairs."""
        root = 1 / (order + 1)
        limit = self.accuracy[rho.dtype] ** root
        return rho.abs() * (tail_i**root) * (tail_j**root) > limit


def _relative_tails(coefficients: Tensor, output: Tensor, variance: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    if not len(coefficients):
        return coefficients
    squares = coefficients.square()
    positive = (variance > 0) & (output > 0)
    total = torch.where(positive, output / torch.where(positive, variance, 1), 1)
    rest = (total - squares.sum(0)).clamp(min=0) + 8 * torch.finfo(total.dtype).eps * total
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])
