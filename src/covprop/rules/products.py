"""Products of two tensors that both vary.

For jointly Gaussian u, v (Isserlis):  E[u v] = m_u m_v + Cov(u, v)  and
Cov(u_i v_i, u_j v_j) = m_ui m_uj V_ij + m_ui m_vj C_ji + m_vi m_uj C_ij + m_vi m_vj U_ij
                        + U_ij V_ij + C_ij C_ji,     U = Cov(u, u), V = Cov(v, v), C = Cov(u, v).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from covprop.flow.contraction import Contraction
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor, dispatch
from covprop.rules.operands import batch_error, promoted

Labels: TypeAlias = list[int]
"""The dimensions of a tensor as torch.einsum numbers them."""


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
    first: Labels, second: Labels, out: Labels, u: GaussianTensor, v: GaussianTensor
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
    first: Labels, second: Labels, out: Labels, u: GaussianTensor, v: GaussianTensor
) -> Contraction:
    """What einsum does within each element of the batch."""
    count = len(u.batch_shape)
    batch = first[:count]
    behind = [labels[count:] for labels in (first, second, out)]
    if u.batch_shape != v.batch_shape or u.batch_at or v.batch_at:
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


def labels_of(equation: str, ranks: Sequence[int]) -> list[Labels]:
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

    def numbers(term: str, count: int) -> Labels:
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
