"""Stable distribution propagation (Petersen et al., ICLR 2024), for Gaussians.

An affine layer keeps a Gaussian. Any other function is replaced by its tangent at the mean, which
is again affine; for ReLU that is the Gaussian nearest in total variation:

    mean  a -> W a + b          covariance  S -> W S W^T        marginals  v -> W^2 v
    mean  a -> relu(a)          covariance  S -> D S D          marginals  v -> D v

with D = diag(1 where a > 0), or diag(g'(a)) of another activation, and W^2 element by element. The
covariance is carried as a root, S = R R^T, whose columns go through the layers.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from experiments.rivals.rival import chain, refuse

AFFINE = (nn.Linear, nn.Conv2d, nn.AvgPool2d, nn.BatchNorm2d, nn.Flatten)
ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus,
)  # fmt: skip

Step: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Tensor]


def propagate(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """With covariances."""
    size = x.event_shape.numel()
    values, vectors = torch.linalg.eigh(x.covariance_matrix.reshape(size, size))
    columns = (vectors * values.clamp(min=0).sqrt()).T.reshape(size, *x.event_shape)

    def affine(layer: nn.Module, mean: Tensor, root: Tensor) -> Tensor:
        zero = torch.zeros_like(mean)
        return layer(root) - layer(zero)

    def scaled(_: nn.Module, slope: Tensor, root: Tensor) -> Tensor:
        return slope * root

    mean, root = _carried(model, x, columns, affine, scaled)
    flat = root.flatten(1)
    return _gaussian(x, mean, flat.T @ flat)


def propagate_marginals(model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
    """With variances alone, as if all units were independent."""
    variance = x.variance.reshape(1, *x.event_shape)
    mean, found = _carried(
        model, x, variance, _squared, lambda _, slope, values: slope.square() * values
    )
    return _gaussian(x, mean, torch.diag(found.flatten()))


def _carried(
    model: nn.Module, x: cp.Gaussian, spread: Tensor, affine: Step, scaled: Step
) -> tuple[Tensor, Tensor]:
    """Mean (1, ...) and what is carried of the covariance (rows, ...), layer by layer."""
    mean = x.mean.reshape(1, *x.event_shape)
    for layer in chain(model):
        if isinstance(layer, AFFINE):
            spread, mean = affine(layer, mean, spread), layer(mean)
        elif isinstance(layer, ACTIVATIONS):
            spread, mean = scaled(layer, _slope(layer, mean), spread), layer(mean.clone())
        else:
            raise refuse(layer)
    return mean, spread


def _slope(activation: nn.Module, mean: Tensor) -> Tensor:
    with torch.enable_grad():
        point = mean.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(activation(point.clone()).sum(), point)
    return slope


def _squared(layer: nn.Module, mean: Tensor, variance: Tensor) -> Tensor:
    """Variances through an affine layer, whose weights are squared."""
    del mean
    match layer:
        case nn.Linear():
            return F.linear(variance, layer.weight.square())
        case nn.Conv2d() if layer.padding_mode == "zeros":
            return F.conv2d(
                variance, layer.weight.square(), None, layer.stride, layer.padding,
                layer.dilation, layer.groups,
            )  # fmt: skip
        case nn.BatchNorm2d():
            assert layer.running_var is not None
            scale = (layer.running_var + layer.eps).rsqrt()
            scale = scale if layer.weight is None else scale * layer.weight
            return variance * scale.square()[:, None, None]
        case nn.AvgPool2d() if isinstance(layer.kernel_size, int) and not layer.padding:
            return layer(variance) / layer.kernel_size**2
        case nn.Flatten():
            return layer(variance)
    raise refuse(layer)


def _gaussian(x: cp.Gaussian, mean: Tensor, covariance: Tensor) -> cp.Gaussian:
    batched = len(x.batch_shape) > 0
    return cp.Gaussian(
        mean if batched else mean[0], covariance[None] if batched else covariance,
        validate_args=False,
    )  # fmt: skip
