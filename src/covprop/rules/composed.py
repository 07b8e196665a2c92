"""Operations that are made of others: step by step where several arguments vary."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import in_place_spellings, spellings
from covprop.activations.base import CLOSED
from covprop.flow.batch_position import FIRST, position_in
from covprop.flow.table import Batch, Kind, register_composer, rule
from covprop.flow.tensor import GaussianTensor, is_plain
from covprop.rules.affine import (
    PRODUCT,
    QUOTIENT,
    affine,
    keeps_last_dims,
)
from covprop.rules.operands import batch_error, gaussians
from covprop.rules.placement import linear_in_both
from covprop.rules.smooth import APPROXIMATE

FACTORS = {"addmm": ("mat1", "mat2"), "addmv": ("mat", "vec"), "baddbmm": ("batch1", "batch2")}
"""What torch calls the two factors of a product that is added to something."""
FAR = 1e4
"""How far below all others the score of what is left out is at least."""
ONE_BY_ONE = "exact for two jointly Gaussian factors, one after another for more"
COMPOSED = "approximate: products as if jointly Gaussian, softmax by the delta method"


@rule(*spellings("lerp"), kind=Kind.PRODUCT, treatment=PRODUCT, name="lerp",
      in_place=in_place_spellings("lerp"))  # fmt: skip
def lerp(function: Callable[..., Any], input: Any, end: Any, weight: Any) -> Any:
    """`input + weight (end - input)` with a constant weight."""
    return linear_in_both(lambda a, b: torch.lerp(a, b, weight), input, end)


def _sum_of_product(
    function: Callable[..., Any],
    product: Callable[[Any, Any], Any],
    terms: tuple[Any, Any, Any],
    scales: dict[str, Any],
) -> Any:
    """`beta input + alpha first * second`: affine in any one of the three."""
    input, first, second = terms
    if len(gaussians(terms, {})) == 1:
        offset = 1 if isinstance(input, GaussianTensor) else 0

        def strip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kept = (torch.zeros_like(t) if i == offset else t for i, t in enumerate(args))
            return tuple(kept), kwargs

        return affine(function, *terms, strip=strip, **scales)
    total = product(first, second) * scales.get("alpha", 1)
    beta = scales.get("beta", 1)
    return total + beta * input if beta else total


@rule(*spellings("addcmul"), kind=Kind.PRODUCT, treatment=PRODUCT, name="addcmul",
      in_place=in_place_spellings("addcmul"))  # fmt: skip
def addcmul(
    function: Callable[..., Any], input: Any, tensor1: Any, tensor2: Any, **scales: Any
) -> Any:
    """`input + value tensor1 tensor2`."""
    return _sum_of_product(function, torch.mul, (input, tensor1, tensor2), scales)


@rule(*spellings("addcdiv"), kind=Kind.PRODUCT, treatment=QUOTIENT, name="addcdiv",
      in_place=in_place_spellings("addcdiv"))  # fmt: skip
def addcdiv(
    function: Callable[..., Any], input: Any, tensor1: Any, tensor2: Any, **scales: Any
) -> Any:
    """`input + value tensor1 / tensor2`."""
    return _sum_of_product(function, torch.div, (input, tensor1, tensor2), scales)


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + value * (tensor1 * tensor2)


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return input + value * (tensor1 / tensor2)


def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return input + weight * (end - input) if isinstance(weight, GaussianTensor) else None


def _in_steps(steps: Callable[..., Any], by_last: bool = False) -> Callable[..., Any]:
    """Operation by operation what is not affine, so that functions of one tensor compose.

    by_last: the last argument alone makes it so.
    """

    def compose(
        function: Callable[..., Any], args: Any, kwargs: Any, tensors: Sequence[GaussianTensor]
    ) -> Any:
        del function, tensors
        given = inspect.signature(steps).bind(*args, **kwargs).args
        varies = [isinstance(one, GaussianTensor) for one in given]
        return steps(*args, **kwargs) if sum(varies) > 1 or (by_last and varies[-1]) else None

    return compose


register_composer(spellings("addcmul"), _in_steps(_addcmul))
register_composer(spellings("addcdiv"), _in_steps(_addcdiv, by_last=True))
register_composer(spellings("lerp"), _in_steps(_lerp, by_last=True))


@rule(*spellings("addmm", "addmv", "baddbmm"), kind=Kind.PRODUCT, treatment=PRODUCT,
      name="addmm, addmv, baddbmm", batch=Batch.ANYWHERE,
      in_place=in_place_spellings("addmm", "addmv", "baddbmm"))  # fmt: skip
def addmm(function: Callable[..., Any], input: Any, *factors: Any, **options: Any) -> Any:
    """`beta input + alpha first @ second`."""
    named = [name for name in FACTORS[function.__name__] if name in options]
    first, second = (*factors, *(options.pop(name) for name in named))
    given = gaussians((input, first, second), {})
    if (at := position_in(function)) != FIRST:
        several = len(given) > 1
        if named if not several else not keeps_last_dims(2, function, first, second):
            raise batch_error(function, given[0])
        if several and not isinstance(input, GaussianTensor):
            shape = at.shape(torch.Size((*first.shape[:-1], second.shape[-1])))
            input = at.first(input.expand(shape))
    return _sum_of_product(function, torch.matmul, (input, first, second), options)


@rule(*spellings("cumprod"), kind=Kind.PRODUCT, treatment=ONE_BY_ONE, name="cumprod",
      batch=Batch.STEPWISE, in_place=in_place_spellings("cumprod"))  # fmt: skip
def cumprod(
    function: Callable[..., Any], input: Any, dim: int, *, dtype: torch.dtype | None = None
) -> Any:
    """One product after another: y_i = y_{i-1} x_i."""
    input = input.clone() if dtype is None else input.to(dtype)
    parts = list(input.unbind(dim)) if input.dim() else []
    for i in range(1, len(parts)):
        parts[i] = parts[i - 1] * parts[i]
    return torch.stack(parts, dim) if parts else input


@rule(*spellings("prod"), kind=Kind.PRODUCT, treatment=ONE_BY_ONE, name="prod",
      batch=Batch.STEPWISE)  # fmt: skip
def prod(
    function: Callable[..., Any],
    input: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The product of all elements, or along a dimension: of halves, until one is left."""
    input = input if dtype is None else input.to(dtype)
    if dim is None:
        if input.batch_shape:
            raise batch_error(function, input)
        input, dim = input.reshape(-1), 0
    if not input.dim():
        return input
    while (count := input.shape[dim]) > 1:
        half = count // 2
        product = input.narrow(dim, 0, half) * input.narrow(dim, half, half)
        rest = input.narrow(dim, 2 * half, count - 2 * half)
        input = torch.cat([product, rest], dim) if count % 2 else product
    # Of no element, it is one.
    return input.sum(dim, keepdim=keepdim) + (0.0 if count else 1.0)


