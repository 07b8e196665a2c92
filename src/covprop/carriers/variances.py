"""Variances alone: every feature taken as independent of every other, in O(n)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.activations.rectifiers import relu
from covprop.carriers.planned import Planned
from covprop.covariance import Covariance, Diagonal, LinearMap
from covprop.flow.algebra import Contraction, GroupBases, Groups
from covprop.flow.carrier import Carrier, Moments, RandomLinear, Term
from covprop.flow.lineage import Lineage, Transfer
from covprop.kernels.directions import Elements, direction, independent_length, length, marginal

LARGEST_EXACT_GROUP = 32
"""Elements of a group up to which the dependence that centring makes is followed.

Of more elements it is a smaller part of their variances than one in the square of their number.
"""


@final
class Variances(Carrier):
    """A vector of variances (*batch, n)."""

    lazy_release: ClassVar[bool] = True

    def __init__(self, values: Tensor, lineage: Lineage) -> None:
        self.values = values
        super().__init__(lineage)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-1]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.values.shape[-1]

    @property
    def covariance(self) -> Covariance:
        """A diagonal one."""
        return Diagonal(self.values)

    def variances(self) -> Tensor:
        """All that there is."""
        return self.values

    def cross(self, other: Carrier) -> Tensor | None:
        """Only a vector with itself is not independent of it."""
        return torch.diag_embed(self.values) if other is self else None

    def _new(self, values: Tensor) -> "Variances":
        return Variances(values, self.lineage)

    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> "Variances":
        """Its diagonal."""
        del transfer
        return self._new(covariance.diagonal().to(loc.dtype))

    def linear(self, loc: Tensor, linear: LinearMap) -> "Variances":
        """sum_j A_ij^2 v_j."""
        return self._new(linear.variances(self.values).to(loc.dtype))

    def select(self, loc: Tensor, index: Tensor) -> "Variances":
        """Elements of the index."""
        return self._new(self.values.index_select(-1, index).to(loc.dtype))

    def scale(self, loc: Tensor, factor: Tensor) -> "Variances":
        """f_i^2 v_i."""
        return self._new((self.values * factor.square()).to(loc.dtype))

    def map(self, loc: Tensor, function: Callable[[Tensor], Tensor]) -> "Variances":
        """A function of the variances."""
        return self._new(function(self.values).to(loc.dtype))

    def sum(self, loc: Tensor, terms: Sequence[Term], operation: Callable[..., Any]) -> "Variances":
        """Variances of the terms, added up."""
        del operation
        total = torch.zeros((), dtype=loc.dtype, device=loc.device)
        for carrier, part in terms:
            own = carrier.variances()
            own = part.variances(own) if isinstance(part, LinearMap) else part**2 * own
            total = total + own
        return self._new(total)

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Variances"]:
        """Of independent factors; the square of a vector is the only other case."""
        first, second = self.values.reshape(mean.shape), other.values.reshape(other_mean.shape)
        values = contraction(mean.square(), second) + contraction(first, other_mean.square())
        values, centre = values + contraction(first, second), contraction(mean, other_mean)
        if self is other and contraction.is_elementwise:
            values = values + 2 * mean * other_mean * first + first * second
            centre = centre + first
        shape = *self.batch_shape, values.shape[len(self.batch_shape) :].numel()
        return centre, self._new(values.reshape(shape))

    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Variances"]:
        """Mean and variance of each element."""
        seen = self.lineage.observed(activation)
        result, variance = seen.marginals(mean.double(), self.values.double())
        return result.to(mean.dtype), self._new(variance.to(mean.dtype))

    def maximum(
        self, pair: Callable[[], tuple[Self, Self, Tensor, Tensor]]
    ) -> tuple[Tensor, "Variances"]:
        """Clark's moments of two independent elements."""
        first, second, mean, other_mean = pair()
        found = independent_maximum(first, second, mean, other_mean)
        values = (1 - found.share).square() * first.values + found.share.square() * second.values
        return found.mean, self._new(values + found.added)

    def monotone_maximum(self, inside: Callable[[], Any], outside: Callable[[], Any]) -> Any:
        """Operation by operation, as Gast & Roth (2018) do."""
        del inside
        return outside()

    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Unit vectors, and the same times the variances."""
        for start in range(0, self.size, count):
            units = self.values.new_zeros(min(count, self.size - start), self.size)
            units.diagonal(offset=start).fill_(1)
            units = units.reshape(len(units), *(1,) * len(self.batch_shape), self.size)
            yield units.expand(len(units), *self.values.shape), units * self.values

    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """Exact within small groups, element by element in large ones."""
        if groups.index.shape[-1] > LARGEST_EXACT_GROUP:
            found = marginal(self._elements(groups, mean), groups.offset)
            centre, linear, extra = found.mean, found.variance - found.extra, found.extra
        else:
            bases = GroupBases.of_covariance(groups, mean, self.covariance)
            exact = direction(bases.vector, groups.offset)
            inside = exact.slope @ bases.vector.covariance @ exact.slope
            linear, extra = (
                (bases.basis @ matrix @ bases.basis.mT).diagonal(dim1=-2, dim2=-1).clamp(min=0)
                for matrix in (inside, exact.extra)
            )
            centre = bases.whole(exact.mean)
        extra, variance = extra * weight.square(), (linear + extra) * weight.square()
        return Moments(centre, self._new(groups.put(variance).to(mean.dtype)), extra, variance)

    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """Exact for small groups; in large ones elements are independent also when centred."""
        if groups.index.shape[-1] > LARGEST_EXACT_GROUP:
            elements = self._elements(groups, mean)
            moments = independent_length(elements, marginal(elements))
        else:
            bases = GroupBases.of_covariance(groups, mean, self.covariance)
            moments = length(bases.vector, direction(bases.vector))
        variance = factor**2 * moments.variance
        result = self._new(variance.to(loc.dtype))
        return Moments(factor * moments.mean, result, factor**2 * moments.extra, variance)

    def _elements(self, groups: Groups, mean: Tensor) -> Elements:
        variance = self.values.double()[..., groups.index]
        return Elements(groups.take(mean.double()), variance, groups.centred)

    def dropout(
        self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None
    ) -> "Variances":
        """Noise of every element, also where masks are shared."""
        del loc, groups
        return self._new(self.values + ratio * (self.values + mean.square()))

    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> "Variances":
        """sum_j (E[W_ij]^2 v_j + Var(W_ij) E[x_j^2]) + Var(b_i)."""
        noise = layer.independent_noise(mean.square() + self.values)
        return self._new((layer.mean_map().variances(self.values) + noise).to(loc.dtype))

    def finish(self, loc: Tensor) -> Covariance:
        """Diagonal."""
        del loc
        return Diagonal(self.values)


@final
class PlannedVariances(Planned):
    """What a plan knows of them: one number for each feature."""

    def maximum(
        self, pair: Callable[[], tuple[Self, Self, Tensor, Tensor]]
    ) -> tuple[Tensor, Planned]:
        """A vector."""
        first, second, mean, other_mean = pair()
        value = torch.maximum(mean, other_mean)
        cost = first.planned.joined(first._result(value, second))
        assert cost is not None, "variances are joined without a matrix"
        return value, first._new(value, cost, second)

    def monotone_maximum(self, inside: Callable[[], Any], outside: Callable[[], Any]) -> Any:
        """As of the variances."""
        del inside
        return outside()


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
