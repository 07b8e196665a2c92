"""Tables in the pages are those of the registry and of the results."""

import json

import pytest

from covprop.operations import operations_table, with_table
from experiments import sampling
from experiments.options import RESULTS
from experiments.table import Table
from tests.pages import ROOT

PAGES = ["docs/operations.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_operations_is_the_registry(page):
    text = (ROOT / page).read_text()
    assert with_table(text) == text, f"run python -m covprop.operations {' '.join(PAGES)}"


def test_the_table_names_what_the_registry_has():
    table = operations_table()
    for name in (
        "linear",
        "conv2d",
        "relu",
        "gelu",
        "flatten",
        "batch_norm",
        "softsign",
        "sort",
        "topk",
        "scatter_reduce",
        "index_reduce",
    ):
        assert f"`{name}`" in table or f".{name}`" in table


def test_a_page_without_markers_is_an_error():
    with pytest.raises(ValueError, match="the page has no"):
        with_table("# a page")


@pytest.mark.parametrize("page", ["README.md", "docs/why.md", "docs/experiments.md"])
def test_the_table_of_sampling_is_that_of_the_results(page):
    (table,) = sampling.tables(json.loads((RESULTS / "sampling.json").read_text()))
    text = (ROOT / page).read_text()
    assert sampling.with_rows(text, table) == text, f"run python -m experiments.sampling {page}"


def test_rows_of_a_page_are_replaced():
    table = Table("t", ["network", "noise", "a", "by"], [["CNN", "0.1", "2 %", "x"]])
    assert sampling.with_rows("| CNN | 0.1 | 1 % |\n", table) == "| CNN | 0.1 | 2 % |\n"
    with pytest.raises(ValueError, match="no row of CNN at noise"):
        sampling.with_rows("| MLP | 0.1 | 1 % |", table)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
