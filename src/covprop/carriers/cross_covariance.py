"""The covariance of two random vectors, from the edges to what both came from.

Each operation gives its result edges to its arguments. An edge has the expected linearisation of
the operation: the operation itself where it is linear, E[g'(y)] where it is an activation (Stein:
Cov(g(y), w) = E[g'(y)] Cov(y, w) for y, w jointly Gaussian). Activations and products of one depth
share more than that: all orders of their pairs.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.covariance import Covariance, Dense
from covprop.errors import InconsistentBranches, UnsupportedOperation, name_of
from covprop.flow.algebra import Contraction
from covprop.flow.lineage import Transfer
from covprop.kernels.normal import SQRT_2, inverse_deviation
from covprop.kernels.rounding import CANCELLATION

INCONSISTENT = 1e-3
"""Relative to the variances of the terms of a sum: a variance below minus this is no rounding."""
SERIES = 4
"""Matrices that the series between two activations holds beside its result."""
COEFFICIENTS = 2**9
"""Numbers for each feature that an activation by quadrature keeps once it has met another."""
SHARED = 2
"""Autograd keeps one in this many of the covariances that are computed on the way to others."""

CrossCache: TypeAlias = dict[tuple[int, int], Tensor | None]


class Treatment(Protocol):
    """How a method treats activations."""

    @property
    def first_order(self) -> bool:
        """Whether covariances of activations with others end with the first order."""

    def activate(
        self, activation: Activation, mean: Tensor, covariance: Covariance
    ) -> tuple[Tensor, Covariance]:
        """Mean (*batch, n) and covariance of an element-wise function."""

    def cross(self, left: Activated, right: Activated, covariance: Tensor) -> Tensor:
        """Covariance of two activations of different tensors, given that of the tensors."""


class Vector(Protocol):
    """A random vector that knows what it came from."""

    serial: int
    rank: tuple[int, bool, int]
    depth: int
    edges: tuple[tuple[Any, Transfer], ...]
    opaque: bool
    dtype: torch.dtype | None
    treatment: Treatment
    activated: Activated | None
    products: "SecondOrder | None"

    @property
    def covariance(self) -> Covariance:
        """Its own covariance."""

    @property
    def nonlinear(self) -> bool:
        """Whether it is an activation or a product, which has more than a first order."""

    def beyond_gaussian(self, other: Any) -> Tensor | None:
        """What third cumulants add to its covariance with a vector of lower rank."""


@final
@dataclass(frozen=True)
class SecondOrder:
    """What a random vector has of second order: products of two of those that it came from.

    scales: numbers (*batch, n) that their elements are multiplied with before, if any.
    """

    parents: tuple[Vector, Vector]
    contraction: Contraction
    scales: tuple[Tensor, Tensor] | None = None

    def scaled(self, side: int, cross: Tensor) -> Tensor:
        """Cov(parent, w) of one of the two, with its scale."""
        return cross if self.scales is None else self.scales[side].to(cross)[..., None] * cross


@final
@dataclass(frozen=True)
class ExpectedSlope:
    """E[g'] of an activation, found when it is asked for."""

    activated: Activated

    def __call__(self, cross: Tensor) -> Tensor:
        """E[g'(y_i)] C_ij."""
        return self.activated.coefficients(1)[0].to(cross)[..., None] * cross


def common_ancestors(
    held: Iterable[Any], living: Sequence[Any]
) -> tuple[set[Any], set[Any], set[Any], int]:
    """Lowest common ancestors of pairs of living vectors, in the graph of edges.

    Returns them (with `held`), the vectors whose edges lead there, all that were visited, and the
    number of pairs that were looked at.
    """
    needed, expanded, reached = set(held), set[Any](), set(living)
    pairs = list(itertools.combinations(living, 2))
    seen: set[tuple[Any, Any]] = set()
    while pairs:
        u, v = pairs.pop()
        if u is v:
            needed.add(u)
            continue
        u, v = (u, v) if u.rank > v.rank else (v, u)
        if (u, v) in seen:
            continue
        seen.add((u, v))
        expanded.add(u)
        reached |= {u, v}
        pairs += [(parent, v) for parent, _ in u.edges]
        if at_same_depth(u, v):
            expanded.add(v)
            pairs += [(parent, other) for parent, _ in u.edges for other, _ in v.edges]
    return needed, expanded, reached, len(seen)


def release(held: Iterable[Any], living: Sequence[Any]) -> int:
    """Release what is no common ancestor: its covariance, and edges that lead to none.

    Returns the number of pairs that were looked at.
    """
    if len(living) <= 1:
        for node in living:
            node.forget()
            node.opaque = False
        return 0
    needed, expanded, reached, pairs = common_ancestors(held, living)
    newest = max(node.serial for node in living)
    for node in reached:
        if node not in needed:
            node.structure = None
        if node not in expanded and node.serial < newest:
            node.forget()
    return pairs


def at_same_depth(u: Any, v: Any) -> bool:
    """Whether both are activations or products, as many nonlinear operations deep."""
    return u.nonlinear and v.nonlinear and u.depth == v.depth


def cross_covariance(
    u: Vector, v: Vector, known: CrossCache, gaussian: bool = False
) -> Tensor | None:
    """Cov(u, v) as (*batch, n, m), None if they are independent.

    known: a cache of those that are computed already; gaussian: without third cumulants.
    """
    key = (u.serial, v.serial)
    if u is v and key not in known:
        return u.covariance.matrix()
    if u.rank < v.rank:
        turned = cross_covariance(v, u, known, gaussian)
        return None if turned is None else turned.mT
    if key not in known:
        result = _expand(u, v, known, gaussian)
        if result is not None and not gaussian:
            added = u.beyond_gaussian(v)
            result = result if added is None else result + added.to(result.dtype)
        known[key] = result
    return known[key]


def _expand(u: Vector, v: Vector, known: CrossCache, gaussian: bool) -> Tensor | None:
    """Cov(u, v) for u of the higher rank, from the covariances of what it came from."""
    if u.opaque:
        raise UnsupportedOperation(
            "a rule made a tensor with .replace(mean, covariance), which does not say how it "
            "depends on its argument; use .through(mean, linear), or pass a transfer"
        )
    if not at_same_depth(u, v):
        return _pushed(u, v, known, gaussian)
    if u.activated is not None and v.activated is not None:
        inner = cross_covariance(u.edges[0][0], v.edges[0][0], known, gaussian)
        return None if inner is None else u.treatment.cross(u.activated, v.activated, inner)
    first = _pushed(u, v, known, gaussian)
    if u.treatment.first_order and (u.activated is not None or v.activated is not None):
        return first
    second = _of_second_order(u, v, known, gaussian)
    return first if second is None else second if first is None else first + second


def _of_second_order(u: Vector, v: Vector, known: CrossCache, gaussian: bool) -> Tensor | None:
    """What products of jointly Gaussian factors share with products or activations of others.

    Cov(f, g) = sum_k <E[D^k f], C^k E[D^k g]> / k! ends with k = 2 where f is a product.
    """
    left, right = second_order(u), second_order(v)

    def between(i: int, j: int) -> Tensor | None:
        cross = cross_covariance(left.parents[i], right.parents[j], known, gaussian)
        return None if cross is None else right.scaled(j, left.scaled(i, cross).mT).mT

    crosses = [[between(i, j) for j in range(2)] for i in range(2)]
    return left.contraction.covariance(right.contraction, crosses)


def _pushed(u: Vector, v: Vector, known: CrossCache, gaussian: bool) -> Tensor | None:
    """Cov(u, v) from the covariances of the parents of u with v."""
    total: Tensor | None = None
    for parent, transfer in u.edges:
        inner = cross_covariance(parent, v, known, gaussian)
        if inner is not None:
            share = transfer(inner.to(u.dtype))  # the operation was one of this dtype
            total = share if total is None else total + share
    return total


def second_order(vector: Vector) -> SecondOrder:
    """Its products; of an activation, E[g''] / 2 times the square of its argument.

    E[g''] = sqrt(2) a_2 / sigma^2. Either 1 / sigma goes to a factor of its own, so that nothing
    overflows where hardly anything varies.
    """
    if vector.products is not None:
        return vector.products
    assert vector.activated is not None
    ((parent, _),), variance = vector.edges, vector.activated.variance
    contraction = Contraction.elementwise(variance.shape[:-1], variance.shape[-1])
    half = vector.activated.coefficients(2)[1] / SQRT_2
    return SecondOrder((parent, parent), contraction, (inverse_deviation(variance), half))


def checked_sum(
    operation: Callable[..., Any],
    matrix: Tensor,
    size: Tensor,
    edges: Sequence[tuple[Any, Transfer]],
) -> tuple[Dense, Sequence[tuple[Any, Transfer]]]:
    """Covariance and edges of a sum; size: the variances of the terms, added up.

    Cross-covariances are approximate beyond one activation: they must not outweigh the rest. An
    element that differs from zero by the rounding of its terms alone is zero, which only its
    gradient does not tell, and so are its covariances with others. So is a variance below zero
    to which no cross-covariance adds, or that is rounding of the largest one.
    """
    variance, size = matrix.detach().diagonal(dim1=-2, dim2=-1), size.detach()
    scale, epsilon = size.clamp(min=0), torch.finfo(matrix.dtype).eps
    below = (variance != size) & (variance < -INCONSISTENT * scale) & (scale > 0)
    if bool(below.any()):
        below &= variance < -epsilon * scale.shape[-1] * scale.amax(-1, keepdim=True)
    if bool(below.any()):
        raise InconsistentBranches(
            f"{name_of(operation)} joins branches whose dependence is known too roughly here: "
            "a variance comes out negative; use smaller noise, or sampling",
            below.any(-1),
        )
    gone = (variance <= CANCELLATION * epsilon * scale) & ((variance != 0) | (scale > 0))
    if bool(gone.any()):
        rows = gone[..., :, None] | gone[..., None, :]
        matrix = torch.where(rows, matrix - matrix.detach(), matrix)
        edges = [(carrier, _without_rows(gone, transfer)) for carrier, transfer in edges]
    return Dense(matrix), edges


def _without_rows(rows: Tensor, transfer: Transfer) -> Transfer:
    """A transfer whose result is zero in some rows, which only its gradient does not tell."""

    def zeroed(cross: Tensor) -> Tensor:
        share = transfer(cross)
        return torch.where(rows[..., None], share - share.detach(), share)

    return zeroed


class CrossBytes(NamedTuple):
    """Bytes of the covariances between vectors that a plan counts.

    matrix: of the largest; temporary: of all that are computed on the way to one pair, at most;
    kept: by autograd, of all that are computed on the way to all pairs.
    """

    matrix: int = 0
    temporary: int = 0
    kept: int = 0


def cross_bytes(vectors: Sequence[Any]) -> CrossBytes:
    """The covariance of each pair of these `Planned` vectors."""
    matrix = temporary = kept = 0
    for first, second in itertools.combinations(vectors, 2):
        entries: dict[tuple[int, int], int] = {}
        varies = not (first.planned.constant or second.planned.constant)
        if varies and _depend(first, second, entries):
            unit = first.batch_shape.numel() * first.planned.itemsize
            matrix = max(matrix, unit * first.size * second.size)
            on_the_way = unit * sum(entries.values())
            numbers, grid = _of_activations(first, second)
            temporary = max(temporary, on_the_way + unit * numbers + grid)
            kept += on_the_way // SHARED
    return CrossBytes(matrix, temporary, kept)


def _depend(u: Any, v: Any, entries: dict[tuple[int, int], int]) -> bool:
    """Whether two random vectors depend on each other; entries of all pairs that were asked."""
    u, v = (u, v) if u.rank >= v.rank else (v, u)
    if u is v:
        return True
    if (u.serial, v.serial) not in entries:
        entries[u.serial, v.serial] = 0
        depends = [_depend(parent, v, entries) for parent, _ in u.edges]
        if at_same_depth(u, v):  # they meet before both
            pairs = itertools.product(u.edges, v.edges)
            depends += [_depend(one, other, entries) for (one, _), (other, _) in pairs]
        if any(depends):
            entries[u.serial, v.serial] = u.size * v.size
    return entries[u.serial, v.serial] > 0


def _of_activations(first: Any, second: Any) -> tuple[int, int]:
    """Numbers of the series and coefficients of activations on the way; bytes of a grid."""
    ways = [ancestors(first), ancestors(second)]
    both = ways[0] & ways[1]
    separate = [[one for one in way - both if one.grid is not None] for way in ways]
    grid = max((one.grid for one in itertools.chain(*separate)), default=0)
    sizes = [max((one.size for one in some), default=0) for some in separate]
    met = sum(one.size for one in ways[0] | ways[1] if one.grid)
    return SERIES * math.prod(sizes) + COEFFICIENTS * met, grid


def ancestors(vector: Any) -> set[Any]:
    """A vector and all that it came from."""
    known, pending = {vector}, [vector]
    while pending:
        parents = {parent for parent, _ in pending.pop().edges} - known
        known |= parents
        pending += parents
    return known
