"""Sizes of third cumulants: blocks of columns beside what a plan counts of covariances."""

import weakref
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from covprop.carriers.ledger import FanInWatcher, Ledger, Work, in_all
from covprop.carriers.planned import NO_WORK, Planned
from covprop.carriers.recurrent import (
    Places,
    at_means,
    extrapolated,
    extrapolated_work,
    series_order,
    table_bytes,
)
from covprop.carriers.third_cumulant import KEPT
from covprop.covariance.dense import PlannedDense
from covprop.covariance.planned import Cost, PlannedCovariance
from covprop.flow.algebra import Recurrence
from covprop.flow.carrier import Carrier
from covprop.flow.lineage import Lineage
from covprop.flow.tensor import GaussianTensor
from covprop.kernels.products import FACTORS, FORMED

BESIDE = 5
"""Copies of the factors of a vector in the blocks of others that are held while they are made."""
HELD = 16
"""Matrices that the corrections of a nonlinear operation hold at a time."""
VERTICES = 6
"""Factors of all columns that fourth cumulants take at a time."""
JOINED = 3
"""Copies of the blocks of several vectors that are held while they are added up."""
SLICED = 3
"""Products of the factors of its argument that autograd keeps of a nonlinear operation."""
FOLLOWED = 40
"""Those that autograd keeps of them."""
FEW_STEPS = (4, 6, 8)
"""Steps of a recurrent layer that are planned one by one; all grows with the square of them."""
REPLAYED = 2
"""Vectors, an argument and what it came of, whose blocks are moved again for a tensor beside it."""


