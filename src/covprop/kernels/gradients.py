"""Backward passes that cannot be differentiated again say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse create_graph=True, where the result would silently lack a part."""
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def guarded(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this part of covprop has first derivatives only; use create_graph=False, or "
                "finite differences of the gradient"
            )
        return once(ctx, *gradients)

    return guarded
