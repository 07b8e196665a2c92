"""Linear operations of plain tensors: movement, arithmetic, sums, products with constants."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from tests.rules.spelling import BATCH, LinearCase, const, layer, one, spelled, with_constant

TWO, THREE = (3, 4), (2, 3, 4)
MASK = torch.tensor([True, False, True, True])
"""Of the last dimension."""


def shapes() -> Iterator[LinearCase]:
    yield layer("flatten", TWO, nn.Flatten(-2))
    yield layer("flatten", THREE, nn.Flatten(), batch_only=True)
    yield from spelled("flatten", THREE, 1, single=(0,))
    yield from spelled("flatten", THREE, start_dim=-2, end_dim=-1)
    yield from spelled("reshape", TWO, (BATCH, 2, -1), single=((6, 2),))
    yield one("reshape", "unpacked", TWO, lambda x: x.reshape(x.shape[0], -1))
    yield from spelled("view", TWO, (BATCH, 2, -1), single=((6, 2),))
    yield one("view", "unpacked", TWO, lambda x: x.view(x.size(0), -1))
    yield layer("unflatten", (6,), nn.Unflatten(-1, (2, 3)))
    yield from spelled("unflatten", (6,), -1, (3, 2))
    yield from spelled("squeeze", (3, 1, 1), -2)
    yield one("squeeze", "all", (3, 1), lambda x: x.squeeze())
    yield one("squeeze", "in place", (3, 1), lambda x: x.clone().squeeze_(-1))
    yield from spelled("unsqueeze", TWO, -2)
    yield from spelled("unsqueeze", TWO, 1, single=(0,))
    yield one("unsqueeze", "in place", TWO, lambda x: x.clone().unsqueeze_(-1))
    yield from spelled("permute", TWO, (0, 2, 1), single=((1, 0),))
    yield one("permute", "unpacked", TWO, lambda x: x.permute(0, 2, 1), lambda x: x.permute(1, 0))
    yield from spelled("transpose swapaxes swapdims", THREE, -3, -1)
    yield one("transpose", "mT", TWO, lambda x: x.mT)
    yield one("transpose", "mH", TWO, lambda x: x.mH)
    for method in ("transpose_", "swapaxes_", "swapdims_"):
        yield one("transpose", method, TWO, lambda x, m=method: getattr(x.clone(), m)(-1, -2))
    yield one("t", "of the rows", TWO, lambda x: x[..., 0, :] + 0, torch.t)
    yield one("t", "method", TWO, lambda x: x[..., 0, :] + 0, lambda x: x.t())
    yield one("t", "in place", TWO, lambda x: x[..., 0, :] + 0, lambda x: x.clone().t_())
    yield one("t", "T", TWO, lambda x: x[..., 0, :] + 0, lambda x: x.T)
    yield one("t", "H", TWO, lambda x: x[..., 0, :] + 0, lambda x: x.H)
    yield from spelled("movedim moveaxis", THREE, (-1, -2), (-3, -1))
    yield one("ravel", "torch", TWO, lambda x: x.flatten(-2), torch.ravel)
    yield one("ravel", "method", TWO, lambda x: x.flatten(-2), lambda x: x.ravel())
    shape = torch.ones(BATCH, 2, 6)
    for method in ("view_as", "reshape_as"):
        yield one(method, "a constant", TWO, lambda x, m=method: getattr(x, m)(shape), None)
        yield one(method, "itself", TWO, lambda x, m=method: getattr(x.flatten(-2), m)(x))
    for name, event in {"atleast_1d": (), "atleast_2d": (3,), "atleast_3d": TWO}.items():
        call = getattr(torch, name)
        yield one(name, "one", event, call)
        yield one(name, "two", THREE, lambda x, call=call: call(x, x[..., 0]))


def moves() -> Iterator[LinearCase]:
    yield from spelled("flip", THREE, (-1, -3))
    yield from spelled("fliplr", TWO)
    yield one("flipud", "torch", TWO, lambda x: x.flip(-2), torch.flipud)
    yield one("flipud", "method", TWO, lambda x: x.flip(-2), lambda x: x.flipud())
    yield from spelled("rot90", THREE, 1, (-2, -1))
    yield from spelled("diagonal", THREE, 1, -2, -1)
    yield from spelled("roll", TWO, 2, -1)
    yield from spelled("roll", TWO, shifts=(1, -1), dims=(-2, -1))
    yield from spelled("broadcast_to", (3, 1), (BATCH, 3, 2), single=((3, 2),), operation="expand")
    yield one(
        "expand", "unpacked", (3, 1), lambda x: x.expand(BATCH, -1, 4), lambda x: x.expand(2, 3, 2)
    )
    yield one("expand", "as", (3, 1), lambda x: x.expand_as(torch.ones(BATCH, 3, 2)))
    yield one("expand_as", "another", TWO, lambda x: x[..., :1].expand_as(x))
    yield one("repeat", "unpacked", TWO, lambda x: x.repeat(1, 2, 3), lambda x: x.repeat(2, 1))
    yield from spelled("tile", TWO, (2, 2))
    yield from spelled("repeat_interleave", TWO, 2, dim=-1)
    yield from spelled("narrow", TWO, -1, 1, 2)
    yield from spelled("select", TWO, -2, 1)
    yield one("index_select", "torch", TWO, lambda x: torch.index_select(x, -1, _numbers(2, 0, 2)))
    yield one("index_select", "method", TWO, lambda x: x.index_select(-2, _numbers(1, 1)))
    yield one("masked_select", "torch", TWO, _every_other, lambda x: torch.masked_select(x, MASK))
    yield one("masked_select", "method", TWO, _every_other, lambda x: x.masked_select(MASK))
    yield from spelled("chunk unsafe_chunk", (5,), 2, -1)
    yield from spelled("split unsafe_split", (5,), 2, -1)
    yield from spelled("split_with_sizes unsafe_split_with_sizes", (5,), [2, 3], -1)
    yield from spelled("hsplit", TWO, 3, single=(2,))
    yield one("vsplit", "torch", TWO, _every_other, lambda x: torch.vsplit(x, [1]))
    yield one("vsplit", "method", TWO, _every_other, lambda x: x.vsplit(3))
    yield from spelled("dsplit", TWO, 2, single=None)
    yield from spelled("split", TWO, [1, 2], dim=-2)
    yield from spelled("tensor_split", (5,), 3, -1)
    yield from spelled("unbind", TWO, -2)


def _every_other(x: Any) -> Any:
    return x[..., ::2]


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def indices() -> Iterator[LinearCase]:
    mask = torch.tensor([True, False, True])
    for label, index in {
        "integer": (..., 1),
        "negative": (..., -1, slice(None)),
        "slice": (..., slice(1, 3)),
        "step": (..., slice(None, None, 2)),
        "new axis": (..., None, slice(2)),
        "list": (..., [0, 2, 2]),
        "mask": (..., mask, slice(None)),
        "tensor": (..., _numbers(3, 0, 1)),
        "pairs": (..., _numbers(0, 2), _numbers(3, 1)),
        "grid": (..., _numbers(0, 2)[:, None], _numbers(3, 1, 1)),
    }.items():
        yield one("__getitem__", label, TWO, lambda x, index=index: x[index])
    yield one("__getitem__", "after the batch", TWO, lambda x: x[:, 1:, [0, 3]], lambda x: x[1])


def sums() -> Iterator[LinearCase]:
    for name in ("sum", "mean"):
        yield from spelled(name, TWO, -1)
        yield from spelled(name, THREE, (-3, -1), keepdim=True)
        yield one(
            name,
            "all",
            TWO,
            lambda x, name=name: getattr(x, name)((1, 2)),
            lambda x, name=name: getattr(x, name)(),
        )

    yield from spelled("cumsum", TWO, -1)
    yield one("cumsum", "in place", TWO, lambda x: x.clone().cumsum_(dim=-2))
    yield from spelled("diff", TWO, 1, -1)
    yield from spelled("diff", TWO, n=2, dim=-1)
    ends = const(BATCH, 3, 1, offset=1e3)
    yield from spelled("diff", TWO, prepend=ends, append=ends, single=None)
    yield one("sum_to_size", "one", TWO, lambda x: x.sum_to_size(*x.shape[:-2], 3, 1))
    for name in ("tril", "triu"):
        yield from spelled(name, THREE, 1)
        yield one(name, "in place", TWO, lambda x, n=name: getattr(x.clone(), f"{n}_")())
    for index in (_numbers(3, 0, 3).expand(BATCH, 3, 3), _numbers(*range(12)).reshape(2, 3, 2) % 4):
        yield from spelled("gather", TWO, -1, index, single=(-1, index[0]))
        yield from spelled("take_along_dim", TWO, index, -1, single=(index[0], -1))


def products() -> Iterator[LinearCase]:
    name = "matmul"
    yield with_constant(name, "x @ matrix", TWO, (4, 2), lambda x, c: x @ c)
    yield with_constant(name, "matrix @ x", TWO, (2, 3), lambda x, c: c @ x)
    yield with_constant(name, "x @ vector", TWO, (4,), lambda x, c: x @ c)
    yield with_constant(name, "vector @ x", TWO, (3,), lambda x, c: c @ x)
    yield with_constant(name, "vectors @ matrix", (4,), (4, 2), lambda x, c: x @ c)
    yield with_constant(name, "torch", TWO, (4, 2), torch.matmul)
    yield with_constant(name, "torch, left", TWO, (2, 3), lambda x, c: torch.matmul(c, x))
    yield with_constant(name, "method", TWO, (4, 2), lambda x, c: x.matmul(c))
    yield with_constant(name, "method, left", TWO, (2, 3), lambda x, c: c.matmul(x))
    yield with_constant(name, "operator", TWO, (2, 3), lambda x, c: torch.Tensor.__matmul__(c, x))
    yield with_constant(name, "reflected", TWO, (4, 2), lambda x, c: torch.Tensor.__rmatmul__(c, x))
    right, left = const(4, 2), const(2, 3)
    for label, single in {
        "torch.mm": lambda x: torch.mm(x, right.like(x)),
        "torch.mm, left": lambda x: torch.mm(left.like(x), x),
        "method mm": lambda x: x.mm(right.like(x)),
        "torch.mv": lambda x: torch.mv(x, right.like(x)[:, 0]),
        "torch.mv, left": lambda x: torch.mv(left.like(x), x[:, 0]),
        "method mv": lambda x: x.mv(right.like(x)[:, 0]),
    }.items():
        yield one(name, label, TWO, lambda x: x.matmul(right.like(x)), single)
    stack = (BATCH, 4, 2)
    yield with_constant(name, "torch.bmm", TWO, stack, torch.bmm, alone=None)
    yield with_constant(name, "method bmm", TWO, stack, lambda x, c: x.bmm(c), alone=None)
    yield with_constant(name, "batch of matrices", TWO, stack, torch.matmul, alone=None)
    name = "einsum"
    for equation in ("...ij,jk->...ik", "...ij,jk->...ki", "...ij,ji->...", "...ij,jk->...ijk"):
        yield with_constant(
            name, equation, TWO, (4, 3), lambda x, c, e=equation: torch.einsum(e, x, c)
        )
    yield with_constant(
        name, "left", TWO, (2, 3), lambda x, c: torch.einsum("ki,...ij->...kj", c, x)
    )
    yield with_constant(
        name, "named batch", (4,), (4, 3), lambda x, c: torch.einsum("bi,ij->bj", x, c), alone=None
    )


def arithmetic() -> Iterator[LinearCase]:
    for shape in ((), (4,), (3, 1), (3, 4), (2, 1, 1)):
        yield with_constant("add, sub", "x + c", TWO, shape, lambda x, c: x + 1e3 * c)
        yield with_constant("add, sub", "c + x", TWO, shape, lambda x, c: 1e3 * c + x)
        yield with_constant("add, sub", "x - c", TWO, shape, lambda x, c: x - 1e3 * c)
        yield with_constant("add, sub", "c - x", TWO, shape, lambda x, c: 1e3 * c - x)
        yield with_constant("mul", "x * c", TWO, shape, lambda x, c: x * c)
        yield with_constant("mul", "c * x", TWO, shape, lambda x, c: c * x)
        yield with_constant("div", "x / c", TWO, shape, lambda x, c: x / c)
    column = (3, 1)
    yield with_constant("add, sub", "x widens", column, (4,), lambda x, c: x + c)
    yield with_constant("add, sub", "c - x widens", column, (4,), lambda x, c: c - x)
    yield with_constant("mul", "x widens", column, (4,), lambda x, c: c * x)
    yield with_constant("div", "x widens", column, (4,), lambda x, c: x / c)
    yield one("add, sub", "numbers", TWO, lambda x: 1e3 + (x - 2) + 0.5)
    yield one("add, sub", "number - x", TWO, lambda x: 1e3 - x)
    yield one("mul", "numbers", TWO, lambda x: 3 * x * -0.5)
    yield one("div", "number", TWO, lambda x: x / -3)
    yield from spelled("add sub subtract rsub", TWO, const(3, 4), operation="add, sub")
    yield from spelled("add sub subtract rsub", TWO, 2.0, alpha=3, operation="add, sub")
    yield with_constant("add, sub", "alpha, left", TWO, (4,), lambda x, c: torch.add(c, x, alpha=3))
    yield with_constant("add, sub", "alpha, left", TWO, (4,), lambda x, c: torch.sub(c, x, alpha=3))
    yield from spelled("mul multiply", TWO, const(3, 4))
    yield from spelled("div divide true_divide", TWO, const(3, 4))
    yield from spelled("neg negative", TWO)
    yield one("neg", "operator", TWO, lambda x: -x)
    in_place = {
        "add_": "add, sub",
        "sub_": "add, sub",
        "subtract_": "add, sub",
        "mul_": "mul",
        "multiply_": "mul",
        "div_": "div",
        "divide_": "div",
        "true_divide_": "div",
    }
    for method, operation in in_place.items():
        yield with_constant(
            operation, method, TWO, (3, 4), lambda x, c, m=method: getattr(x.clone(), m)(c)
        )
    for method in ("neg_", "negative_"):
        yield one("neg", method, TWO, lambda x, m=method: getattr(x.clone(), m)())
        yield one("neg", f"torch.{method}", TWO, lambda x, m=method: getattr(torch, m)(x.clone()))
    reflected = {"__radd__": "add, sub", "__rmul__": "mul"}
    for method, operation in reflected.items():
        call = getattr(torch.Tensor, method)
        yield with_constant(operation, method, TWO, (4,), lambda x, c, call=call: call(c, x))
    yield one("mul", "augmented", TWO, _augmented)


def _augmented(x: Any) -> Any:
    x = x.clone()
    x += 2
    x *= 3
    x -= 1e3
    x /= 7
    return x


def copies() -> Iterator[LinearCase]:
    yield from spelled("clone", TWO, operation="clone, contiguous")
    yield from spelled("positive", TWO)
    yield one("positive", "operator", TWO, lambda x: +x)
    yield one("clone, contiguous", "contiguous", TWO, lambda x: x.mT.contiguous())
    yield one("detach", "data", TWO, lambda x: x.data if isinstance(x, cp.GaussianTensor) else x)
    yield one(
        "detach", "method", TWO, lambda x: x.detach() if isinstance(x, cp.GaussianTensor) else x
    )
    yield one(
        "detach", "torch", TWO, lambda x: torch.detach(x) if isinstance(x, cp.GaussianTensor) else x
    )
    name = "to, type_as, float, double, cpu, cuda"
    yield one(name, "dtype", TWO, lambda x: x.to(x.dtype))
    yield one(name, "type", TWO, lambda x: x.type(x.dtype))
    yield one(name, "device", TWO, lambda x: x.to("cpu"))
    yield one(name, "tensor", TWO, lambda x: x.to(torch.ones(1, dtype=x.dtype)))
    yield one(name, "double", TWO, lambda x: x.double())
    yield one(name, "float", TWO, lambda x: x.float())
    yield one(name, "cpu", TWO, lambda x: x.cpu())
    yield one(name, "type_as", TWO, lambda x: x.type_as(torch.ones(1, dtype=x.dtype)))
    modules = nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout()
    for module in (*modules, nn.FeatureAlphaDropout()):
        batch_only = not isinstance(module, nn.Dropout | nn.AlphaDropout)
        event = TWO if isinstance(module, nn.Dropout1d) else THREE
        yield layer("dropout", event, module, batch_only=batch_only)
    yield one("dropout", "F", TWO, lambda x: F.dropout(x, 0.3, training=False))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        call = getattr(torch, name)
        yield one("dropout", f"torch.{name}", TWO, lambda x, call=call: call(x, 0.3, False))
    yield one("dropout", "p = 0", TWO, lambda x: F.dropout(x, p=0.0))
