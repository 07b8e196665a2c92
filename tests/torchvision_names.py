"""Packages that import torchvision, without it: no test uses what they take from there."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from covprop.cli.models import without_torchvision

__all__ = ["any_name_of_torchvision", "without_torchvision"]
MODULES = {"datasets", "functional", "models", "ops", "transforms", "tv_tensors", "utils", "v2"}


class _Name(type):
    """The type of a class that stands for anything, and has any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(cls, name, _Name(name, (), {}))
        return getattr(cls, name)


class _Module(ModuleType):
    """A module that has any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in MODULES:
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, _Name(name, (), {}))
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    """Finds torchvision and everything in it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        found = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "1.0"


@contextmanager
def any_name_of_torchvision() -> Iterator[None]:
    """Let packages be imported that derive from torchvision's classes, or look into them."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
