"""What a propagation will take, before it is run: sizes, memory and work of every operation.

The means alone go through the network, one forward pass; the covariances are counted.
"""

import math
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from covprop.counted import Counted, NeedsNumbers
from covprop.covariance import Sharded, Zero
from covprop.covariance.congruence import unwritten
from covprop.covariance.dense import streams
from covprop.dispatch import AT_MEANS, BATCH, KIND, RANDOM_WEIGHTS, Batch, leaves, map_leaves
from covprop.errors import name_of
from covprop.gaussian import Gaussian
from covprop.lineage import Lineage, Node
from covprop.report.table import Table, in_bytes
from covprop.tensor import GaussianTensor

PER_PAIR = 40.0
"""Operations on one entry of a covariance by an activation, about."""
NODES, KEPT = 3, 4
"""Random vectors that each element of a window adds, and matrices of the result that are held."""


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


class _Cost(NamedTuple):
    """What an operation makes of a counted covariance, and what it takes meanwhile."""

    counted: Counted
    temporary: int = 0
    work: float = 0.0
    shares: bool = False


def _cost(function: Callable[..., Any], parent: Counted, given: Any, out: Tensor) -> _Cost:
    batch, before = parent.batch.numel(), parent.count
    features = out.numel() // max(1, batch)
    kind, unit = KIND[function], batch * out.itemsize
    if kind == "shape" and features == before:
        return _Cost(parent)
    weights = _weights(given)
    taps = weights[0].numel() / weights[0].shape[0] if weights else 1.0
    early = _early_cost(kind, parent, weights, features, out)
    if early is not None or kind == "maximum":
        return early or _of_maximum(parent, features, _window(function, given), out)
    ranks = parent.ranks
    if kind == "element-wise":
        counted = Counted(parent.batch, features, out.itemsize, parent.half, ranks=ranks)
        pairs = batch * features**2 / (2 if ranks == 1 else ranks)  # one process takes half of them
        return _Cost(counted, 0, PER_PAIR * pairs, shares=parent.half > 0)
    if features == before and not weights:  # a factor for each element, or a sum
        counted = Counted(parent.batch, features, out.itemsize, parent.half, ranks=ranks)
        return _Cost(counted, 0, 2.0 * batch * features**2 / ranks)
    work = 2.0 * batch * taps * features * (before + features) / ranks
    late = (parent.apart or parent.bare) and not unwritten(before, features, parent.batch)
    first = before**2 if late else 0
    streamed = ranks == 1 and not parent.half and streams(before, features, parent.batch)
    if kind == "linear" and streamed:
        counted = Counted(parent.batch, features, out.itemsize, before)
        return _Cost(counted, counted.nbytes + unit * first, work)  # it is turned once
    counted = Counted(parent.batch, features, out.itemsize, ranks=ranks)
    most = before * features + max(features**2, before * features if ranks > 1 else 0)
    return _Cost(counted, unit * (first + most) // ranks, work)


def _of_maximum(parent: Counted, features: int, window: int, out: Tensor) -> _Cost:
    """One after another, with the covariances of all so far with the input."""
    batch, before = parent.batch.numel(), parent.count
    players = window or before // max(1, features)
    held = before**2 + NODES * (players - 1) * before * features + KEPT * features**2
    held += before**2 if parent.apart or parent.bare else 0
    counted = Counted(parent.batch, features, out.itemsize, ranks=parent.ranks)
    return _Cost(counted, batch * out.itemsize * held, PER_PAIR * players * batch * features**2 / 2)


def _window(function: Callable[..., Any], given: Any) -> int:
    """Elements of a window of max pooling; 0 for maxima over whole dimensions."""
    args, kwargs = given
    if "max_pool" not in (name := name_of(function)) or "adaptive" in name:
        return 0
    kernel = kwargs["kernel_size"] if "kernel_size" in kwargs else args[1]
    count = next(int(part[0]) for part in name.split("max_pool")[1:])
    return kernel**count if isinstance(kernel, int) else math.prod(kernel)


def _weights(given: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(given) if isinstance(leaf, Tensor) and leaf.dim() > 1]


def _early_cost(
    kind: str, parent: Counted, weights: list[Tensor], features: int, out: Tensor
) -> _Cost | None:
    """What comes of a constant, and of what has no covariances yet, if it has none either."""
    work = 2.0 * out.numel()
    plain = Counted(parent.batch, features, out.itemsize)
    if parent.columns:
        taps = weights[0].numel() / weights[0].shape[0] if weights else 1.0
        enters = kind in ("element-wise", "products", "maximum")
        sketch = replace(parent, count=features, itemsize=out.itemsize, enters=enters)
        return _Cost(sketch, work=taps * parent.columns * work)
    constant = parent.constant and kind not in ("noise", RANDOM_WEIGHTS)
    if parent.alone or constant:
        return _Cost(replace(plain, alone=parent.alone, constant=constant), work=work)
    if parent.constant:
        if kind == "noise" or features == weights[0].shape[0]:
            return _Cost(replace(plain, apart=True), work=work)
        return _Cost(plain, plain.nbytes, work=features * work)
    if parent.apart and kind == "element-wise":
        return _Cost(replace(plain, apart=True), work=work)
    return None


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
    """Runs operations on means, and writes down what their covariances would take."""

    def __init__(self, module: object) -> None:
        """Know the names of the modules."""
        self.steps: list[Step] = []
        self._nodes: weakref.WeakSet[Node] = weakref.WeakSet()
        self._names = module_names(module)

    def wrap(self, x: Gaussian, lineage: Lineage) -> GaussianTensor:
        """An input, its covariance counted."""
        alone = lineage.method.variances_only
        columns = lineage.method.columns(x.covariance)
        constant = isinstance(x.covariance, Zero) and not (alone or columns)
        ranks = x.covariance.team.size if isinstance(x.covariance, Sharded) and not alone else 1
        counted = Counted(x.batch_shape, x.event_shape.numel(), x.mean.itemsize, ranks=ranks)
        remembers = lineage.method.remembers
        counted = replace(
            counted, alone=alone, constant=constant, columns=columns, remembers=remembers
        )
        if x.covariance.written(1) < counted.count and not (alone or constant or columns):
            apart = x.covariance.independent
            counted = replace(counted, apart=apart, bare=not apart)
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
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, GaussianTensor)]
        means = map_leaves(
            (args, kwargs),
            lambda leaf: leaf.loc.clone() if isinstance(leaf, GaussianTensor) else leaf,
        )
        if KIND[function] == "noise":  # which leaves the mean, and must not draw
            outputs = tensors[0].loc.clone()
        else:
            outputs = AT_MEANS.get(function, function)(*means[0], **means[1])
        given = (args, kwargs)
        return map_leaves(
            outputs,
            lambda out: (
                self._counted(function, tensors, given, out)
                if isinstance(out, Tensor) and out.is_floating_point()
                else out
            ),
        )

    def _counted(
        self, function: Callable[..., Any], tensors: list[GaussianTensor], given: Any, out: Tensor
    ) -> GaussianTensor:
        """A result, and its step."""
        parent = tensors[0].node.covariance
        assert isinstance(parent, Counted)
        cost = _cost(function, parent, given, out)
        same = cost.counted is parent
        edges = [(tensor.node, lambda cross: cross) for tensor in tensors]
        node = tensors[0].node if same else Node(cost.counted, edges)
        living = sum(n.covariance.nbytes for n in self._nodes if isinstance(n.covariance, Counted))
        new = 0 if same or cost.shares else cost.counted.nbytes
        self.steps.append(
            Step(
                running_module(self._names), short_name(function), tuple(out.shape),
                cost.counted.count, cost.counted.nbytes, living + new + cost.temporary, cost.work,
            )
        )  # fmt: skip
        self._add(node)
        return GaussianTensor(out, node, tensors[0].lineage)

    def _add(self, node: Node) -> Node:
        self._nodes.add(node)
        return node
