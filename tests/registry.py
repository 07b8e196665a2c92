"""The tables of rules, left as they were by what registers rules of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from covprop import dispatch


@contextmanager
def registry_kept() -> Iterator[None]:
    """Forget every rule that is registered inside."""
    tables = dispatch.RULES, dispatch.BATCH, dispatch.KIND, dispatch.IN_PLACE, dispatch.OPERATIONS
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            getattr(table, "update" if isinstance(table, dict) else "extend")(content)
