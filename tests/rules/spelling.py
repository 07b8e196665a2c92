"""How a case of a linear operation is written: one line for all spellings of a function."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.registry import rule_of

BATCH = 2


@dataclass(frozen=True)
class LinearCase:
    """A function of a tensor (BATCH, *event), and the same of one event where torch has it."""

    operation: str
    """The row of the table of operations."""
    label: str
    function: Callable[[Any], Any]
    event: tuple[int, ...]
    single: Callable[[Any], Any] | None
    alias: bool = False
    """Another name of the function of the case before it, which has the same rule."""


@dataclass(frozen=True, eq=False)
class Layer:
    """An evaluation-mode layer in the dtype of its input."""

    modules: dict[torch.dtype, nn.Module]

    def __call__(self, x: Any) -> Any:
        return self.modules[x.dtype](x)


def SAME(x: Any) -> Any:
    """Mark: a single event takes the function of the batch."""
    raise NotImplementedError(x)


def one(
    operation: str,
    label: str,
    event: tuple[int, ...],
    function: Callable[[Any], Any],
    single: Callable[[Any], Any] | None = SAME,
) -> LinearCase:
    single = function if single is SAME else single
    return LinearCase(operation, f"{operation}: {label}", function, event, single)


def layer(operation: str, event: tuple[int, ...], module: nn.Module, *, batch_only: bool = False):
    """A case for a torch.nn layer with parameters and buffers that are not special."""
    generator = torch.Generator().manual_seed(len(event))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                values = torch.rand(tensor.shape, generator=generator) + 0.5
                tensor.copy_(values * torch.randn(tensor.shape, generator=generator).sign())
        for norm in module.modules():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                norm.running_var.abs_()
    module = module.eval().requires_grad_(requires_grad=False)
    modules = {torch.float32: module, torch.float64: copy.deepcopy(module).double()}
    function = Layer(modules)
    return one(operation, repr(module), event, function, None if batch_only else SAME)


def spelled(
    names: str,
    event: tuple[int, ...],
    *args: Any,
    single: tuple[Any, ...] | None = (),
    operation: str | None = None,
    **kwargs: Any,
) -> Iterator[LinearCase]:
    """A case for each of torch.name, Tensor.name and F.name that exists.

    single: the arguments for one event, () if the same, None if torch has no such thing.
    """
    known = {}
    for name in names.split():
        for home in (torch, F, torch.Tensor):
            if not hasattr(home, name):
                continue
            body = rule_of(getattr(home, name))
            alias = body is not None and body in known.values()
            known[home, name] = body
            where = {torch: "torch", F: "F", torch.Tensor: "Tensor"}[home]

            def call(arguments, home=home, name=name):
                if home is torch.Tensor:
                    return lambda x: getattr(x, name)(*made(arguments, x), **made(kwargs, x))
                return lambda x: getattr(home, name)(x, *made(arguments, x), **made(kwargs, x))

            alone = None if single is None else call(single or args)
            label = f"{where}.{name}{args}{kwargs or ''}"
            case = one(operation or names.split()[0], label, event, call(args), alone)
            yield replace(case, alias=alias)


@dataclass(frozen=True)
class Constant:
    """A tensor of fixed numbers in the dtype of the input, far from zero and from each other."""

    shape: tuple[int, ...]
    offset: float = 0.0

    def like(self, x: Any) -> Tensor:
        numbers = torch.arange(math.prod(self.shape), dtype=x.dtype)
        return (torch.cos(2 * numbers + 1) * 2 + self.offset).reshape(self.shape)


def const(*shape: int, offset: float = 0.0) -> Constant:
    return Constant(shape, offset)


def made(nest: Any, x: Any) -> Any:
    """Arguments with each constant made for x."""
    if isinstance(nest, Constant):
        return nest.like(x)
    if isinstance(nest, list | tuple):
        return type(nest)([made(item, x) for item in nest])
    if isinstance(nest, dict):
        return {key: made(item, x) for key, item in nest.items()}
    return nest


def with_constant(
    operation: str,
    label: str,
    event: tuple[int, ...],
    shape: tuple[int, ...],
    function: Callable[[Any, Tensor], Any],
    alone: Callable[[Any], Any] | None = SAME,
) -> LinearCase:
    """A function of x and one constant of a shape."""
    constant = Constant(shape)
    label = f"{label} {shape}"
    return one(operation, label, event, lambda x: function(x, constant.like(x)), alone)
