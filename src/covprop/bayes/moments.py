"""The moments of a linear map with random weights (Wu et al. 2019, Eq. 3).

Weights are independent of the input and of each other, so that for outputs i, k of one position
  Cov(y_i, y_k) = (E[W] S E[W]^T)_ik + delta_ik (sum_j Var(W_ij) (S_jj + mu_j^2) + Var(b_i)).
Where the same weights are used in several positions, outputs of one channel o share its kernel:
  Cov(y_op, y_oq) += sum_t Var(W_ot) (S_{t(p), t(q)} + mu_t(p) mu_t(q)) + Var(b_o),
with t(p) the input that weight t meets in position p. Nothing is added between channels.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.bayes.geometry import Dot, Geometry
from covprop.bayes.weights import Weights
from covprop.covariance import Covariance, Dense, Diagonal, LinearMap, Sketch, Zero
from covprop.covariance.base import symmetric
from covprop.errors import UnsupportedOperation
from covprop.tensor import GaussianTensor

GATHERED = 2**22
"""Entries of covariances between taps that are gathered at a time."""


def propagated(x: GaussianTensor, geometry: Geometry, weights: Weights) -> GaussianTensor:
    """Mean, covariance and ties of the output; the noise of the weights is new."""
    members = weights.members is not None
    loc = geometry.apply(x.loc, weights.weight_mean, weights.bias_mean, members)
    # Made when it is needed, and without x, which would live as long as its result.
    linear = partial(linear_map, x.event_shape, geometry, weights)
    covariance: Covariance
    if x.method.variances_only:
        noise = _independent_noise(x, geometry, weights)
        covariance = Diagonal(linear().variances(x.covariance.diagonal()) + noise, assumed=True)
    elif geometry.positions(weights.kernel, x.event_shape) == 1:
        covariance = _of_one_position(x, loc, geometry, weights, linear)
    elif isinstance(x.covariance, Sketch):
        raise UnsupportedOperation(
            "random weights that are used in several places have no rule with cp.Sketched; use "
            "cp.Exact() or cp.MonteCarlo()"
        )
    else:
        x.expect(loc)
        shared = geometry.blocks(_shared_noise(x, geometry, weights))
        if not isinstance(x.covariance, Zero):
            shared = shared + x.covariance.push(linear()).matrix()
        covariance = Dense(symmetric(shared))
    return x.replace(loc, covariance, transfer=lambda cross: linear()(cross.mT).mT)


def linear_map(event_shape: torch.Size, geometry: Geometry, weights: Weights) -> LinearMap:
    """The mean weights as a map of the event."""
    mean = weights.weight_mean
    if weights.members is None:
        return geometry.linear(mean, event_shape)
    return LinearMap(
        lambda v: geometry.apply(v, mean, None, members=True), event_shape, leading=True,
        squared=lambda v: geometry.apply(v, mean.square(), None, members=True),
    )  # fmt: skip


def _of_one_position(
    x: GaussianTensor,
    loc: Tensor,
    geometry: Geometry,
    weights: Weights,
    linear: Callable[[], LinearMap],
) -> Covariance:
    """Every weight meets one input, so that what it adds is independent."""
    noise = _independent_noise(x, geometry, weights)
    if isinstance(x.covariance, Zero):
        return Diagonal(noise)
    if isinstance(x.covariance, Sketch):
        return x.covariance.push(linear()).plus(noise)
    if isinstance(x.covariance, Diagonal) and isinstance(geometry, Dot):
        members = weights.members is not None
        rows = loc.itemsize * loc.numel() * max(loc.shape[-1], x.loc.shape[-1])
        x.lineage.expect(rows)
        mean = weights.weight_mean[:, None] if members else weights.weight_mean
        matrix = geometry.apply(  # W V W^T, without the matrix V
            mean * x.covariance.values[..., None, :], weights.weight_mean, None, members
        )
    else:
        x.expect(loc)
        matrix = x.covariance.push(linear()).matrix()
    return Dense(symmetric(matrix + torch.diag_embed(noise)))


def _independent_noise(x: GaussianTensor, geometry: Geometry, weights: Weights) -> Tensor:
    """sum_j Var(W_ij) E[x_j^2] + Var(b_i), flat."""
    second = x.loc.square()
    if not isinstance(x.covariance, Zero):
        second = second + x.covariance.diagonal().reshape(x.loc.shape)
    noise = geometry.apply(
        second, weights.weight_variance, weights.bias_variance, weights.members is not None
    )
    batch = len(x.batch_shape)
    return noise if noise.dim() == batch + 1 else noise.flatten(batch)


def _shared_noise(x: GaussianTensor, geometry: Geometry, weights: Weights) -> Tensor:
    """What weights add between the positions of each output, (*batch, out, p, q)."""
    batch = x.batch_shape
    taps = geometry.taps(weights.kernel, x.event_shape)  # (groups * t, places)
    variance = weights.weight_variance.flatten(-weights.kernel.dim() + 1)  # (*members, out, t)
    groups = len(taps) // variance.shape[-1]
    variance = variance.unflatten(-2, (groups, -1))  # (*members, groups, out, t)
    if weights.members is not None:
        variance = variance[:, None]
    mean = x.loc.reshape(*batch, x.event_shape.numel())
    met = F.pad(mean, (1, 0))[..., taps].unflatten(-2, (groups, -1))  # (*batch, groups, t, p)
    weighted = variance[..., None] * met[..., None, :, :]  # (*batch, groups, out, t, p)
    total = weighted.mT @ met[..., None, :, :]  # (*batch, groups, out, p, q)
    if isinstance(x.covariance, Diagonal):
        # A weight meets the same input in one position only.
        spread = F.pad(x.covariance.values, (1, 0))[..., taps].unflatten(-2, (groups, -1))
        total = total + torch.diag_embed(variance @ spread)
    elif not isinstance(x.covariance, Zero):
        total = total + _between_taps(x.covariance.matrix(), taps, variance)
    total = total.flatten(-4, -3)
    if weights.bias_mean is None:
        return total
    offset = weights.bias_variance
    assert offset is not None
    return total + (offset if weights.members is None else offset[:, None])[..., None, None]


def _between_taps(matrix: Tensor, taps: Tensor, variance: Tensor) -> Tensor:
    """sum_t Var(W_ot) S_{t(p), t(q)}, (*batch, groups, out, p, q), some weights at a time."""
    groups, each, places = variance.shape[-3], variance.shape[-1], taps.shape[1]
    padded = F.pad(matrix, (1, 0, 1, 0))
    index = taps.unflatten(0, (groups, each))  # (groups, t, places)
    entries = matrix[..., 0, 0].numel() * groups * places**2
    total: Tensor | None = None
    step = max(1, GATHERED // max(1, entries))
    for start in range(0, each, step):
        part = index[:, start : start + step]
        found = padded[..., part[..., :, None], part[..., None, :]]  # (*batch, groups, t, p, q)
        share = variance[..., start : start + step] @ found.flatten(-2)
        total = share if total is None else total + share
    assert total is not None
    return total.unflatten(-1, (places, places))
