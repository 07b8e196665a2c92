"""Where an in-flight tensor came from: enough to find its covariance with any other.

Every operation gives its result edges to its arguments. An edge carries the expected linearisation
of the operation: the operation itself where it is linear, E[g'(y)] where it is an activation
(Stein: Cov(g(y), w) = E[g'(y)] Cov(y, w) for y, w jointly Gaussian). Activations and products of
one depth share more than that: all orders of their pairs.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.contraction import Contraction
from covprop.covariance import Covariance, Zero
from covprop.errors import UnsupportedOperation
from covprop.kernels.normal import SQRT_2, inverse_deviation
from covprop.methods import LayerwiseMethod
from covprop.room import LARGE

Transfer: TypeAlias = Callable[[Tensor], Tensor]
"""Cov(parent, w) -> its share of Cov(child, w): (*batch, n_parent, m) -> (*batch, n_child, m)."""

Known: TypeAlias = dict[tuple[int, int], Tensor | None]

_serials = itertools.count()


class Holder(Protocol):
    """What keeps a node alive: an in-flight tensor."""

    @property
    def node(self) -> "Node":
        """The random vector."""

    @property
    def is_pending(self) -> bool:
        """Whether it has none yet: what it will come of has a holder of its own."""


class Watcher(Protocol):
    """What sees the operations of a propagation."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:
        """Give the result of an operation, which is that of `proceed`, or another."""


@final
@dataclass(frozen=True)
class SecondOrder:
    """What a random vector has of second order: products of two of those that it came of.

    scales: numbers (*batch, n) that their elements are multiplied with before, if any.
    """

    parents: tuple["Node", "Node"]
    contraction: Contraction
    scales: tuple[Tensor, Tensor] | None = None

    def scaled(self, side: int, cross: Tensor) -> Tensor:
        """Cov(parent, w) of one of the two, with its scale."""
        return cross if self.scales is None else self.scales[side].to(cross)[..., None] * cross


class Node:
    """A random vector: tensors that differ by a constant, or in shape, share one.

    depth: how many activations and products, one after another, lead to it at most.
    """

    __slots__ = (
        "__weakref__", "activated", "covariance", "depth", "dtype", "edges", "opaque", "products",
        "rank", "serial",
    )  # fmt: skip

    def __init__(
        self,
        covariance: Covariance,
        edges: Iterable[tuple["Node", Transfer]] = (),
        activated: Activated | None = None,
        opaque: bool = False,
        products: SecondOrder | None = None,
        planned: bool = False,
    ) -> None:
        """Keep the covariance and where it came from; an opaque node does not say.

        planned: it stands for an activation or a product in a plan, which computes neither.
        """
        self.serial = next(_serials)
        self.covariance: Covariance | None = covariance
        self.dtype: torch.dtype | None = None
        """That of the tensors of this vector, which set it."""
        self.edges = tuple(edges)
        self.activated = activated
        self.opaque = opaque
        self.products = products
        """The products of which this is made, all of its second order."""
        before = max((parent.depth for parent, _ in self.edges), default=0)
        nonlinear = self.nonlinear or planned
        self.depth: int = before + nonlinear
        self.rank = self.depth, not nonlinear, self.serial
        """Higher than of all that it came of; of nonlinear ones lower than of others as deep."""

    @property
    def nonlinear(self) -> bool:
        """Whether it is an activation or a product, which has more than a first order."""
        return self.activated is not None or self.products is not None

    def second_order(self) -> SecondOrder:
        """Its products; of an activation, E[g''] / 2 times the square of what it is of.

        E[g''] = sqrt(2) a_2 / sigma^2. Either 1 / sigma goes to a factor of its own, so that
        nothing overflows where hardly anything varies.
        """
        if self.products is not None:
            return self.products
        assert self.activated is not None
        ((parent, _),), variance = self.edges, self.activated.variance
        contraction = Contraction.elementwise(variance.shape[:-1], variance.shape[-1])
        half = self.activated.coefficients(2)[1] / SQRT_2
        return SecondOrder((parent, parent), contraction, (inverse_deviation(variance), half))

    def forget(self) -> None:
        """Cut the ties to what it came from."""
        self.edges, self.activated, self.products = (), None, None


