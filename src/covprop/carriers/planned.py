"""A carrier of sizes in place of numbers: memory and work of a propagation, by running its rules.

Means are those of each function at the mean; of the randomness, bytes and work are counted. No
tensor of the size of a covariance is made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from covprop.activations import Activation
from covprop.activations.moments import PART
from covprop.carriers.cross_covariance import CrossBytes, cross_bytes, release
from covprop.carriers.ledger import Ledger, Work
from covprop.carriers.recurrent import recurrent_cost
from covprop.covariance import Covariance, LinearMap, Zero
from covprop.covariance.dense import PlannedDense
from covprop.covariance.planned import Cost, PlannedCovariance, Result
from covprop.flow.algebra import Contraction, Groups, Recurrence
from covprop.flow.carrier import Carrier, Moments, RandomLinear, Term
from covprop.flow.lineage import Lineage, Transfer
from covprop.kernels.compiled import library

VECTORS = 7 * 2**8
"""Bytes of moments and coefficients of an activation for each feature."""
GRID = 2**14
"""Bytes of the grid of a quadrature for each feature, of as many as have theirs at a time."""
COMPILED_GRID = 256
"""The same of a compiled one: what it finds of each feature."""
SMOOTH, DIRECTIONS = 9, 2**24
"""Tensors in float64 of second derivatives along directions, and how many numbers each has."""
PRODUCT, JOINED, SUMMED, CONTRACTED, MASKED = 4, 3, 2, 3, 4
"""Matrices held beside the result: of a product, a join, a sum, a contraction, shared masks."""
GROUPED, FOLLOWED_GROUPS = 9, 12
"""Matrices in float64, of what has a length together, that a norm holds, and that autograd keeps.
"""
NORMED, FOLLOWED_NORM = 3, 6
"""Matrices of the whole result that a norm holds beside it, and those that autograd keeps."""
RANDOM = 2
"""Matrices that random weights add."""
NO_WORK = Work()
"""No work beside that of a `Cost`."""


class Planned(Carrier):
    """A random vector of which only the size is known; its variances are zeros without memory.

    needs_grad: whether autograd would follow it; grid: bytes of the quadrature of the activation
    that made it, None if none did; saved: its covariance is counted with what autograd keeps.
    """

    def __init__(
        self,
        structure: PlannedCovariance,
        loc: Tensor,
        lineage: Lineage,
        ledger: Ledger,
        parents: Iterable[Carrier] = (),
        *,
        needs_grad: bool = False,
        grid: int | None = None,
        nonlinear: bool = False,
        saved: bool = False,
        opaque: bool = False,
    ) -> None:
        self.structure: PlannedCovariance | None = structure
        self.ledger, self.needs_grad, self.grid = ledger, needs_grad, grid
        self.nonlinear, self.saved = nonlinear, saved
        self._zeros = loc.new_zeros(()).expand(*structure.batch_shape, structure.size)
        edges = [(parent, _same) for parent in parents]
        super().__init__(lineage, edges, nonlinear=nonlinear, opaque=opaque)
        ledger.add(self)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self._zeros.shape[:-1]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._zeros.shape[-1]

    @property
    def nbytes(self) -> int:
        """What it holds beside what autograd keeps."""
        return 0 if self.structure is None or self.saved else self.structure.nbytes

    @property
    def planned(self) -> PlannedCovariance:
        """The structure of its covariance."""
        assert self.structure is not None, "collect() released a covariance that is needed"
        return self.structure

    @property
    def covariance(self) -> Covariance:
        """Zeros, for rules that ask for one."""
        return Zero(self._zeros)

    def variances(self) -> Tensor:
        """Zeros, so that what depends on their numbers takes the usual way."""
        return self._zeros

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would follow it."""
        return self.needs_grad

    def cross(self, other: Carrier) -> Tensor | None:
        """None: there are no numbers."""
        del other
        return None

    # What operations make.

    def _result(self, loc: Tensor, *others: "Planned") -> Result:
        ledger = self.ledger
        needs_grad = ledger.needs_grad or any(one.needs_grad for one in (self, *others))
        batch = max(1, self.batch_shape.numel())
        return Result(loc.numel() // batch, loc.itemsize, ledger.fan_in, needs_grad)

    def _new(
        self,
        loc: Tensor,
        cost: Cost,
        *others: "Planned",
        kind: str = "entries",
        more: Work = NO_WORK,
        grid: int | None = None,
        **options: Any,
    ) -> "Planned":
        """The result of an operation on this vector and others; its cost is recorded.

        kind: the kind of the work of the cost; more: work of other kinds.
        """
        parents = dict.fromkeys((self, *others))
        needs_grad = self._result(loc, *others).needs_grad
        made, ledger = cost.structure, self.ledger
        result = type(self)(
            made, loc, self.lineage, ledger, parents, needs_grad=needs_grad, grid=grid, saved=True,
            **options,
        )  # fmt: skip
        new = 0 if cost.shares else made.nbytes
        work = more + Work(**{kind: cost.work, "operations": 1.0})
        ledger.record(new + cost.temporary, work, result.serial)
        result.saved = needs_grad
        if needs_grad:
            ledger.keep(cost.graph + made.nbytes)
        if cost.writes:
            for one in parents:
                one.structure = one.planned.materialized
        return result

    def _dense(self, result: Result) -> PlannedDense:
        return PlannedDense(self.batch_shape, result.size, result.itemsize)

    def with_covariance(
        self, loc: Tensor, covariance: Covariance, transfer: Transfer | None
    ) -> "Planned":
        """Planned as a linear map to as many features."""
        del covariance
        cost = self.planned.push(self._result(loc))
        return self._new(loc, cost, kind=self.ledger.linear, opaque=transfer is None)

    def linear(self, loc: Tensor, linear: LinearMap) -> "Planned":
        """A S A^T."""
        del linear
        return self._new(loc, self.planned.push(self._result(loc)), kind=self.ledger.linear)

    def select(self, loc: Tensor, index: Tensor) -> "Planned":
        """Rows and columns of the index."""
        return self._new(loc, self.planned.take(index, self._result(loc)))

    def scale(self, loc: Tensor, factor: Tensor) -> "Planned":
        """f_i f_j S_ij."""
        del factor
        return self._new(loc, self.planned.scale(self._result(loc)))

    def map(self, loc: Tensor, function: Callable[[Tensor], Tensor]) -> "Planned":
        """Another dtype."""
        del function
        return self._new(loc, self.planned.map(self._result(loc)))

    def activation(self, activation: Activation, mean: Tensor) -> tuple[Tensor, "Planned"]:
        """Its value at the mean; a kernel for every pair."""
        value = torch.nan_to_num(activation.at(mean.double()), 0.0, 0.0, 0.0).to(mean.dtype)
        each = COMPILED_GRID if activation.compiles and library() is not None else GRID
        grid = each * min(PART, mean.numel()) if activation.integrated else 0
        vectors = VECTORS * mean.numel()
        compiled = activation.compiles_matrix and self.lineage.method.compiled_gradients
        result = self._result(mean)._replace(compiled=compiled and library() is not None)
        cost = self.planned.pairwise(result, vectors, grid)
        more = Work(integrals=mean.numel() if activation.integrated else 0)
        made = self._new(value, cost, kind="pairs", more=more, grid=grid, nonlinear=True)
        return value, made

    def directions(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """None; the cost of second derivatives along all of them is recorded."""
        del count
        planned, batch = self.planned, self.batch_shape.numel()
        if planned.joined(self._result(self._zeros), nonlinear=True) is None:
            entries = batch * self.size**2
            most = 8 * SMOOTH * min(entries, DIRECTIONS)
            self.ledger.record(most + planned.to_write, Work(entries=2.0 * SMOOTH * entries))
            if self._result(self._zeros).needs_grad:
                self.ledger.keep(most)
        return iter(())

    def normalized(self, groups: Groups, mean: Tensor, weight: Tensor) -> Moments:
        """The value at the mean, for every group."""
        z = groups.take(mean.double())
        value = z / (z.square().sum(-1, keepdim=True) + groups.offset).sqrt()
        zeros = torch.zeros((), device=mean.device).expand(value.shape)
        del weight
        planned, result = self.planned, self._result(mean)
        made = planned.scale(result).structure if planned.constant else self._dense(result)
        return Moments(value.nan_to_num(), self._of_groups(mean, groups, made), zeros, zeros)

    def lengths(self, loc: Tensor, groups: Groups, mean: Tensor, factor: float) -> Moments:
        """The value at the mean, for every group."""
        value = factor * groups.take(mean.double()).square().sum(-1).sqrt()
        zeros = torch.zeros((), device=mean.device).expand(value.shape)
        result = self._result(loc)
        made = self.planned.push(result).structure.plus(result).structure
        return Moments(value, self._of_groups(loc, groups, made), zeros, zeros)

    def _of_groups(self, loc: Tensor, groups: Groups, made: PlannedCovariance) -> "Planned":
        """Blocks of groups in float64, then a linear map and blocks that are added."""
        result, planned, batch = self._result(loc), self.planned, self.batch_shape.numel()
        cost = planned.joined(result, nonlinear=True)
        if cost is None:
            blocks = 8 * batch * self.size * groups.index.shape[-1]
            whole = batch * loc.itemsize * result.size * self.size
            graph = FOLLOWED_GROUPS * blocks + FOLLOWED_NORM * whole
            held = max(GROUPED * blocks, NORMED * whole)
            held = graph + (NORMED + 1) * whole if result.needs_grad else held
            work = 2.0 * SMOOTH * batch * self.size**2
            cost = Cost(made, held + planned.to_write, work, graph, writes=True)
        return self._new(loc, cost)

    def dropout(self, loc: Tensor, mean: Tensor, ratio: float, groups: Tensor | None) -> "Planned":
        """Independent noise; blocks of groups are a matrix."""
        del mean, ratio
        result = self._result(loc)
        if groups is None or self.planned.joined(result) is not None:
            return self._new(loc, self.planned.plus(result))
        dense = self._dense(result)
        work = 2.0 * self.batch_shape.numel() * self.size**2
        cost = Cost(dense, MASKED * dense.nbytes, work, MASKED * dense.nbytes)
        return self._new(loc, self.planned.by_matrix(cost))

    def random_linear(self, loc: Tensor, mean: Tensor, layer: RandomLinear) -> "Planned":
        """A linear map, and noise that is diagonal where a weight meets one position."""
        del mean
        result, planned = self._result(loc), self.planned
        if planned.joined(result) is not None or (planned.constant and not layer.shared):
            return self._new(loc, planned.push(result)._replace(structure=planned.plus(result)[0]))
        cost, dense = planned.push(result), self._dense(result)
        more = RANDOM * dense.nbytes
        cost = cost._replace(
            structure=dense, temporary=cost.temporary + more, graph=cost.graph + more
        )
        return self._new(loc, cost, kind=self.ledger.linear)

    def finish(self, loc: Tensor) -> Covariance:
        """What is held without a matrix until now is written out."""
        del loc
        cost = self.planned.finished()
        if cost is not None:
            work = Work(products=cost.work)
            self.ledger.record(cost.structure.nbytes + cost.temporary, work, self.serial)
            self.structure = cost.structure
        if share := self.planned.backward_share:
            self.ledger.record(0, self.ledger.done.backward(share), self.serial)
        return self.covariance

    # Operations on several vectors.

    def sum(self, loc: Tensor, terms: Sequence[Term], operation: Callable[..., Any]) -> "Planned":
        """Matrices of the terms, added up; those that a linear map makes are larger."""
        del operation
        others = [_checked(carrier) for carrier, _ in terms]
        result = self._result(loc, *others)
        cost = self.planned.joined(result)
        if cost is None:
            matrix, crossed = self._dense(result).nbytes, cross_bytes(others)
            if any(isinstance(part, LinearMap) for _, part in terms):
                widest = max(one.size for one in others)
                half = self.batch_shape.numel() * loc.itemsize * result.size * widest
                held = graph = JOINED * matrix if crossed.matrix else SUMMED * matrix + half
            else:
                held, graph = SUMMED * matrix + crossed.matrix, 0
            cost = self._joined(result, others, crossed, held, graph)
        return self._new(loc, cost, *others)

    def _joined(
        self,
        result: Result,
        others: Sequence["Planned"],
        crossed: CrossBytes,
        held: int,
        graph: int,
    ) -> Cost:
        """A matrix of vectors that vary together; beside the first, the way to what they share."""
        dense = self._dense(result)
        written = sum(one.planned.to_write for one in dict.fromkeys(others))
        most = max(held, dense.nbytes + crossed.temporary) + written
        graph += crossed.kept
        most = max(most, graph + written) if result.needs_grad else most
        work = 4.0 * result.fan_in * self.batch_shape.numel() * result.size**2
        return Cost(dense, most, work, graph, writes=True)

    def product(
        self, other: Self, contraction: Contraction, mean: Tensor, other_mean: Tensor
    ) -> tuple[Tensor, "Planned"]:
        """All terms of Isserlis."""
        value = contraction(mean, other_mean)
        result, pair = self._result(value, other), (self, other)
        cost = self.planned.joined(result, nonlinear=True)
        if cost is None:
            matrix, unit = self._dense(result).nbytes, self.batch_shape.numel() * value.itemsize
            crossed, held = cross_bytes(list(dict.fromkeys(pair))), PRODUCT * matrix
            if not contraction.is_elementwise:
                sizes = [one.size for one in dict.fromkeys(pair)]
                moved = unit * sum(size**2 for size in sizes) * (3 - len(sizes))
                held = CONTRACTED * matrix + max(moved, unit * result.size * max(sizes))
            cost = self._joined(result, pair, crossed, held + crossed.matrix, held)
        return value, self._new(value, cost, other, nonlinear=True)

    def recurrent(self, mean: Tensor, recurrence: Recurrence) -> tuple[Tensor, "Planned"] | None:
        """One step is planned, and multiplied."""
        planned, result = self.planned, self._result(mean)
        if planned.constant or planned.joined(result) is not None or planned.processes > 1:
            return None
        value, cost, more = recurrent_cost(self, mean, recurrence, Ledger(), result.needs_grad)
        return value, self._new(value, cost, kind="products", more=more)

    def forget(self) -> None:
        """Cut the edges to what it came from."""
        self.edges, self.grid, self.nonlinear = (), None, False

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """Release what the real carrier releases."""
        nodes = {carrier for carrier in held if isinstance(carrier, Planned)}
        if not any(node.planned.joined(Result(0, 0)) for node in nodes):
            pairs = release(nodes, [node for node in nodes if not node.planned.constant])
            for ledger in {node.ledger for node in nodes}:
                ledger.visited += pairs
            return
        for one in others:
            if isinstance(one, Planned) and one not in nodes and one.structure is not None:
                one.structure = one.structure.released


def _same(cross: Tensor) -> Tensor:
    """The transfer of an edge that no one computes with."""
    return cross


def _checked(carrier: Carrier) -> Planned:
    assert isinstance(carrier, Planned)
    return carrier
