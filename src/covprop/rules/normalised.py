"""Vectors over their lengths, and lengths: what norms of all kinds are made of.

The elements of an event that have a length together are a group. Within a group the moments are
exact for Gaussian input (`kernels.directions`); between groups, and with all other tensors, the
dependence is that of the expected slope.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from covprop.covariance import Covariance, Dense, Diagonal, LinearMap, Sketch, Zero
from covprop.covariance.base import symmetric
from covprop.covariance.innovation import random_signs
from covprop.errors import ApproximationWarning, name_of, warn_user
from covprop.kernels.directions import (
    Direction,
    Elements,
    Vector,
    diagonalised,
    direction,
    independent_length,
    length,
    marginal,
)
from covprop.lineage import Node
from covprop.rules.operands import batch_error, check_finite
from covprop.tensor import GaussianTensor
from covprop.transfers import Along

FAR = 0.1
"""The share of a variance that may be not linear without a warning."""
FEW = 32
"""Elements of a group up to which `cp.AssumedDensity` follows the dependence that centring makes.

Of more elements it is a smaller part of their variances than one in the square of their number.
"""
SPANNED = 1e-12
"""The share of a mean that is rounding, if all of it but so much is in the span of the noise."""
WITHIN = "approximate: exact within each group for Gaussian input, linear between groups"


@final
@dataclass(frozen=True)
class Groups:
    """Which elements of a flat event have a length together, index (G, n), less their mean or not.

    offset: what is added to the square of the length.
    """

    index: Tensor
    centred: bool = False
    offset: float = 0.0

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        x: GaussianTensor,
        arrange: Callable[[Tensor], Tensor],
        centred: bool = False,
        offset: float = 0.0,
    ) -> "Groups":
        """By what `arrange` makes, (groups, n), of a tensor in the layout that the model sees."""
        batch = [max(1, size) for size in x.batch_shape]
        size = max(1, x.event_shape.numel())
        places = torch.arange(math.prod((*batch, *x.event_shape)), device=x.device)
        places = places.reshape(*batch, *x.event_shape)
        rows = arrange(places.movedim(0, x.batch_at) if x.batch_at else places)
        owner = rows // size
        if bool((owner != owner[:, :1]).any()):
            raise batch_error(function, x)
        return cls(rows[(owner == 0).all(-1)], centred, offset)

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Rows and columns of the blocks of a matrix."""
        return self.index[:, :, None], self.index[:, None, :]

    def taken(self, vectors: Tensor) -> Tensor:
        """The groups of vectors (*any, N): (*any, G, n)."""
        return self._less_mean(vectors[..., self.index])

    def put(self, found: Tensor) -> Tensor:
        """Groups (*any, G, n) as vectors (*any, N)."""
        values = found.flatten(-2)
        return torch.zeros_like(values).index_copy(-1, self.index.flatten(), values)

    def blocks(self, covariance: Covariance) -> Tensor:
        """The covariances of the groups, (*batch, G, n, n)."""
        if covariance.independent:
            found = torch.diag_embed(covariance.diagonal().double()[..., self.index])
        else:
            found = covariance.matrix()[(..., *self.pairs)].double()
        return self._less_mean(self._less_mean(found).mT)

    def _less_mean(self, found: Tensor) -> Tensor:
        return found - found.mean(-1, keepdim=True) if self.centred else found


