"""Choices by a constant, and sums of a product, where one of the arguments varies or two do."""

from collections.abc import Iterator
from typing import Any

import torch

from tests.rules.spelling import BATCH, LinearCase, const, one, spelled, with_constant

EVENT = (3, 4)
MASK = torch.tensor([True, False, True, True])
ROWS = torch.tensor([[1, 0], [3, 2], [2, 0]])
OTHER, BIAS = const(3, 4, offset=1e3), const(4, offset=1e3)
SCALES: dict[str, Any] = {"beta": 0.5, "alpha": 3}


def choices() -> Iterator[LinearCase]:
    conditions = {"last": MASK, "first": MASK[:3, None], "batch": MASK[:BATCH, None, None]}
    for label, mask in conditions.items():
        for name, call in {
            "x": lambda x, c=mask: torch.where(c, x, OTHER.like(x)),
            "number": lambda x, c=mask: torch.where(c, 1e3, x),
            "method": lambda x, c=mask: x.where(c, 1e3),
            "a tensor's": lambda x, c=mask: OTHER.like(x).where(c, x),
            "both": lambda x, c=mask: torch.where(c, x, x.flip(-1)),
        }.items():
            yield one("where", f"{name}, {label}", EVENT, call)
        for name, call in {
            "torch": lambda x, c=mask: torch.masked_fill(x, c, 1e3),
            "method": lambda x, c=mask: x.masked_fill(c, value=2),
        }.items():
            yield one("masked_fill", f"{name}, {label}", EVENT, call)
    for place in (0, 1):
        yield one(
            "broadcast_tensors", f"{place}", EVENT,
            lambda x, i=place: torch.broadcast_tensors(x, x[..., :1], OTHER.like(x))[i],
        )  # fmt: skip
    yield one("where", "widens", (3, 1), lambda x: torch.where(MASK, x, OTHER.like(x)))
    yield one("masked_fill", "in place", EVENT, lambda x: x.clone().masked_fill_(MASK, 1e3))
    for weight in (0.3, const(3, 4)):
        yield from spelled("lerp", EVENT, OTHER, weight)
    yield with_constant("lerp", "end", EVENT, EVENT, lambda x, c: torch.lerp(c, x, 0.3))
    yield one("lerp", "both", EVENT, lambda x: torch.lerp(x, x.flip(-1), 0.3))
    yield one("lerp", "in place", EVENT, lambda x: x.clone().lerp_(OTHER.like(x), 0.3))


def placed() -> Iterator[LinearCase]:
    last = torch.tensor([2, 0])
    for name in ("index_add", "index_copy", "scatter", "scatter_add"):
        call, method = getattr(torch, name), f"{name}_"
        index = (lambda _: last) if name.startswith("index") else _rows
        for label, function in {
            "input": lambda x, f=call, at=index: f(x, -1, at(x), _whole(x)[..., 2:]),
            "source": lambda x, f=call, at=index: f(_whole(x), -1, at(x), x[..., 1:3]),
            "both": lambda x, f=call, at=index: f(x, -1, at(x), x[..., 1:3]),
            "in place": lambda x, m=method, at=index: getattr(x.clone(), m)(
                -1, at(x), _whole(x)[..., :2]
            ),
        }.items():
            yield one(name, label, EVENT, function)
    order = torch.tensor([2, 0, 3, 1])
    yield one("index_copy", "moves", EVENT, lambda x: _whole(x).index_copy(-1, order, x))
    yield one("index_add", "alpha", EVENT, lambda x: x.index_add(-1, order, _whole(x), alpha=3))
    yield one("masked_scatter", "input", EVENT, lambda x: x.masked_scatter(MASK, _whole(x)))
    yield one(
        "masked_scatter", "in place", EVENT, lambda x: x.clone().masked_scatter_(MASK, _whole(x))
    )
    yield one(
        "masked_scatter", "method of torch", EVENT,
        lambda x: torch.masked_scatter(x, MASK, source=_whole(x)),
    )  # fmt: skip
    at = (last.flip(0),)  # of the first dimension, where the batch is not
    for label, put in {
        "torch": torch.index_put,
        "method": torch.Tensor.index_put,
        "in place": lambda x, *args: x.clone().index_put_(*args),
        "in place, torch": lambda x, *args: torch.index_put_(x.clone(), *args),
    }.items():
        yield one(
            "index_put", label, EVENT,
            lambda x, put=put: put(x.movedim(-1, 0), at, x.movedim(-1, 0)[2:] * 2).movedim(0, -1),
        )  # fmt: skip
    yield one("copy_", "Gaussian", EVENT, lambda x: _changed(x, lambda x, y: x.copy_(y.flip(-1))))
    yield one("copy_", "a row", EVENT, lambda x: _changed(x, lambda x, y: x.copy_(y[..., :1])))
    for label, change in {
        "number": lambda x, _: x.__setitem__((..., 1), 3.0),
        "Gaussian": lambda x, y: x.__setitem__((..., slice(1, 3)), y[..., 2:]),
        "broadcast": lambda x, y: x.__setitem__((..., last), y[..., :1]),
        "mask": lambda x, y: x.__setitem__((..., MASK), 2 * y[..., 1:]),
    }.items():
        yield one("__setitem__", label, EVENT, lambda x, change=change: _changed(x, change))


