"""The table of operations in the pages is the registry's."""

import pytest

from covprop.operations import operations_table, with_table
from tests.pages import ROOT

PAGES = ["docs/operations.md"]


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