@final
@dataclass(frozen=True)
class _Bases:
    """Groups as vectors in bases (*batch, G, n, r) in which their covariances are diagonal."""

    vector: Vector
    basis: Tensor

    @classmethod
    def of(cls, x: GaussianTensor, groups: Groups) -> "_Bases":
        mean = groups.taken(_flat(x).double())
        if not isinstance(x.covariance, Sketch):
            return cls(*diagonalised(mean, groups.blocks(x.covariance)))
        rows = groups.taken(x.covariance.rows().double()).movedim(-3, -2)  # (*batch, G, rows, n)
        _, values, basis = torch.linalg.svd(rows, full_matrices=False)
        along = (basis @ mean[..., None])[..., 0]
        rest, whole = mean, mean.square().sum(-1, keepdim=True).sqrt()
        for _ in range(2):  # once more, for what rounding has left
            rest = rest - (rest[..., None, :] @ basis.mT @ basis)[..., 0, :]
        size = rest.square().sum(-1, keepdim=True).sqrt()
        beyond = size > SPANNED * whole
        unit = torch.where(beyond, rest / torch.where(beyond, size, 1), 0)
        basis = torch.cat([basis, unit[..., None, :]], -2)
        variance = torch.cat([values.square(), torch.zeros_like(size)], -1)
        mean = torch.cat([along, torch.where(beyond, size, 0)], -1)
        return cls(Vector(mean, variance), basis.mT)

    def whole(self, vectors: Tensor) -> Tensor:
        """(*batch, G, r) as (*batch, G, n)."""
        return (self.basis @ vectors[..., None])[..., 0]

    def slope(self, found: Direction, dtype: torch.dtype) -> "Slope":
        """E[dv/dz] of vectors (*batch, G, count, n), which keeps one matrix for each group."""
        basis = self.basis.to(dtype)
        if basis.shape[-1] >= basis.shape[-2]:
            matrix = (self.basis @ found.slope @ self.basis.mT).to(dtype)
            return lambda vectors: vectors @ matrix.to(vectors.dtype)
        inside, rest = found.slope.to(dtype), found.idle.to(dtype)[..., None, None]

        def along(vectors: Tensor) -> Tensor:
            turned, kind = basis.to(vectors.dtype), vectors.dtype
            seen = vectors @ turned
            beyond = rest.to(kind) * (vectors - seen @ turned.mT)
            return seen @ inside.to(kind) @ turned.mT + beyond

        return along


Slope = Callable[[Tensor], Tensor]
"""What a function of all groups makes of vectors (*batch, G, count, n)."""


def normalised(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    weight: Tensor | float = 1.0,
    bias: Tensor | float = 0.0,
) -> GaussianTensor:
    """weight * z / sqrt(|z|^2 + offset) + bias of every group z, in the shape of x.

    weight, bias: as the model would multiply and add them.
    """
    check_finite(function, x)
    factor, shift = (_of_event(x, value) for value in (weight, bias))
    inner = factor[groups.index]
    if x.method.variances_only:
        mean, slope, linear, extra = _independently(x, groups)
        extra, variance = extra * inner.square(), (linear + extra) * inner.square()
        covariance: Covariance = Diagonal(groups.put(variance).to(x.dtype), assumed=True)
        _warn(function, extra, variance)
        edge = _edge(x, groups, slope, inner)
    else:
        x.expect(x.loc)
        bases = _Bases.of(x, groups)
        found = direction(bases.vector, groups.offset)
        mean, edge = bases.whole(found.mean), _edge(x, groups, bases.slope(found, x.dtype), inner)
        root = bases.basis * inner[..., None]
        covariance = _grown(function, x, x.covariance.push(edge), groups, root, found.extra)
    loc = (groups.put(mean) * factor + shift).to(x.dtype).reshape(x.loc.shape)
    node = Node(covariance, [(x.node, Along(edge))])
    return GaussianTensor(loc, node, x.lineage).laid(x.batch_at)


def lengths(
    function: Callable[..., Any],
    x: GaussianTensor,
    groups: Groups,
    shape: torch.Size,
    scale: float = 1.0,
) -> GaussianTensor:
    """scale * |z| of every group z; shape: that of the result's event."""
    check_finite(function, x)
    if x.method.variances_only and groups.index.shape[-1] > FEW:
        elements = _alone(x, groups)
        found = marginal(elements)
        mean, moments = found.mean, independent_length(elements, found)
    else:
        bases = _Bases.of(x, groups)
        direct = direction(bases.vector)
        mean, moments = bases.whole(direct.mean), length(bases.vector, direct)
    row = scale * mean[..., None, :]  # (*batch, G, 1, n)

    def linear(vectors: Tensor) -> Tensor:
        return (groups.taken(vectors) * row.to(vectors.dtype).movedim(-2, -3)).sum(-1)

    edge = LinearMap(linear, torch.Size((x.event_shape.numel(),)), leading=True)
    loc = (scale * moments.mean).to(x.dtype).reshape(torch.Size((*x.batch_shape, *shape)))
    variance, extra = (scale**2 * t for t in (moments.variance, moments.extra))
    _warn(function, extra[..., None], variance[..., None])
    if x.method.variances_only:
        covariance: Covariance = Diagonal(variance.to(x.dtype), assumed=True)
    else:
        x.expect(loc)
        covariance = x.covariance.push(edge).plus(extra.to(x.dtype))
    return GaussianTensor(loc, Node(covariance, [(x.node, Along(edge))]), x.lineage)


