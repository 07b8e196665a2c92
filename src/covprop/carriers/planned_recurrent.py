"""What a plan counts of recurrent layers: one step, and all of them as so many of its kind."""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from covprop.activations.moments import NODES, panel_count
from covprop.activations.quadrature import Quadrature
from covprop.carriers.cross_covariance import ancestors, cross_bytes
from covprop.carriers.ledger import Taps, Work, in_all
from covprop.carriers.recurrent import Places
from covprop.covariance.dense import PlannedDense
from covprop.covariance.planned import Cost
from covprop.flow.algebra import Recurrence
from covprop.flow.tensor import GaussianTensor
from covprop.kernels.compiled import library

TABLES = 2
"""Tables of Hermite functions that are kept: steps have series of different lengths."""
CROSSED = 2
"""Copies of cross-covariances that are held at a time: what a map takes and what it gives."""
COEFFICIENT_ROWS = 3
"""Copies of the coefficients of a series that are held at a time."""


def recurrent_cost(
    carrier: Any, mean: Tensor, recurrence: Recurrence, ledger: Any, followed: bool
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
    inner.watcher, ledger.followed = Taps(ledger), followed
    base = type(carrier)(PlannedDense(batch, wide, item), joint, inner, ledger, followed=followed)
    parts = recurrence.step(GaussianTensor(joint, base))
    for part in parts:
        part.materialize()
    vectors = list(dict.fromkeys(part.carrier for part in parts))
    crossed = cross_bytes([*vectors, base])
    compiled = library() is not None  # else the grids of the torch code cover more
    copies, tables = (CROSSED, TABLES) if compiled and not followed else (1, 1)
    # With autograd they are kept already, of the operations before.
    meanwhile = 0 if followed else copies * crossed.meanwhile
    ledger.record(max(meanwhile, series_bytes(vectors, recurrence, mean.dtype, tables)), Work())
    events = ledger.pop()
    inside = max(event.peak for event in events) + unit * wide**2
    # Rows of a state have a column for each input, and for each output so far.
    dense, most = PlannedDense(batch, values.shape[-1], item), size + places.steps * each
    mean_columns = (size + most) / 2
    joined = unit * (2 * wide - width) * most  # rows of inputs and states before they are one
    meanwhile = unit * wide * most + max(inside, joined)
    if count > 1:
        meanwhile = max(meanwhile, 2 * dense.nbytes)
    held = unit * places.steps * (each * size + width * wide) + carrier.planned.to_write
    rows = int(unit * places.steps * wide * mean_columns)
    graph = places.steps * ledger.kept + rows
    held += graph - ledger.kept if followed else 0  # that of one step is in its peak
    count = max(1, batch.numel()) * places.steps
    cost = Cost(
        dense, held + meanwhile, 2.0 * count * width * wide * mean_columns, graph, writes=True
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
