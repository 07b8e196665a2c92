"""Sums and differences of tensors, tensors side by side, and choices between them.

The covariance of sum_i A_i x_i is sum_ij A_i Cov(x_i, x_j) A_j^T; tensors of one random vector are
one term, so that x - x is exactly zero, and tensors of different origin have no cross term.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import LinearMap
from covprop.flow.carrier import Carrier, Term
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.operands import (
    Slot,
    at_means,
    batch_error,
    check_batch_is_separate,
    check_batch_shape,
    fill,
    gaussians,
    in_dtype,
    with_slots,
    without_constants,
)


def join(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> GaussianTensor:
    """Carry several tensors through a function that is linear in all of them together.

    args and kwargs have no constant offset but in the means: constant terms are zeroed for the
    linear part.
    """
    tensors = gaussians(args, kwargs)
    x = tensors[0]
    if any(tensor.batch_shape != x.batch_shape for tensor in tensors):
        raise batch_error(function, x)
    loc = at_means(function, args, kwargs)
    check_batch_shape(function, x, loc.shape)
    args, kwargs = in_dtype((args, kwargs), loc.dtype)
    tensors = gaussians(args, kwargs)
    slots, named = without_constants(with_slots((args, kwargs)))
    terms: list[Term] = []
    for carrier in dict.fromkeys(tensor.carrier for tensor in tensors):
        linear = _linear_part(function, slots, named, carrier, loc)
        vector = torch.Size((*x.batch_shape, carrier.size))
        check_batch_is_separate(function, linear.function, x, vector)
        terms.append((carrier, linear))
    return GaussianTensor(loc, terms[0][0].sum(loc, terms, function))


def _linear_part(
    function: Callable[..., Any], slots: Any, named: Any, carrier: Carrier, like: Tensor
) -> LinearMap:
    """The function of one random vector (*batch, n), the others and all constants at zero."""
    dtype, device = like.dtype, like.device

    def of_vector(vector: Tensor) -> Tensor:
        def value(slot: Slot) -> Tensor:
            if slot.carrier is carrier:
                return vector.reshape(slot.shape)
            return torch.zeros(slot.shape, dtype=dtype, device=device)

        result: Tensor = function(*fill(slots, value), **fill(named, value))
        return result

    return LinearMap(of_vector, torch.Size((carrier.size,)))


def weighted_sum(loc: Tensor, terms: list[tuple[GaussianTensor, float]]) -> GaussianTensor:
    """sum_i w_i x_i of tensors of one shape, with the given mean."""
    weights: dict[Carrier, float] = {}
    for tensor, weight in in_dtype(terms, loc.dtype):
        weights[tensor.carrier] = weights.get(tensor.carrier, 0.0) + weight
    return GaussianTensor(loc, next(iter(weights)).sum(loc, list(weights.items()), torch.add))


@rule(*spellings("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack",
                 "row_stack", "column_stack"), kind=Kind.JOIN, treatment="exact",
      name="cat, stack, hstack, vstack, dstack, column_stack", batch=Batch.ANYWHERE)  # fmt: skip
def concatenate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Tensors side by side, with constants among them if there are any."""
    return join(function, args, kwargs)