def _edge(x: GaussianTensor, groups: Groups, slope: Slope, inner: Tensor) -> LinearMap:
    """The expected linear part, of vectors (*batch, count, N)."""

    def linear(vectors: Tensor) -> Tensor:
        taken = groups.taken(vectors).movedim(-3, -2)
        return groups.put(slope(taken).movedim(-2, -3) * inner.to(vectors.dtype))

    return LinearMap(linear, torch.Size((x.event_shape.numel(),)), leading=True)


def _independently(x: GaussianTensor, groups: Groups) -> tuple[Tensor, Slope, Tensor, Tensor]:
    """Mean, slope, and the variances that are linear and that are not, (*batch, G, n) each."""
    if groups.index.shape[-1] > FEW:
        alone = marginal(_alone(x, groups), groups.offset)
        return alone.mean, alone.slope, alone.variance - alone.extra, alone.extra
    bases = _Bases.of(x, groups)
    found = direction(bases.vector, groups.offset)
    inside = found.slope @ bases.vector.covariance @ found.slope
    linear, extra = (
        (bases.basis @ matrix @ bases.basis.mT).diagonal(dim1=-2, dim2=-1).clamp(min=0)
        for matrix in (inside, found.extra)
    )
    return bases.whole(found.mean), bases.slope(found, x.dtype), linear, extra


def _alone(x: GaussianTensor, groups: Groups) -> Elements:
    mean = groups.taken(_flat(x).double())
    return Elements(mean, x.covariance.diagonal().double()[..., groups.index], groups.centred)


def _grown(
    function: Callable[..., Any],
    x: GaussianTensor,
    pushed: Covariance,
    groups: Groups,
    root: Tensor,
    extra: Tensor,
) -> Covariance:
    """With what each group has beyond its linear part, root extra root^T."""
    if isinstance(pushed, Zero):
        return pushed
    if isinstance(pushed, Sketch):
        values, vectors = torch.linalg.eigh(extra)
        rows = (root @ (vectors * values.clamp(min=0).sqrt()[..., None, :])).mT.to(x.dtype)
        added = rows.square().sum(-2)
        _warn(function, added, added + pushed.diagonal()[..., groups.index])
        return _sketched(pushed, _Blocks(groups.index, rows))
    blocks = (root @ extra @ root.mT).to(x.dtype)
    matrix = pushed.matrix().clone()
    matrix[(..., *groups.pairs)] += blocks
    added = blocks.diagonal(dim1=-2, dim2=-1)
    _warn(function, added, matrix.diagonal(dim1=-2, dim2=-1)[..., groups.index])
    return Dense(symmetric(matrix))


@final
@dataclass(frozen=True)
class _Blocks:
    """Noise of each group of an index (G, n), by roots (*batch, G, r, n): an entry of a sketch."""

    index: Tensor
    roots: Tensor

    def quadratic(self, rows: Tensor) -> Tensor:
        """J R J^T of rows J (*batch, p, N)."""
        seen = rows[..., self.index].movedim(-2, -3) @ self.roots.mT  # (*batch, G, p, r)
        return symmetric((seen @ seen.mT).sum(-3))


def _sketched(begun: Sketch, noise: _Blocks) -> Sketch:
    """With the noise of groups, of which the tangents have random directions."""
    shape = torch.Size((*noise.roots.shape[:-2], begun.count, noise.roots.shape[-2]))
    signs = random_signs(shape, noise.roots, begun.generator) / math.sqrt(begun.count)
    shared = Groups(noise.index).put((signs @ noise.roots).movedim(-3, -2))
    return replace(begun, tangents=begun.tangents + shared, entry=noise)


@torch.no_grad()
def _warn(function: Callable[..., Any], extra: Tensor, variance: Tensor) -> None:
    """Warn where too much of the variance of a group, (*batch, G, n) each, is not linear."""
    if bool((extra.sum(-1) > FAR * variance.sum(-1)).any()):
        warn_user(
            f"more than {FAR:.0%} of the variance of {name_of(function)} is not linear in its "
            "input here: its own mean and covariance are good, but its result is far from "
            "Gaussian for what comes next; compare with sampling",
            ApproximationWarning,
        )


def _flat(x: GaussianTensor) -> Tensor:
    return x.loc.reshape(*x.batch_shape, x.event_shape.numel())


def _of_event(x: GaussianTensor, value: Tensor | float) -> Tensor:
    """A number for each element of the flat event, of what the model would broadcast."""
    value = torch.as_tensor(value, dtype=torch.float64, device=x.device).expand(x.shape)
    value = value.movedim(x.batch_at, 0) if x.batch_at else value
    return value[(0,) * len(x.batch_shape)].reshape(-1)
