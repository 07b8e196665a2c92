"""Any function, by quadrature: nothing derived by hand.

Moments follow from the derivative, which autograd gives; the covariance of a pair is the Hermite
series where it is short enough, and an integral of its own elsewhere.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from covprop.activations.base import Elements, Prepared
from covprop.activations.correlated import LADDER, Correlated
from covprop.activations.grids import WIDE, Scalar, Two
from covprop.activations.moments import moments
from covprop.activations.nested import nested_covariance
from covprop.kernels.normal import correlation, inverse_deviation, standard_deviation

WITH_KINKS = 64
"""The longest series with kinks, where coefficients cost more than a few pairs of narrow elements;
those of wide ones are far dearer."""


@final
@dataclass(frozen=True)
class Quadrature(Correlated):
    """A continuous function given as plain torch code.

    kinks: where its derivatives jump; conditional_mean(mean, variance): E[g] in closed form, where
    there is one, turns the covariance of strongly correlated pairs into a one-dimensional integral;
    rises: whether it is nondecreasing; parameters: numbers of each element that the function takes
    after y. Parameters, and kinks that are tensors, have the shape (*batch, n) of the means.
    """

    function: Callable[..., Tensor]
    kinks: Sequence[float | Tensor] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None
    rises: bool = False
    parameters: tuple[Tensor, ...] = ()

    longest: ClassVar[int] = LADDER[-1]  # an integral of a pair is dearer than any series
    few: ClassVar[int] = 0
    dear: ClassVar[float] = 2e6
    accuracy: ClassVar[dict[torch.dtype, float]] = {torch.float32: 2e-6, torch.float64: 1e-11}

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + E[g(y) - g(mu)]."""
        return self.moments(mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Centred second moment of g(y) - g(mu)."""
        return self.moments(mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """E[g' He_{k-1}] / sqrt(k!)."""
        return self.moments(mean, variance, order)[2]

    def moments(self, mean: Tensor, variance: Tensor, order: int) -> tuple[Tensor, Tensor, Tensor]:
        """All from one grid."""
        centre, output, coefficients, _ = moments(self._scalar(), mean, variance, order)
        return centre, output, coefficients

    @property
    def key(self) -> Hashable:
        """The function; what it has of each element is in the elements."""
        kinks = tuple(None if isinstance(kink, Tensor) else kink for kink in self.kinks)
        return self.function, kinks, len(self.parameters)

    def prepare(self, mean: Tensor, variance: Tensor, order: int, dtype: torch.dtype) -> Prepared:
        """Moments, coefficients and the fineness that all of them need, from one grid."""
        if self.kinks and not bool((variance > WIDE**2).any()):
            order = min(order, WITH_KINKS)
        centre, output, coefficients, fineness = moments(self._scalar(), mean, variance, order)
        # A variance at the level of rounding has no correlation to speak of.
        varies = output > (torch.finfo(output.dtype).eps * centre).square()
        own = self._with_fineness(mean, variance, fineness)
        series = self.series_elements(coefficients, output * varies, variance, dtype)
        return Prepared(centre, output, (*series, *(element.to(dtype) for element in own)))

    def scalars(self, mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Scalar]]:
        """The function itself, as fine as its moments ask for."""
        fineness = moments(self._scalar(), mean, variance, 1)[3]
        finest = int(fineness.max()) if fineness.numel() else 1
        return [(torch.ones_like(mean), self._scalar(finest))]

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """mu, sigma, 1 / sigma, the grid's fineness, and the numbers of each element."""
        fineness = moments(self._scalar(), mean, variance, 1)[3]
        return self._with_fineness(mean, variance, fineness)

    def direct(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """An integral over one variable given the other, in float64."""
        finest = int(max(left[3].max(), right[3].max()))
        rho = correlation(covariance, left[2], right[2])
        tensors = torch.broadcast_tensors(*left[:2], *right[:2], rho, *left[4:], *right[4:])
        pairs = [tensor.reshape(-1).double() for tensor in tensors]
        scalar, count = self._scalar(finest), len(left) - 4
        two = Two(scalar.having(pairs[5 : 5 + count]), scalar.having(pairs[5 + count :]))
        result = nested_covariance(two, *pairs[:5])
        return result.reshape(rho.shape).to(covariance.dtype)

    def _with_fineness(self, mean: Tensor, variance: Tensor, fineness: Tensor) -> Elements:
        numbers = mean, standard_deviation(variance), inverse_deviation(variance), fineness
        return *numbers, *self._scalar().of_elements

    def _scalar(self, fineness: int = 1) -> Scalar:
        return Scalar(
            self.function, self.kinks, self.conditional_mean, fineness, parameters=self.parameters
        )
