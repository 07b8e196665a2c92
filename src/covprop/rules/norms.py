"""Layers that normalise: batch norm, which is affine in evaluation, and norms of each example."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.dispatch import Batch, rule
from covprop.errors import UnsupportedOperation
from covprop.rules.affine import scaling
from covprop.rules.delta import APPROXIMATE, delta
from covprop.rules.operands import batch_error
from covprop.tensor import GaussianTensor


def _normalised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Written out: torch's fused kernel has wrong second derivatives in forward mode."""
    result = _normalised(x, list(range(-len(shape), 0)), eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


@rule(*spellings("layer_norm"), kind="several elements", treatment=APPROXIMATE, name="layer_norm",
      batch=Batch.STEPWISE)  # fmt: skip
def layer_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> GaussianTensor:
    """Over the last dimensions."""
    if input.batch_at >= max(input.dim() - len(normalized_shape), 1):
        raise batch_error(function, input)
    result = delta(_layer_norm, input.laid(0), tuple(normalized_shape), weight, bias, eps)
    return result.laid(input.batch_at)


@rule(F.instance_norm, kind="several elements", treatment=APPROXIMATE, name="instance_norm")
def instance_norm(
    function: Callable[..., Any],
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Over the positions of each channel, or batch norm where it keeps running statistics."""
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)

    def instance(x: Tensor) -> Tensor:
        channel = (-1, *(1,) * (x.dim() - 2))
        result = _normalised(x, list(range(2, x.dim())), eps)
        result = result if weight is None else result * weight.reshape(channel)
        return result if bias is None else result + bias.reshape(channel)

    return delta(instance, input)


def _batch_norm(
    input: GaussianTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    eps: float,
) -> GaussianTensor:
    """In evaluation an affine map of each channel; training would need the batch's moments."""
    if training or running_mean is None or running_var is None:
        raise UnsupportedOperation(
            "batch norm in training mode would use the statistics of the batch; call model.eval(), "
            "and keep its running statistics"
        )
    centred = (torch.zeros_like(running_mean), running_var, weight, None, False, 0.0, eps)

    def strip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args[0], *centred), kwargs

    parameters = (running_mean, running_var, weight, bias, False, 0.0, eps)
    return scaling(F.batch_norm, input, *parameters, strip=strip)


@rule(F.batch_norm, kind="linear", treatment="exact (evaluation mode)", name="batch_norm")
def functional_batch_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> GaussianTensor:
    """torch.nn.functional's order of arguments."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, eps)


@rule(torch.batch_norm, kind="linear", treatment="exact (evaluation mode)", name="batch_norm")
def torch_batch_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> GaussianTensor:
    """torch's own order of arguments."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, eps)
