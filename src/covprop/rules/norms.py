"""Layers that normalise: batch norm, which is affine in evaluation, and norms of each example."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.affine import scaling
from covprop.rules.lengths import WITHIN, groups_of, normalised


def _norm(
    function: Callable[..., Any],
    x: GaussianTensor,
    arrange: Callable[[Tensor], Tensor],
    affine: tuple[Tensor | None, Tensor | None],
    eps: float,
    centred: bool = True,
) -> GaussianTensor:
    """z / sqrt(mean z^2 + eps) of groups of elements, and a weight and bias for each element."""
    x.materialize()
    if not x.loc.numel():
        return x
    groups = groups_of(function, x, arrange, centred)
    count = groups.index.shape[-1]
    weight, bias = affine
    return normalised(
        function,
        x,
        replace(groups, offset=count * eps),
        math.sqrt(count) * (1.0 if weight is None else weight),
        0.0 if bias is None else bias,
    )


@rule(*spellings("layer_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="layer_norm",
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
    arrange = _last(function, input, normalized_shape)
    return _norm(function, input, arrange, (weight, bias), eps)


@rule(*spellings("rms_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="rms_norm",
      batch=Batch.STEPWISE)  # fmt: skip
def rms_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> GaussianTensor:
    """Over the last dimensions, without taking their mean away."""
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    arrange = _last(function, input, normalized_shape)
    return _norm(function, input, arrange, (weight, None), eps, centred=False)


def _last(
    function: Callable[..., Any], x: GaussianTensor, shape: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """The last dimensions as groups, which have to be of this shape."""
    if not shape or tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(
            f"{name_of(function)} over a shape of {tuple(shape)} has an input of {tuple(x.shape)}"
        )
    return lambda places: places.reshape(-1, math.prod(shape))


@rule(*spellings("group_norm"), kind=Kind.SMOOTH, treatment=WITHIN, name="group_norm",
      batch=Batch.STEPWISE)  # fmt: skip
def group_norm(
    function: Callable[..., Any],
    input: GaussianTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> GaussianTensor:
    """Over groups of channels and all their positions."""
    if input.shape[1] % num_groups:
        raise ValueError(f"{input.shape[1]} channels are no {num_groups} groups of one size")
    affine = _of_channels(input, weight), _of_channels(input, bias)
    return _norm(
        function,
        input,
        lambda t: t.unflatten(1, (num_groups, -1)).flatten(2).flatten(0, 1),
        affine,
        eps,
    )


@rule(F.instance_norm, kind=Kind.SMOOTH, treatment=WITHIN, name="instance_norm",
      batch=Batch.STEPWISE)  # fmt: skip
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
    affine = _of_channels(input, weight), _of_channels(input, bias)
    return _norm(function, input, lambda t: t.flatten(2).flatten(0, 1), affine, eps)


def _of_channels(x: GaussianTensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.reshape(-1, *(1,) * (x.dim() - 2))


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


@rule(F.batch_norm, kind=Kind.LINEAR, treatment="exact (evaluation mode)", name="batch_norm")
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


@rule(torch.batch_norm, kind=Kind.LINEAR, treatment="exact (evaluation mode)", name="batch_norm")
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