@final
class PlannedCumulants(Planned):
    """A random vector whose blocks are counted as if every element had a column.

    own: columns of its own block; columns: those of all blocks, by the vector that made them;
    replays: bytes that are moved again where another tensor asks for its share in a block.
    """

    def __init__(
        self,
        structure: PlannedCovariance,
        loc: Tensor,
        lineage: Lineage,
        ledger: Ledger,
        parents: Iterable[Carrier] = (),
        own: int = 0,
        replayed: int = 0,
        **options: Any,
    ) -> None:
        before = [parent for parent in parents if isinstance(parent, PlannedCumulants)]
        self._beside: dict[int, int] = {}
        self._bases: dict[int, tuple[weakref.ref[PlannedCumulants], ...]] = {}
        self.columns: dict[int, int] = {}
        self.replays: dict[int, int] = {}
        for parent in before:
            self.columns.update(parent.columns)
            self.replays.update(parent.replays)
            self._bases.update(parent._bases)
        self._own, self._released = own, False
        self._simple = bool(before) and all(one.columns == self.columns for one in before)
        super().__init__(structure, loc, lineage, ledger, before, **options)
        if own:
            self.columns[self.serial] = own
            self.replays[self.serial] = replayed
            self._bases[self.serial] = tuple(map(weakref.ref, before))

    @property
    def nbytes(self) -> int:
        """With the blocks, of which its own stays when others are released."""
        if self.saved:
            return 0
        blocks = self._blocks(self.size, self.columns.values())
        if self._released and self._simple and blocks > KEPT:
            blocks = self._blocks(self.size, [self._own])
        return super().nbytes + blocks + self._shares()

    def _shares(self) -> int:
        """Bytes of what it has in the blocks of others, and of all in order, once asked for."""
        beside = self._blocks(self.size, self._beside.values())
        aligned = self._blocks(self.size, self.columns.values()) if beside else 0
        return beside + (0 if self._released else beside + aligned)

    def _ask(self, columns: dict[int, int], bases: dict[int, Any]) -> None:
        """It is asked for its share in blocks, and so is what these were made of, for its own."""
        missing = columns.keys() - self.columns.keys() - self._beside.keys()
        self._beside.update({serial: columns[serial] for serial in missing})
        for serial in missing:
            for ref in bases[serial]:
                base = ref()
                if base is not None:
                    base._beside.update(
                        {k: v for k, v in self.columns.items() if k not in base.columns}
                    )

    def _correlations(self, columns: Iterable[int]) -> int:
        """Bytes of what all columns know of the older ones."""
        return self.batch_shape.numel() * self._zeros.itemsize * sum(columns) ** 2 // 2

    def _blocks(self, size: int, columns: Iterable[int]) -> int:
        unit = self.batch_shape.numel() * self._zeros.itemsize
        return unit * size * FACTORS * sum(columns)

    def _new(
        self, loc: Tensor, cost: Cost, *others: Planned, more: Work = NO_WORK, **options: Any
    ) -> Planned:
        """The result of an operation; a nonlinear one has a block of its own."""
        vectors = [v for v in dict.fromkeys((self, *others)) if isinstance(v, PlannedCumulants)]
        columns, replays, bases = dict[int, int](), dict[int, int](), dict[int, Any]()
        for one in vectors:
            columns.update(one.columns)
            replays.update(one.replays)
            bases.update(one._bases)
        for one in vectors:
            one._ask(columns, bases)
        result = self._result(loc, *others)
        moved = self._blocks(result.size, columns.values())
        linear, products = 2 * result.fan_in * moved / result.itemsize, 0.0
        held, kept, own, replayed = (JOINED if len(vectors) > 1 else 1) * moved, moved, 0, 0
        for one in vectors:  # what each has in the blocks of the others
            missing = columns.keys() - one.columns.keys()
            beside = (1 + BESIDE) * self._blocks(one.size, (columns[serial] for serial in missing))
            again = REPLAYED * sum(replays[serial] for serial in missing)
            held, kept, products = held + beside + again, kept + beside, products + 2 * beside
        if options.get("nonlinear"):
            own = result.size
            matrix = self.batch_shape.numel() * result.itemsize * own**2
            argument = self._blocks(self.size, self.columns.values())
            replayed = argument if argument > KEPT else 0
            formed = 2 * min(FORMED * result.itemsize, argument)
            held += FACTORS * matrix + max(HELD * matrix, formed, VERTICES * argument // FACTORS)
            held += self._correlations(self.columns.values()) + argument // FACTORS
            kept += moved + SLICED * argument + FOLLOWED * matrix
            products += 2 * own * moved / result.itemsize
            older = sum(self.columns.values())
            products += self.batch_shape.numel() * older * own * (2 * older + 6 * own)  # trees
        cost = cost._replace(temporary=cost.temporary + held, graph=cost.graph + kept)
        ledger = self.ledger
        more += Work(**{ledger.linear: linear}) + Work(products=products, visits=ledger.visited)
        ledger.visited = 0
        return super()._new(loc, cost, *others, more=more, own=own, replayed=replayed, **options)

    def recurrent(self, mean: Tensor, recurrence: Recurrence) -> tuple[Tensor, Planned] | None:
        """Step by step; what many steps take is extrapolated from few."""
        table = table_bytes(series_order(recurrence.size, recurrence, mean.dtype))
        steps = len(recurrence.index)
        if steps <= FEW_STEPS[-1]:
            self.ledger.keep(table)  # which stays
            return None
        needs_grad = self._result(mean).needs_grad
        counted = [self._few_steps(mean, recurrence, few, needs_grad) for few in FEW_STEPS]
        peak = extrapolated(FEW_STEPS, [row[0] for row in counted], steps)
        kept = extrapolated(FEW_STEPS, [row[1] for row in counted], steps)
        work = extrapolated_work(FEW_STEPS, [row[2] for row in counted], steps)
        count = mean.shape[len(self.batch_shape) : -1].numel()
        places = Places(recurrence, self.batch_shape, self.size, count)
        value = at_means(places, mean.reshape(*self.batch_shape, self.size))[0]
        value = value.reshape(*mean.shape[:-1], -1)
        made = PlannedDense(
            self.batch_shape, value.numel() // self.batch_shape.numel(), mean.itemsize
        )
        columns = counted[-1][3] * steps // FEW_STEPS[-1]
        cost = Cost(made, int(peak) + table, graph=int(kept), writes=True)
        return value, super()._new(value, cost, more=work, own=columns)

    def _few_steps(
        self, mean: Tensor, recurrence: Recurrence, steps: int, needs_grad: bool
    ) -> tuple[int, int, Work, int]:
        """Peak, what autograd keeps, work and columns of the first steps."""
        ledger, lineage = Ledger(), self.lineage.inner()
        lineage.watcher, ledger.needs_grad = FanInWatcher(ledger), needs_grad
        vector = PlannedCumulants(
            self.planned, mean, lineage, ledger, needs_grad=needs_grad, saved=True
        )
        x: Any = GaussianTensor(mean, vector)
        state: Any = recurrence.initial
        if state is None:
            state = x[..., -recurrence.size * recurrence.parts :]
        outputs, parts = [], tuple[Any, ...]()
        for index in recurrence.index[:steps]:
            parts = recurrence.step(torch.cat([x[..., index], state], -1))
            state = torch.cat(list(parts), -1) if len(parts) > 1 else parts[0]
            outputs.append(parts[0])
        made: Any = torch.cat([*outputs, *parts[1:]], -1)
        events = ledger.pop()
        return (
            max(event.peak for event in events),
            ledger.kept,
            in_all([event.work for event in events]),
            sum(made.carrier.columns.values()),
        )

    @classmethod
    def collect(cls, held: set[Carrier], others: Iterable[Carrier]) -> None:
        """Blocks of vectors that are not held are released as well."""
        others = list(others)
        super().collect(held, others)
        for one in others:
            if isinstance(one, PlannedCumulants) and one not in held:
                one._released = True
