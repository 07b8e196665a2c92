"""The page on mathematics knows every module that holds a formula, and names none that is gone."""

import re
from pathlib import Path

import pytest

import covprop

SOURCE = Path(covprop.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "mathematics.md"
WITHOUT_FORMULA = {"__init__.py", "base.py", "registry.py"}
"""Interfaces and tables of names."""


def modules(folder: str) -> list[str]:
    found = (path.name for path in (SOURCE / folder).glob("*.py"))
    return [f"{folder}/{name}" for name in sorted(found) if name not in WITHOUT_FORMULA]


@pytest.mark.parametrize("module", [*modules("kernels"), *modules("activations")])
def test_a_module_with_formulas_is_on_the_page(module: str) -> None:
    assert f"`{module}`" in PAGE.read_text()


def test_the_page_names_modules_that_exist() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text())
    root = PAGE.parents[1]
    gone = [name for name in named if not ((SOURCE / name).exists() or (root / name).exists())]
    assert named
    assert gone == []
