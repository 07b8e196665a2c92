"""Every public name has a place in the pages, and a docstring whose example runs to show there."""

import importlib
import inspect
import math
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop
from tests.registry import registry_kept

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


def section(text: str, title: str) -> dict[str, str]:
    """The entries of a section of a docstring in Google style: name and description."""
    _, found, rest = f"\n{text}".partition(f"\n{title}:\n")
    lines = re.split(r"\n(?=\S)", rest, maxsplit=1)[0] if found else ""
    entries = re.split(r"^ {4}(?=\S)", lines, flags=re.MULTILINE)[1:]
    split = (entry.partition(":") for entry in entries)
    return {name.lstrip("*"): described.strip() for name, _, described in split}


def example(value: Any) -> str:
    """The code that a docstring ends with."""
    text = inspect.getdoc(value) or ""
    return textwrap.dedent(text.partition("\nExample:\n")[2])


def examples(name: str) -> dict[str, str]:
    """That of a name, and those of the methods of a class that have one."""
    value = offered(name)
    members = vars(value).items() if isinstance(value, type) else ()
    own = {f"{name}.{member}": example(method) for member, method in members}
    return {name: example(value)} | {member: code for member, code in own.items() if code}


def is_error(value: Any) -> bool:
    """Whether users catch or filter it: they make none, so it has no parameters to tell of."""
    return isinstance(value, type) and issubclass(value, Exception)


def parameters(value: Any) -> list[str]:
    """What a reader must know of a function or class: its parameters, the members of an enum."""
    if isinstance(value, type) and issubclass(value, Enum):
        return list(value.__members__)
    return list(inspect.signature(value).parameters)


NAMES = list(public(covprop))
EXTENDING = [f"{covprop.extending.__name__}.{name}" for name in covprop.extending.__all__]
DESCRIBED = list(
    {id(offered(name)): name for name in NAMES if not is_error(offered(name))}.values()
)
"""Those with parameters and an example, each once (`Exact` is `GaussianLayers`)."""
EXAMPLES = {path: code for name in DESCRIBED for path, code in examples(name).items()}
DOCUMENTED = documented()


def test_public_names_are_in_the_pages_of_the_api() -> None:
    shown = {id(value) for value in DOCUMENTED.values()}
    missing = [name for name in NAMES if id(offered(name)) not in shown and name not in EXTENDING]
    assert missing == [], f"no line ::: in {' or '.join(page.name for page in PAGES)}"


def members() -> dict[str, list[str]]:
    """What the pages show of an object, where they do not show all of it."""
    found = {}
    for page in PAGES:
        for path, options in re.findall(
            r"^::: (\S+)\n((?: +.*\n?)*)", page.read_text(), re.MULTILINE
        ):
            found[path] = re.findall(r"^ +- (\w+)$", options, re.MULTILINE)
    return found


INTERNAL = {"mapped", "unchecked", "with_error", "with_moments"}
"""Of `cp.Gaussian`, for what makes one."""


def test_members_in_the_pages_exist_and_those_of_a_gaussian_are_complete() -> None:
    shown = members()
    missing = [
        f"{path}.{name}"
        for path in shown
        for name in shown[path]
        if not hasattr(resolved(path), name) and name not in resolved(path).__annotations__
    ]
    assert missing == []
    public = {name for name in dir(covprop.Gaussian) if not name.startswith("_")}
    assert set(shown["covprop.Gaussian"]) == public - INTERNAL


def test_what_rules_are_written_with_is_in_the_page_on_them() -> None:
    """In-flight tensors and carriers are for those who write rules, and not in the API."""
    _, _, table = (DOCS / "extending.md").read_text().partition("## What rules are written with\n")
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
    assert sorted(named) == sorted(covprop.extending.__all__)


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


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_public_name_lists_its_parameters(name: str) -> None:
    """Fields of what is returned, and members of an enum, may stand as attributes."""
    value, text = offered(name), inspect.getdoc(offered(name))
    listed = section(text, "Args")
    assert [each for each in listed if each not in parameters(value)] == [], "no such parameters"
    told = listed | section(text, "Attributes")
    assert [each for each in parameters(value) if not told.get(each)] == []


def surroundings() -> dict[str, Any]:
    """The names that an example may take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    return {
        "cp": covprop, "bayes": covprop.bayes, "metrics": covprop.bayes.metrics,
        "robustness": covprop.robustness, "torch": torch, "nn": nn, "F": F, "math": math, "np": np,
        "model": model, "x": covprop.Gaussian.isotropic(torch.zeros(3), stddev=0.1),
    }  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert EXAMPLES[name], "no section Example:"
    with registry_kept():
        exec(compile(EXAMPLES[name], name, "exec"), surroundings())
    plt.close("all")


def test_a_section_of_a_docstring_is_read() -> None:
    text = (
        "One.\n\nArgs:\n    one: The first,\n        and more.\n    *two: Rest.\n\nExample:\n    x"
    )
    assert section(text, "Args") == {"one": "The first,\n        and more.", "two": "Rest."}
    assert section(text, "Attributes") == {}
