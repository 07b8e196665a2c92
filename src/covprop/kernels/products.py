"""Products of matrices, and slices of third cumulants from their factors: compiled, or in torch."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from covprop.kernels import compiled

FACTORS = 4
"""Factors of a block of third cumulants: e, w, q and r."""
FORMED = 2**20
"""Numbers of products of factors that torch forms at a time."""
COMPILED = 2**13
"""Numbers of a matrix from which the compiled product is the faster one."""


class _Product(ctypes.Structure):
    """`Product` of products.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "rows", "terms", "columns")),
        ("a", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("a_batch", "a_row", "a_term")),
        ("b", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("b_batch", "b_row")),
        ("c", ctypes.c_void_p),
    )


class _Factors(ctypes.Structure):
    """`Factors` of products.h."""

    _fields_ = (("data", ctypes.c_void_p), ("n", ctypes.c_int64), ("batch", ctypes.c_int64))


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """A B of A (*batch, m, k) and B (*batch, k, n), or one B (k, n) for all."""
    if left.numel() < COMPILED or right.numel() < COMPILED or not compiled.usable(left, right):
        return left @ right
    *batch, rows, terms = left.shape
    columns = right.shape[-1]
    a = left.reshape(-1, rows, terms)
    if right.dim() == 2:  # noqa: PLR2004
        b = right.expand(len(a), terms, columns)
    else:
        b = right.expand(*batch, terms, columns).reshape(-1, terms, columns)
    b = b if b.stride(-1) == 1 else b.contiguous()
    result = torch.empty((*batch, rows, columns), dtype=left.dtype)
    call = _Product(
        len(a), rows, terms, columns, a.data_ptr(), *a.stride(),
        b.data_ptr(), *b.stride()[:2], result.data_ptr(),
    )  # fmt: skip
    compiled.function("product", result)(ctypes.byref(call), compiled.threads(left.numel()))
    return result


def slices_of(one: Tensor, two: Tensor, three: Tensor, counting: Tensor | None = None) -> Tensor:
    """T(x_i, y_i, z_j) from factors (*batch, 4, count, n), times a number of each column."""
    if two is one and counting is None and compiled.usable(one, three):
        return _compiled_slices(one, three)
    count, step = one.shape[-2], columns_at_a_time(one, two, three)
    total: Tensor | None = None
    for start in range(0, count, step):
        some = slice(start, start + step)
        x, z = one[..., some, :], three[..., some, :]
        partners = x if two is one else two[..., some, :]
        share = _slices(x, partners, z, None if counting is None else counting[some])
        total = share if total is None else total.add_(share)
    assert total is not None
    return total


def columns_at_a_time(*factors: Tensor) -> int:
    """Columns of factors (*batch, 4, count, n) to take at a time; all if autograd follows them."""
    first = factors[0]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in factors):
        return first.shape[-2]
    return max(1, FORMED * first.shape[-2] // max(1, first.numel()))


def _slices(one: Tensor, two: Tensor, three: Tensor, counting: Tensor | None) -> Tensor:
    (e, w, q, r), (e2, w2, q2, r2) = one.unbind(-3), two.unbind(-3)
    if two is one:
        left = [torch.addcmul(w * q, r, e, value=2), e * q, e * w, e * e]
    else:
        left = [
            (w * q2 + q * w2) / 2 + r * e2 + e * r2,
            (e * q2 + q * e2) / 2,
            (e * w2 + w * e2) / 2,
            e * e2,
        ]
    products = torch.stack(left, dim=-3)
    products = products if counting is None else products * counting
    return products.flatten(-3, -2).mT @ three.flatten(-3, -2)


def _compiled_slices(one: Tensor, three: Tensor) -> Tensor:
    """The same of x = y, in one pass."""
    batch = torch.broadcast_shapes(one.shape[:-3], three.shape[:-3])
    x, z = (t.expand(*batch, *t.shape[-3:]).contiguous() for t in (one, three))
    count, n = x.shape[-2:]
    result = torch.empty((*batch, n, z.shape[-1]), dtype=x.dtype)
    given = (_Factors(t.data_ptr(), t.shape[-1], FACTORS * count * t.shape[-1]) for t in (x, z))
    arguments: list[Any] = [ctypes.byref(factors) for factors in given]
    compiled.function("slices", result)(
        ctypes.c_int64(batch.numel()), ctypes.c_int64(count), *arguments,
        ctypes.c_void_p(result.data_ptr()), compiled.threads(x.numel()),
    )  # fmt: skip
    return result
