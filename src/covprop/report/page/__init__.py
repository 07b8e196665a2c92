"""A report in one HTML file: what went in, what came out, and how far to trust it."""

from covprop.report.page.document import render, write

__all__ = ["render", "write"]
