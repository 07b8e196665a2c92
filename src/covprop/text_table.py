"""Tables as plain text and as HTML, and how numbers are written in them."""

import html
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
MINUTE = 60.0
MOST_DIGITS = 6
"""Significant digits that the format `g` writes."""
GAP = "  "
WIDTH = 100
"""Characters of a line that fit a page of 1,000 pixels."""
NARROWEST = 8
"""Characters that the first column keeps in a table of limited width."""
CALL = re.compile(r"\bcp\.\w+\((?:[^()]|\([^()]*\))*\)")
"""A call to copy, which is not broken over lines."""


@dataclass(frozen=True)
class Table:
    """A table of text cells; the first `words` and last `remarks` columns are flush left."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    remarks: int = 0
    notes: tuple[str, ...] = ()
    """Lines below the table."""
    lead: tuple[str, ...] = ()
    """Lines above the table."""
    width: int | None = None
    """Characters of a line of the text at most; longer notes and first cells are wrapped."""
    below: "Table | None" = None
    """A table between the rows and the notes, such as more columns than fit beside the others."""

    def __str__(self) -> str:
        """The lead, a line for each row, the table below, then the notes."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        if self.width is not None:
            others = sum(widths[1:]) + len(GAP) * (len(widths) - 1)
            widths[0] = min(widths[0], max(NARROWEST, self.width - others))
        lines = [line for row in (self.head, *self.rows) for line in self._lines(row, widths)]
        if self.below is not None:
            lines.append(str(replace(self.below, width=self.width)))
        return "\n".join((*self._wrapped(self.lead), *lines, *self._wrapped(self.notes)))

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        """A row; what its first cell has beyond the width follows below."""
        first, below = row[0], list[str]()
        if len(first) > widths[0]:
            first, *below = _broken(first, widths[0])
        cells = (
            cell.ljust(width) if self._is_word(i) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip((first, *row[1:]), widths, strict=True))
        )
        return [GAP.join(cells).rstrip(), *below]

    def _wrapped(self, texts: Sequence[str]) -> list[str]:
        if self.width is None:
            return list(texts)
        return [line for text in texts for line in wrapped(text, self.width)]

    def _is_word(self, column: int) -> bool:
        return column < self.words or column >= len(self.head) - self.remarks

    def to_html(self) -> str:
        """The table as HTML, for a notebook."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{self._cells(row)}</tr>" for row in self.rows)
        notes = "<br>".join(html.escape(note) for note in self.notes)
        lead = "".join(f"<p>{html.escape(line)}</p>" for line in self.lead)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        below = "" if self.below is None else self.below.to_html()
        foot = f"<p>{notes}</p>" if notes or self.below is None else ""
        return f"{lead}{table}{below}{foot}"

    def _cells(self, row: Sequence[str]) -> str:
        sides = ("left" if self._is_word(i) else "right" for i in range(len(row)))
        return "".join(
            f'<td style="text-align: {side}">{html.escape(cell)}</td>'
            for side, cell in zip(sides, row, strict=True)
        )


class Tabular:
    """A result that is shown as its table, in a terminal and in a notebook."""

    @property
    def table(self) -> Table:
        """What is shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The table as text that fits a page."""
        return str(replace(self.table, width=WIDTH))

    def _repr_html_(self) -> str:
        return self.table.to_html()


def _broken(cell: str, width: int) -> list[str]:
    """The lines of a first cell, later ones indented; arguments begin a line if need be."""
    name, bracket, arguments = cell.partition("(")
    if not bracket or len(name) > width:
        return textwrap.wrap(cell, width, subsequent_indent=" ")
    lines = textwrap.wrap(bracket + arguments, width, initial_indent=" ", subsequent_indent=" ")
    return [name, *lines]


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, later ones indented; calls of covprop are kept in one piece."""
    glued = CALL.sub(lambda call: call[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(glued, width, subsequent_indent=GAP, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines] or [""]


def in_bytes(count: float) -> str:
    """A number of bytes to three digits."""
    power = 0
    while count >= 999.5 and power < len(UNITS) - 1:  # noqa: PLR2004  (three digits of it: 1000)
        count, power = count / 1000, power + 1
    return f"{count:.3g} {UNITS[power]}"


def in_seconds(seconds: float) -> str:
    """A time to three digits."""
    if seconds < 999.5e-6:  # noqa: PLR2004  (three digits of it: 1000)
        return f"{1e6 * seconds:.3g} µs"
    if seconds < 999.5e-3:  # noqa: PLR2004
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < MINUTE else f"{seconds / MINUTE:.3g} min"


def in_percent(share: float) -> str:
    """A share to two digits; NaN is a dash."""
    return "-" if math.isnan(share) else f"{in_digits(100 * share, 2)} %"


def in_percent_unlike(share: float, other: float) -> str:
    """A share to two digits, or to as many as distinguish it from another."""
    digits = 2
    while digits < MOST_DIGITS and in_digits(100 * share, digits) == in_digits(100 * other, digits):
        digits += 1
    return f"{in_digits(100 * share, digits)} %"


def in_digits(value: float, digits: int = 3) -> str:
    """A number to so many significant digits; NaN is a dash."""
    return "-" if math.isnan(value) else f"{float(f'{value:.{digits}g}'):g}"


def place_words(number: int, shape: Sequence[int]) -> str:
    """The place of an element, by its number in row-major order: `3`, or `0,3`."""
    words: list[str] = []
    for size in reversed(shape):
        number, place = divmod(number, max(1, size))
        words.insert(0, str(place))
    return ",".join(words) or "0"


def plain(value: object) -> object:
    """A value that JSON can hold: infinities and NaN become words, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
