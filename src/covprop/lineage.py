"""Where an in-flight tensor came from: enough to find its covariance with any other.

Every operation gives its result edges to its arguments. An edge carries the expected linearisation
of the operation: the operation itself where it is linear, E[g'(y)] where it is an activation
(Stein: Cov(g(y), w) = E[g'(y)] Cov(y, w) for y, w jointly Gaussian).
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from covprop.activations import Activated, Activation
from covprop.covariance import Covariance, Zero
from covprop.errors import UnsupportedOperation
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
    def waits(self) -> bool:
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


class Node:
    """A random vector: tensors that differ by a constant, or in shape, share one."""

    __slots__ = (
        "__weakref__", "activated", "ancestors", "covariance", "edges", "factors", "opaque",
        "serial",
    )  # fmt: skip

    def __init__(
        self,
        covariance: Covariance,
        edges: Iterable[tuple["Node", Transfer]] = (),
        activated: Activated | None = None,
        opaque: bool = False,
        factors: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Keep the covariance and where it came from; an opaque node does not say."""
        self.serial = next(_serials)
        self.covariance: Covariance | None = covariance
        self.edges = tuple(edges)
        parents = {parent for parent, _ in self.edges}
        self.ancestors: frozenset[int] = frozenset(parent.serial for parent in parents).union(
            *(parent.ancestors for parent in parents)
        )
        self.activated = activated
        self.opaque = opaque
        self.factors = factors
        """The means (*batch, n) of the two parents of which this is the product."""

    @property
    def bends(self) -> bool:
        """Whether it is an activation or a product, which others of its kind know more of."""
        return self.activated is not None or self.factors is not None

    def forget(self) -> None:
        """Cut the ties to what it came from."""
        self.edges, self.activated, self.factors = (), None, None


class Lineage:
    """The random vectors of one propagation, and which of them may still meet."""

    def __init__(self, method: LayerwiseMethod) -> None:
        """Begin without tensors."""
        self.method = method
        self.watcher: Watcher | None = None
        self.observe: Callable[[Activation], Activation] | None = None
        """Replaces the activation that the method sees by one that tells what is done with it."""
        self.guard: Callable[[], None] | None = None
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
        if self.guard is not None and nbytes > LARGE:
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
        if u.serial < v.serial:
            turned = self._cross(v, u, known)
            return None if turned is None else turned.mT
        if key not in known:
            known[key] = self._expand(u, v, known)
        return known[key]

    def _expand(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """Cov(u, v) for u the newer, from the covariances of what it came from."""
        if u.opaque:
            raise UnsupportedOperation(
                "a rule made a tensor with .replace(mean, covariance), which does not say how it "
                "depends on its argument; use .through(mean, linear), or pass a transfer"
            )
        if parallel(u, v):
            if u.factors is not None:
                return self._of_products(u, v, known)
            assert u.activated is not None
            assert v.activated is not None
            inner = self._cross(u.edges[0][0], v.edges[0][0], known)
            return None if inner is None else self.method.cross(u.activated, v.activated, inner)
        if older_first(u, v):
            turned = self._pushed(v, u, known)
            return None if turned is None else turned.mT
        return self._pushed(u, v, known)

    def _of_products(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """Cov(a b, c d) of jointly Gaussian factors: all terms of Isserlis' theorem."""
        assert u.factors is not None
        assert v.factors is not None
        crosses = [[self._cross(p, q, known) for q, _ in v.edges] for p, _ in u.edges]
        total: Tensor | None = None
        for i in range(2):
            for j in range(2):
                cross = crosses[i][j]
                if cross is None:
                    continue
                term = u.factors[1 - i][..., :, None] * cross * v.factors[1 - j][..., None, :]
                total = term if total is None else total + term
        for first, second in ((crosses[0][0], crosses[1][1]), (crosses[0][1], crosses[1][0])):
            if first is not None and second is not None:
                total = first * second if total is None else total + first * second
        return total

    def _pushed(self, u: Node, v: Node, known: Known) -> Tensor | None:
        """Cov(u, v) from the covariances of the parents of u with v."""
        total: Tensor | None = None
        for parent, transfer in u.edges:
            inner = self._cross(parent, v, known)
            if inner is not None:
                total = transfer(inner) if total is None else total + transfer(inner)
        return total

    def collect(self) -> None:
        """Forget what no two living tensors, nor what comes of them, can meet at."""
        self._holders = [ref for ref in self._holders if ref() is not None]
        living = (holder for ref in self._holders if (holder := ref()) is not None)
        held = {holder.node for holder in living if not holder.waits}
        if self.method.returns:
            self._rest(held)
        else:
            self._forget(held)

    def _forget(self, held: set[Node]) -> None:
        living = [node for node in held if not isinstance(node.covariance, Zero)]
        if len(living) <= 1:
            for node in living:
                node.forget()
                node.opaque, node.ancestors = False, frozenset()
            return
        needed, expanded, reached = set(held), set[Node](), set(living)
        pairs = list(itertools.combinations(living, 2))
        for u, v in itertools.permutations(living, 2):
            for pair, taken in meetings(u, v):
                pairs.append(pair)
                expanded |= taken
        seen: set[tuple[Node, Node]] = set()
        while pairs:
            u, v = pairs.pop()
            if u is v:
                needed.add(u)
                continue
            u, v = (u, v) if u.serial > v.serial else (v, u)
            if (u, v) in seen:
                continue
            seen.add((u, v))
            expanded.add(u)
            reached |= {u, v}
            pairs += [(parent, v) for parent, _ in u.edges]
            if parallel(u, v):
                expanded.add(v)
                pairs += [(parent, other) for parent, _ in u.edges for other, _ in v.edges]
            elif older_first(u, v):
                expanded.add(v)
                pairs += [(parent, u) for parent, _ in v.edges]
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
    """Whether both are activations, or products, and neither came of the other."""
    activated = u.activated is not None and v.activated is not None
    products = u.factors is not None and v.factors is not None
    return (activated or products) and not is_ancestor(u, v) and not is_ancestor(v, u)


def older_first(u: Node, v: Node) -> bool:
    """Whether to expand v, the older, so that what bends behind it meets u, which bends."""
    plain = not v.bends and bool(v.edges) and not v.opaque
    return u.bends and plain and not is_ancestor(v, u)


def meetings(u: Node, v: Node) -> Iterator[tuple[tuple[Node, Node], set[Node]]]:
    """Where what is yet to come of u would meet v: the pairs, and the nodes on the way."""
    waiting, taken, seen = [v], set[Node](), {v}
    while waiting:
        node = waiting.pop()
        if node is u or is_ancestor(node, u):
            yield (u, node), taken
            continue
        if node.bends:
            for parent, _ in node.edges:
                yield (u, parent), taken | {node}
            continue
        taken.add(node)
        for parent, _ in node.edges:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)


def is_ancestor(old: Node, new: Node) -> bool:
    """Whether `new` came of `old`."""
    return old.serial in new.ancestors
