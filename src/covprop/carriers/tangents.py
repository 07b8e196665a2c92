"""Random tangents in place of covariances: for layers too wide for a matrix.

Nothing of size n x n exists. An activation has exact moments of each unit; the tangents are scaled
by E[g'], and what is left enters as an `Innovation`: a backward pass from the outputs adds it up.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self, final

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.carriers.innovation import Innovation, random_signs
from covprop.carriers.sketch import Product, Sketch, random_products
from covprop.carriers.sketched_activations import SketchSettings, activated
from covprop.covariance import Covariance, LinearMap
from covprop.covariance.base import symmetric
from covprop.covariance.planned import Cost, PlannedRows, Result
from covprop.covariance.semidefinite import square_root
from covprop.errors import UnsupportedOperation
from covprop.flow.algebra import Contraction, GroupBases, Groups
from covprop.flow.carrier import (
    Carrier,
    DiagonalTransfer,
    IndexTransfer,
    LinearTransfer,
    Moments,
    RandomLinear,
    ScalarTransfer,
    Term,
    transfer_of,
)
from covprop.flow.lineage import Lineage, Transfer
from covprop.kernels.directions import direction, length

NUMBERS = itertools.count()
"""Names of inputs, in the order in which they begin: two may share one covariance."""


@final
class Tangents(Carrier):
    """A `Sketch` of the covariance, and edges for the backward pass."""

    def __init__(
        self,
        sketch: Sketch,
        lineage: Lineage,
        settings: SketchSettings,
        edges: Iterable[tuple[Carrier, Transfer]] = (),
    ) -> None:
        self.sketch, self.settings = sketch, settings
        super().__init__(lineage, edges)

    @classmethod
    def of_input(
        cls, covariance: Covariance, lineage: Lineage, settings: SketchSettings
    ) -> "Tangents":
        """Directions that are few are kept; of others, random combinations."""
        count, size = settings.tangents, covariance.size
        variance = covariance.diagonal()
        none = variance.new_zeros(*covariance.batch_shape, count, size)
        empty = Sketch(none, {}, settings.generator, settings.kept, covariance)
        return cls(_sketch_of(covariance, empty, settings), lineage, settings)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.sketch.batch_shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.sketch.size

    @property
    def covariance(self) -> Covariance:
        """There is none."""
        raise UnsupportedOperation(
            "this operation asks for the covariance of every pair, which cp.Sketched does not "
            "have; use cp.GaussianLayers() or cp.MonteCarlo()"
        )

    def variances(self) -> Tensor:
        """Estimates."""
        return self.sketch.variances()

    def cross(self, other: Carrier) -> Tensor | None:
        """None: the dependence of two tensors is in their tangents."""
        del other
        raise UnsupportedOperation(
            "cp.Sketched has no covariance of two tensors on the way; use cp.GaussianLayers()"
        )

    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> "Tangents":
        """There is none."""
        del loc, covariance, transfer
        raise UnsupportedOperation(
            "a rule that gives a covariance, with .replace(mean, covariance), does not work with "
            "cp.Sketched, which has none on the way; write it with .through(mean, linear), or use "
            "cp.GaussianLayers()"
        )

    def _new(self, sketch: Sketch, edges: Iterable[tuple[Carrier, Transfer]]) -> "Tangents":
        return Tangents(sketch, self.lineage, self.settings, edges)

    def _result(self, loc: Tensor, sketch: Sketch, transfer: Transfer) -> "Tangents":
        if sketch.dtype != loc.dtype:
            sketch = replace(sketch.map(lambda rows: rows.to(loc.dtype)), entry=sketch.entry)
        return self._new(sketch, [(self, transfer)])

    def linear(self, loc: Tensor, linear: LinearMap) -> "Tangents":
        """The map of every row."""
        return self._result(loc, self.sketch.push(linear), LinearTransfer(linear.without_buffers()))

    def select(self, loc: Tensor, index: Tensor) -> "Tangents":
        """Elements of the index."""
        return self._result(loc, self.sketch.take(index), IndexTransfer(index, self.size))

    def scale(self, loc: Tensor, factor: Tensor) -> "Tangents":
        """f_i S_i."""
        return self._result(loc, self.sketch.scale(factor), DiagonalTransfer(factor))

    def map(self, loc: Tensor, function: Callable[[Tensor], Tensor]) -> "Tangents":
        """A function of all rows."""
        return self._result(loc, self.sketch.map(function), function)

    def sum(self, loc: Tensor, terms: Sequence[Term], operation: Callable[..., Any]) -> "Tangents":
        """The sum of the tangents, which has the dependence of the terms."""
        del loc, operation
        edges = [(carrier, transfer_of(part)) for carrier, part in terms]
        return self._new(self._linear_part(terms), edges)

    def _linear_part(self, terms: Sequence[Term]) -> Sketch:
        parts = []
        for carrier, part in terms:
            sketch = _sketched(carrier)
            if isinstance(part, LinearMap):
                parts.append(sketch.push(part))
            else:
                parts.append(sketch.map(ScalarTransfer(part)))
        return reduce(Sketch.added, parts)

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Tangents"]:
        """To first order d(uv) = m_v du + m_u dv.

        What is beyond has the covariance of (u v' + u' v) / sqrt(2), (u', v') an independent copy,
        and is shared with other nonlinearities of the same depth (`SharedSigns`).
        """
        if contraction.is_elementwise:
            return self._elementwise_product(other, mean, other_mean)
        first, second = self.sketch.aligned(other.sketch), other.sketch.aligned(self.sketch)
        batch = len(self.batch_shape)

        def of_rows(left: Tensor, right: Tensor) -> Tensor:
            sides = (left, mean), (right, other_mean)
            images = [rows.movedim(-2, 0).reshape(rows.shape[-2], *x.shape) for rows, x in sides]
            result = torch.func.vmap(contraction)(*images)
            shape = result.shape[: 1 + batch]
            return result.reshape(*shape, result.shape[1 + batch :].numel()).movedim(0, -2)

        centre = contraction(mean, other_mean)
        between = of_rows(first.rows(), second.rows()).sum(-2).reshape(centre.shape)
        terms = contraction.linear_terms(self, other, mean, other_mean)
        linear = self._linear_part(terms)
        weight = torch.full_like(linear.variances(), 1 / math.sqrt(2))
        there = Product(weight, first, second, of_rows)
        back = Product(weight, second, first, lambda right, left: of_rows(left, right))
        shared = random_products([there, back], self.settings.signs)
        if self.settings.order == 1:
            sketch = linear.plus(shared.square().sum(-2))
        else:
            sketch = linear.innovated(Innovation(torch.zeros_like(weight), columns=shared), shared)
        edges = [(carrier, transfer_of(part)) for carrier, part in terms]
        return centre + between, self._new(sketch, edges)

    def _elementwise_product(
        self, other: "Tangents", mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Tangents"]:
        first, second = self.sketch.aligned(other.sketch), other.sketch.aligned(self.sketch)
        between = first.inner(second)
        linear = first.scale(other_mean).added(second.scale(mean))
        variance = first.variances() * second.variances() + between.square()
        if self.settings.order == 1:
            sketch = linear.plus(variance)
        else:
            weight = torch.full_like(mean, 1 / math.sqrt(2))
            products = Product(weight, first, second), Product(weight, second, first)
            pairs = tuple(product.pairs() for product in products)
            none, layout = torch.zeros_like(variance), products[0].layout()
            innovation = Innovation(variance, pairs, left=none, layout=layout)
            sketch = linear.innovated(innovation, random_products(products, self.settings.signs))
        edges = [(self, DiagonalTransfer(other_mean)), (other, DiagonalTransfer(mean))]
        return mean * other_mean + between, self._new(sketch, edges)

    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Tangents"]:
        """Exact moments of each unit; E[g'] times the tangents, and the rest as an innovation."""
        seen = self.lineage.observed(activation)
        result, slope, sketch = activated(seen, mean, self.sketch, self.settings)
        return result, self._result(result, sketch, DiagonalTransfer(slope))

    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows: sum_c S_c S_c^T has the covariance as its expectation."""
        for part in self.sketch.rows().split(count, dim=-2):
            rows = part.movedim(-2, 0)
            yield rows, rows

    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """Exact within each group for the covariance of the sketch."""
        bases = GroupBases.of_rows(groups, mean, self.sketch.rows())
        found = direction(bases.vector, groups.offset)
        edge = groups.normalizing_map(bases.slope(found, mean.dtype), weight)
        pushed = self.sketch.push(edge)
        values, vectors = torch.linalg.eigh(found.extra)
        root = bases.basis * weight[..., None]
        rows = (root @ (vectors * values.clamp(min=0).sqrt()[..., None, :])).mT.to(mean.dtype)
        extra = rows.square().sum(-2)
        variance = extra + pushed.variances()[..., groups.index]
        noise = GroupNoise(groups.index, rows)
        result = self._new(noise.added_to(pushed), [(self, LinearTransfer(edge))])
        return Moments(bases.whole(found.mean), result, extra, variance)

    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """Exact for each group for the covariance of the sketch."""
        del loc
        bases = GroupBases.of_rows(groups, mean, self.sketch.rows())
        found = direction(bases.vector)
        moments = length(bases.vector, found)
        edge = groups.length_map(factor * bases.whole(found.mean))
        extra = factor**2 * moments.extra
        sketch = self.sketch.push(edge).plus(extra.to(mean.dtype))
        result = self._new(sketch, [(self, LinearTransfer(edge))])
        return Moments(factor * moments.mean, result, extra, factor**2 * moments.variance)

    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Tangents":
        """Independent noise of every element."""
        if groups is not None:
            raise UnsupportedOperation(
                "dropout of whole channels has no rule with cp.Sketched; use "
                "cp.GaussianLayers() or cp.MonteCarlo()"
            )
        sketch = self.sketch.plus(ratio * (self.variances() + mean.square()))
        return self._result(loc, sketch, ScalarTransfer(1.0))

    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> "Tangents":
        """The mean map, and independent noise."""
        if layer.shared:
            raise UnsupportedOperation(
                "random weights that are used in several places have no rule with cp.Sketched; "
                "use cp.GaussianLayers() or cp.MonteCarlo()"
            )
        linear = layer.mean_map()
        noise = layer.independent_noise(mean.square() + self.variances())
        return self._result(
            loc, self.sketch.push(linear).plus(noise), LinearTransfer(linear.without_buffers())
        )

    def finish(self, loc: Tensor) -> Covariance:
        """Never called: `cp.Sketched` computes the covariance in a backward pass."""
        del loc
        return self.covariance

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """Keep edges and the entries of nonlinearities for the backward pass, and nothing else."""
        for carrier in others:
            if isinstance(carrier, Tangents) and carrier not in held and carrier.sketch.count:
                carrier.sketch = carrier.sketch.released()


@final
@dataclass(frozen=True)
class GroupNoise:
    """Noise of each group of an index (G, n), by roots (*batch, G, r, n): an entry of a sketch."""

    index: Tensor
    roots: Tensor

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T of rows J (*batch, p, N)."""
        seen = rows[..., self.index].movedim(-2, -3) @ self.roots.mT  # (*batch, G, p, r)
        return symmetric((seen @ seen.mT).sum(-3))

    def added_to(self, sketch: Sketch) -> Sketch:
        """A sketch with this noise, of which the tangents have random directions."""
        shape = torch.Size((*self.roots.shape[:-2], sketch.count, self.roots.shape[-2]))
        signs = random_signs(shape, self.roots, sketch.generator) / math.sqrt(sketch.count)
        shared = Groups(self.index).put((signs @ self.roots).movedim(-3, -2))
        return replace(sketch, tangents=sketch.tangents + shared, entry=self)


def _sketched(carrier: Carrier) -> Sketch:
    assert isinstance(carrier, Tangents)
    return carrier.sketch


def _sketch_of(covariance: Covariance, empty: Sketch, settings: SketchSettings) -> Sketch:
    """The sketch of an input's covariance, which it has as its entry."""
    size, count = covariance.size, settings.tangents
    if covariance.constant:
        return empty
    parts = covariance.factor_and_noise()
    if parts is not None and parts[0].shape[-1] <= settings.directions:
        factor, rest = parts
        exact = replace(empty, exact={next(NUMBERS): factor.mT})
        return exact if rest is None else replace(exact.plus(rest), entry=covariance)
    if size <= settings.directions:
        return replace(empty, exact={next(NUMBERS): square_root(covariance.matrix()).mT})
    if covariance.independent:
        return replace(empty.plus(covariance.diagonal()), entry=covariance)
    root = covariance.root()
    shape = torch.Size((count, *covariance.batch_shape, root.width))
    draws = root.times(random_signs(shape, empty.tangents, settings.generator)).movedim(0, -2)
    return replace(empty, tangents=draws / math.sqrt(count))


@final
@dataclass(frozen=True)
class PlannedTangents(PlannedRows):
    """Rows of a sketch, which runs are to share.

    kept: for the backward pass, behind a nonlinearity that remembers them.
    """

    remembers: bool
    runs: int
    kept: bool = False

    @property
    def backward_share(self) -> float:
        """A row for each feature of the result, in each run."""
        return self.runs * self.size / self.width

    @property
    def released(self) -> PlannedRows | None:
        """The entries of nonlinearities."""
        return self if self.kept else None

    def joined(self, result: Result, nonlinear: bool = False) -> Cost:
        """What enters at a nonlinearity is remembered."""
        kept = nonlinear and self.remembers
        made = replace(self, size=result.size, itemsize=result.itemsize, kept=kept)
        return super().joined(result)._replace(structure=made)
