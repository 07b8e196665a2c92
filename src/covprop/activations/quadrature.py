"""Any function, by quadrature: nothing derived by hand.

Moments follow from the derivative, which autograd gives; the covariance of a pair is the Hermite
series where it is short enough, and an integral of its own elsewhere.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from covprop.activations.base import Activation, Elements
from covprop.activations.grids import Scalar
from covprop.activations.moments import moments
from covprop.activations.nested import nested_covariance
from covprop.kernels.hermite import power_series
from covprop.kernels.normal import correlation, standard_deviation

LADDER = (8, 16, 32, 64, 128, 256, 512)
"""Orders that the exact covariance tries before it integrates a pair directly."""
LONGEST_WITH_KINKS = 64
"""With kinks the coefficients cost more and fall more slowly."""
LAST = 8
"""How many of the last coefficients tell the size of those beyond."""
ACCURACY = {torch.float32: 2e-6, torch.float64: 1e-11}
"""Bound of the exact covariance's error, relative to the standard deviations: ends the series."""


@final
@dataclass(frozen=True)
class Quadrature(Activation):
    """A continuous function given as plain torch code.

    kinks: where its derivatives jump; conditional_mean(mean, variance): E[g] in closed form, where
    there is one, turns the covariance of strongly correlated pairs into a one-dimensional integral.
    """

    function: Callable[[Tensor], Tensor]
    kinks: Sequence[float] = ()
    conditional_mean: Callable[[Tensor, Tensor], Tensor] | None = None

    def mean(self, mean: Tensor, variance: Tensor) -> Tensor:
        """g(mu) + E[g(y) - g(mu)]."""
        return moments(self._scalar(), mean, variance, 1)[0]

    def variance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Centred second moment of g(y) - g(mu)."""
        return moments(self._scalar(), mean, variance, 1)[1]

    def coefficients(self, mean: Tensor, variance: Tensor, order: int) -> Tensor:
        """E[g' He_{k-1}] / sqrt(k!)."""
        return moments(self._scalar(), mean, variance, order)[2]

    @property
    def key(self) -> Hashable:
        """The function."""
        return (self.function, tuple(self.kinks))

    def elements(self, mean: Tensor, variance: Tensor) -> Elements:
        """mu, sigma, the grid's fineness, the tail after each order of LADDER, coefficients."""
        order = LADDER[-1] if not self.kinks else LONGEST_WITH_KINKS
        centre, output, coefficients, fineness = moments(self._scalar(), mean, variance, order)
        # A variance at the level of rounding has no correlation to speak of.
        varies = output > (torch.finfo(output.dtype).eps * centre).square()
        tails = _relative_tails(coefficients.detach(), output.detach() * varies, variance.detach())
        return mean, standard_deviation(variance), fineness, tails, coefficients

    def pair(self, left: Elements, right: Elements, covariance: Tensor) -> Tensor:
        """The series at the first order whose bound suffices; pairs beyond all orders directly."""
        mean_i, stddev_i, fineness_i, tail_i, a = left
        mean_j, stddev_j, fineness_j, tail_j, b = right
        rho = correlation(covariance, stddev_i, stddev_j)
        size = rho.detach().abs()
        for order, r_i, r_j in zip(LADDER, tail_i, tail_j, strict=False):
            hard = size ** (order + 1) * (r_i * r_j) > ACCURACY[covariance.dtype]
            if not bool(hard.any()):
                break
        result = covariance * power_series(rho, a[:order], b[:order])
        if not bool(hard.any()):
            return result
        pairs = [
            t[hard].double()
            for t in torch.broadcast_tensors(mean_i, stddev_i, mean_j, stddev_j, rho)
        ]
        finest = int(max(fineness_i.max(), fineness_j.max()))
        direct = nested_covariance(self._scalar(finest), *pairs)
        return result.masked_scatter(hard, direct.to(result.dtype))

    def _scalar(self, fineness: int = 1) -> Scalar:
        return Scalar(self.function, self.kinks, self.conditional_mean, fineness)


def _relative_tails(coefficients: Tensor, output: Tensor, variance: Tensor) -> Tensor:
    """sqrt(sum_{k > K} a_k^2 / Var) for each K of LADDER that the coefficients reach.

    What lies beyond the last coefficient is the rest of the variance, as far as rounding shows it,
    and no more than coefficients of the size of the last ones would make.
    """
    squares = coefficients.square()
    positive = (variance > 0) & (output > 0)
    total = torch.where(positive, output / torch.where(positive, variance, 1), 1)
    rounding = 8 * torch.finfo(total.dtype).eps * total
    rest = (total - squares.sum(0)).clamp(min=0) + rounding
    rest = torch.minimum(rest, 2 * len(squares) * squares[-LAST:].amax(0))
    beyond = [squares[order:].sum(0) + rest for order in LADDER if order <= len(squares)]
    return torch.stack([torch.where(positive, (tail / total).sqrt(), 0) for tail in beyond])
