"""Products of two tensors that are known by their tangents.

For jointly Gaussian u, v:  E[u v] = m_u m_v + Cov(u, v), to first order d(uv) = m_v du + m_u dv.
What is beyond has the covariance of (u v' + u' v) / sqrt(2), (u', v') an independent copy, and is
shared with other nonlinearities of the same depth (`covariance.sketch.SharedSigns`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from covprop.covariance import Sketch
from covprop.covariance.innovation import Innovation
from covprop.covariance.sketch import Product, random_products
from covprop.lineage import Node
from covprop.methods import Sketched
from covprop.tensor import GaussianTensor


def sketched_product(
    u: GaussianTensor, v: GaussianTensor, a: Tensor, b: Tensor, shape: torch.Size
) -> GaussianTensor:
    """u * v, of one shape, with means a, b (*batch, n)."""
    first, second = _sketches(u, v)
    between = first.inner(second)
    linear = first.scale(b).added(second.scale(a))
    variance = first.diagonal() * second.diagonal() + between.square()
    edges = [(u.node, lambda c: b[..., None] * c), (v.node, lambda c: a[..., None] * c)]
    if _method(u).order == 1:
        covariance = linear.plus(variance)
    else:
        weight = torch.full_like(a, 1 / math.sqrt(2))
        products = Product(weight, first, second), Product(weight, second, first)
        pairs = tuple(product.pairs() for product in products)
        none, layout = torch.zeros_like(variance), products[0].layout()
        innovation = Innovation(variance, pairs, left=none, layout=layout)
        covariance = linear.innovated(innovation, random_products(products, _method(u).signs))
    return GaussianTensor((a * b + between).reshape(shape), Node(covariance, edges), u.lineage)


def sketched_contraction(
    u: GaussianTensor,
    v: GaussianTensor,
    linear: GaussianTensor,
    contract: Callable[[Tensor, Tensor], Tensor],
) -> GaussianTensor:
    """A bilinear function of u and v, given its linear part.

    What it has beyond is kept as random directions.
    """
    first, second = _sketches(u, v)
    batch = len(u.batch_shape)

    def of_rows(left: Tensor, right: Tensor) -> Tensor:
        sides = (left, u), (right, v)
        images = [rows.movedim(-2, 0).reshape(rows.shape[-2], *x.shape) for rows, x in sides]
        result = torch.func.vmap(contract)(*images)
        return result.flatten(1 + batch).movedim(0, -2)

    mean = contract(u.loc, v.loc)
    between = of_rows(first.rows(), second.rows()).sum(-2).reshape(mean.shape)
    begun = linear.covariance
    assert isinstance(begun, Sketch)
    weight = torch.full_like(begun.diagonal(), 1 / math.sqrt(2))
    there = Product(weight, first, second, of_rows)
    back = Product(weight, second, first, lambda right, left: of_rows(left, right))
    shared = random_products([there, back], _method(u).signs)
    none = torch.zeros_like(weight)
    if _method(u).order == 1:
        covariance = begun.plus(shared.square().sum(-2))
    else:
        covariance = begun.innovated(Innovation(none, columns=shared), shared)
    return GaussianTensor(mean + between, Node(covariance, linear.node.edges), u.lineage)


def _sketches(u: GaussianTensor, v: GaussianTensor) -> tuple[Sketch, Sketch]:
    assert isinstance(u.covariance, Sketch)
    assert isinstance(v.covariance, Sketch)
    return u.covariance.aligned(v.covariance), v.covariance.aligned(u.covariance)


def _method(u: GaussianTensor) -> Sketched:
    assert isinstance(u.method, Sketched)
    return u.method
