"""A Gaussian input replaced by a few narrower ones, whose outputs are put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from covprop.covariance import Covariance, LowRank
from covprop.error_estimate import SamplingError
from covprop.errors import TooLarge, UnsupportedOperation
from covprop.flow.lineage import free_bytes
from covprop.flow.nests import leaves, map_leaves
from covprop.gaussian import Gaussian
from covprop.kernels.polynomials import hermite_rule
from covprop.kernels.rounding import COMPONENT_MEAN, rounding
from covprop.methods.base import Method, WrappingMethod, is_skewed
from covprop.methods.call import Call
from covprop.methods.layerwise import GaussianLayers
from covprop.methods.linearized import gains_of
from covprop.methods.root import Root
from covprop.mixture import Mixture
from covprop.skewed import Skewed
from covprop.text_table import in_bytes

MIN_COMPONENTS, MAX_COMPONENTS = 2, 256
"""Nodes of a rule; those of longer ones overflow."""
COPIES = 3
"""Matrices that are held while one of them is changed."""
PERTURBATION = 1.0
"""In units of machine epsilon: how far means are moved to see what rounding does."""
ROUNDINGS = 4.0
"""Nonlinearity of so many errors by rounding, or less, may be these alone."""


@final
@dataclass(frozen=True)
class Split(WrappingMethod):
    """Replace the input by a mixture of narrower Gaussians, and propagate each by another method.

    x = m + u_1 v_1 + ... + rest: the directions v are those in which the input moves the output
    most (the first singular vectors of E[J] S^(1/2), times S^(1/2)). Each u takes the nodes of a
    Gauss-Hermite rule, and the rest has the covariance S - sum v v^T. The network is closer to
    linear over each component. `y.mixture` has the components. Differentiable, except for the
    choice of directions.

    A `LowRank` input is split along its own directions and stays one. A `Diagonal` input becomes
    `Deflated`, without a matrix. A `Dense` input becomes `LowRank`, so that rounding leaves no
    negative variance.

    Args:
        components: The number of components for each direction.
        directions: The number of directions; there are components^directions components in all.
        base: The method that propagates the components.

    Example:
        y = cp.propagate(model, x, cp.Split(3))
        y.mixture
    """

    components: int = 3
    directions: int = 1
    base: Method = field(default_factory=GaussianLayers)

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        if (
            type(self.components) is not int
            or not MIN_COMPONENTS <= self.components <= MAX_COMPONENTS
        ):
            raise ValueError(f"components is a whole number from 2 to 256, not {self.components!r}")
        if type(self.directions) is not int or self.directions < 1:
            raise ValueError(f"directions is a whole number from 1, not {self.directions!r}")
        if not isinstance(self.base, Method):
            raise TypeError(f"base is a method such as cp.GaussianLayers(), not {self.base!r}")

    def check_skewness(self, inputs: Sequence[Gaussian]) -> None:
        """Refuse what is no mixture of Gaussians with the same covariance."""
        if any(is_skewed(x) for x in inputs if isinstance(x, Skewed)):
            raise UnsupportedOperation(
                "cp.Split makes a mixture of Gaussians of the input, which would lose its "
                "skewness; use cp.Cumulants() or cp.MonteCarlo() without cp.Split, or take the "
                "input as cp.Gaussian.diagonal(x.mean, x.variance)"
            )
        super().check_skewness(inputs)

    def around(self, call: Call) -> Any:
        """Split, propagate the components, and put their moments together."""
        with torch.no_grad():  # directions are constants to autograd
            gains = gains_of(call, self, selected=True)
        if not gains or not any(x.covariance.directions for x in call.inputs):
            return self.run_base(call.on(call.inputs))  # nothing varies, or along none
        parts, linear = self._parts(call.inputs, gains)
        perturbed: Any = None
        if not self.stochastic:
            perturbed = self.run_base(call.on(parts.perturbed()))
        nest, columns = self._batched(call, parts, perturbed) or self._one_by_one(call, parts)
        near = [None] * len(columns) if perturbed is None else list(leaves(perturbed))
        combined = iter(
            mixed(parts.weights, leaf, linear.get(place), other).moments(self)
            if isinstance(leaf, Gaussian) else leaf
            for place, (leaf, other) in enumerate(zip(columns, near, strict=True))
        )  # fmt: skip
        return map_leaves(nest, lambda _: next(combined))

    def _parts(
        self, inputs: Sequence[Gaussian], found: dict[int, list[Tensor]]
    ) -> tuple["Components", dict[int, Tensor]]:
        """Components of the inputs, and where the gains alone put those of each output.

        Each direction is one of a single input, so that inputs stay independent.
        """
        gains = list(found.values())
        roots = [Root.of(x) for x in inputs]
        singular = [
            _largest(
                torch.cat([rows[i] for rows in gains], dim=-2)[..., : x.covariance.directions],
                self.directions,
            )
            for i, x in enumerate(inputs)
        ]
        ranked = sorted(
            ((float(size), i, k) for i, (sizes, _) in enumerate(singular)
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
            unit = singular[i][1][..., [k for _, k in own], :].movedim(-2, 0).to(x.dtype)
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

    def _batched(self, call: Call, parts: "Components", last: Any) -> tuple[Any, list[Any]] | None:
        """All components as one batch, where the last of them is seen to be what it is alone.

        What the model returns, and each of its leaves for all components. None without a batch: a
        model that is not written for one may do anything with it.
        """
        if last is None or not parts.batch_shape:
            return None
        try:
            found = self.run_base(call.on(parts.batched()))
        except Exception:  # a module may raise anything; one by one, it will again
            return None
        if not agree(found, last, parts):
            return None
        call.advance(parts.count, parts.count)
        both = zip(leaves(found), leaves(last), strict=True)
        return last, [
            parts.divided(leaf) if isinstance(leaf, Gaussian) else other for leaf, other in both
        ]

    def _one_by_one(self, call: Call, parts: "Components") -> tuple[Any, list[Any]]:
        results = []
        for place in range(parts.count):
            results.append(self.run_base(call.on(parts.single(place))))
            call.advance(1, parts.count)
        columns = zip(*(list(leaves(result)) for result in results), strict=True)
        return results[0], [stacked(c) if isinstance(c[0], Gaussian) else c[0] for c in columns]


def _largest(gain: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest singular values (*batch, count) and their right singular vectors, as rows."""
    _, sizes, vectors = torch.linalg.svd(gain.detach(), full_matrices=False)
    return sizes[..., :count], vectors[..., :count, :]


