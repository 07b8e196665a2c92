"""Attention, as a composition of products and softmax."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.dispatch import rule
from covprop.errors import UnsupportedOperation

MASKED = -1e4
"""A score whose weight is zero, but whose derivatives are finite."""


@rule(F.scaled_dot_product_attention, kind="attention",
      treatment="approximate: products as if jointly Gaussian, softmax by the delta method",
      name="scaled_dot_product_attention")  # fmt: skip
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
    """softmax(Q K^T scale + mask) V."""
    boolean = attn_mask is not None and not attn_mask.is_floating_point()
    if dropout_p > 0 or enable_gqa or boolean or (is_causal and attn_mask is not None):
        raise UnsupportedOperation(
            "attention has a rule without dropout and grouped queries, and with one mask: a causal "
            "one, or numbers to be added"
        )
    scores = (query @ key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        shape = scores.shape[-2:]
        future = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(1)
        attn_mask = torch.zeros(shape, dtype=scores.dtype, device=scores.device)
        attn_mask = attn_mask.masked_fill(future, MASKED)
    scores = scores if attn_mask is None else scores + attn_mask.clamp(min=MASKED)
    return torch.softmax(scores, -1) @ value
