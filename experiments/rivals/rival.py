"""What a rival is, what it refuses, packages that it calls, and chains of layers."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias, final

from torch import nn

import covprop as cp

Propagate: TypeAlias = Callable[[nn.Module, cp.Gaussian], cp.Gaussian]


class Refused(ValueError):
    """A network that a rival has no formula for; the sentence stands in its row."""


@final
@dataclass(frozen=True)
class Rival:
    """A method of the field.

    joint: whether it has covariances of outputs, or variances alone; counted: whether its memory is
    that of torch's tensors, which is counted.
    """

    run: Propagate
    joint: bool = True
    counted: bool = True

    def __call__(self, model: nn.Module, x: cp.Gaussian) -> cp.Gaussian:
        """The Gaussian of the output."""
        return self.run(model, x)


def imported(module: str, requirement: str) -> ModuleType:
    """A module of a package that is installed beside; warnings of its sources are its own.

    Raises:
        Refused: Where it cannot be imported, with the command that installs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise Refused(
            f"cannot be imported ({error}): pip install --no-deps --target FOLDER {requirement}, "
            "and FOLDER in PYTHONPATH"
        ) from error


def chain(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`s one after another; dropout does nothing.

    Raises:
        Refused: Where the model is not such a chain.
    """
    for child in model.children() if isinstance(model, nn.Sequential) else [model]:
        if isinstance(child, nn.Sequential):
            yield from chain(child)
        elif isinstance(child, nn.Dropout | nn.Identity):
            continue
        elif any(True for _ in child.children()):
            raise Refused(f"our page of it goes along chains of layers, and {_name(child)} is none")
        else:
            yield child


def refuse(layer: nn.Module) -> Refused:
    """Of a layer without a formula."""
    return Refused(f"our page of it has no formula for {_name(layer)}")


def _name(module: nn.Module) -> str:
    return type(module).__name__
