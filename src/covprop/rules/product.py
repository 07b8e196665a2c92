"""Products of two tensors that both vary.

For jointly Gaussian u, v (Isserlis):  E[u v] = m_u m_v + Cov(u, v)  and
Cov(u_i v_i, u_j v_j) = m_ui m_uj V_ij + m_ui m_vj C_ji + m_vi m_uj C_ij + m_vi m_vj U_ij
                        + U_ij V_ij + C_ij C_ji,     U = Cov(u, u), V = Cov(v, v), C = Cov(u, v).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.covariance import Dense, Diagonal, Sketch
from covprop.covariance.base import symmetric
from covprop.dispatch import Batch, rule
from covprop.lineage import Node
from covprop.rules.join import join
from covprop.rules.operands import batch_error
from covprop.rules.sketched import sketched_contraction, sketched_product
from covprop.tensor import GaussianTensor, dispatch

Labels: TypeAlias = list[int]
"""The dimensions of a tensor as torch.einsum numbers them."""


def product(u: GaussianTensor, v: GaussianTensor) -> GaussianTensor:
    """u * v, broadcast as torch does; exact moments if u and v are jointly Gaussian."""
    shape = torch.broadcast_shapes(u.shape, v.shape)
    if u.batch_shape != v.batch_shape or shape[: len(u.batch_shape)] != u.batch_shape:
        raise batch_error(torch.mul, u)
    u, v = (
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {}) for x in (u, v)
    )
    if u.batch_at != v.batch_at:  # broadcasting has taken a batch for another dimension
        raise batch_error(torch.mul, u)
    a, b = _flat(u), _flat(v)
    if u.method.variances_only:
        return _independent_product(u, v, a, b, shape)
    if isinstance(u.covariance, Sketch) and isinstance(v.covariance, Sketch):
        return sketched_product(u, v, a, b, shape)
    first, second = u.covariance.matrix(), v.covariance.matrix()
    cross = u.cross_covariance(v)
    matrix = _outer(a, a) * second + _outer(b, b) * first + first * second
    mean = a * b
    if cross is not None:
        mixed = _outer(b, a) * cross
        matrix = matrix + mixed + mixed.mT + cross * cross.mT
        mean = mean + cross.diagonal(dim1=-2, dim2=-1)
    edges = [
        (u.node, lambda c: b[..., None] * c),
        (v.node, lambda c: a[..., None] * c),
    ]
    node = Node(Dense(symmetric(matrix)), edges, factors=(a, b))
    return GaussianTensor(mean.reshape(shape), node, u.lineage)


def _independent_product(
    u: GaussianTensor, v: GaussianTensor, a: Tensor, b: Tensor, shape: torch.Size
) -> GaussianTensor:
    """The variances alone; only a tensor with itself is not independent of it."""
    first, second = u.covariance.diagonal(), v.covariance.diagonal()
    values, mean = a.square() * second + b.square() * first + first * second, a * b
    if u.node is v.node:
        values, mean = values + 2 * a * b * first + first * second, mean + first
    edges = [
        (u.node, lambda c: b[..., None] * c),
        (v.node, lambda c: a[..., None] * c),
    ]
    node = Node(Diagonal(values, assumed=True), edges)
    return GaussianTensor(mean.reshape(shape), node, u.lineage)


def bilinear(
    first: Labels, second: Labels, out: Labels, u: GaussianTensor, v: GaussianTensor
) -> Any:
    """einsum(u, v) of two tensors that both vary, without writing out their products.

    To first order it is linear in u and v together. The second order is two contractions:
    sum_kl U_(ak,cl) V_(kb,ld) + C_(ak,ld) C_(cl,kb)  for  sum_k u_ak v_kb.
    """
    batch = u.batch_shape
    sizes = dict(zip(first, u.shape, strict=True))
    for label, size in zip(second, v.shape, strict=True):
        sizes[label] = max(size, sizes.get(label, 1))
    u, v = (
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {})
        for x, shape in (
            (u, torch.Size(sizes[label] for label in first)),
            (v, torch.Size(sizes[label] for label in second)),
        )
    )
    leading = [labels[: len(batch)] for labels in (first, second, out)]
    if u.batch_shape != v.batch_shape or leading[0] != leading[1] or leading[0] != leading[2]:
        raise batch_error(torch.einsum, u)
    if u.batch_at or v.batch_at:
        raise batch_error(torch.einsum, u)
    left, right = u.loc, v.loc

    def contract(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(x, first, y, second, out)

    linear = join(lambda x, y: contract(x, right) + contract(left, y), (u, v), {})
    if u.method.variances_only:
        spread = [x.covariance.diagonal().reshape(x.shape) for x in (u, v)]
        parts = contract(spread[0], right.square()) + contract(left.square(), spread[1])
        values = (parts + contract(*spread)).reshape(linear.covariance.diagonal().shape)
        node = Node(Diagonal(values, assumed=True), linear.node.edges)
        return GaussianTensor(contract(left, right), node, u.lineage)
    if isinstance(linear.covariance, Sketch):
        return sketched_contraction(u, v, linear, contract)
    shift = 1 + max(first + second)

    def again(labels: Labels) -> Labels:
        """Labels of a second copy, within the same element of the batch."""
        return [label + shift for label in labels[len(batch) :]]

    def block(x: GaussianTensor, y: GaussianTensor, matrix: Tensor) -> Tensor:
        return matrix.reshape(*batch, *x.event_shape, *y.event_shape)

    spread = [block(x, x, x.covariance.matrix()) for x in (u, v)]
    both = out + again(out)
    added = torch.einsum(spread[0], first + again(first), spread[1], second + again(second), both)
    mean = contract(left, right)
    cross = u.cross_covariance(v)
    if cross is not None:
        between = block(u, v, cross)
        turned = again(first) + second[len(batch) :]
        added = added + torch.einsum(
            between, first + again(second), between, first[: len(batch)] + turned, both
        )
        mean = mean + torch.einsum(between, first + second[len(batch) :], out)
    matrix = linear.covariance.matrix() + added.reshape(linear.covariance.matrix().shape)
    node = Node(Dense(symmetric(matrix)), linear.node.edges)
    return GaussianTensor(mean, node, u.lineage)


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


@rule(F.glu, kind="products", treatment="exact for jointly Gaussian factors", name="glu",
      batch=Batch.STEPWISE)  # fmt: skip
def gated(function: Callable[..., Any], input: Any, dim: int = -1) -> Any:
    """One half of the input times the sigmoid of the other."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _flat(x: GaussianTensor) -> Tensor:
    return x.loc.reshape(*x.batch_shape, x.event_shape.numel())


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]
