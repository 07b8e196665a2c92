"""Products of two tensors that both vary.

For jointly Gaussian u, v (Isserlis):  E[u v] = m_u m_v + Cov(u, v)  and
Cov(u_i v_i, u_j v_j) = m_ui m_uj V_ij + m_ui m_vj C_ji + m_vi m_uj C_ij + m_vi m_vj U_ij
                        + U_ij V_ij + C_ij C_ji,     U = Cov(u, u), V = Cov(v, v), C = Cov(u, v).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.contraction import Contraction
from covprop.covariance import Dense, Diagonal, Sketch
from covprop.covariance.base import symmetric, without_negative_variances
from covprop.dispatch import Batch, rule
from covprop.lineage import Node, SecondOrder, Transfer
from covprop.rules.join import join
from covprop.rules.operands import batch_error, promoted
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
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {})
        for x in promoted(u, v)
    )
    if u.batch_at != v.batch_at:  # broadcasting has taken a batch for another dimension
        raise batch_error(torch.mul, u)
    a, b = _flat(u), _flat(v)
    if u.method.variances_only:
        return _independent_product(u, v, a, b, shape)
    if isinstance(u.covariance, Sketch) and isinstance(v.covariance, Sketch):
        return sketched_product(u, v, a, b, shape)
    u.expect(u.loc)
    first, second = u.covariance.matrix(), v.covariance.matrix()
    cross = u.cross_covariance(v)
    linear, mean = _outer(a, a) * second + _outer(b, b) * first, a * b
    if cross is not None:
        mixed = _outer(b, a) * cross
        linear = linear + mixed + mixed.mT
        mean = mean + cross.diagonal(dim1=-2, dim2=-1)
    edges = [
        (u.node, lambda c: b[..., None] * c),
        (v.node, lambda c: a[..., None] * c),
    ]
    products = SecondOrder((u.node, v.node), Contraction.elementwise(a.shape[:-1], a.shape[-1]))
    node = _with_products(products, linear, cross, edges)
    assert node.covariance is not None
    # Where the two slopes cancel, what is left of them is rounding.
    node.covariance = without_negative_variances(
        node.covariance, lambda: a.square() * _variance(second) + b.square() * _variance(first)
    )
    return GaussianTensor(mean.reshape(shape), node, u.lineage)


def _with_products(
    products: SecondOrder,
    linear: Tensor,
    cross: Tensor | None,
    edges: Iterable[tuple[Node, Transfer]],
) -> Node:
    """Add the second order to the covariance of what is linear in two tensors."""
    first, second = products.parents
    assert first.covariance is not None
    assert second.covariance is not None
    crosses = (
        (first.covariance.matrix(), cross),
        (None if cross is None else cross.mT, second.covariance.matrix()),
    )
    added = products.contraction.covariance(products.contraction, crosses)
    matrix = linear if added is None else linear + added
    return Node(Dense(symmetric(matrix)), edges, products=products)


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

    To first order it is linear in u and v together; the second order is that of its contraction.
    """
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
    contract = _contraction(first, second, out, u, v)
    left, right = u.loc, v.loc
    linear = join(lambda x, y: contract(x, right) + contract(left, y), (u, v), {})
    if u.method.variances_only:
        spread = [x.covariance.diagonal().reshape(x.shape) for x in (u, v)]
        parts = contract(spread[0], right.square()) + contract(left.square(), spread[1])
        values = (parts + contract(*spread)).reshape(linear.covariance.diagonal().shape)
        node = Node(Diagonal(values, assumed=True), linear.node.edges)
        return GaussianTensor(contract(left, right), node, u.lineage)
    if isinstance(linear.covariance, Sketch):
        return sketched_contraction(u, v, linear, contract)
    mean, cross = contract(left, right), u.cross_covariance(v)
    if cross is not None:
        mean = mean + contract.expectation(cross)
    products = SecondOrder((u.node, v.node), contract)
    node = _with_products(products, linear.covariance.matrix(), cross, linear.node.edges)
    return GaussianTensor(mean, node, u.lineage)


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


@rule(F.glu, kind="products", treatment="exact for jointly Gaussian factors", name="glu",
      batch=Batch.STEPWISE)  # fmt: skip
def gated(function: Callable[..., Any], input: Any, dim: int = -1) -> Any:
    """One half of the input times the sigmoid of the other."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _flat(x: GaussianTensor) -> Tensor:
    return x.loc.reshape(*x.batch_shape, x.event_shape.numel())


def _variance(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]
