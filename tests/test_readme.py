"""What README says is what the code does."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from covprop.operations import operations_table, with_table

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/operations.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_first_example_prints_what_readme_says():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks("README.md", "python")[0], {})
    assert printed.getvalue() == blocks("README.md", "text")[0]


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_operations_is_the_registry(page):
    text = (ROOT / page).read_text()
    assert with_table(text) == text, f"run python -m covprop.operations {' '.join(PAGES)}"


def test_the_table_names_what_the_registry_has():
    table = operations_table()
    for name in ("linear", "conv2d", "relu", "gelu", "flatten", "batch_norm", "softsign"):
        assert f"`{name}`" in table or f".{name}`" in table


def test_a_page_without_markers_is_an_error():
    with pytest.raises(ValueError, match="the page has no"):
        with_table("# a page")


def test_the_page_on_trust_shows_what_its_code_prints():
    """But for times, and for digits that another version of torch may draw otherwise."""
    space: dict[str, object] = {}
    code, shown = blocks("docs/trust.md", "python"), blocks("docs/trust.md", "text")
    assert len(code) == len(shown) == 3
    for source, expected in zip(code, shown, strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(source, space)
        assert words(printed.getvalue()) == words(expected)


def words(table: str) -> list[str]:
    """Everything without numbers: names, headings, verdicts, notes."""
    text = re.sub(r"[-±\d.]+(e-\d+)?( (µs|ms|s|kB|MB|B)\b)?", " ", table)
    return text.replace("inf", " ").split()