_OF_EXPONENTIALS: dict[str, Callable[[Any], Any]] = {
    "expm1": lambda x: torch.exp(x) - 1,
    "exp2": lambda x: torch.exp(math.log(2) * x),
    "sinh": lambda x: (torch.exp(x) - torch.exp(-x)) / 2,
    "cosh": lambda x: (torch.exp(x) + torch.exp(-x)) / 2,
    "log1p": lambda x: torch.log(1 + x),
    "log2": lambda x: torch.log(x) / math.log(2),
    "log10": lambda x: torch.log(x) / math.log(10),
}


def _written_out(name: str, formula: Callable[[Any], Any]) -> None:
    """One line: an element-wise function in terms of exponentials or logarithms."""
    treatment = APPROXIMATE if "log" in name else CLOSED

    @rule(*spellings(name), kind=Kind.SMOOTH if "log" in name else Kind.ELEMENTWISE, name=name,
          treatment=treatment, batch=Batch.STEPWISE, in_place=in_place_spellings(name))  # fmt: skip
    def body(function: Callable[..., Any], input: Any) -> Any:
        return formula(input)


for _name, _formula in _OF_EXPONENTIALS.items():
    _written_out(_name, _formula)


@rule(torch.tensordot, kind=Kind.PRODUCT, treatment=PRODUCT, name="tensordot",
      batch=Batch.STEPWISE)  # fmt: skip