def _check_memory(x: Gaussian) -> None:
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
    """S - V V^T for V = L U: units (d, *batch, directions) and vectors (d, *batch, *event)."""
    if not (x.covariance.independent or x.covariance.factored):  # a root of all pairs is written
        _check_memory(x)
    rows = vectors.reshape(len(vectors), *x.batch_shape, -1).movedim(0, -2)  # (*batch, d, n)
    left = x.covariance.without(units.movedim(0, -2), rows)
    return LowRank(left) if isinstance(left, Tensor) else left


@final
@dataclass(frozen=True)
class Components:
    """The inputs of all components."""

    weights: Tensor
    means: list[Tensor]
    """(components, *batch, *event) of every input."""
    covariances: list[Covariance]
    """Of every input, the same for all components."""
    batch_shape: torch.Size

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.weights)

    def single(self, place: int) -> list[Gaussian]:
        """The inputs of one component."""
        return self._at([mean[place] for mean in self.means])

    def perturbed(self) -> list[Gaussian]:
        """Those of the last one, with every element of the means moved by rounding or so."""
        coins = torch.Generator().manual_seed(0)
        means = []
        for last in (mean[-1] for mean in self.means):
            signs = 2 * torch.randint(2, last.shape, generator=coins) - 1
            means.append(last * (1 + PERTURBATION * torch.finfo(last.dtype).eps * signs.to(last)))
        return self._at(means)

    def batched(self) -> list[Gaussian]:
        """All of them, as more of the first dimension of a batch."""
        return [
            Gaussian(
                mean.flatten(0, 1),
                covariance.map(lambda t: t.expand(self.count, *t.shape).flatten(0, 1)),
                validate_args=False,
            )
            for mean, covariance in zip(self.means, self.covariances, strict=True)
        ]

    def divided(self, y: Gaussian) -> Gaussian:
        """A result of all together, by component."""
        return y.reshape_batch((self.count, *self.batch_shape))

    def _at(self, means: Sequence[Tensor]) -> list[Gaussian]:
        both = zip(means, self.covariances, strict=True)
        return [Gaussian(mean, covariance, validate_args=False) for mean, covariance in both]