class Lineage:
    """The random vectors of one propagation, and which of them may still meet."""

    def __init__(self, method: LayerwiseMethod) -> None:
        """Begin without tensors."""
        self.method = method.begun()
        self.watcher: Watcher | None = None
        self.observe: Callable[[Activation], Activation] | None = None
        """Replaces the activation that the method sees by one that tells what is done with it."""
        self.guard: Callable[[], None] | None = None
        self._expected = 0
        self._holders: list[weakref.ref[Holder]] = []
        self._sources: set[int] = set()
        self._held: set[Node] = set()

    def claim(self, source: object) -> bool:
        """Whether randomness of the model's own, known by what holds it, enters for the first time.

        It is independent of everything then, and of nothing that came of it the second time.
        """
        first = id(source) not in self._sources
        self._sources.add(id(source))
        return first

    def expect(self, nbytes: int) -> None:
        """Before a covariance of that size is made, see once whether all will fit."""
        self._expected += nbytes
        if self.guard is not None and self._expected > LARGE:
            guard, self.guard = self.guard, None
            guard()

    def add(self, holder: "Holder") -> None:
        """Watch a tensor for as long as the program holds it."""
        self._holders.append(weakref.ref(holder))
        if self.method.returns:
            self._held.add(holder.node)

    def cross(self, u: Node, v: Node) -> Tensor | None:
        """Cov(u, v) as (*batch, n_u, n_v), or None if they are independent."""
        if self.method.variances_only and u is not v:
            return None
        if isinstance(u.covariance, Zero) or isinstance(v.covariance, Zero):
            return None
        return self._cross(u, v, {})

    def carried(self, u: Node, source: Node, columns: Tensor) -> Tensor | None:
        """E[J] B for columns B (*batch, n, m), J from a source, which came of nothing, to u."""
        if isinstance(source.covariance, Zero):
            return None
        return self._cross(u, source, {(source.serial, source.serial): columns})

    def _cross(self, u: Node, v: Node, known: Known) -> Tensor | None:
        key = (u.serial, v.serial)
        if u is v and key not in known:
            assert u.covariance is not None, "collect() dropped a covariance that is needed"
            return u.covariance.matrix()
        if u.rank < v.rank:
            turned = self._cross(v, u, known)
            return None if turned is None else turned.mT
        if key not in known:
            known[key] = self._expand(u, v, known)
        return known[key]

    def _expand(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """Cov(u, v) for u of the higher rank, from the covariances of what it came from."""
        if u.opaque:
            raise UnsupportedOperation(
                "a rule made a tensor with .replace(mean, covariance), which does not say how it "
                "depends on its argument; use .through(mean, linear), or pass a transfer"
            )
        if not parallel(u, v):
            return self._pushed(u, v, known)
        if u.activated is not None and v.activated is not None:
            inner = self._cross(u.edges[0][0], v.edges[0][0], known)
            return None if inner is None else self.method.cross(u.activated, v.activated, inner)
        first = self._pushed(u, v, known)
        if self.method.first_order and (u.activated is not None or v.activated is not None):
            return first
        second = self._of_second_order(u, v, known)
        return first if second is None else second if first is None else first + second

    def _of_second_order(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """What products of jointly Gaussian factors share with products or activations of others.

        Cov(f, g) = sum_k <E[D^k f], C^k E[D^k g]> / k! ends with k = 2 where f is a product.
        """
        left, right = u.second_order(), v.second_order()

        def between(i: int, j: int) -> Tensor | None:
            cross = self._cross(left.parents[i], right.parents[j], known)
            return None if cross is None else right.scaled(j, left.scaled(i, cross).mT).mT

        crosses = [[between(i, j) for j in range(2)] for i in range(2)]
        return left.contraction.covariance(right.contraction, crosses)

    def _pushed(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """Cov(u, v) from the covariances of the parents of u with v."""
        total: Tensor | None = None
        for parent, transfer in u.edges:
            inner = self._cross(parent, v, known)
            if inner is not None:
                share = transfer(inner.to(u.dtype))  # the operation was one of this dtype
                total = share if total is None else total + share
        return total

    def collect(self) -> None:
        """Forget what no two living tensors, nor what comes of them, can meet at."""
        self._holders = [ref for ref in self._holders if ref() is not None]
        living = (holder for ref in self._holders if (holder := ref()) is not None)
        held = {holder.node for holder in living if not holder.is_pending}
        if self.method.returns:
            self._rest(held)
        else:
            self._forget(held)

    def _forget(self, held: set[Node]) -> None:
        living = [node for node in held if not isinstance(node.covariance, Zero)]
        if len(living) <= 1:
            for node in living:
                node.forget()
                node.opaque = False
            return
        needed, expanded, reached = set(held), set[Node](), set(living)
        pairs = list(itertools.combinations(living, 2))
        seen: set[tuple[Node, Node]] = set()
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
            if parallel(u, v):
                expanded.add(v)
                pairs += [(parent, other) for parent, _ in u.edges for other, _ in v.edges]
        newest = max(node.serial for node in living)
        for node in reached:
            if node not in needed:
                node.covariance = None
            if node not in expanded and node.serial < newest:
                node.forget()

    def _rest(self, held: set[Node]) -> None:
        """Of nodes that no tensor has any more, keep what the way back asks for."""
        for node in self._held - held:
            if node.covariance is not None:
                node.covariance = node.covariance.at_rest()
        self._held = held


def parallel(u: Node, v: Node) -> bool:
    """Whether both are activations or products, with as many before them."""
    return u.nonlinear and v.nonlinear and u.depth == v.depth
