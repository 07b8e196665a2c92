"""Names in the pages are names in the code: modules, what `cp.` offers, tests, commands of make."""

import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import covprop
from covprop import bayes, robustness

ROOT = Path(__file__).parents[2]
SOURCE = Path(covprop.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SPACES = {"cp": covprop, "covprop": covprop, "bayes": bayes, "robustness": robustness}
FOREIGN = {"utils.py", "helpers.py", "torchvision.ops"}
"""Named as what is not there."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def code(page: Path) -> list[str]:
    """What stands in backticks, within a line."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def offered(path: str) -> bool:
    """Whether a dotted name leads somewhere; a last part may be a module that is run by name."""
    space, *names = path.split(".")
    found: Any = SPACES[space]
    for name in names:
        if not hasattr(found, name):
            return find_spec(f"{getattr(found, '__name__', '?')}.{name}") is not None
        found = getattr(found, name)
    return True


def exists(path: str) -> bool:
    """In the package, in one of its folders, or in the repository."""
    places = (SOURCE / path, ROOT / path, ROOT / "tests" / path)
    return any(place.exists() for place in places) or any(SOURCE.rglob(path))


@cache
def all_tests() -> set[str]:
    """The names of the functions that are tests."""
    paths = (ROOT / "tests").rglob("test_*.py")
    return {name for path in paths for name in re.findall(r"def (test_\w+)\(", path.read_text())}


@every_page
def test_a_file_that_is_named_exists(page: Path) -> None:
    named = {path for text in code(page) for path in re.findall(r"\b(?:[\w.-]+/)*\w+\.py\b", text)}
    assert sorted(path for path in named - FOREIGN if not exists(path)) == []


@every_page
def test_a_name_of_the_package_exists(page: Path) -> None:
    pattern = r"(?<![\w./'-])((?:cp|covprop|bayes|robustness)(?:\.\w+)+)"
    named = {path for text in code(page) for path in re.findall(pattern, text)}
    assert sorted(path for path in named if not offered(path)) == []


@every_page
def test_a_test_that_is_named_exists(page: Path) -> None:
    named = {name for text in code(page) for name in re.findall(r"\btest_\w+\b(?!\.py)", text)}
    assert sorted(named - all_tests()) == []


@every_page
def test_a_target_of_make_that_is_named_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {name for text in code(page) for name in re.findall(r"^make (\w+)", text)}
    assert sorted(name for name in named if f"\n{name}:" not in makefile) == []


def test_an_extra_that_is_asked_for_exists_in_a_clone() -> None:
    """The package is on no index, so `pip install 'covprop[...]'` would find nothing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    paths = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py")]
    asked = [
        wanted for path in paths for wanted in re.findall(r"install '([^']*)\[", path.read_text())
    ]
    assert set(asked) == {"."}
    named = [
        name
        for path in paths
        for names in re.findall(r"install '\.\[([\w,]+)\]'", path.read_text())
        for name in names.split(",")
    ]
    assert len(named) >= len(asked)
    assert set(named) <= set(extras)
