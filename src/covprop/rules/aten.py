"""Operators of exported programs and traced graphs that torch's functions do not have as such.

Where an operator has the name and the signature of a torch function, as most have,
`flow.table.as_torch_function` finds that function's rule; what is here is written in terms of such.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from covprop.errors import UnsupportedOperation
from covprop.flow.table import Batch, Kind, rule

aten = torch.ops.aten


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    if input_scale != 1:
        raise UnsupportedOperation("aten.elu with an input_scale has no rule; use 1")
    return F.elu(x, alpha) if scale == 1 else scale * F.elu(x, alpha)


def _convolution(
    x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    dims = weight.dim() - 2
    if transposed:
        transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        return transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    forward = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return forward(x, weight, bias, stride, padding, dilation, groups)


def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    whole = [slice(None)] * x.dim()
    whole[dim] = slice(start, end, step)
    return x[tuple(whole)]


def _index(x: Any, indices: Sequence[Any]) -> Any:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _group_norm(
    x: Any, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, eps: float
) -> Any:
    return F.group_norm(x, groups, weight, bias, eps)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
) -> Any:
    return F.batch_norm(x, mean, variance, weight, bias, False, momentum, eps)


def _instance_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Any:  # fmt: skip
    return F.instance_norm(x, mean, variance, weight, bias, use_input_stats, momentum, eps)


def _to_copy(x: Any, **options: Any) -> Any:
    wanted = {key: value for key, value in options.items() if key in ("dtype", "device")}
    return x.to(**wanted) if any(value is not None for value in wanted.values()) else x.clone()


def _upsampled(mode: str) -> Callable[..., Any]:
    def upsample(x: Any, output_size: Any, *options: Any) -> Any:
        """align_corners, which nearest neighbours have not, and scale factors come last."""
        align = options[0] if mode != "nearest" else None
        factors = options[-1] if output_size is None else None
        return F.interpolate(x, output_size, factors, mode, align)

    return upsample


_SAME: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.sym_size.int: lambda x, dim: x.size(dim),
    aten.sym_numel.default: lambda x: x.numel(),
    aten.alias.default: lambda x: x,
    aten._to_copy.default: _to_copy,
    aten._unsafe_view.default: lambda x, size: x.view(size),
    aten.slice.Tensor: _slice,
    aten.convolution.default: _convolution,
    aten.index.Tensor: _index,
    aten.constant_pad_nd.default: lambda x, pad, value=0: F.pad(x, pad, value=value),
    aten.im2col.default: F.unfold,
    aten.col2im.default: F.fold,
    aten.elu.default: _elu,
    aten.log_sigmoid.default: F.logsigmoid,
    aten._softmax.default: lambda x, dim, _: torch.softmax(x, dim),
    aten._log_softmax.default: lambda x, dim, _: torch.log_softmax(x, dim),
    aten._adaptive_avg_pool2d.default: F.adaptive_avg_pool2d,
    aten._adaptive_avg_pool3d.default: F.adaptive_avg_pool3d,
    aten.instance_norm.default: _instance_norm,
    aten.linalg_vector_norm.default: torch.linalg.vector_norm,
    aten.upsample_nearest1d.vec: _upsampled("nearest"),
    aten.upsample_nearest2d.vec: _upsampled("nearest"),
    aten.upsample_nearest3d.vec: _upsampled("nearest"),
    aten.upsample_linear1d.vec: _upsampled("linear"),
    aten.upsample_bilinear2d.vec: _upsampled("bilinear"),
    aten.upsample_bicubic2d.vec: _upsampled("bicubic"),
    aten.upsample_trilinear3d.vec: _upsampled("trilinear"),
}
"""What an operator is in torch's own words."""

_FIRST: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.native_layer_norm.default: F.layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.native_dropout.default: F.dropout,
    aten.max_pool2d_with_indices.default: F.max_pool2d,
    aten.max_pool3d_with_indices.default: F.max_pool3d,
    aten.adaptive_max_pool1d.default: F.adaptive_max_pool1d,
    aten.adaptive_max_pool2d.default: F.adaptive_max_pool2d,
    aten.adaptive_max_pool3d.default: F.adaptive_max_pool3d,
    aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda q, k, v, dropout=0.0, causal=False, attn_mask=None, scale=None: (
            F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, scale=scale)
        )
    ),
}
"""The same for operators that return more, such as indices, which no Gaussian has."""


def _register(operator: Any, translation: Callable[..., Any], single: bool) -> None:
    results = len(operator._schema.returns)

    @rule(operator, kind=Kind.OTHER, batch=Batch.STEPWISE)
    def body(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = translation(*args, **kwargs)
        return result if single else (result, *[None] * (results - 1))


for _operator, _translation in _SAME.items():
    _register(_operator, _translation, single=True)
for _operator, _translation in _FIRST.items():
    _register(_operator, _translation, single=False)