def tensordot(function: Callable[..., Any], a: Any, b: Any, dims: Any = 2, out: None = None) -> Any:
    """A sum of products over dimensions of both, as einsum writes it."""
    if isinstance(dims, int):
        pairs = list(zip(range(a.dim() - dims, a.dim()), range(dims), strict=True))
    else:
        pairs = [(i % a.dim(), j % b.dim()) for i, j in zip(*dims, strict=True)]
    first, second = list(range(a.dim())), list(range(a.dim(), a.dim() + b.dim()))
    for i, j in pairs:
        second[j] = first[i]
    summed = {first[i] for i, _ in pairs}
    letters = ["".join(map(chr, (ord("a") + k for k in ks))) for ks in (
        first, second, [k for k in first + second if k not in summed])]  # fmt: skip
    return torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", a, b)


@rule(F.scaled_dot_product_attention, kind=Kind.ATTENTION, treatment=COMPOSED,
      name="scaled_dot_product_attention", batch=Batch.STEPWISE)  # fmt: skip
def attention(
    function: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(Q K^T scale + mask) V; a boolean mask tells what takes part."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    masks = [attn_mask, _future(query, key) if is_causal else None]
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return F.dropout(_weights(scores, masks), dropout_p) @ value


def _future(query: Any, key: Any) -> Tensor:
    shape = query.shape[-2], key.shape[-2]
    return torch.ones(shape, dtype=torch.bool, device=query.device).triu(1)


def _weights(scores: Any, masks: list[Tensor | None]) -> Any:
    """softmax(scores + masks); a mask has numbers to be added, or tells what is left out.

    Numbers that depend on the input, such as relative positions of the query, are part of scores.
    """
    for mask in masks:
        if isinstance(mask, GaussianTensor):
            scores = scores + mask
    given = [mask for mask in masks if is_plain(mask)]
    if not given:
        return torch.softmax(scores, -1)
    if isinstance(scores, GaussianTensor):
        scores.materialize()
    means = scores.loc if isinstance(scores, GaussianTensor) else scores
    # So low that its weight is zero, but not infinite, which would have no derivative.
    low = -FAR - 2 * float(means.detach().abs().max())
    total = torch.zeros((), dtype=scores.dtype, device=scores.device)
    for mask in given:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, low)
        total = total + mask.clamp(min=low)
    weights = torch.softmax(scores + total, -1)
    nothing = (total <= low / 2).all(-1, keepdim=True)
    return weights * ~nothing if bool(nothing.any()) else weights


@rule(F.multi_head_attention_forward, kind=Kind.ATTENTION, treatment=COMPOSED,
      name="MultiheadAttention", batch=Batch.STEPWISE)  # fmt: skip
def multi_head_attention(
    function: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Projections, attention within each head, projection: of (length, batch, features)."""
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    query, key, value = (
        F.linear(x, weight, bias)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    key, value = key if static_k is None else static_k, value if static_v is None else static_v
    masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[..., None, None, :]]
    if key_padding_mask is not None and query.dim() == 2:  # noqa: PLR2004 (no batch)
        masks[1] = key_padding_mask
    if attn_mask is not None and attn_mask.dim() == 3 and query.dim() == 3:  # noqa: PLR2004
        masks[0] = attn_mask.unflatten(0, (-1, num_heads))
    if is_causal and attn_mask is None:
        masks.append(_future(query.movedim(0, -2), key.movedim(0, -2)))
    extra: list[tuple[Tensor | float, Tensor | float]] = []
    if bias_k is not None and bias_v is not None:
        extra.append((bias_k, bias_v))
    if add_zero_attn:
        extra.append((0.0, 0.0))
    for key_row, value_row in extra:
        key, value = _longer(key, key_row), _longer(value, value_row)
        masks = [None if mask is None else F.pad(mask, (0, 1)) for mask in masks]
    query, key, value = (_heads(x, num_heads) for x in (query, key, value))
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    shares = F.dropout(_weights(scores, masks), dropout_p, training)
    together = (shares @ value).movedim(-2, 0).flatten(-2)
    output = F.linear(together, out_proj_weight, out_proj_bias)
    if not need_weights:
        return output, None
    return output, shares.mean(-3) if average_attn_weights else shares


def _heads(x: Any, count: int) -> Any:
    """(length, *batch, features) -> (*batch, head, length, features of one head)."""
    return x.unflatten(-1, (count, -1)).movedim(0, -2)


def _longer(x: Any, row: Tensor | float) -> Any:
    """Append one row, the same for every element of the batch."""
    last = torch.zeros(1, *x.shape[1:], dtype=x.dtype, device=x.device)
    return torch.cat([x, last + (row if isinstance(row, float) else row.reshape(-1))])
