"""A Gaussian input replaced by a few narrower ones, whose outputs are put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.covariance import Covariance, Dense
from covprop.dispatch import leaves, map_leaves
from covprop.errors import TooLarge
from covprop.gaussian import Gaussian
from covprop.kernels.nodes import hermite_rule
from covprop.methods.base import Advance, Method, Propagation, WrappingMethod
from covprop.methods.exact import Exact
from covprop.methods.roots import Root
from covprop.mixture import Mixture
from covprop.report.table import in_bytes
from covprop.room import free_bytes
from covprop.sampling import SamplingError

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
    without a matrix.

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
        """Split, propagate as one batch (or one by one, where the network takes none), combine."""
        with torch.no_grad():  # directions are constants to autograd
            gains = propagation.gains(self.base, wanted=True)
        if not gains or not any(x.covariance.directions for x in propagation.inputs):
            return propagation.run(propagation.inputs, self.base)  # nothing varies, or along none
        parts = self._parts(propagation.inputs, list(gains.values()))
        sizes = {place: rows[0].shape[-2] for place, rows in gains.items()}
        found = self._together(propagation, parts, sizes)
        if found is not None:
            advance(parts.count, parts.count)
            return map_leaves(found, lambda leaf: self._whole(leaf, parts))
        results = []
        for i in range(parts.count):
            results.append(propagation.run(parts.alone(i), self.base))
            advance(1, parts.count)
        columns = zip(*(list(leaves(result)) for result in results), strict=True)
        combined = iter([self._joined(column, parts.weights) for column in columns])
        return map_leaves(results[0], lambda _: next(combined))

    def _parts(self, inputs: Sequence[Gaussian], gains: Sequence[Sequence[Tensor]]) -> "_Parts":
        """Components of the inputs; each direction is one of a single input: they stay apart."""
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
        for i, (x, root) in enumerate(zip(inputs, roots, strict=True)):
            own = [(at, k) for at, (_, where, k) in enumerate(ranked) if where == i]
            if not own:
                shifts.append(x.mean.expand(len(grid), *x.mean.shape))
                reduced.append(x.covariance)
                continue
            unit = ways[i][1][..., [k for _, k in own], :].movedim(-2, 0)  # (d, *batch, room)
            vectors = root.times(pad(unit, (0, root.width - unit.shape[-1])))  # (d, *mean)
            places = grid[:, [at for at, _ in own]]
            shifts.append(x.mean + torch.tensordot(places, vectors, dims=1))
            reduced.append(_without(x, unit, vectors))
        return _Parts(chances, shifts, reduced, inputs[0].batch_shape)

    def _together(self, propagation: Propagation, parts: "_Parts", sizes: dict[int, int]) -> Any:
        """All components as one batch; None where the network does something else with a batch."""
        try:
            found = propagation.run(parts.together(), self.base)
        except Exception:  # a module may raise anything; one by one, it will again
            return None
        batch = parts.merged_shape
        seen = {
            place: leaf for place, leaf in enumerate(leaves(found))
            if isinstance(leaf, Gaussian | Tensor)
        }  # fmt: skip
        same = seen.keys() == sizes.keys() and all(
            isinstance(leaf, Gaussian)
            and leaf.batch_shape == batch
            and leaf.event_shape.numel() == sizes[place]
            for place, leaf in seen.items()
        )
        return found if same else None

    def _whole(self, leaf: Any, parts: "_Parts") -> Any:
        if not isinstance(leaf, Gaussian):
            return leaf
        return Mixture(parts.weights, parts.apart(leaf)).moments(self)

    def _joined(self, column: Sequence[Any], weights: Tensor) -> Any:
        """One result of every component."""
        if not isinstance(column[0], Gaussian):
            return column[0]
        errors = [y.sampling_error for y in column]
        error = None
        if all(one is not None for one in errors):
            error = SamplingError(
                errors[0].samples,
                torch.stack([one.mean for one in errors]),
                torch.stack([one.covariance for one in errors]),
            )
        stacked = Gaussian(
            torch.stack([y.mean for y in column]),
            torch.stack([y.covariance_matrix for y in column]),
            validate_args=False,
            sampling=error,
        )
        return Mixture(weights, stacked).moments(self)


@final
@dataclass(frozen=True)
class _Parts:
    """The inputs of all components."""

    weights: Tensor
    means: list[Tensor]
    """(components, *batch, *event) of every input."""
    covariances: list[Covariance]
    """Of every input, the same for all components."""
    batch_shape: torch.Size

    @property
    def count(self) -> int:
        return len(self.weights)

    @property
    def merged_shape(self) -> torch.Size:
        """The components are more of the first dimension of a batch."""
        first, *rest = self.batch_shape or (1,)
        return torch.Size((self.count * first, *rest))

    def alone(self, place: int) -> list[Gaussian]:
        return [
            Gaussian(mean[place], covariance, validate_args=False)
            for mean, covariance in zip(self.means, self.covariances, strict=True)
        ]

    def together(self) -> list[Gaussian]:
        return [
            Gaussian(self._merged(mean), covariance.map(self._repeated), validate_args=False)
            for mean, covariance in zip(self.means, self.covariances, strict=True)
        ]

    def apart(self, y: Gaussian) -> Gaussian:
        """A result of all, by component."""
        return y.reshape_batch((self.count, *self.batch_shape))

    def _repeated(self, tensor: Tensor) -> Tensor:
        return self._merged(tensor.expand(self.count, *tensor.shape))

    def _merged(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1) if self.batch_shape else tensor


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
    return Dense(left) if isinstance(left, Tensor) else left
