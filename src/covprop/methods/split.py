"""A Gaussian input replaced by a few narrower ones, whose outputs are put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.covariance import Covariance, Dense, LowRank
from covprop.dispatch import leaves, map_leaves
from covprop.errors import TooLarge
from covprop.gaussian import Gaussian
from covprop.kernels.nodes import hermite_rule
from covprop.methods.base import Advance, Method, Propagation, WrappingMethod
from covprop.methods.components import Components, agree, mixed, stacked
from covprop.methods.control import ControlVariate
from covprop.methods.exact import Exact
from covprop.methods.montecarlo import MonteCarlo
from covprop.methods.roots import Root
from covprop.methods.sketched import Sketched
from covprop.report.table import in_bytes
from covprop.room import free_bytes

FEWEST, MOST = 2, 256
"""Nodes of a rule; those of longer ones overflow."""
COPIES = 3
"""Matrices that are held while one of them is changed."""


@final
@dataclass(frozen=True)
class Split(WrappingMethod):
    """Another method on a small mixture in place of the input, narrow where it moves the output.

    x = m + u_1 v_1 + ... + rest: the directions v are those in which the input moves the output
    most, the first singular vectors of E[J] S^(1/2), times S^(1/2); each u takes the nodes of a
    Gauss-Hermite rule, and the rest has the covariance S - sum v v^T. Every component is closer
    to what the network treats as linear. Their moments are put together; `y.mixture` has the
    components, which tell more than two moments do. Differentiable, but for the choice of
    directions.

    A `LowRank` input stays one, split along its own directions; `Diagonal` ones become `Deflated`,
    without a matrix; `Dense` ones become `LowRank`, whose rounding leaves no negative variance.

    components: nodes for each direction; directions: how many, so that there are
    components^directions in all; base: what the components are propagated with.
    """

    components: int = 3
    directions: int = 1
    base: Method = field(default_factory=Exact)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if type(self.components) is not int or not FEWEST <= self.components <= MOST:
            raise ValueError(f"components is a whole number from 2 to 256, not {self.components!r}")
        if type(self.directions) is not int or self.directions < 1:
            raise ValueError(f"directions is a whole number from 1, not {self.directions!r}")
        if not isinstance(self.base, Method):
            raise TypeError(f"base is a method such as cp.Exact(), not {self.base!r}")

    def around(self, propagation: Propagation, advance: Advance) -> Any:
        """Split, propagate the components, and put their moments together."""
        with torch.no_grad():  # directions are constants to autograd
            gains = propagation.gains(self.base, wanted=True)
        if not gains or not any(x.covariance.directions for x in propagation.inputs):
            return propagation.run(propagation.inputs, self.base)  # nothing varies, or along none
        parts, linear = self._parts(propagation.inputs, gains)
        nudged: Any = None if _draws(self.base) else propagation.run(parts.nudged(), self.base)
        found = self._together(propagation, parts, nudged)
        if found is None:
            found = self._one_by_one(propagation, parts, advance)
        else:
            advance(parts.count, parts.count)
        moved = [None] * len(found.columns) if nudged is None else list(leaves(nudged))
        combined = iter(
            mixed(parts.weights, leaf, linear.get(place), near).moments(self)
            if isinstance(leaf, Gaussian) else leaf
            for place, (leaf, near) in enumerate(zip(found.columns, moved, strict=True))
        )  # fmt: skip
        return map_leaves(found.nest, lambda _: next(combined))

    def _parts(
        self, inputs: Sequence[Gaussian], found: dict[int, list[Tensor]]
    ) -> tuple[Components, dict[int, Tensor]]:
        """Components of the inputs, and where the gains alone put those of each output.

        Each direction is one of a single input, so that inputs stay independent.
        """
        gains = list(found.values())
        roots = [Root.of(x) for x in inputs]
        ways = [
            _ways(
                torch.cat([rows[i] for rows in gains], dim=-2)[..., : x.covariance.directions],
                self.directions,
            )
            for i, x in enumerate(inputs)
        ]
        ranked = sorted(
            ((float(size), i, k) for i, (sizes, _) in enumerate(ways)
             for k, size in enumerate(sizes.flatten(0, -2).mean(0) if sizes.dim() > 1 else sizes)),
            reverse=True,
        )[: self.directions]  # fmt: skip
        nodes, weights = hermite_rule(self.components)
        like = inputs[0].mean
        grid = torch.cartesian_prod(*[torch.as_tensor(nodes)] * len(ranked))
        chances = torch.cartesian_prod(*[torch.as_tensor(weights)] * len(ranked))
        grid = grid.reshape(-1, len(ranked)).to(like)
        chances = chances.reshape(len(grid), -1).prod(-1).to(like)
        shifts, reduced = [], []
        linear: dict[int, Tensor] = {}
        for i, (x, root) in enumerate(zip(inputs, roots, strict=True)):
            own = [(at, k) for at, (_, where, k) in enumerate(ranked) if where == i]
            if not own:
                shifts.append(x.mean.expand(len(grid), *x.mean.shape))
                reduced.append(x.covariance)
                continue
            unit = ways[i][1][..., [k for _, k in own], :].movedim(-2, 0).to(x.dtype)
            vectors = root.times(pad(unit, (0, root.width - unit.shape[-1])))  # (d, *mean)
            places = grid[:, [at for at, _ in own]]
            shifts.append(x.mean + torch.tensordot(places, vectors, dims=1))
            reduced.append(_without(x, unit, vectors))
            for place, rows in found.items():
                seen = rows[i][..., : unit.shape[-1]].double()
                along = torch.einsum("...mn,d...n->d...m", seen, unit.double())
                part = torch.tensordot(places.double(), along, dims=1)
                linear[place] = linear[place] + part if place in linear else part
        return Components(chances, shifts, reduced, inputs[0].batch_shape), linear

    def _together(self, propagation: Propagation, parts: Components, alone: Any) -> "_Found | None":
        """All components as one batch, where the last of them is seen to be what it is alone.

        None without a batch: a model that is not written for one may do anything with it.
        """
        if alone is None or not parts.batch_shape:
            return None
        try:
            found = propagation.run(parts.together(), self.base)
        except Exception:  # a module may raise anything; one by one, it will again
            return None
        if not agree(found, alone, parts):
            return None
        both = zip(leaves(found), leaves(alone), strict=True)
        columns = [
            parts.divided(leaf) if isinstance(leaf, Gaussian) else other for leaf, other in both
        ]
        return _Found(alone, columns)

    def _one_by_one(
        self, propagation: Propagation, parts: Components, advance: Advance
    ) -> "_Found":
        results = []
        for place in range(parts.count):
            results.append(propagation.run(parts.alone(place), self.base))
            advance(1, parts.count)
        columns = zip(*(list(leaves(result)) for result in results), strict=True)
        return _Found(
            results[0],
            [stacked(c) if isinstance(c[0], Gaussian) else c[0] for c in columns],
        )


class _Found(NamedTuple):
    """What the network returns, and each of its leaves for all components."""

    nest: Any
    columns: list[Any]


def _draws(method: Method) -> bool:
    """Whether two runs of a method differ by chance."""
    if isinstance(method, Sketched | MonteCarlo | ControlVariate):
        return True
    return isinstance(method, WrappingMethod) and _draws(method.base)


def _ways(gain: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest singular values (*batch, count) and their right singular vectors, as rows."""
    _, sizes, ways = torch.linalg.svd(gain.detach(), full_matrices=False)
    return sizes[..., :count], ways[..., :count, :]


def _check_room(x: Gaussian) -> None:
    """Raise where a matrix of all pairs of elements, and what makes it, would not fit."""
    count = x.event_shape.numel()
    needed = COPIES * x.batch_shape.numel() * count**2 * x.mean.itemsize
    if needed > (free := free_bytes(x.device)):
        raise TooLarge(
            f"cp.Split makes another matrix of {count:,} x {count:,} numbers of this input, which "
            f"would need {in_bytes(needed)}, and {in_bytes(free)} are free; give the noise "
            "as cp.Gaussian.low_rank or cp.Gaussian.diagonal, which make none, or leave cp.Split "
            "away"
        )


def _without(x: Gaussian, units: Tensor, vectors: Tensor) -> Covariance:
    """S - V V^T for V = L U: units (d, *batch, room) and vectors (d, *batch, *event)."""
    if isinstance(x.covariance, Dense):
        _check_room(x)
    rows = vectors.reshape(len(vectors), *x.batch_shape, -1).movedim(0, -2)  # (*batch, d, n)
    left = x.covariance.without(units.movedim(0, -2), rows)
    return LowRank(left) if isinstance(left, Tensor) else left
