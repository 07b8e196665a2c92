"""Every public name has a place in the pages of the API, and a docstring to show there."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import covprop

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("api*.md"))


def public(module: ModuleType) -> Iterator[str]:
    """The dotted names of what a package offers, and of what its public packages offer."""
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield f"{module.__name__}.{name}"
        elif hasattr(value, "__all__"):
            yield from public(value)


def offered(name: str) -> Any:
    """What a package gives to those who import the name from it."""
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def resolved(path: str) -> Any:
    """The object at a dotted name, of which some are modules as well (`covprop.plan`)."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def documented() -> dict[str, Any]:
    """What the pages ask mkdocstrings for; a module stands for all that is defined in it."""
    found = {}
    for page in PAGES:
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            assert path not in found, f"{path} has two places"
            found[path] = resolved(path)
            if isinstance(found[path], ModuleType):
                names = getattr(found[path], "__all__", None) or vars(found[path])
                members = {name: getattr(found[path], name) for name in names}
                found |= {f"{path}.{name}": member for name, member in members.items()}
    return found


NAMES = list(public(covprop))
DOCUMENTED = documented()


def test_public_names_are_in_the_pages_of_the_api() -> None:
    shown = {id(value) for value in DOCUMENTED.values()}
    missing = [name for name in NAMES if id(offered(name)) not in shown]
    assert missing == [], f"no line ::: in {' or '.join(page.name for page in PAGES)}"


def test_public_names_have_docstrings_of_their_own() -> None:
    bare = []
    for name in NAMES:
        value = offered(name)
        if not callable(value) or not hasattr(value, "__qualname__"):
            continue  # a table, or the name of a type
        inherited = any(value.__doc__ == base.__doc__ for base in getattr(value, "__mro__", ())[1:])
        # What dataclasses write themselves begins with the name.
        own = value.__doc__ and not inspect.getdoc(value).startswith(f"{value.__name__}(")
        if inherited or not own:
            bare.append(name)
    assert bare == []
