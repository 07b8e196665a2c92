"""Operations on several tensors that vary: sums, concatenations and products.

The covariance of sum_i A_i x_i is sum_ij A_i Cov(x_i, x_j) A_j^T; tensors of one random vector are
one term, so that x - x is exactly zero, and tensors of different origin have no cross term.

For jointly Gaussian u, v (Isserlis):  E[u v] = m_u m_v + Cov(u, v)  and
Cov(u_i v_i, u_j v_j) = m_ui m_uj V_ij + m_ui m_vj C_ji + m_vi m_uj C_ij + m_vi m_vj U_ij
                        + U_ij V_ij + C_ij C_ji,     U = Cov(u, u), V = Cov(v, v), C = Cov(u, v).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import LinearMap
from covprop.flow.algebra import Contraction
from covprop.flow.batch_position import FIRST
from covprop.flow.carrier import Carrier, Term
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.rules.operands import (
    Slot,
    at_means,
    batch_error,
    check_batch_is_separate,
    check_batch_shape,
    fill,
    gaussians,
    in_dtype,
    promoted,
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


def product(u: GaussianTensor, v: GaussianTensor) -> GaussianTensor:
    """u * v, broadcast as torch does; exact moments if u and v are jointly Gaussian."""
    shape = torch.broadcast_shapes(u.shape, v.shape)
    if u.batch_shape != v.batch_shape or shape[: len(u.batch_shape)] != u.batch_shape:
        raise batch_error(torch.mul, u)
    u, v = (
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {})
        for x in promoted(u, v)
    )
    if u.batch_at != v.batch_at:  # broadcasting has taken a batch for another dimension
        raise batch_error(torch.mul, u)
    elementwise = Contraction.elementwise(u.batch_shape, u.event_shape.numel())
    mean, carrier = u.carrier.product(v.carrier, elementwise, u.flat, v.flat)
    return GaussianTensor(mean.reshape(shape), carrier)


def bilinear(
    first: list[int], second: list[int], out: list[int], u: GaussianTensor, v: GaussianTensor
) -> Any:
    """einsum(u, v) of two tensors that both vary, without writing out their products.

    To first order it is linear in u and v together; the second order is that of its contraction.
    """
    sizes = dict(zip(first, u.shape, strict=True))
    for label, size in zip(second, v.shape, strict=True):
        sizes[label] = max(size, sizes.get(label, 1))
    u, v = promoted(u, v)
    u, v = (
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {})
        for x, shape in (
            (u, torch.Size(sizes[label] for label in first)),
            (v, torch.Size(sizes[label] for label in second)),
        )
    )
    contract = _contraction(first, second, out, u, v)
    return GaussianTensor(*u.carrier.product(v.carrier, contract, u.loc, v.loc))


def _contraction(
    first: list[int], second: list[int], out: list[int], u: GaussianTensor, v: GaussianTensor
) -> Contraction:
    """What einsum does within each element of the batch."""
    count = len(u.batch_shape)
    batch = first[:count]
    behind = [labels[count:] for labels in (first, second, out)]
    if u.batch_shape != v.batch_shape or (u.batch_at, v.batch_at) != (FIRST, FIRST):
        raise batch_error(torch.einsum, u)
    if any(labels[:count] != batch for labels in (second, out)):
        raise batch_error(torch.einsum, u)
    if any(label in labels for labels in behind for label in batch):
        raise batch_error(torch.einsum, u)
    places = {label: place for place, label in enumerate(dict.fromkeys(behind[0] + behind[1]))}
    numbered = [tuple(places[label] for label in labels) for labels in behind]
    shapes = u.event_shape, v.event_shape
    return Contraction(u.batch_shape, numbered[0], numbered[1], numbered[2], shapes)


def matrix_product(u: Any, v: Any) -> Any:
    """u @ v of two tensors that both vary."""
    left = u.unsqueeze(-2) if u.dim() == 1 else u
    right = v.unsqueeze(-1) if v.dim() == 1 else v
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (
        x if x.shape[:-2] == lead else x.expand(*lead, *x.shape[-2:]) for x in (left, right)
    )
    a, k, b = (len(lead) + i for i in range(3))
    leading = list(range(len(lead)))
    result = bilinear([*leading, a, k], [*leading, k, b], [*leading, a, b], left, right)
    result = result.squeeze(-1) if v.dim() == 1 else result
    return result.squeeze(-2 if v.dim() > 1 else -1) if u.dim() == 1 else result


def labels_of(equation: str, ranks: Sequence[int]) -> list[list[int]]:
    """The labels of einsum's operands and of its result, an ellipsis written out."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    letters = sorted(set(inputs) - set(".,"))
    hidden = [
        rank - len(term) + 3 if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    if not arrow:
        result = "".join(letter for letter in letters if inputs.count(letter) == 1)
        result = f"...{result}" if any(hidden) else result

    def numbers(term: str, count: int) -> list[int]:
        before, dots, after = term.partition("...")
        last = len(letters) + max(hidden)
        within = list(range(last - count, last)) if dots else []
        return [*map(letters.index, before), *within, *map(letters.index, after)]

    operands = [numbers(*pair) for pair in zip(terms, hidden, strict=True)]
    return [*operands, numbers(result, max(hidden))]


@rule(F.glu, kind=Kind.PRODUCT, treatment="exact for jointly Gaussian factors", name="glu",
      batch=Batch.STEPWISE)  # fmt: skip
def gated(function: Callable[..., Any], input: Any, dim: int = -1) -> Any:
    """One half of the input times the sigmoid of the other."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)
