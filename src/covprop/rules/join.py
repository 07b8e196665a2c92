"""Operations that join tensors: sums, differences, concatenation, stacking.

The covariance of sum_i A_i x_i is sum_ij A_i Cov(x_i, x_j) A_j^T; tensors of one random vector are
one term, so that x - x is exactly zero, and tensors of different origin have no cross term.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from covprop.activations import spellings
from covprop.covariance import Dense, Diagonal, LinearMap, Sketch
from covprop.covariance.base import symmetric
from covprop.dispatch import Batch, rule
from covprop.errors import InconsistentBranches, name_of
from covprop.lineage import Node, Transfer
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
from covprop.tensor import GaussianTensor
from covprop.transfers import Times

INCONSISTENT = 1e-3
"""A variance below minus this part of what was joined is no rounding."""
ROUNDING = 8.0
"""In units of machine epsilon: what rounding leaves of variances that cancel."""


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
    x.expect(loc)
    args, kwargs = in_dtype((args, kwargs), loc.dtype)
    tensors = gaussians(args, kwargs)
    slots, named = without_constants(with_slots((args, kwargs)))
    terms = [
        (node, _linear_part(function, slots, named, node, loc))
        for node in dict.fromkeys(tensor.node for tensor in tensors)
    ]
    edges = [(node, _transfer(linear)) for node, linear in terms]
    if x.method.variances_only:
        values = torch.zeros((), dtype=loc.dtype, device=loc.device)
        for node, linear in terms:
            assert node.covariance is not None
            values = values + linear.variances(node.covariance.diagonal())
        return GaussianTensor(loc, Node(Diagonal(values, assumed=True), edges), x.lineage)
    for node, linear in terms:
        assert node.covariance is not None
        vector = torch.Size((*x.batch_shape, node.covariance.size))
        check_batch_is_separate(function, linear.function, x, vector)
    if isinstance(x.covariance, Sketch):
        return GaussianTensor(loc, Node(_sketched(terms), edges), x.lineage)
    matrix: Tensor | None = None
    size = torch.zeros((), dtype=loc.dtype, device=loc.device)
    for i, (node, linear) in enumerate(terms):
        assert node.covariance is not None
        own = node.covariance.push(linear).matrix()
        size = size + own.diagonal(dim1=-2, dim2=-1)
        matrix = own if matrix is None else matrix + own
        for other, second in terms[:i]:
            cross = x.lineage.cross(node, other)
            if cross is not None:
                half = linear(second(cross).mT)
                matrix = matrix + (half + half.mT)
    assert matrix is not None
    node = _consistent(function, symmetric(matrix), size, edges)
    return GaussianTensor(loc, node, x.lineage)


def _sketched(terms: Sequence[tuple[Node, LinearMap]]) -> Sketch:
    """Tangents add, and their dependence with them."""
    parts = []
    for node, linear in terms:
        assert isinstance(node.covariance, Sketch)
        parts.append(node.covariance.push(linear))
    return reduce(Sketch.added, parts)


def _weighted(node: Node, weight: float) -> Sketch:
    assert isinstance(node.covariance, Sketch)
    return node.covariance.map(lambda rows: weight * rows)


def _linear_part(
    function: Callable[..., Any], slots: Any, named: Any, node: Node, like: Tensor
) -> LinearMap:
    """The function of one random vector (*batch, n), the others and all constants at zero."""
    dtype, device = like.dtype, like.device

    def of_vector(vector: Tensor) -> Tensor:
        def value(slot: Slot) -> Tensor:
            if slot.node is node:
                return vector.reshape(slot.shape)
            return torch.zeros(slot.shape, dtype=dtype, device=device)

        result: Tensor = function(*fill(slots, value), **fill(named, value))
        return result

    assert node.covariance is not None
    return LinearMap(of_vector, torch.Size((node.covariance.size,)))


def _transfer(linear: LinearMap) -> Callable[[Tensor], Tensor]:
    return lambda cross: linear(cross.mT).mT


def weighted_sum(loc: Tensor, terms: list[tuple[GaussianTensor, float]]) -> GaussianTensor:
    """sum_i w_i x_i of tensors of one shape, with the given mean."""
    x = terms[0][0]
    x.expect(loc)
    terms = in_dtype(terms, loc.dtype)
    weights: dict[Node, float] = {}
    for tensor, weight in terms:
        weights[tensor.node] = weights.get(tensor.node, 0.0) + weight
    edges = [(node, Times(weight)) for node, weight in weights.items()]
    matrix = torch.zeros((), dtype=loc.dtype, device=loc.device)
    size = matrix
    nodes = list(weights)
    if x.method.variances_only:
        for node in nodes:
            size = size + weights[node] ** 2 * node.covariance.diagonal()  # type: ignore[union-attr]
        return GaussianTensor(loc, Node(Diagonal(size, assumed=True), edges), x.lineage)
    if isinstance(x.covariance, Sketch):
        sketches = [_weighted(node, weight) for node, weight in weights.items()]
        return GaussianTensor(loc, Node(reduce(Sketch.added, sketches), edges), x.lineage)
    for i, node in enumerate(nodes):
        assert node.covariance is not None
        matrix = matrix + weights[node] ** 2 * node.covariance.matrix()
        size = size + weights[node] ** 2 * node.covariance.diagonal()
        for other in nodes[:i]:
            cross = x.lineage.cross(node, other)
            if cross is not None:
                matrix = matrix + weights[node] * weights[other] * (cross + cross.mT)
    return GaussianTensor(loc, _consistent(torch.add, matrix, size, edges), x.lineage)


def _consistent(
    function: Callable[..., Any],
    matrix: Tensor,
    size: Tensor,
    edges: Sequence[tuple[Node, Transfer]],
) -> Node:
    """The random vector of a sum, of which `size` are the variances of the terms, added up.

    Cross-covariances are approximate beyond one activation: they must not outweigh the rest. An
    element that differs from zero by the rounding of its terms alone is zero, which only its
    gradient does not tell, and so are its covariances with others. So is a variance below zero to
    which no cross-covariance adds, or that is rounding of the largest one.
    """
    variance, size = matrix.detach().diagonal(dim1=-2, dim2=-1), size.detach()
    scale, epsilon = size.clamp(min=0), torch.finfo(matrix.dtype).eps
    below = (variance != size) & (variance < -INCONSISTENT * scale) & (scale > 0)
    if bool(below.any()):
        below &= variance < -epsilon * scale.shape[-1] * scale.amax(-1, keepdim=True)
    if bool(below.any()):
        raise InconsistentBranches(
            f"{name_of(function)} joins branches whose dependence is known too roughly here: a "
            "variance comes out negative; use smaller noise, or sampling"
        )
    gone = (variance <= ROUNDING * epsilon * scale) & ((variance != 0) | (scale > 0))
    if not bool(gone.any()):
        return Node(Dense(matrix), edges)
    zeroed = torch.where(gone[..., :, None] | gone[..., None, :], matrix - matrix.detach(), matrix)
    return Node(Dense(zeroed), [(node, _without(gone, transfer)) for node, transfer in edges])


def _without(rows: Tensor, transfer: Transfer) -> Transfer:
    """A transfer whose result is zero in some rows, which only its gradient does not tell."""

    def zeroed(cross: Tensor) -> Tensor:
        share = transfer(cross)
        return torch.where(rows[..., None], share - share.detach(), share)

    return zeroed


@rule(*spellings("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack",
                 "row_stack", "column_stack"), kind="joining", treatment="exact",
      name="cat, stack, hstack, vstack, dstack, column_stack", batch=Batch.ANYWHERE)  # fmt: skip
def concatenate(function: Callable[..., Any], *args: Any, **kwargs: Any) -> GaussianTensor:
    """Tensors side by side, with constants among them if there are any."""
    return join(function, args, kwargs)
