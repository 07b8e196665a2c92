"""What a propagation will take, before it is run: sizes, memory and work of every operation.

The means alone go through the network, one forward pass; the covariances are counted.
"""

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from covprop import costs
from covprop.counted import Counted, NeedsNumbers, Operation
from covprop.covariance import LowRank, Sharded, Zero
from covprop.dispatch import AT_MEANS, BATCH, KIND, Batch, leaves, map_leaves
from covprop.errors import name_of
from covprop.gaussian import Gaussian
from covprop.lineage import Lineage, Node
from covprop.moves import order_of
from covprop.report.table import Table, in_bytes
from covprop.tensor import GaussianTensor


@dataclass(frozen=True)
class Step:
    """One operation: where it is, what it gives, what its covariance and itself take."""

    module: str
    operation: str
    shape: tuple[int, ...]
    features: int
    covariance_bytes: int
    peak_bytes: int
    work: float


@dataclass(frozen=True)
class Plan:
    """The operations of a propagation, in order; print it to see the table."""

    steps: tuple[Step, ...]
    free_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that covariances will take at a time."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def work(self) -> float:
        """Floating-point operations on covariances, about."""
        return sum(step.work for step in self.steps)

    @property
    def fits(self) -> bool:
        """Whether the peak is below the memory that is free."""
        return self.peak_bytes <= self.free_bytes

    @property
    def table(self) -> Table:
        """A row for each operation."""
        head = ("module", "operation", "shape", "features", "covariance", "peak", "work")
        rows = [
            (
                step.module, step.operation, "x".join(map(str, step.shape)), f"{step.features:,}",
                in_bytes(step.covariance_bytes), in_bytes(step.peak_bytes), f"{step.work:.1e}",
            )
            for step in self.steps
        ]  # fmt: skip
        note = (
            f"peak {in_bytes(self.peak_bytes)} of {in_bytes(self.free_bytes)} that are free, about "
            f"{self.work:.1e} operations"
        )
        return Table(head, tuple(rows), words=3, notes=(note,))

    def __str__(self) -> str:
        """The table."""
        return str(self.table)


def short_name(function: Callable[..., Any]) -> str:
    """What a table calls an operation."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return str(function).split(".")[1]  # aten.linear.default
    return name_of(function).rpartition(".")[2]


def module_names(module: object) -> dict[int, str]:
    """The path of each module, by its id; a plain function has none."""
    if not isinstance(module, nn.Module):
        return {}
    return {id(layer): name for name, layer in module.named_modules()}


def running_module(names: Mapping[int, str]) -> str:
    """The path of the innermost module whose forward is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            return names[id(owner)]
        frame = frame.f_back
    return ""


