"""The full covariance of every tensor, and of any two tensors through the edges between them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.carriers.cross_covariance import (
    CrossCache,
    ExpectedSlope,
    SecondOrder,
    Treatment,
    checked_sum,
    cross_covariance,
    release,
)
from covprop.carriers.recurrent import recurrent_layer
from covprop.covariance import Covariance, Dense, Diagonal, LinearMap
from covprop.covariance.base import symmetric, without_negative_variances
from covprop.flow.algebra import Contraction, GroupBases, Groups, Recurrence
from covprop.flow.carrier import (
    Carrier,
    DiagonalTransfer,
    IndexTransfer,
    LazyTransfer,
    LinearTransfer,
    Moments,
    RandomLinear,
    ScalarTransfer,
    Term,
    pushed_matrix,
    transfer_of,
)
from covprop.flow.lineage import Lineage, Transfer
from covprop.kernels.directions import direction, length


class Full(Carrier):
    """A covariance structure, with edges to the carriers that it was computed from.

    activated, products: the activation that made it, or the products that it consists of.
    """

    lazy_release: ClassVar[bool] = True

    def __init__(
        self,
        covariance: Covariance,
        lineage: Lineage,
        treatment: Treatment,
        edges: Iterable[tuple[Carrier, Transfer]] = (),
        activated: Activated | None = None,
        products: SecondOrder | None = None,
        opaque: bool = False,
    ) -> None:
        self.treatment = treatment
        self.activated, self.products = activated, products
        self.structure: Covariance | None = covariance
        """The covariance, None once it is released."""
        self._batch_shape, self._size = covariance.batch_shape, covariance.size
        super().__init__(lineage, edges, nonlinear=self.nonlinear, opaque=opaque)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self._batch_shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._size

    @property
    def covariance(self) -> Covariance:
        """The covariance structure."""
        assert self.structure is not None, "collect() released a covariance that is needed"
        return self.structure

    @property
    def nonlinear(self) -> bool:
        """Whether it is an activation or a product, which has more than a first order."""
        return self.activated is not None or self.products is not None

    def variances(self) -> Tensor:
        """The diagonal of the covariance."""
        return self.covariance.diagonal()

    # Operations on one vector.

    def _new(
        self, covariance: Covariance, edges: Iterable[tuple[Carrier, Transfer]], **options: Any
    ) -> "Full":
        return type(self)(covariance, self.lineage, self.treatment, edges, **options)

    def _result(
        self,
        loc: Tensor,
        covariance: Covariance,
        transfer: Transfer | None,
        activated: Activated | None = None,
        **options: Any,
    ) -> "Full":
        if covariance.dtype != loc.dtype:  # torch has promoted the mean
            self._reserve(loc)
            covariance = covariance.map(lambda tensor: tensor.to(loc.dtype))
        edges = () if transfer is None else ((self, transfer),)
        opaque = transfer is None
        return self._new(covariance, edges, activated=activated, opaque=opaque, **options)

    def _reserve(self, loc: Tensor) -> None:
        """Reserve memory for the covariance of a result with this mean."""
        batch = max(1, self.batch_shape.numel())
        features = self.covariance.matrix_rows(loc.numel() // batch)
        self.lineage.reserve(loc.itemsize * batch * features**2)

    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> "Full":
        """The covariance as it is given."""
        return self._result(loc, covariance, transfer)

    def linear(self, loc: Tensor, linear: LinearMap) -> "Full":
        """A S A^T."""
        self._reserve(loc)
        return self._linear(loc, linear, self.covariance.push(linear))

    def _linear(
        self, loc: Tensor, linear: LinearMap, covariance: Covariance, **options: Any
    ) -> "Full":
        """The carrier of a linear map's result, given its covariance."""
        covariance = without_negative_variances(
            covariance, lambda: self.size * linear.variances(self.variances())
        )
        return self._result(loc, covariance, LinearTransfer(linear.without_buffers()), **options)

    def select(self, loc: Tensor, index: Tensor) -> "Full":
        """Rows and columns of the index."""
        self._reserve(loc)
        return self._result(loc, self.covariance.take(index), IndexTransfer(index, self.size))

    def scale(self, loc: Tensor, factor: Tensor) -> "Full":
        """f_i f_j S_ij."""
        self._reserve(loc)
        return self._result(loc, self.covariance.scale(factor), DiagonalTransfer(factor))

    def map(self, loc: Tensor, function: Callable[[Tensor], Tensor]) -> "Full":
        """A function of the tensors of the structure, and of those of every cross-covariance."""
        self._reserve(loc)
        return self._result(loc, self.covariance.map(function), function)

    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Full"]:
        """Moments by the method's treatment; the edge has E[g']."""
        result, covariance, activated = self._activated(activation, mean)
        return result, self._result(result, covariance, ExpectedSlope(activated), activated)

    def _activated(
        self, activation: Activation, mean: Tensor
    ) -> tuple[Tensor, Covariance, Activated]:
        """Mean and covariance of an element-wise function, and the activation for its edge."""
        seen = self.lineage.observed(activation)
        variance = self.variances()
        if not self.covariance.independent:
            self.lineage.reserve(mean.itemsize * mean.numel() * self.size)
            variance = variance.to(torch.float64, copy=True)  # a view would keep the whole matrix
        result, covariance = self.treatment.activate(seen, mean, self.covariance)
        return result, covariance, Activated(activation, mean, variance)

    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Unit vectors and rows of the covariance."""
        like = self.variances()
        for start in range(0, self.size, count):
            stop = min(self.size, start + count)
            units = like.new_zeros(stop - start, self.size)
            units.diagonal(offset=start).fill_(1)
            units = units.reshape(stop - start, *(1,) * len(self.batch_shape), self.size)
            units = units.expand(stop - start, *self.batch_shape, self.size)
            if self.covariance.independent:
                rows = units * like[..., start:stop].movedim(-1, 0)[..., None]
            else:
                rows = self.covariance.matrix()[..., start:stop, :].movedim(-2, 0)
            yield units, rows

    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """Exact within each group, by the expected slope between them."""
        dtype = mean.dtype
        self._reserve(mean)
        bases = GroupBases.of_covariance(groups, mean, self.covariance)
        found = direction(bases.vector, groups.offset)
        edge = groups.normalizing_map(bases.slope(found, dtype), weight)
        pushed = self.covariance.push(edge)
        variance = pushed.diagonal()[..., groups.index]
        extra = torch.zeros_like(variance)
        if not pushed.constant:
            root = bases.basis * weight[..., None]
            blocks = (root @ found.extra @ root.mT).to(dtype)
            matrix = pushed.matrix().clone()
            matrix[(..., *groups.pairs)] += blocks
            extra = blocks.diagonal(dim1=-2, dim2=-1)
            variance = matrix.diagonal(dim1=-2, dim2=-1)[..., groups.index]
            pushed = Dense(symmetric(matrix))
        result = self._new(pushed, [(self, LinearTransfer(edge))])
        return Moments(bases.whole(found.mean), result, extra, variance)

    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """Exact for each group, by the expected slope between them."""
        bases = GroupBases.of_covariance(groups, mean, self.covariance)
        found = direction(bases.vector)
        moments = length(bases.vector, found)
        edge = groups.length_map(factor * bases.whole(found.mean))
        self._reserve(loc)
        extra = factor**2 * moments.extra
        covariance = self.covariance.push(edge).plus(extra.to(mean.dtype))
        result = self._new(covariance, [(self, LinearTransfer(edge))])
        return Moments(factor * moments.mean, result, extra, factor**2 * moments.variance)

    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Full":
        """Independent noise of elements, or that of groups as blocks."""
        self._reserve(loc)
        if groups is None:
            covariance = self.covariance.plus(ratio * (self.variances() + mean.square()))
        else:
            same = groups[:, None] == groups[None, :]
            matrix = self.covariance.matrix()
            second = matrix + mean[..., :, None] * mean[..., None, :]
            covariance = Dense(matrix + ratio * torch.where(same, second, 0))
        return self._result(loc, covariance, ScalarTransfer(1.0))

    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> "Full":
        """E[W] S E[W]^T plus the independent noise of the weights."""
        covariance = self.covariance
        if not layer.shared:
            second = mean.square() if covariance.constant else mean.square() + self.variances()
            noise = layer.independent_noise(second)
            if covariance.constant:
                return self._result(loc, Diagonal(noise), LazyTransfer(layer.mean_map))
            self._reserve(loc)
            matrix = layer.congruence(covariance)
            matrix = covariance.push(layer.mean_map()).matrix() if matrix is None else matrix
            added = torch.diag_embed(noise)
        else:
            self._reserve(loc)
            added = layer.shared_noise(mean, covariance)
            matrix = torch.zeros_like(added)
            if not covariance.constant:
                matrix = covariance.push(layer.mean_map()).matrix()
        return self._result(loc, Dense(symmetric(matrix + added)), LazyTransfer(layer.mean_map))

    def finish(self, loc: Tensor) -> Covariance:
        """The covariance, materialized, without variances that rounding has made negative."""
        covariance = self.covariance
        if covariance.deferred:
            self._reserve(loc)
            covariance = Dense(covariance.matrix())
        variance = covariance.diagonal()
        return without_negative_variances(covariance, lambda: variance.abs().amax(-1, keepdim=True))

    # Operations on several vectors.

    def sum(self, loc: Tensor, terms: Sequence[Term], operation: Callable[..., Any]) -> "Full":
        """sum_ij A_i Cov(x_i, x_j) A_j^T."""
        self._reserve(loc)
        edges = [(carrier, transfer_of(part)) for carrier, part in terms]
        matrix = size = torch.zeros((), dtype=loc.dtype, device=loc.device)
        for i, (carrier, part) in enumerate(terms):
            own = pushed_matrix(part, carrier.covariance)
            size = size + own.diagonal(dim1=-2, dim2=-1)
            matrix = matrix + own if i else own
            del own  # matrices are large: none is held longer than it is needed
            for other, transfer in edges[:i]:
                cross = carrier.cross(other)
                if cross is not None:
                    half = transfer(edges[i][1](cross).mT)
                    del cross
                    matrix = matrix + (half + half.mT)
                    del half
        return self._new(*checked_sum(operation, symmetric(matrix), size, edges))

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Full"]:
        """All terms of Isserlis: exact moments if both are jointly Gaussian.

        E[u v] = m_u m_v + Cov(u, v); to first order linear in both, the second order is that of the
        contraction.
        """
        cross = self.cross(other)
        if contraction.is_elementwise:
            linear, edges = self._elementwise_product(other, mean, other_mean, cross)
        else:
            terms = contraction.linear_terms(self, other, mean, other_mean)
            joined = self.sum(contraction(mean, other_mean), terms, torch.einsum)
            linear, edges = joined.covariance.matrix(), joined.edges
        centre = contraction(mean, other_mean)
        if cross is not None:
            centre = centre + contraction.expectation(cross)
        products = SecondOrder((self, other), contraction)
        crosses = (
            (self.covariance.matrix(), cross),
            (None if cross is None else cross.mT, other.covariance.matrix()),
        )
        added = contraction.covariance(contraction, crosses)
        matrix = linear if added is None else linear + added
        covariance: Covariance = Dense(symmetric(matrix))
        if contraction.is_elementwise:  # where the two slopes cancel, what is left is rounding
            covariance = without_negative_variances(
                covariance,
                lambda: mean.square() * other.variances() + other_mean.square() * self.variances(),
            )
        return centre, self._new(covariance, edges, products=products)

    def _elementwise_product(
        self, other: "Full", mean: Tensor, other_mean: Tensor, cross: Tensor | None
    ) -> tuple[Tensor, Sequence[tuple[Carrier, Transfer]]]:
        """The linear part m_v u + m_u v of a product of vectors."""
        self._reserve(mean)
        linear = _outer(mean, mean) * other.covariance.matrix()
        linear = linear + _outer(other_mean, other_mean) * self.covariance.matrix()
        if cross is not None:
            mixed = _outer(other_mean, mean) * cross
            linear = linear + mixed + mixed.mT
        return linear, [(self, DiagonalTransfer(other_mean)), (other, DiagonalTransfer(mean))]

    def recurrent(self, mean: Tensor, recurrence: Recurrence) -> tuple[Tensor, "Full"] | None:
        """A small propagation for each step; of first order in covariances with other tensors."""
        if self.covariance.constant or self.covariance.distributed:
            return None
        value, matrix, edge = recurrent_layer(self, mean, recurrence)
        return value, self._new(Dense(matrix), [(self, edge)])

    # Covariances of two vectors.

    def cross(self, other: Carrier) -> Tensor | None:
        """Cov(this, other), from the covariances of what both came from."""
        assert isinstance(other, Full)
        if any(one.structure is not None and one.structure.constant for one in (self, other)):
            return None
        return cross_covariance(self, other, {})

    def expected_jvp(self, source: Self, columns: Tensor) -> Tensor | None:
        """E[J] B for columns B (*batch, n, m), J the Jacobian from an input to this."""
        if source.covariance.constant:
            return None
        known: CrossCache = {(source.serial, source.serial): columns}
        return cross_covariance(self, source, known, gaussian=True)

    def beyond_gaussian(self, other: Carrier) -> Tensor | None:
        """None: every vector is taken as Gaussian."""
        del other
        return None

    def forget(self) -> None:
        """Drop the edges to its ancestors."""
        self.edges, self.activated, self.products = (), None, None

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """Release covariances and edges that no pair of living vectors needs."""
        del others
        nodes = {carrier for carrier in held if isinstance(carrier, Full)}
        release(nodes, [node for node in nodes if not node.covariance.constant])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]