def _changed(x: Any, change: Any) -> Any:
    y = x * 2
    change(y, x)
    return y


def _rows(x: Any) -> torch.Tensor:
    return ROWS.expand(*x.shape[:-2], 3, 2)


def _whole(x: Any) -> torch.Tensor:
    return OTHER.like(x).expand(x.shape)


def fused_elementwise() -> Iterator[LinearCase]:
    for name in ("addcmul", "addcdiv"):
        call, method = getattr(torch, name), f"{name}_"
        yield from spelled(name, EVENT, const(3, 4), const(3, 4), value=0.3)
        for label, function in {
            "factor": lambda x, c, call=call: call(1e3 * c, x, c, value=3),
            "in place": lambda x, c, method=method: getattr(x.clone(), method)(c, c),
        }.items():
            yield with_constant(name, label, EVENT, EVENT, function)
    yield with_constant("addcmul", "last", EVENT, EVENT, lambda x, c: torch.addcmul(1e3 * c, c, x))


def fused_matrices() -> Iterator[LinearCase]:
    left, right, vector = const(3, 2), const(2, 4), const(2)
    for label, call in {
        "torch": lambda x: torch.addmm(x, left.like(x), right.like(x), **SCALES),
        "method": lambda x: x.addmm(left.like(x), right.like(x)),
        "in place": lambda x: x.clone().addmm_(left.like(x), right.like(x)),
        "first": lambda x: torch.addmm(BIAS.like(x)[:2], x, right.like(x).mT, **SCALES),
        "second": lambda x: torch.addmm(BIAS.like(x), left.like(x).mT, x, **SCALES),
    }.items():
        yield one("addmm", label, EVENT, _of_stacks, call)
    yield one(
        "addmm", "rows", (4,), lambda x: torch.addmm(BIAS.like(x)[:2], x, right.like(x).mT), None
    )
    for label, call in {
        "torch": lambda x: torch.addmv(x[:, 0], left.like(x), vector.like(x), **SCALES),
        "method": lambda x: x[:, 0].addmv(left.like(x), vector.like(x)),
        "in place": lambda x: x[:, 0].clone().addmv_(left.like(x), vector.like(x)),
        "torch, in place": lambda x: torch.addmv_(x[:, 0].clone(), left.like(x), vector.like(x)),
        "matrix": lambda x: torch.addmv(BIAS.like(x)[:3], x, BIAS.like(x)),
    }.items():
        yield one("addmv", label, EVENT, _of_stacks, call)
    for label, call in {
        "torch": lambda x: torch.baddbmm(x, _stack(left, x), _stack(right, x), **SCALES),
        "method": lambda x: x.baddbmm(_stack(left, x), _stack(right, x)),
        "in place": lambda x: x.clone().baddbmm_(_stack(left, x), _stack(right, x)),
    }.items():
        yield one("baddbmm", label, EVENT, call, None)
    yield one("baddbmm", "first", EVENT, _of_stacks, None)


def _stack(constant: Any, x: Any) -> Any:
    """Another matrix for each element of the batch."""
    return constant.like(x) * torch.arange(1, BATCH + 1)[:, None, None]


def _of_stacks(x: Any) -> Any:
    return torch.baddbmm(BIAS.like(x)[:2], x, _stack(const(4, 2), x), **SCALES)
