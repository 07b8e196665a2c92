"""What a propagation will take, before it is run: sizes, memory and work of every operation.

The rules run on carriers that count (`covprop.carriers.planned`), about one forward pass of means.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from covprop.carriers.ledger import Event, Ledger, Work, in_all
from covprop.errors import OutsideDomain, UnsupportedOperation, name_of
from covprop.flow.lineage import Lineage
from covprop.flow.nests import leaves, map_leaves
from covprop.flow.table import TABLE, Batch, Kind
from covprop.flow.tensor import GaussianTensor, is_plain
from covprop.gaussian import Gaussian
from covprop.modules import EagerMode, module_names, running_module
from covprop.text_table import Table, in_bytes, in_seconds

TYPICAL = Work(
    products=4e-11, convolved=2e-10, entries=2e-9, pairs=2.5e-10, integrals=2e-6, operations=2e-4,
    visits=2.5e-6,
)  # fmt: skip
"""Seconds on one core of a common machine; those of visits, Python alone, are taken anywhere."""
RESULT = "result"
"""The operation of what is written out, or passed back, at the end."""
FOLDED = 3
"""Times that operations are repeated, from which a table has them once."""
LONGEST = 64
"""Operations that are seen as one that is repeated."""
ELEMENTWISE = 8
"""Floating-point operations that take as long as passing a number through memory, about."""


@dataclass(frozen=True)
class Step:
    """One operation: where it is, what it gives, what its covariance and itself take.

    counts: the work, by kinds that take different times.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    features: int
    covariance_bytes: int
    peak_bytes: int
    counts: Work

    @property
    def work(self) -> float:
        """Floating-point operations, about."""
        return self.counts.total


