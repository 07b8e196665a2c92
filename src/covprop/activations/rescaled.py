"""g(y) = h(r y) / r: a function with features of the size 1 / r, in units of that size."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements, Prepared
from covprop.activations.grids import Scalar
from covprop.activations.quadrature import Quadrature
from covprop.kernels.normal import inverse_deviation

WIDEST = 1e8
"""Standard deviations in units of the features: beyond, h is homogeneous but for rounding.

What h(r y) / r has beside its limit, |y| or relu(y) and the like, is within 1 / r of zero, and adds
the square of 1 / (r sigma) to moments.
"""
LARGEST = 1e30
"""Units of what does not vary: single precision has numbers for them."""
AROUND = (2.5, 5.0, 10.0, 20.0, 40.0)
"""Distances from zero, in units of the features, between which h is smooth."""


@final
@dataclass(frozen=True)
class Rescaled(Activation):
    """What quadrature knows of h, whose grids have points around features of unit size.

    Hermite coefficients over the standard deviation are those of h: a_k[g] = a_k[h] / r at a
    standard deviation of h that is r times as large. function: g itself; rate: r > 0.
    """

    inner: Quadrature
    rate: float
    function: Callable[[Tensor], Tensor]

    few: ClassVar[int] = Quadrature.few

    @property
    def rises(self) -> bool:
        """Whether h does."""
        return self.inner.rises

    @property
    def key(self) -> Hashable:
        """The function and its rate."""
        return self.inner.key, self.rate

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """E[h(r y)] / r."""
        return self.moments(mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Var[h(r y)] / r^2."""
        return self.moments(mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """Those of h."""
        return self.moments(mean, variance, order)[2]

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from one grid."""
        rate = self._rate(variance)
        centre, output, coefficients = self.inner.moments(
            rate * mean, rate.square() * variance, order
        )
        return centre / rate, output / rate.square(), coefficients

    def order(self, largest: float, dtype: torch.dtype) -> int:
        """As many coefficients as h."""
        return self.inner.order(largest, dtype)

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """What h has of each element, and its unit."""
        rate = self._rate(variance)
        found = self.inner.prepare(rate * mean, rate.square() * variance, order, dtype)
        elements = *found.elements, rate.to(dtype)
        return Prepared(found.mean / rate, found.variance / rate.square(), elements)

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """Those of h, and the unit."""
        rate = self._rate(variance)
        return *self.inner.elements(rate * mean, rate.square() * variance), rate

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """That of h, in units of both."""
        (*rows, high), (*columns, wide) = left, right
        found = self.inner.pair(tuple(rows), tuple(columns), covariance * high * wide)
        return found / high / wide

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, with points around what there is to see of it."""
        del variance
        return [(torch.ones_like(mean), Scalar(self.function, self.kinks))]

    @property
    def kinks(self) -> tuple[float, ...]:
        """Points around what there is to see of the function."""
        places = {sign * place / self.rate for place in (0.0, *AROUND) for sign in (-1, 1)}
        return tuple(sorted(places))

    def _rate(self, variance: Tensor) -> Tensor:
        """Units for each element: a constant to autograd."""
        inverse = inverse_deviation(variance.detach())
        most = torch.where(inverse > 0, WIDEST * inverse, LARGEST).clamp(max=LARGEST)
        return most.clamp(max=self.rate)
