"""Maxima of elements that are taken as independent (Gast & Roth 2018): for comparison."""

from dataclasses import dataclass
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from covprop.activations.piecewise import relu
from covprop.carriers.full import Full
from covprop.carriers.planned import PRODUCT, Planned
from covprop.covariance import Dense
from covprop.covariance.planned import Cost
from covprop.flow.carrier import Carrier, Scaled, Transfer


@final
class IndependentMaxima(Full):
    """The same, with the arguments of a maximum taken as independent (Gast & Roth 2018)."""

    joint_maxima: ClassVar[bool] = False

    def maximum(self, other: Self, mean: Tensor, other_mean: Tensor) -> tuple[Tensor, Carrier]:
        """Cov_ij = (1 - p_i)(1 - p_j) A_ij + p_i p_j B_ij, and Clark's variance on the diagonal."""
        self._expect(mean)
        found = independent_maximum(self, other, mean, other_mean)
        first, second = 1 - found.share, found.share
        parts = self.covariance.scale(first), other.covariance.scale(second)
        matrix = parts[0].matrix() + parts[1].matrix() + torch.diag_embed(found.added)
        edges: list[tuple[Carrier, Transfer]] = [(self, Scaled(first)), (other, Scaled(second))]
        return found.mean, self._new(Dense(matrix), edges)


@final
class PlannedIndependentMaxima(Planned):
    """The same, with the arguments of a maximum taken as independent."""

    joint_maxima: ClassVar[bool] = False

    def maximum(self, other: Self, mean: Tensor, other_mean: Tensor) -> tuple[Tensor, Planned]:
        """Two matrices, each scaled, and their sum."""
        value = torch.maximum(mean, other_mean)
        result = self._result(value, other)
        cost = self.planned.joined(result)
        if cost is None:
            dense = self._dense(result)
            held = PRODUCT * dense.nbytes
            pair: list[Planned] = [self] if other is self else [self, other]
            held += sum(one.planned.to_write for one in pair)
            work = 4.0 * self.batch_shape.numel() * self.size**2
            cost = Cost(dense, held, work, held, writes=True)
        return value, self._new(value, cost, other)


@final
@dataclass(frozen=True)
class MaximumOfIndependent:
    """max(a, b) of independent elements: mean, P(b > a), and variance beyond the linear part."""

    mean: Tensor
    share: Tensor
    added: Tensor


def independent_maximum(
    a: Carrier, b: Carrier, mean: Tensor, other_mean: Tensor
) -> MaximumOfIndependent:
    """d = b - a with variance A_ii + B_ii, p = P(d > 0):  E max = max(E a, E b) + E relu(-|E d|).

    The larger mean comes first: E a + E relu(d) would lose the digits of a small b to a large a.
    Beyond (1 - p)^2 A + p^2 B the variance has Var relu(d) - p^2 Var d, which is never negative.
    """
    ramp = relu()
    distance = other_mean.double() - mean.double()
    variance = a.variances().double() + b.variances().double()
    share = ramp.coefficients(distance, variance, 1)[0]
    rest = (ramp.variance(distance, variance) - share.square() * variance).clamp(min=0)
    above = ramp.mean(-distance.abs(), variance).to(mean.dtype)
    centre = torch.maximum(mean, other_mean) + above
    return MaximumOfIndependent(centre, share.to(mean.dtype), rest.to(mean.dtype))
