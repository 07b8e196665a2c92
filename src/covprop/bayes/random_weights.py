"""The moments of a linear map with random weights (Wu et al. 2019, Eq. 3).

Weights are independent of the input and of each other, so that for outputs i, k of one position
  Cov(y_i, y_k) = (E[W] S E[W]^T)_ik + delta_ik (sum_j Var(W_ij) (S_jj + mu_j^2) + Var(b_i)).
Where the same weights are used in several positions, outputs of one channel o share its kernel:
  Cov(y_op, y_oq) += sum_t Var(W_ot) (S_{t(p), t(q)} + mu_t(p) mu_t(q)) + Var(b_o),
with t(p) the input that weight t meets in position p. Nothing is added between channels.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.bayes.layers import BayesLayer, BayesLinear, random_linear
from covprop.covariance import Covariance, LinearMap
from covprop.errors import UnsupportedOperation
from covprop.flow.table import USED_TWICE, Kind, rule
from covprop.flow.tensor import GaussianTensor

GATHERED = 2**22
"""Entries of covariances between taps that are gathered at a time."""


def at_means(input: Tensor, _weight: Tensor, layer: BayesLayer) -> Tensor:
    """Apply a layer with its mean weights."""
    return layer.linear(input, layer.weight_mean, layer.bias_mean)


def weights_of(_input: Tensor, _weight: Tensor, layer: BayesLayer) -> object:
    """Identify the weights of a layer, unless it is declared to be used several times."""
    return None if layer.shared else layer.weight_mean


@rule(random_linear, kind=Kind.RANDOM_WEIGHTS, weights=weights_of)
def random_linear_rule(
    _function: Any, input: GaussianTensor, weight: Tensor, layer: BayesLayer
) -> GaussianTensor:
    """Propagate moments through a layer, whose weights may enter a pass once."""
    layer.check_input(input.loc, len(input.batch_shape))
    if not layer.shared and not input.lineage.is_first_use(layer.weight_mean):
        raise UnsupportedOperation(USED_TWICE)
    loc = at_means(input.loc, weight, layer)
    weights = RandomWeights(layer, input.event_shape, len(input.batch_shape))
    return GaussianTensor(loc, input.carrier.random_linear(loc, input.flat, weights))


@final
@dataclass(frozen=True)
class RandomWeights:
    """A layer on events of a shape: a `covprop.flow.carrier.RandomLinear`."""

    layer: BayesLayer
    event_shape: torch.Size
    batch_dims: int

    @property
    def shared(self) -> bool:
        """Whether a weight meets inputs of several positions."""
        return self.layer.positions(self.event_shape) > 1

    def mean_map(self) -> LinearMap:
        """The mean weights as a map of the event."""
        return self.layer.linear_map(self.event_shape)

    def independent_noise(self, second_moment: Tensor) -> Tensor:
        """sum_j Var(W_ij) E[x_j^2] + Var(b_i), flat."""
        layer, batch = self.layer, self.batch_dims
        squares = second_moment.reshape(*second_moment.shape[:batch], *self.event_shape)
        noise = layer.linear(squares, layer.weight_variance, layer.bias_variance)
        return noise if noise.dim() == batch + 1 else noise.flatten(batch)

    def congruence(self, covariance: Covariance) -> Tensor | None:
        """W V W^T of independent features, without the matrix V."""
        layer = self.layer
        if not (covariance.independent and isinstance(layer, BayesLinear)):
            return None
        mean = layer.weight_mean if layer.members is None else layer.weight_mean[:, None]
        return layer.linear(mean * covariance.diagonal()[..., None, :], layer.weight_mean)

    def shared_noise(self, mean: Tensor, covariance: Covariance) -> Tensor:
        """What weights add between the positions p, q of each output, (*batch, m, m)."""
        layer = self.layer
        taps = layer.taps(self.event_shape)  # (groups * t, places)
        variance, offset = layer.weight_variance, layer.bias_variance
        variance = variance.flatten(-layer.kernel.dim() + 1)  # (*members, out, t)
        groups = len(taps) // variance.shape[-1]
        variance = variance.unflatten(-2, (groups, -1))  # (*members, groups, out, t)
        if layer.members is not None:
            variance = variance[:, None]
            offset = None if offset is None else offset[:, None]

        def met(values: Tensor) -> Tensor:
            return F.pad(values, (1, 0))[..., taps].unflatten(-2, (groups, -1))

        inputs = met(mean)[..., None, :, :]
        total = (variance[..., None] * inputs).mT @ inputs  # (*batch, groups, out, p, q)
        if covariance.independent:
            # A weight meets the same input in one position only.
            total = total + torch.diag_embed(variance @ met(covariance.diagonal()))
        else:
            total = total + _between_taps(covariance.matrix(), taps, variance)
        total = total.flatten(-4, -3)  # (*batch, out, p, q)
        if offset is not None:
            total = total + offset[..., None, None]
        full = torch.diag_embed(total.movedim(-3, -1)).movedim(-2, -3)  # (*batch, p, out, q, out)
        if not isinstance(layer, BayesLinear):  # convolutions have channels before places
            full = full.transpose(-4, -3).transpose(-2, -1)
        return full.flatten(-4, -3).flatten(-2)


def _between_taps(matrix: Tensor, taps: Tensor, variance: Tensor) -> Tensor:
    """sum_t Var(W_ot) S_{t(p), t(q)}, (*batch, groups, out, p, q), some weights at a time."""
    groups, each, places = variance.shape[-3], variance.shape[-1], taps.shape[1]
    padded = F.pad(matrix, (1, 0, 1, 0))
    index = taps.unflatten(0, (groups, each))  # (groups, t, places)
    entries = matrix[..., 0, 0].numel() * groups * places**2
    step = max(1, GATHERED // max(1, entries))
    total: Tensor | None = None
    for start in range(0, each, step):
        part = index[:, start : start + step]
        gathered = padded[..., part[..., :, None], part[..., None, :]]  # (*batch, groups, t, p, q)
        share = variance[..., start : start + step] @ gathered.flatten(-2)
        total = share if total is None else total + share
    assert total is not None
    return total.unflatten(-1, (places, places))