class Planner:
    """Runs operations on means, and writes down what their covariances would take.

    follows: whether autograd would keep what it needs of tensors that require gradients.
    """

    def __init__(self, module: object, follows: bool = False) -> None:
        """Know the names of the modules."""
        self.steps: list[Step] = []
        self._nodes: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()
        self._names = module_names(module)
        self._follows = follows
        self._graph = 0
        self._nonlinear: weakref.WeakSet[Node] = weakref.WeakSet()
        self._grids: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()

    def wrap(self, x: Gaussian, lineage: Lineage) -> GaussianTensor:
        """An input, its covariance counted."""
        method, structure = lineage.method, x.covariance
        alone, columns = method.variances_only, method.columns(structure)
        follows = x.mean.requires_grad or structure.diagonal().requires_grad
        counted = Counted(
            x.batch_shape, x.event_shape.numel(), x.mean.itemsize,
            alone=alone, columns=columns, remembers=method.remembers,
            constant=isinstance(structure, Zero) and not (alone or columns),
            ranks=structure.team.size if isinstance(structure, Sharded) and not alone else 1,
            followed=follows and self._follows,
        )  # fmt: skip
        if structure.written(1) < counted.count and not (alone or counted.constant or columns):
            apart = structure.independent
            rank = structure.rank if isinstance(structure, LowRank) else 0
            counted = replace(counted, apart=apart, rank=rank, bare=not (apart or rank))
        return GaussianTensor(x.mean.detach(), self._add(Node(counted)), lineage)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:
        """One operation, or the operations that it is made of."""
        if BATCH[function] is Batch.STEPWISE:
            try:
                return proceed()
            except NeedsNumbers:
                pass
        given = (args, kwargs)
        tensors = [leaf for leaf in leaves(given) if isinstance(leaf, GaussianTensor)]
        if KIND[function] == "shape" and isinstance(next(leaves(given)), Tensor):
            return proceed()  # a constant takes the shape of a random one
        if KIND[function] == "noise":  # which leaves the mean, and must not draw
            outputs = tensors[0].loc.clone()
        else:
            outputs = _called(function, given, lambda tensor: tensor.loc.clone())
        origins: Iterator[Any] = iter(())
        if KIND[function] == "shape":
            origins = leaves(_called(function, given, _numbers))
        return map_leaves(
            outputs,
            lambda out: (
                self._counted(function, tensors, given, out, next(origins, None))
                if isinstance(out, Tensor) and out.is_floating_point()
                else out
            ),
        )

    def end(self, result: Any) -> None:
        """The end of the propagation: what is given back is written out."""
        for tensor in leaves(result):
            if not isinstance(tensor, GaussianTensor) or tensor.node.covariance is None:
                continue
            counted = tensor.node.covariance
            assert isinstance(counted, Counted)
            handed = costs.result(counted)
            if handed is not None:
                sized = [step for step in self.steps if step.features == counted.count]
                module = sized[-1].module if sized else ""
                self._step(module, "result", tuple(tensor.shape), handed, handed.counted.nbytes)
                tensor.node.covariance = handed.counted

    def _counted(
        self,
        function: Callable[..., Any],
        tensors: list[GaussianTensor],
        given: Any,
        out: Tensor,
        origins: Tensor | None,
    ) -> GaussianTensor:
        """A result, and its step."""
        nodes = list(dict.fromkeys(tensor.node for tensor in tensors))
        parents = tuple(self._known(node, given) for node in nodes)
        order = None
        if origins is not None and origins.dtype == torch.float64:
            order = order_of(origins, tensors[0].loc.shape, parents[0].batch.numel())
        operation = Operation(
            function, parents, given, out, *self._crossed(nodes), len(tensors), order
        )
        cost = costs.cost(operation)
        node = next((n for n in nodes if n.covariance is cost.counted), None)
        new = 0 if node is not None or cost.shares else cost.counted.nbytes
        self._step(running_module(self._names), short_name(function), tuple(out.shape), cost, new)
        if cost.writes:
            for one, parent in zip(nodes, parents, strict=True):
                if parent.half:
                    one.covariance = replace(parent, cached=True)
        if cost.counted.followed and node is None:
            self._graph += cost.graph + cost.counted.nbytes
        if node is None:
            nonlinear = KIND[function] in ("element-wise", "products")
            edges = [(n, lambda cross: cross) for n in nodes]
            node = self._add(Node(cost.counted, edges, planned=nonlinear))
            if nonlinear:
                self._nonlinear.add(node)
            if KIND[function] == "element-wise":
                self._grids[node] = costs.grid_bytes(operation)
        return GaussianTensor(out, node, tensors[0].lineage)

    def _step(
        self, module: str, operation: str, shape: tuple[int, ...], cost: costs.Cost, new: int
    ) -> None:
        counted = cost.counted
        peak = self._living() + new + cost.temporary
        self.steps.append(
            Step(module, operation, shape, counted.count, counted.nbytes, peak, cost.work)
        )

    def _known(self, node: Node, given: Any) -> Counted:
        """The covariance of an argument, which autograd follows if it follows the others."""
        counted = node.covariance
        assert isinstance(counted, Counted)
        followed = self._follows and any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(given)
        )
        return replace(counted, followed=True) if followed and not counted.followed else counted

    def _living(self) -> int:
        """Bytes of all covariances that are there; those that autograd follows stay."""
        found = self._graph
        for node in self._nodes:
            counted = node.covariance
            if isinstance(counted, Counted) and not (counted.followed and node.edges):
                found += counted.nbytes
        return found

    def _crossed(self, nodes: Sequence[Node]) -> tuple[int, int, int]:
        """Bytes of the covariances between two arguments, of all on the way to them, and in all."""
        crossed = meanwhile = kept = 0
        for first, second in itertools.combinations(nodes, 2):
            counted = first.covariance
            assert isinstance(counted, Counted)
            if counted.alone or counted.columns:
                return 0, 0, 0
            seen: dict[tuple[int, int], int] = {}
            if self._cross(first, second, seen):
                unit = counted.batch.numel() * counted.itemsize
                crossed = max(crossed, unit * self._nodes[first] * self._nodes[second])
                on_the_way = unit * sum(seen.values())
                meanwhile = max(meanwhile, on_the_way + self._of_activations(first, second))
                kept += on_the_way // costs.SHARED
        return crossed, meanwhile, kept

    def _of_activations(self, *nodes: Node) -> int:
        """What the coefficients of activations on the way, and the series between two, take."""
        ways = [_ancestors(node) for node in nodes]
        both = set.intersection(*ways)
        found = [[n for n in self._grids if n in way - both] for way in ways]
        counted = nodes[0].covariance
        assert isinstance(counted, Counted)
        grid = max((self._grids[node] for node in itertools.chain(*found)), default=0)
        sizes = [max((self._nodes[node] for node in some), default=0) for some in found]
        numbers = costs.SERIES * math.prod(sizes)
        met = [node for node in set.union(*ways) if self._grids.get(node)]
        numbers += costs.COEFFICIENTS * sum(self._nodes[node] for node in met)
        return grid + numbers * counted.batch.numel() * counted.itemsize

    def _cross(self, u: Node, v: Node, seen: dict[tuple[int, int], int]) -> bool:
        """Whether two random vectors depend on each other; entries of all pairs that were asked."""
        u, v = (u, v) if u.rank >= v.rank else (v, u)
        if u is v:
            return True
        if (u.serial, v.serial) not in seen:
            seen[u.serial, v.serial] = 0
            depends = [self._cross(parent, v, seen) for parent, _ in u.edges]
            if u in self._nonlinear and v in self._nonlinear and u.depth == v.depth:
                pairs = itertools.product(u.edges, v.edges)  # they meet before both
                depends += [self._cross(one, other, seen) for (one, _), (other, _) in pairs]
            if any(depends):
                seen[u.serial, v.serial] = self._nodes[u] * self._nodes[v]
        return seen[u.serial, v.serial] > 0

    def _add(self, node: Node) -> Node:
        counted = node.covariance
        assert isinstance(counted, Counted)
        self._nodes[node] = counted.count
        return node


def _ancestors(node: Node) -> set[Node]:
    """A node and all that it came of."""
    found, open_nodes = {node}, [node]
    while open_nodes:
        parents = {parent for parent, _ in open_nodes.pop().edges} - found
        found |= parents
        open_nodes += parents
    return found


def _called(
    function: Callable[..., Any], given: Any, value: Callable[[GaussianTensor], Tensor]
) -> Any:
    """The function with a tensor in place of each random one."""
    args, kwargs = map_leaves(
        given, lambda leaf: value(leaf) if isinstance(leaf, GaussianTensor) else leaf
    )
    return AT_MEANS.get(function, function)(*args, **kwargs)


def _numbers(tensor: GaussianTensor) -> Tensor:
    """Where each element is."""
    loc = tensor.loc
    numbers = torch.arange(loc.numel(), dtype=torch.float64, device=loc.device)
    return numbers.reshape(loc.shape)
