"""How docstrings become pages: they are plain text, whose stars are shapes, (*batch, n)."""

import re
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
        parts = LITERAL.split(obj.docstring.value)
        parts[::2] = [part.replace("*", r"\*") for part in parts[::2]]
        obj.docstring.value = "".join(parts)
