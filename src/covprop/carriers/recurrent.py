"""Recurrent layers on full covariances, block by block.

A step goes from b = (x_t, state) to the next state. It is a propagation of its own, from the joint
covariance of b, which gives the covariance of the new state and its expected Jacobian G = E[J].
What is outside of the step (all inputs, the outputs so far) meets it to first order (Stein):
Cov(state', w) = G Cov(b, w), one matrix product for all w together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from covprop.activations.moments import NODES, panel_count
from covprop.activations.quadrature import Quadrature
from covprop.carriers.cross_covariance import CrossCache, ancestors, cross_bytes, cross_covariance
from covprop.carriers.ledger import FanInWatcher, Work, in_all
from covprop.covariance import Dense
from covprop.covariance.base import symmetric
from covprop.covariance.dense import PlannedDense
from covprop.covariance.planned import Cost
from covprop.flow.algebra import Recurrence
from covprop.flow.lineage import Lineage
from covprop.flow.tensor import GaussianTensor
from covprop.kernels.compiled import library

TABLES = 2
"""Tables of Hermite functions that are kept: steps have series of different lengths."""
CROSSED = 2
"""Copies of cross-covariances that are held at a time: what a map takes and what it gives."""
COEFFICIENT_ROWS = 3
"""Copies of the coefficients of a series that are held at a time."""


@final
class Places:
    """Where N sequences have what is read and written, in flat vectors.

    Inside, states are (part, sequence, element), and results (step, sequence, element) with the
    other parts of the last state behind; outside, sequences come first.

    reads (T, N * inputs): inputs of each step; begins: the initial state among the inputs, None if
    it does not vary; joint: (sequence, input or state) among inputs and states one after another.
    """

    def __init__(self, recurrence: Recurrence, batch: torch.Size, size: int, count: int) -> None:
        """For vectors (*batch, size) of so many sequences."""
        self.recurrence, self.batch, self.count = recurrence, batch, count
        index, each, device = recurrence.index, size // count, recurrence.index.device
        start = each * torch.arange(count, device=device)[:, None]
        inputs, states = index.shape[-1], recurrence.parts * recurrence.size
        self.reads = (start + index[:, None, :]).flatten(1)
        self.width = count * states
        ends = torch.arange(each - states, each, device=device)
        self.begins = None if recurrence.initial is not None else self._by_part(start + ends)
        every = torch.arange(count * (inputs + states), device=device)
        x, state = every.split([count * inputs, count * states])
        self.joint = torch.cat([x.reshape(count, -1), self._by_sequence(state)], -1).flatten()

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.reads)

    @property
    def outputs(self) -> int:
        """Elements that a step gives."""
        return self.count * self.recurrence.size

    @property
    def total(self) -> int:
        """Elements of the result."""
        return (self.steps - 1) * self.outputs + self.width

    @property
    def results(self) -> Tensor:
        """Those of the result, outside, among those inside."""
        first = torch.arange(self.steps * self.outputs, device=self.reads.device)
        last = len(first) + torch.arange(self.width - self.outputs, device=self.reads.device)
        parts = first.reshape(self.steps, self.count, -1).transpose(0, 1).flatten(1)
        return torch.cat([parts, self._by_sequence(last)], -1).flatten()

    def initial(self, mean: Tensor) -> Tensor:
        """The mean of the state at the beginning, inside, given that of the vector."""
        if self.begins is not None:
            return mean[..., self.begins]
        assert self.recurrence.initial is not None
        return self._by_part(self.recurrence.initial.reshape(*self.batch, self.count, -1))

    def _by_part(self, states: Tensor) -> Tensor:
        """(*any, N, parts * size) -> (*any, parts * N * size)."""
        parts = states.unflatten(-1, (self.recurrence.parts, self.recurrence.size))
        return parts.transpose(-2, -3).flatten(-3)

    def _by_sequence(self, states: Tensor) -> Tensor:
        """(any parts * N * size) -> (N, any parts * size)."""
        parts = states.reshape(-1, self.count, self.recurrence.size)
        return parts.transpose(0, 1).flatten(1)


class Stepped(NamedTuple):
    """The next state: mean, covariance, and expected Jacobian by inputs and states."""

    mean: Tensor
    covariance: Tensor
    gain: Tensor


Step = Callable[[Tensor, Tensor], Stepped]
"""Mean and covariance of inputs and state -> the next state."""


@final
@dataclass(frozen=True)
class Unrolled:
    """The edge of a recurrent layer: the expected Jacobians of all steps, one after another."""

    places: Places
    gains: tuple[Tensor, ...]

    def __call__(self, cross: Tensor) -> Tensor:
        """Cov(input, w) -> Cov(result, w)."""
        places = self.places
        state = _initial_rows(places, cross)
        outputs = []
        for reads, gain in zip(places.reads, self.gains, strict=True):
            inputs = cross.index_select(-2, reads)
            state = gain.to(cross.dtype) @ torch.cat([inputs, state], -2)
            outputs.append(state[..., : places.outputs, :])
        rows = torch.cat([*outputs, state[..., places.outputs :, :]], -2)
        return rows.index_select(-2, places.results)


def _initial_rows(places: Places, cross: Tensor) -> Tensor:
    """Covariances of the initial state."""
    if places.begins is not None:
        return cross.index_select(-2, places.begins)
    return cross.new_zeros(*cross.shape[:-2], places.width, cross.shape[-1])


def unrolled(
    places: Places, mean: Tensor, matrix: Tensor, step: Step, lineage: Lineage
) -> tuple[Tensor, Tensor, Unrolled]:
    """Mean and covariance of the results of all steps, and how they depend on the input.

    mean (*batch, n), matrix (*batch, n, n): those of the input.
    """
    batch, size, each = places.batch, mean.shape[-1], places.outputs
    state = places.initial(mean)
    # Rows: the state; columns: all inputs, then the outputs so far.
    rows = _initial_rows(places, matrix)
    own = matrix.new_zeros(*batch, places.width, places.width)
    if places.begins is not None:
        own = rows.index_select(-1, places.begins)
    made = matrix.new_zeros(*batch, places.total, places.total)
    to_inputs = matrix.new_zeros(*batch, places.steps * each, size)
    means, gains = [], []
    for t, reads in enumerate(lineage.repeated(list(places.reads))):
        at, after = t * each, (t + 1) * each
        inputs = matrix.index_select(-2, reads)
        joint = symmetric_blocks(inputs.index_select(-1, reads), rows.index_select(-1, reads), own)
        known = to_inputs[..., :at, :].index_select(-1, reads).mT
        rows = torch.cat([torch.cat([inputs, known], -1), rows], -2)
        state, own, gain = step(torch.cat([mean[..., reads], state], -1), joint)
        rows = gain @ rows
        means.append(state[..., :each])
        gains.append(gain)
        to_inputs[..., at:after, :] = rows[..., :each, :size]
        _put(made, at, rows[..., :each, size:], own[..., :each, :each])
        rows = torch.cat([rows, own[..., :each]], -1)
    _put(made, places.steps * each, rows[..., each:, size:], own[..., each:, each:])
    values = torch.cat([*means, state[..., each:]], -1)
    if places.count > 1:
        order = places.results
        values, made = values[..., order], made.index_select(-2, order).index_select(-1, order)
    return values, made, Unrolled(places, tuple(gains))


def symmetric_blocks(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    """A matrix of four blocks; cross: the lower left one."""
    upper, lower = torch.cat([first, cross.mT], -1), torch.cat([cross, second], -1)
    return torch.cat([upper, lower], -2)


def _put(matrix: Tensor, start: int, before: Tensor, own: Tensor) -> None:
    """Write rows from `start` on, up to the diagonal, and the columns that they are as well."""
    stop = start + own.shape[-1]
    matrix[..., start:stop, :start] = before
    matrix[..., :start, start:stop] = before.mT
    matrix[..., start:stop, start:stop] = own


def stepped(parts: Sequence[Any], base: Any) -> Stepped:
    """The parts of a state that a step has made, in flight, jointly, and by what they came of."""
    carriers = [part.carrier for part in parts]
    like, batch = base.covariance.matrix(), base.batch_shape
    eye = torch.eye(base.size, dtype=like.dtype, device=like.device)
    found: CrossCache = {}
    slopes: CrossCache = {(base.serial, base.serial): eye.expand(*batch, -1, -1)}

    def filled(cross: Tensor | None, one: Any, other: Any) -> Tensor:
        return like.new_zeros(*batch, one.size, other.size) if cross is None else cross

    rows = [
        torch.cat([filled(cross_covariance(u, v, found), u, v) for v in carriers], -1)
        for u in carriers
    ]
    gain = [filled(cross_covariance(u, base, slopes, gaussian=True), u, base) for u in carriers]
    mean = torch.cat([part.flat for part in parts], -1)
    return Stepped(mean, symmetric(torch.cat(rows, -2)), torch.cat(gain, -2))


def recurrent_layer(
    carrier: Any, mean: Tensor, recurrence: Recurrence
) -> tuple[Tensor, Tensor, Unrolled]:
    """Mean, covariance and edge of a recurrent layer of a `Full` carrier."""
    batch = carrier.batch_shape
    count = mean.shape[len(batch) : -1].numel()
    places = Places(recurrence, batch, carrier.size, count)
    back = places.joint.argsort()

    def step(mean: Tensor, covariance: Tensor) -> Stepped:
        joint = places.joint
        matrix = covariance.index_select(-2, joint).index_select(-1, joint)
        base = type(carrier)(Dense(matrix), carrier.lineage.inner(), carrier.treatment)
        together = GaussianTensor(mean[..., joint].reshape(*batch, count, -1), base)
        parts = recurrence.step(together)
        for part in parts:
            part.materialize()
        made = stepped(parts, base)
        return made._replace(gain=made.gain.index_select(-1, back))

    flat = mean.reshape(*batch, carrier.size)
    carrier.lineage.reserve(mean.itemsize * max(1, batch.numel()) * places.total**2)
    matrix = carrier.covariance.matrix()
    values, matrix, edge = unrolled(places, flat, matrix, step, carrier.lineage)
    return values.reshape(*mean.shape[:-1], -1), matrix, edge


def recurrent_cost(
    carrier: Any, mean: Tensor, recurrence: Recurrence, ledger: Any, needs_grad: bool
) -> tuple[Tensor, Cost, Work]:
    """The layer at the mean, its cost, and the work inside of its steps.

    ledger: an empty one, for what is in a step.
    """
    batch, size = carrier.batch_shape, carrier.size
    count = mean.shape[len(batch) : -1].numel()
    places = Places(recurrence, batch, size, count)
    values, joint = at_means(places, mean.reshape(*batch, size))
    unit, item = max(1, batch.numel()) * mean.itemsize, mean.itemsize
    wide, width, each = len(places.joint), places.width, places.outputs
    inner = carrier.lineage.inner()
    inner.watcher, ledger.needs_grad = FanInWatcher(ledger), needs_grad
    base = type(carrier)(
        PlannedDense(batch, wide, item), joint, inner, ledger, needs_grad=needs_grad
    )
    parts = recurrence.step(GaussianTensor(joint, base))
    for part in parts:
        part.materialize()
    vectors = list(dict.fromkeys(part.carrier for part in parts))
    crossed = cross_bytes([*vectors, base])
    compiled = library() is not None  # else the grids of the torch code cover more
    copies, tables = (CROSSED, TABLES) if compiled and not needs_grad else (1, 1)
    # With autograd they are kept already, of the operations before.
    temporary = 0 if needs_grad else copies * crossed.temporary
    ledger.record(max(temporary, series_bytes(vectors, recurrence, mean.dtype, tables)), Work())
    events = ledger.pop()
    inside = max(event.peak for event in events) + unit * wide**2
    # Rows of a state have a column for each input, and for each output so far.
    dense, most = PlannedDense(batch, values.shape[-1], item), size + places.steps * each
    mean_columns = (size + most) / 2
    joined = unit * (2 * wide - width) * most  # rows of inputs and states before they are one
    temporary = unit * wide * most + max(inside, joined)
    if count > 1:
        temporary = max(temporary, 2 * dense.nbytes)
    held = unit * places.steps * (each * size + width * wide) + carrier.planned.to_write
    rows = int(unit * places.steps * wide * mean_columns)
    graph = places.steps * ledger.kept + rows
    held += graph - ledger.kept if needs_grad else 0  # that of one step is in its peak
    count = max(1, batch.numel()) * places.steps
    cost = Cost(
        dense, held + temporary, 2.0 * count * width * wide * mean_columns, graph, writes=True
    )
    inside_steps = in_all([event.work for event in events]) * places.steps
    return values.reshape(*mean.shape[:-1], -1), cost, inside_steps


def at_means(places: Places, mean: Tensor) -> tuple[Tensor, Tensor]:
    """All results at the mean, and the argument of the last step, (*batch, N, any)."""
    state, outputs, joint = places.initial(mean), [], mean
    for reads in places.reads:
        joint = torch.cat([mean[..., reads], state], -1)[..., places.joint]
        joint = joint.reshape(*places.batch, places.count, -1)
        parts = places.recurrence.step(joint)
        state = torch.cat([part.reshape(*places.batch, -1) for part in parts], -1)
        outputs.append(state[..., : places.outputs])
    values = torch.cat([*outputs, state[..., places.outputs :]], -1)
    return values[..., places.results], joint


def series_bytes(
    vectors: Sequence[Any], recurrence: Recurrence, dtype: torch.dtype, tables: int
) -> int:
    """What the series of nearly parallel units takes beyond that of others, where there is one."""
    grids = [one for vector in vectors for one in ancestors(vector) if one.grid]
    if not grids:
        return 0
    units = max(one.size for one in grids)
    order = series_order(units, recurrence, dtype)
    panels = panel_count(torch.zeros(1), order) / panel_count(torch.zeros(1))
    grid = int(max(one.grid for one in grids) * (panels - 1))
    return grid + 8 * order * COEFFICIENT_ROWS * units + tables * table_bytes(order)


def series_order(units: int, recurrence: Recurrence, dtype: torch.dtype) -> int:
    """Terms for nearly parallel units: the first step often has more units than inputs.

    Of n random directions in d dimensions two have 1 - |rho| = (2 / n^2)^(2 / (d - 1)), about.
    """
    inputs = recurrence.index.shape[-1]
    gap = (2 / max(2, units) ** 2) ** (2 / max(1, inputs - 1))
    varied = recurrence.initial is None  # then the state has as many directions as units
    return Quadrature(torch.tanh).order(1 - (0.9 if varied else min(gap, 0.9)), dtype)


def table_bytes(order: int) -> int:
    """The Hermite functions at the nodes of a grid, a table that is kept."""
    return 8 * order * NODES * panel_count(torch.zeros(1), order)


def extrapolated(steps: Sequence[int], values: Sequence[float], count: int) -> float:
    """A polynomial through the values at these steps (Lagrange), at another number of them."""
    total = 0.0
    for i, value in enumerate(values):
        others = [step for j, step in enumerate(steps) if j != i]
        total += value * math.prod((count - step) / (steps[i] - step) for step in others)
    return total


def extrapolated_work(steps: Sequence[int], works: Sequence[Work], count: int) -> Work:
    """The same of each kind of work."""
    kinds = zip(*map(astuple, works), strict=True)
    return Work(*(max(0.0, extrapolated(steps, kind, count)) for kind in kinds))