def stacked(results: Sequence[Gaussian]) -> Gaussian:
    """One result of every component, as a batch (components, *batch)."""
    errors = [y.sampling_error for y in results if y.sampling_error is not None]
    error = None
    if len(errors) == len(results):
        error = SamplingError(
            errors[0].samples,
            torch.stack([one.mean for one in errors]),
            torch.stack([one.covariance for one in errors]),
        )
    skewness = [y.skewness for y in results if y.skewness is not None]
    return Gaussian(
        torch.stack([y.mean for y in results]),
        torch.stack([y.covariance_matrix for y in results]),
        validate_args=False,
        sampling=error,
        skewness=torch.stack(skewness) if len(skewness) == len(results) else None,
        notes=tuple(dict.fromkeys(note for y in results for note in y.notes)),
    )


def agree(batched: Any, last: Any, parts: Components) -> bool:
    """Whether all components in one batch have in them what the last one is by itself.

    A model may count its axes from the front, or treat elements of a batch by their place. Half of
    the digits have to agree, means in units of themselves and the deviations.
    """
    found, expected = list(leaves(batched)), list(leaves(last))
    if len(found) != len(expected):
        return False
    for ours, other in zip(found, expected, strict=True):
        if not isinstance(ours, Gaussian | Tensor) and not isinstance(other, Gaussian | Tensor):
            continue  # that of the last is taken
        if not isinstance(ours, Gaussian) or not isinstance(other, Gaussian):
            return False
        first, *rest = other.batch_shape
        same_batch = ours.batch_shape == (parts.count * first, *rest)
        if not same_batch or ours.event_shape != other.event_shape:
            return False
        if not _close(parts.divided(ours)[-1], other):
            return False
    return True


@torch.no_grad()
def _close(y: Gaussian, z: Gaussian) -> bool:
    tolerance = torch.finfo(y.dtype).eps ** 0.5
    spread = torch.maximum(y.stddev, z.stddev)
    means = (y.mean - z.mean).abs() <= tolerance * (z.mean.abs() + spread)
    flat = spread.reshape(*y.batch_shape, y.event_shape.numel())
    scale = flat[..., :, None] * flat[..., None, :]
    difference = (y.covariance_matrix - z.covariance_matrix).abs()
    return bool(means.all()) and bool((difference <= tolerance * scale).all())


def mixed(
    weights: Tensor, components: Gaussian, linear: Tensor | None, perturbed: Gaussian | None
) -> Mixture:
    """The mixture of a result, with offsets of its components that rounding has no part in.

    linear (components, *batch, n): where the expected Jacobian puts the components; perturbed: what
    the last one is with its means moved by rounding. Where components are so close to each other
    that the rest of their offsets is what rounding does, the linear part is all that is known.
    """
    weights = weights.to(components.dtype)  # that of the outputs may be another one
    if linear is None or perturbed is None or not linear.numel():
        return Mixture(weights, components)
    means = components.mean.double().reshape(linear.shape)
    chances = weights.double()
    offsets = means - torch.einsum("k,k...->...", chances, means)
    with torch.no_grad():
        size = torch.einsum("k,k...->...", chances, offsets.square()).sqrt()
        moved = (perturbed.mean.double().reshape(size.shape) - means[-1]).abs()
        # Of all outputs together: those that no component moves have a size of rounding alone.
        largest = size.amax(-1, keepdim=True)
        unit = torch.where(largest > 0, largest, 1)
        together = torch.linalg.vector_norm(size / unit, dim=-1, keepdim=True).clamp(min=1)
        typical = torch.linalg.vector_norm(moved, dim=-1, keepdim=True) / together * (size / unit)
        least = rounding(COMPONENT_MEAN, components.dtype) * means.abs().amax((0, -1))[..., None]
        error = torch.maximum(torch.maximum(moved, typical), least)
        rest = torch.einsum("k,k...->...", chances, (offsets - linear).square()).sqrt()
        drop = rest <= ROUNDINGS * error
    # The value of the linear part, and the gradient of the offsets.
    known = linear + (offsets - offsets.detach())
    return Mixture(weights, components, torch.where(drop, known, offsets).to(components.dtype))
