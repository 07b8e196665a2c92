"""Pages are short: paragraphs, the guide as a whole, and the page for maintainers."""

import re
from pathlib import Path

import pytest

from docs.site.notebooks import markdown
from tests.notebooks import NOTEBOOKS, read
from tests.pages import ROOT

DOCS = ROOT / "docs"
PARAGRAPH, GUIDE, ARCHITECTURE = 80, 15_000, 1_200
REFERENCE = {
    "operations.md", "mathematics.md", "methods-reference.md", "trust-reference.md",
    "bayes-reference.md", "robustness-reference.md", "comparison.md", "errata.md",
    "uncertainty-budget.md", "conformal.md",
}  # fmt: skip
RESULTS = {"experiments.md", "accuracy.md", "performance.md"}
API = {path.name for path in DOCS.glob("api*.md")}
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *NOTEBOOKS]


def prose(path: Path) -> str:
    """A page without blocks of code, what they print, comments and pictures."""
    text = markdown(read(path)) if path.suffix == ".ipynb" else path.read_text()
    return re.sub(r"```.*?```|<!--.*?-->|<img [^>]*>", "", text, flags=re.DOTALL)


def paragraphs(text: str) -> list[str]:
    """Paragraphs and items of lists; no headings, tables and formulas."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        if not block.strip("\n").startswith("    "):  # a formula
            found += re.split(r"\n(?=\s*(?:[-*] |\d+\. ))", block.strip())
    return [each for each in found if each and not each.lstrip().startswith(("|", "#", ":::"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_paragraphs_are_short(path: Path) -> None:
    long = [each[:60] for each in paragraphs(prose(path)) if len(each.split()) > PARAGRAPH]
    assert long == []


def test_the_guide_is_short() -> None:
    guide = [path for path in PAGES[1:] if path.name not in REFERENCE | RESULTS | API]
    assert sum(len(prose(path).split()) for path in guide) <= GUIDE


def test_the_page_for_maintainers_is_short() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= ARCHITECTURE


def test_a_long_paragraph_is_found() -> None:
    text = f"# One\n\n{'word ' * 81}\n\n    {'formula ' * 90}\n\n| {'cell ' * 90} |\n\n- a\n- b c\n"
    assert [len(each.split()) for each in paragraphs(text)] == [81, 2, 3]
