"""What one operation takes: the covariance that it makes, and what it holds meanwhile.

Counts of matrices are those of the rules: tensors of the size of a covariance that live at once.
Blocks, in which the large ones are worked on, are counted as well: they are what small ones take.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from covprop import extents
from covprop.activations import DECLARATIONS
from covprop.activations.moments import PART
from covprop.activations.registry import QUADRATURE
from covprop.counted import Counted, Operation
from covprop.covariance import base, congruence, dense, streamed
from covprop.dispatch import KIND, RANDOM_WEIGHTS

PER_PAIR = 40.0
"""Operations on one entry of a covariance by an activation, about."""
VECTORS, ELEMENTS = 7 * 2**8, 2**9
"""Bytes of moments and coefficients of an activation for each feature, and of what is kept."""
GRID = 2**14
"""Bytes of the grid of a quadrature for each feature, of as many as have theirs at a time."""
PIECES = 4
"""Pieces of a block that a linear map holds at a time."""
KERNEL = 16
"""The same of the kernel of an activation."""
SAVED, FOLLOWED = 6, 3
"""Matrices that autograd keeps of a small kernel, and those that a large one makes beside."""
SMOOTH, DIRECTIONS = 11, 2**24
"""Tensors of second derivatives along directions, and how many numbers each has at most."""
PRODUCT, JOINED, SUMMED, CONTRACTED = 4, 3.5, 2, 3
"""Matrices that a rule holds beside the result: of a product, a join, a sum, a contraction."""
SERIES = 4
"""Matrices that the series between two activations holds beside its result."""
NODES, KEPT = 4, 2
"""Matrices of the result that each element of a window adds, and those that are held beside."""
GROUPED, FOLLOWED_GROUPS = 9, 12
"""Matrices in float64, of what has a length together, that a norm holds, and that autograd keeps.
"""
NORMED, FOLLOWED_NORM = 3, 6
"""Matrices of the whole result that a norm holds beside it, and those that autograd keeps."""
SHARED = 2
"""One in so many of the covariances on the way to others is kept by autograd."""
COEFFICIENTS = 2**9
"""Numbers for each feature that an activation by quadrature keeps once it has met another."""
SHIFTS = {"add", "sub", "subtract", "add_", "sub_"}
SCALES = {
    "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "rsub", "__rsub__",
    "batch_norm", "tril", "triu", "where", "masked_fill",
}  # fmt: skip
INTEGRATED = {f for one in DECLARATIONS if QUADRATURE in one.treatment for f in one.functions}
CONTRACTIONS = {"matmul", "__rmatmul__", "mm", "mv", "bmm", "einsum", "addmm", "addmv", "baddbmm"}


class Cost(NamedTuple):
    """What an operation makes of a counted covariance, and what it takes meanwhile.

    shares: the result holds what its argument does; writes: a streamed argument is written out,
    and stays so; graph: what autograd keeps of it, beside the result.
    """

    counted: Counted
    temporary: int = 0
    work: float = 0.0
    shares: bool = False
    writes: bool = False
    graph: int = 0


def cost(operation: Operation) -> Cost:
    """What the rule of an operation makes and takes."""
    kind = KIND[operation.function]
    if kind == "shape":
        return _of_movement(operation)
    early = _early(kind, operation)
    if early is not None:
        return early
    if operation.together > 1 and kind != "maximum":
        return _of_several(kind, operation)
    return BY_KIND.get(kind, _of_linear)(operation)


def _of_movement(operation: Operation) -> Cost:
    """Rows, then columns; what is held without a matrix gets one where elements repeat."""
    parent, features, unit = operation.parent, operation.features, operation.unit
    work = 2.0 * operation.out.numel()
    if operation.order is None and operation.out.itemsize == parent.itemsize:
        return Cost(parent)
    if operation.order is None:  # another dtype, for which a streamed one is written out
        plain = replace(parent, itemsize=operation.out.itemsize, half=0, active=False, cached=False)
        held = unit * _to_write(parent) if parent.half else 0
        return Cost(plain, held, work, writes=True)
    if parent.columns or parent.alone or parent.constant or parent.rank:
        return Cost(replace(parent, count=features, itemsize=operation.out.itemsize), work=work)
    repeats = len(operation.order.unique()) < len(operation.order)
    if (parent.apart or parent.bare) and not repeats:
        return Cost(operation.counted(apart=parent.apart, bare=parent.bare), work=work)
    held = unit * (_to_write(parent) + features * parent.count // parent.ranks)
    return Cost(operation.counted(), held, work * features, writes=True, graph=held)


def _of_activation(operation: Operation) -> Cost:
    parent, features = operation.parent, operation.features
    batch = parent.batch.numel()
    vectors, grid = batch * features * VECTORS, grid_bytes(operation)
    pairs = batch * features**2 / (2 if parent.ranks == 1 else parent.ranks)  # one takes half
    if parent.half and not parent.active and not parent.followed:
        held = vectors + max(grid, KERNEL * operation.block(streamed.PAIRS, features))
        counted = replace(parent, itemsize=operation.out.itemsize, active=True)
        return Cost(counted, held, PER_PAIR * pairs, shares=True)
    held = vectors + max(grid, KERNEL * operation.block(dense.BLOCK, features))
    held += operation.unit * _to_write(parent)
    size = operation.unit * features**2
    graph = vectors + size
    if batch * features**2 <= dense.KEPT:
        graph = vectors + SAVED * size
    if parent.followed:
        held += FOLLOWED * size
    return Cost(operation.counted(), held, PER_PAIR * pairs, writes=True, graph=graph)


def grid_bytes(operation: Operation) -> int:
    """What the grid of a quadrature takes, of as many features as have theirs at a time."""
    integrated = operation.function in INTEGRATED
    return GRID * min(PART, operation.out.numel()) if integrated else 0


def _of_scale(operation: Operation) -> Cost:
    """A factor for each element: its outer product beside the result."""
    parent, features = operation.parent, operation.features
    work = 2.0 * parent.batch.numel() * features**2 / parent.ranks
    if parent.apart or parent.bare or parent.rank:
        kept = {"apart": parent.apart, "bare": parent.bare, "rank": parent.rank}
        return Cost(operation.counted(**kept), 0, work)
    if parent.half and not parent.active:
        return Cost(operation.counted(half=parent.half), 0, work)
    return _written(operation, matrices=1)


def _written(operation: Operation, matrices: float) -> Cost:
    """So many matrices of the result beside it, the argument written out."""
    features = operation.features
    work = 2.0 * operation.parent.batch.numel() * features**2 / operation.parent.ranks
    held = int(matrices * operation.unit * features**2) // operation.parent.ranks
    held += operation.unit * _to_write(operation.parent)
    return Cost(operation.counted(), held, work, writes=True, graph=held)


def _of_smooth(operation: Operation) -> Cost:
    """Norms, group by group; else second derivatives along directions; then a linear map."""
    parent, unit = operation.parent, operation.unit
    most = min(unit * parent.count**2, operation.out.itemsize * DIRECTIONS)
    work = 2.0 * SMOOTH * parent.batch.numel() * parent.count**2
    written = unit * _to_write(parent)
    group = extents.group(operation.name, operation.given, parent.count, operation.features)
    if group:
        groups = 8 * parent.batch.numel() * parent.count * group
        whole = unit * operation.features * parent.count
        graph = FOLLOWED_GROUPS * groups + FOLLOWED_NORM * whole
        held = max(GROUPED * groups, NORMED * whole)
        if operation.counted().followed:
            held = graph + (NORMED + 1) * whole
        return Cost(operation.counted(), held + written, work, writes=True, graph=graph)
    held = max(SMOOTH * most, 2 * unit * operation.features * parent.count)
    return Cost(operation.counted(), held + written, work, writes=True, graph=SMOOTH * most)


def _of_noise(operation: Operation) -> Cost:
    return _written(operation, matrices=2)


def _of_linear(operation: Operation) -> Cost:
    """A shift, a factor for each element, or a map of the rows and then the columns, in blocks."""
    same = operation.features == operation.parent.count
    if same and operation.name in SHIFTS:
        return Cost(operation.parent, work=2.0 * operation.out.numel())
    if same and operation.name in SCALES:
        return _of_scale(operation)
    return _of_map(operation)


def _of_map(operation: Operation) -> Cost:
    parent, features, unit = operation.parent, operation.features, operation.unit
    before, ranks, batch = parent.count, parent.ranks, parent.batch
    counted = operation.counted()
    work = 2.0 * batch.numel() * operation.taps * features * (before + features) / ranks
    if parent.rank and parent.rank < features:
        return Cost(operation.counted(rank=parent.rank), work=2.0 * operation.taps * parent.rank)
    pieces = PIECES * operation.block(congruence.ROWS, max(before, features))
    if parent.half:  # a block of its rows at a time, each through the map
        rows = (2 + KERNEL * parent.active * streamed.PAIRS / streamed.ROWS) * operation.block(
            streamed.ROWS, before
        )
        held = unit * before * features + int(rows) + pieces
        held += ELEMENTS * batch.numel() * before * parent.active
        return Cost(counted, held, work)
    if (parent.apart or parent.bare) and congruence.unwritten(before, features, batch):
        columns = 2 * operation.block(congruence.COLUMNS, before)
        return Cost(counted, 2 * counted.nbytes + columns, work, graph=unit * before * features)
    written = unit * _to_write(parent)
    wide = ranks == 1 and not counted.followed and dense.streams(before, features, batch)
    if KIND[operation.function] == "linear" and wide:
        counted = operation.counted(half=before)
        return Cost(counted, counted.nbytes + written + pieces, work)  # it is turned once
    graph = unit * before * features
    held = (unit * before * features + min(pieces, unit * features**2)) // ranks + written
    if counted.followed or batch.numel() * before * features <= congruence.ROWS:
        held += counted.nbytes  # it is made as a whole, and symmetrised
    return Cost(counted, held, work, graph=graph + written)


def _of_several(kind: str, operation: Operation) -> Cost:
    """Sums, joins, products and contractions of tensors that vary together."""
    counted = operation.counted()
    size, unit = operation.unit * operation.features**2, operation.unit
    before = [one.count for one in operation.parents]
    written = sum(unit * _to_write(one) for one in operation.parents)
    work = 4.0 * operation.taps * size / operation.out.itemsize
    crossed, already = operation.crossed, size
    if kind != "products":
        same = all(count == operation.features for count in before)
        held = int((SUMMED if same else JOINED) * size)
        held += 0 if same else unit * operation.features * sum(before)
        already *= 1 if same else 2  # the sum so far, and the last that was added
    elif operation.name in CONTRACTIONS:
        moved = unit * sum(count**2 for count in before) * (3 - len(before))
        held = CONTRACTED * size + max(moved, unit * operation.features * max(before))
    else:
        broadcast = sum(count != operation.features for count in before)
        held = (PRODUCT + broadcast) * size  # each has a matrix of the size of the result
        crossed = size if broadcast and crossed else crossed
    most = max(held + crossed, already + operation.meanwhile) + written
    graph = operation.kept + (0 if held == SUMMED * size else held)
    most = max(most, graph + written) if counted.followed else most
    return Cost(counted, most, work, writes=True, graph=graph)


def _of_maximum(operation: Operation) -> Cost:
    """One after another, with the covariances of all so far with the input."""
    parent, features = operation.parent, operation.features
    batch = parent.batch.numel()
    before = parent.count + extents.padding(operation.function, operation.given, parent.count)
    players = extents.window(operation.function, operation.given) or before // max(1, features)
    players = max(players, operation.together)
    held = (players - 1) * features * (before + NODES * features) + KEPT * features**2
    held += _to_write(parent) + (before**2 + before * parent.count) * (before > parent.count)
    work = PER_PAIR * players * batch * features**2 / 2
    held *= operation.unit * (3 if parent.followed and players > 2 else 1)  # noqa: PLR2004
    return Cost(operation.counted(), held, work, writes=True, graph=2 * held)


BY_KIND: dict[str, Callable[[Operation], Cost]] = {
    "element-wise": _of_activation,
    "maximum": _of_maximum,
    "noise": _of_noise,
    "several elements": _of_smooth,
}
"""Of operations with one random argument; those of other kinds are linear in it."""


def _to_write(counted: Counted) -> int:
    """Entries of the matrix of what is held without one, and of what it takes to write it."""
    if counted.alone or counted.constant or counted.columns or counted.ranks > 1:
        return 0
    if counted.half and not counted.cached:
        return counted.count**2 + streamed.ROWS // max(1, counted.batch.numel())
    if counted.rank:
        large = counted.batch.numel() * counted.count**2 > base.SMALL
        return counted.count**2 + 2 * base.STRIP * counted.count * large
    return counted.count**2 * (2 if counted.bare else counted.apart)


def _early(kind: str, operation: Operation) -> Cost | None:
    """What comes of a constant, and of what has no covariances yet, if it has none either."""
    parent, weights, out = operation.parent, operation.weights, operation.out
    work = 2.0 * out.numel()
    plain = operation.counted(ranks=1)
    if parent.columns:
        enters = kind in ("element-wise", "products", "maximum", "several elements")
        sketch = replace(parent, count=plain.count, itemsize=out.itemsize, enters=enters)
        return Cost(sketch, work=operation.taps * parent.columns * work)
    constant = parent.constant and kind not in ("noise", RANDOM_WEIGHTS)
    if parent.alone or constant:
        return Cost(replace(plain, alone=parent.alone, constant=constant), work=work)
    if parent.constant:
        if kind == "noise" or plain.count == weights[0].shape[0]:
            return Cost(replace(plain, apart=True), work=work)
        return Cost(plain, plain.nbytes, work=plain.count * work)
    if parent.apart and operation.together == 1 and kind in ("element-wise", "noise"):
        return Cost(replace(plain, apart=True), work=work)
    return None


def result(counted: Counted) -> Cost | None:
    """What it takes to hand a covariance to the caller, where that writes it out."""
    if not counted.half:
        return None
    plain = Counted(counted.batch, counted.count, counted.itemsize)
    held = counted.batch.numel() * counted.itemsize * _to_write(counted) - plain.nbytes
    return Cost(plain, max(0, held))
