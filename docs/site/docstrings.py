"""How docstrings become pages: they are plain text, whose stars are shapes, (*batch, n)."""

import re
import textwrap
from typing import Any

import griffe

LITERAL = re.compile(r"(`[^`]*`)")
OWN_AFFAIRS = ("__post_init__", "__str__", "__repr__", "__torch_function__")
"""Methods that do what Python or torch says, which nobody looks up."""


class PlainText(griffe.Extension):
    """Escapes stars outside of backticks, which Markdown would take as emphasis."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Look at every object that has a docstring; one without it has no place on a page."""
        if obj.docstring is None:
            return
        if obj.name in OWN_AFFAIRS:
            obj.docstring = None
            return
        text, example, code = obj.docstring.value.partition("\nExample:\n")
        parts = LITERAL.split(text)
        parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
        obj.docstring.value = "".join(parts) + (example and example + _fenced(code))


def _fenced(code: str) -> str:
    """The code of an example, which docstrings end with, as a block of Python."""
    lines = ["```python", *textwrap.dedent(code).strip().splitlines(), "```"]
    return textwrap.indent("\n".join(lines), "    ")
