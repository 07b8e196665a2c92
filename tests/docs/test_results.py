"""Pages of results say what the records say, and records say how they were made.

A table of a page cites the record that its numbers come from in a comment right above it:

    <!-- numbers: uci-deep -->
    <!-- numbers: table3; not: difference, one standard error -->
    <!-- numbers: none, measured by hand before there was a record -->

`not` names columns that are computed from others, or quoted.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments import record, runner
from experiments.__main__ import EXPERIMENTS
from experiments.options import RESULTS
from tests.pages import ROOT

PAGES = ("docs/experiments.md", "docs/accuracy.md")
"""All tables with numbers cite a record there."""
ELSEWHERE = ("README.md", "docs/why.md")
"""Some do."""
CITATION = re.compile(
    r"<!-- numbers: (?P<source>[\w-]+)(?:; not: (?P<columns>.*)|, (?P<why>.+))? -->"
)
NUMBER = re.compile(r"(?<![A-Za-z_.]-)(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
TEN = re.compile(r"(\S+?)(?: ± (\S+))? · 10⁻([⁰¹²³⁴-⁹]+)")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
WITHOUT_RUNS = {
    "accuracy", "architectures", "auto", "figure2", "figure3", "figure4", "figure5",
    "filters", "mc_dropout", "noisy-inputs", "ood", "sampling", "split", "table1", "table2",
    "table3", "toy", "train-mnist", "uci-deep",
}  # fmt: skip
"""Records with results from before runs were kept; one that is measured anew leaves this list."""


class Table(NamedTuple):
    """A table of a page, and what the line above says of its numbers."""

    page: str
    line: int
    header: list[str]
    rows: list[list[str]]
    citation: re.Match[str] | None


def tables(page: str, text: str) -> Iterator[Table]:
    """Those with a number outside of their first column."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if not line.startswith("|") or (start and lines[start - 1].startswith("|")):
            continue
        block = []
        for row in lines[start:]:
            if not row.startswith("|"):
                break
            block.append([cell.strip() for cell in row.strip().strip("|").split("|")])
        above = next((each for each in reversed(lines[:start]) if each), "")
        citation = CITATION.fullmatch(above)
        if citation or any(NUMBER.search(cell) for row in block[2:] for cell in row[1:]):
            yield Table(page, start + 1, block[0], block[2:], citation)


def printed(cell: str) -> list[tuple[float, float, bool]]:
    """Numbers of a cell, half a unit of their last digits, and whether they are percentages."""
    found = []
    for match in NUMBER.finditer(TEN.sub(_power, cell)):
        text = match[0].replace(",", "").replace("−", "-")
        digits, _, power = text.partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
        found.append((float(text), unit / 2, "%" in cell))
    return found


def _power(match: re.Match[str]) -> str:
    """One power of ten belongs to a number and to its error."""
    power = f"e-{match[3].translate(SUPERSCRIPTS)}"
    return f"{match[1]}{power}" + (f" ± {match[2]}{power}" if match[2] else "")


def agrees(number: tuple[float, float, bool], recorded: float) -> bool:
    """Whether a number is the recorded one, rounded; a percentage may be recorded as a share."""
    value, half, percent = number
    slack = half * (1 + 1e-9)
    return abs(value - recorded) <= slack or (percent and abs(value - 100 * recorded) <= slack)


def missing(cell: str, pool: list[list[float]]) -> list[float]:
    """Numbers of a cell that no cell of the record's page has; both of a ± in one cell."""
    numbers = printed(cell)
    if "±" in cell:
        both = any(
            all(any(agrees(number, value) for value in values) for number in numbers)
            for values in pool
        )
        return [] if both else [number[0] for number in numbers]
    return [
        number[0] for number in numbers
        if not any(agrees(number, value) for values in pool for value in values)
    ]  # fmt: skip


def pool_of(text: str) -> list[list[float]]:
    """Numbers of every cell of a rendered page."""
    cells = (cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|"))
    return [numbers for cell in cells if (numbers := [number[0] for number in printed(cell)])]


CITED = [
    table for page in (*PAGES, *ELSEWHERE) for table in tables(page, (ROOT / page).read_text())
]


@pytest.mark.parametrize(
    "table", [each for each in CITED if each.citation], ids=lambda each: f"{each.page}:{each.line}"
)
def test_the_numbers_of_a_table_are_in_the_record_that_it_cites(table: Table) -> None:
    assert table.citation is not None
    if table.citation["source"] == "none":
        assert table.citation["why"], "say why there is no record"
        return
    pool = pool_of((RESULTS / f"{table.citation['source']}.md").read_text())
    left_out = [name.strip() for name in (table.citation["columns"] or "").split(",") if name]
    assert set(left_out) <= set(table.header)
    unknown = {
        f"{row[0]}, {name}: {cell}": absent
        for row in table.rows
        for name, cell in zip(table.header[1:], row[1:], strict=True)
        if name not in left_out and (absent := missing(cell, pool))
    }
    assert unknown == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_a_page_of_results_cites_its_record(page: str) -> None:
    assert [table.line for table in CITED if table.page == page and table.citation is None] == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_rendered_page_is_its_record(name: str) -> None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip("it has not been measured")
    experiment, content = EXPERIMENTS[name], record.read(path)
    text = runner.markdown(experiment, content, experiment.figures(content))
    assert path.with_suffix(".md").read_text() == text, f"python -m experiments render {name}"
    latex = "\n".join(table.latex() for table in experiment.tables(content))
    assert path.with_suffix(".tex").read_text() == latex, f"python -m experiments render {name}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_says_how_it_was_made(path: Path) -> None:
    content: dict[str, Any] = json.loads(path.read_text())
    assert set(content["versions"]) >= {"covprop", "torch", "python"}
    assert content["settings"]
    for run in content.get("runs", ()):
        assert re.fullmatch(r"[0-9a-f]{12}", run["commit"]), "measure on what is committed"
        assert run["threads"] >= 1
        assert run["load"] >= 0
    told = sum(run["results"] for run in content.get("runs", ()))
    assert (told < len(content["results"])) == (path.stem in WITHOUT_RUNS)
    if told:
        assert "seed" in content["settings"]


def test_a_number_that_is_not_in_the_record_is_found() -> None:
    pool = pool_of("| a | 0.1234 ± 0.02 | 55.04 % | 2.1e-06 |\n| b | 0.981 | 1,500 |")
    for cell in (
        "0.12 ± 0.02",
        "55 %",
        "98.1 %",
        "1,500",
        "2.1 · 10⁻⁶",
        "0.1234",
        "FC-4, T2",
        "12.3 ± 2 · 10⁻²",
    ):
        assert missing(cell, pool) == []
    for cell in (
        "0.13 ± 0.02",
        "0.98 ± 0.02",
        "0.1 ± 0.2 · 10⁻¹",
        "98.2 %",
        "1501",
        "2.2 · 10⁻⁶",
        "0.1235",
        "-0.981",
    ):
        assert missing(cell, pool), cell


def test_tables_and_citations_are_found() -> None:
    page = "<!-- numbers: auto; not: b, c -->\n\n| a | b |\n| --- | --- |\n| x | 1 |\n\n"
    first, second = tables(
        "page", page + "Text.\n\n| a |\n| --- |\n| 1 |\n\n| a | b |\n|-|-|\n| x | 2 |\n"
    )
    assert first.citation is not None
    assert (first.citation["source"], first.citation["columns"]) == ("auto", "b, c")
    assert (second.citation, second.rows) == (None, [["x", "2"]])