@dataclass(frozen=True)
class Plan:
    """The operations of a propagation, in order; print it to see the table.

    Attributes:
        steps: Operation, shape, bytes and work of each step.
        free_bytes: The free memory.
        rates: Returns the seconds for each kind of work on this machine, after measuring for about
            a second.

    Example:
        plan = cp.plan(model, x)
        plan.fits, plan.peak_bytes, plan.seconds
    """

    steps: tuple[Step, ...]
    free_bytes: int
    rates: Callable[[], Work] = field(default=lambda: TYPICAL, repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """The most that covariances will take at a time."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def work(self) -> float:
        """About how many floating-point operations on covariances it takes."""
        return sum(step.work for step in self.steps)

    @property
    def counts(self) -> Work:
        """The amount of each kind of work."""
        return in_all([step.counts for step in self.steps])

    @property
    def seconds(self) -> float:
        """How long it will take, within a factor of three as a rule."""
        return self.counts.seconds(self.rates())

    def rates_for(self, least: float) -> Work:
        """The rates of this machine, measured only if typical rates predict so many seconds."""
        return self.rates() if self.counts.seconds(TYPICAL) > least else TYPICAL

    @property
    def fits(self) -> bool:
        """Whether the peak is below the free memory."""
        return self.peak_bytes <= self.free_bytes

    @property
    def table(self) -> Table:
        """A row for each operation, or for each of some that are repeated."""
        return self.table_at(self.rates())

    def table_at(self, rates: Work) -> Table:
        """The same table with other rates."""
        head = ("module", "operation", "shape", "features", "covariance", "peak", "work", "time")
        rows = []
        for steps in folded(self.steps):
            last, counts = steps[-1], in_all([step.counts for step in steps])
            times = f" ({len(steps)} times)" if len(steps) > 1 else ""
            peak = max(step.peak_bytes for step in steps)
            rows.append((
                last.module, last.operation + times, "x".join(map(str, last.shape)),
                f"{last.features:,}", in_bytes(last.covariance_bytes), in_bytes(peak),
                f"{counts.total:.1e}", in_seconds(counts.seconds(rates)),
            ))  # fmt: skip
        note = (
            f"peak {in_bytes(self.peak_bytes)} of {in_bytes(self.free_bytes)} that are free, about "
            f"{self.work:.1e} operations, {in_seconds(self.counts.seconds(rates))}"
        )
        return Table(head, tuple(rows), words=3, notes=(note,))

    def __str__(self) -> str:
        """The table."""
        return str(self.table)


def folded(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Each step, with those in its place where several are repeated again and again."""
    keys = [(step.module, step.operation, step.shape) for step in steps]
    start = 0
    while start < len(steps):
        period, count = 1, 1
        for width in range(1, LONGEST + 1):
            times, unit = 1, keys[start : start + width]
            while keys[start + times * width : start + (times + 1) * width] == unit:
                times += 1
            if times >= FOLDED and times * width > period * count:
                period, count = width, times
        for offset in range(start, start + period):
            yield list(steps[offset : offset + period * count : period])
        start += period * count


def short_name(function: Callable[..., Any]) -> str:
    """What a table calls an operation."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return str(function).split(".")[1]  # aten.linear.default
    return name_of(function).rpartition(".")[2]


class Planner:
    """A watcher that turns the records of planned carriers into steps.

    follows: whether autograd would keep what it needs of tensors that require gradients.
    """

    def __init__(self, module: object, follows: bool = False) -> None:
        """Know the names of the modules."""
        self.steps: list[Step] = []
        self._ledger = Ledger()
        self._names = module_names(module)
        self._follows = follows
        self._inside = False
        self.needs_grad = False
        """Whether autograd would follow any result."""

    def wrap(self, x: Gaussian, lineage: Lineage) -> GaussianTensor:
        """An input, its covariance counted."""
        mean = x.mean.detach()
        carrier = lineage.method.planned_carrier(x, lineage, self._ledger)
        varies = x.mean.requires_grad or x.covariance.diagonal().requires_grad
        carrier.needs_grad = self._follows and varies
        return GaussianTensor(mean, carrier)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:
        """One operation, or the operations that it is made of; maxima are one."""
        if self._inside:
            return proceed()
        row = TABLE[function]
        made_of_steps = row.batch is Batch.STEPWISE and row.kind is not Kind.MAXIMUM
        with self._seen((args, kwargs), made_of_steps):
            result = self._result(function, (args, kwargs), proceed)
            tensors = [leaf for leaf in leaves(result) if isinstance(leaf, GaussianTensor)]
            for tensor in tensors:
                tensor.evaluate()
                # Means are those of each function at the mean, where a propagation has others.
                tensor.loc = torch.nan_to_num(tensor.loc, 0.0, 0.0, 0.0)
        events = self._ledger.pop()
        if events or not made_of_steps:
            self._write(running_module(self._names), short_name(function), tensors, events)
        return result

    def _result(
        self, function: Callable[..., Any], arguments: Any, proceed: Callable[[], Any]
    ) -> Any:
        """The result of the rule; a matrix where it needs values, which a plan does not have."""
        try:
            return proceed()
        except Exception as error:  # rules of users may raise anything
            of_values = not isinstance(error, UnsupportedOperation) or isinstance(
                error, OutsideDomain
            )
            if not (self._inside and of_values):
                raise
        first = next(leaf for leaf in leaves(arguments) if isinstance(leaf, GaussianTensor))
        args, kwargs = map_leaves(
            arguments, lambda leaf: leaf.loc if isinstance(leaf, GaussianTensor) else leaf
        )

        def counted(out: Any) -> Any:
            if not isinstance(out, Tensor) or not out.is_floating_point():
                return out
            return first.replace(out, first.covariance, transfer=lambda cross: cross)

        return map_leaves(function(*args, **kwargs), counted)

    @contextmanager
    def _seen(self, arguments: Any, made_of_steps: bool) -> Iterator[None]:
        """Tell the ledger the fan-in of the current operation."""
        ledger = self._ledger
        before = ledger.fan_in, ledger.linear, ledger.needs_grad
        given = [leaf for leaf in leaves(arguments) if is_plain(leaf)]
        ledger.begin(given)
        # What an operation is made of may have weights that are made of those it was given.
        ledger.needs_grad |= self._follows and any(leaf.requires_grad for leaf in given)
        self._inside = not made_of_steps
        try:
            yield
        finally:
            ledger.fan_in, ledger.linear, ledger.needs_grad = before
            self._inside = False

    def advance(self, share: float) -> None:
        """Ignored: a plan has no bar."""

    def end(self, result: Any) -> None:
        """End the propagation: the covariances of its results are materialized."""
        for tensor in leaves(result):
            if isinstance(tensor, GaussianTensor):
                tensor.carrier.finish(tensor.loc)
                if events := self._ledger.pop():
                    sized = [step for step in self.steps if step.features == tensor.carrier.size]
                    module = sized[-1].module if sized else ""
                    self._write(module, RESULT, [tensor], events)

    def _write(
        self, module: str, name: str, tensors: Sequence[Any], events: Sequence[Event]
    ) -> None:
        """A step for each result; records of no result belong to the first."""
        serials = {tensor.carrier.serial for tensor in tensors}
        others = [event for event in events if event.serial not in serials]
        for tensor in tensors:
            carrier = tensor.carrier
            own = [event for event in events if event.serial == carrier.serial] + others
            others = []
            peak = max((event.peak for event in own), default=self._ledger.held())
            work = in_all([event.work for event in own])
            if not work.total:
                work += Work(entries=2.0 * tensor.numel(), operations=1.0)
            self.needs_grad |= carrier.needs_grad
            held, shape = carrier.planned.nbytes, tuple(tensor.shape)
            self.steps.append(Step(module, name, shape, carrier.size, held, peak, work))


class WorkCounter(EagerMode):
    """Counts floating-point operations, about: of matrix products and convolutions, and numbers.

    torch's own counter imports a compiler.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count what an operator makes."""
        del types
        result = func(*args, **(kwargs or {}))
        numbers = sum(leaf.numel() for leaf in leaves(result) if isinstance(leaf, Tensor))
        matrices = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 1]
        name = func.overloadpacket.__name__
        each = ELEMENTWISE
        if len(matrices) > 1 and name == "convolution":
            each = 2 * matrices[1][0].numel()
        elif len(matrices) > 1 and "mm" in name:
            each = 2 * matrices[-2].shape[-1]
        self.total += 0 if func.is_view else each * numbers
        return result
