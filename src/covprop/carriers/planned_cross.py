"""Covariances between vectors that a plan counts: all pairs that lead to them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from covprop.carriers.cross_covariance import parallel

SERIES = 4
"""Matrices that the series between two activations holds beside its result."""
COEFFICIENTS = 2**9
"""Numbers for each feature that an activation by quadrature keeps once it has met another."""
SHARED = 2
"""One in so many of the covariances on the way to others is kept by autograd."""


class Crossed(NamedTuple):
    """Bytes of the covariances between vectors.

    matrix: of the largest; meanwhile: of all on the way to the two that have the most; kept: by
    autograd, of all on the way to all pairs.
    """

    matrix: int = 0
    meanwhile: int = 0
    kept: int = 0


def between(vectors: Sequence[Any]) -> Crossed:
    """Of each pair of these `Planned` vectors."""
    matrix = meanwhile = kept = 0
    for first, second in itertools.combinations(vectors, 2):
        entries: dict[tuple[int, int], int] = {}
        varies = not (first.planned.constant or second.planned.constant)
        if varies and _depend(first, second, entries):
            unit = first.batch_shape.numel() * first.planned.itemsize
            matrix = max(matrix, unit * first.size * second.size)
            on_the_way = unit * sum(entries.values())
            numbers, grid = _of_activations(first, second)
            meanwhile = max(meanwhile, on_the_way + unit * numbers + grid)
            kept += on_the_way // SHARED
    return Crossed(matrix, meanwhile, kept)


def _depend(u: Any, v: Any, entries: dict[tuple[int, int], int]) -> bool:
    """Whether two random vectors depend on each other; entries of all pairs that were asked."""
    u, v = (u, v) if u.rank >= v.rank else (v, u)
    if u is v:
        return True
    if (u.serial, v.serial) not in entries:
        entries[u.serial, v.serial] = 0
        depends = [_depend(parent, v, entries) for parent, _ in u.edges]
        if parallel(u, v):  # they meet before both
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
