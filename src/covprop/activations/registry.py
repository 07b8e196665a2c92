"""The table of declared activations: which torch functions are which scalar function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from covprop.activations.base import Activation

Factory: TypeAlias = Callable[..., Activation]


@dataclass(frozen=True)
class Declaration:
    """One scalar function: its torch spellings and the factory that takes their options.

    Args:
        name: The first of its torch names.
        functions: Its torch functions.
        in_place: Those that change their argument.
        factory: Takes the options of the torch functions and returns an `Activation`.
        treatment: How the table of operations describes it.

    Example:
        relu = next(one for one in cp.activations.DECLARATIONS if one.name == "relu")
        relu.factory()
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    in_place: tuple[Callable[..., Any], ...]
    factory: Factory
    treatment: str


DECLARATIONS: list[Declaration] = []

CLOSED = "exact: closed form"
INTEGRAL = "exact: closed form and one-dimensional integral"
QUADRATURE = "accurate to 1e-8: quadrature and as many terms as the bound needs"
"""How the table of operations describes what is done with an activation."""


def declare(*names: str, treatment: str) -> Callable[[Factory], Factory]:
    """Declare an activation under every spelling of some torch names, above its factory.

    Args:
        names: Names of the function in torch, `torch.Tensor`, `torch.nn.functional` or
            `torch.special`; those with a trailing underscore, in place, follow from them.
        treatment: How the table of operations describes it.

    Example:
        @declare("hardswish", treatment=QUADRATURE)
        def hardswish(inplace: bool = False) -> Activation:
            return Quadrature(F.hardswish, kinks=(-3.0, 3.0))
    """

    def decorate(factory: Factory) -> Factory:
        functions, in_place = spellings(*names), spellings(*(f"{name}_" for name in names))
        DECLARATIONS.append(Declaration(names[0], functions, in_place, factory, treatment))
        return factory

    return decorate


def spellings(*names: str) -> tuple[Callable[..., Any], ...]:
    """All the functions that torch offers under these names, each once.

    Example:
        cp.activations.spellings("relu")  # (torch.relu, torch.Tensor.relu, F.relu)
    """
    homes = (torch, torch.Tensor, F, torch.special)
    functions = [getattr(home, name) for name in names for home in homes if hasattr(home, name)]
    return tuple(dict.fromkeys(functions))
