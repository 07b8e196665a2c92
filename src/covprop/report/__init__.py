"""The report: one HTML page on a network, its input and its results."""

from covprop.report.page import render, write

__all__ = ["render", "write"]


def __dir__() -> list[str]:
    return list(__all__)
