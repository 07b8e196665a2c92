"""Products of two tensors that both vary.

For jointly Gaussian u, v (Isserlis):  E[u v] = m_u m_v + Cov(u, v)  and
Cov(u_i v_i, u_j v_j) = m_ui m_uj V_ij + m_ui m_vj C_ji + m_vi m_uj C_ij + m_vi m_vj U_ij
                        + U_ij V_ij + C_ij C_ji,     U = Cov(u, u), V = Cov(v, v), C = Cov(u, v).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.covariance import Dense
from covprop.covariance.dense import symmetric
from covprop.dispatch import rule
from covprop.lineage import Node
from covprop.rules.operands import batch_error
from covprop.tensor import GaussianTensor, dispatch


def product(u: GaussianTensor, v: GaussianTensor) -> GaussianTensor:
    """u * v, broadcast as torch does; exact moments if u and v are jointly Gaussian."""
    shape = torch.broadcast_shapes(u.shape, v.shape)
    if u.batch_shape != v.batch_shape or shape[: len(u.batch_shape)] != u.batch_shape:
        raise batch_error(torch.mul, u)
    u, v = (
        x if x.shape == shape else dispatch(torch.Tensor.expand, (x, shape), {}) for x in (u, v)
    )
    a, b = _flat(u), _flat(v)
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
    return GaussianTensor(mean.reshape(shape), Node(Dense(symmetric(matrix)), edges), u.lineage)


def matrix_product(u: Any, v: Any) -> Any:
    """u @ v of two tensors that both vary: all products, then their sums."""
    left = u.unsqueeze(0) if u.dim() == 1 else u
    right = v.unsqueeze(-1) if v.dim() == 1 else v
    result = (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)
    result = result.squeeze(-1) if v.dim() == 1 else result
    return result.squeeze(-2 if v.dim() > 1 else -1) if u.dim() == 1 else result


@rule(F.glu, kind="products", treatment="exact for jointly Gaussian factors", name="glu")
def gated(function: Callable[..., Any], input: Any, dim: int = -1) -> Any:
    """One half of the input times the sigmoid of the other."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _flat(x: GaussianTensor) -> Tensor:
    return x.loc.reshape(*x.batch_shape, x.event_shape.numel())


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]
