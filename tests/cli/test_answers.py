"""Answers: tables that fit a terminal, and text for any encoding."""

import io
import sys

import pytest

from covprop.cli.output import CommandResult, split_columns
from covprop.text_table import Table

WIDE = Table(
    ("name", "first", "second", "third", "verdict"),
    (("one", "1.5", "2.25", "3", "fine"), ("two", "10", "20", "30", "not at all")),
    words=1,
    remarks=1,
    notes=("a note",),
)


@pytest.mark.parametrize("width", [10, 14, 20, 31, 80])
def test_a_table_is_cut_into_pieces_that_fit(width: int) -> None:
    pieces = split_columns(WIDE, width)
    heads = [piece.head for piece in pieces]
    assert all(head[0] == "name" for head in heads)
    assert [title for head in heads for title in head[1:]] == list(WIDE.head[1:])
    assert all(len(piece.head) == 2 or len(str(piece).split("\n")[1]) <= width for piece in pieces)
    cells = [
        cell for row in range(len(WIDE.rows)) for piece in pieces for cell in piece.rows[row][1:]
    ]
    assert cells == [cell for row in WIDE.rows for cell in row[1:]]


def test_a_table_that_fits_is_whole() -> None:
    (piece,) = split_columns(WIDE, 80)
    assert str(piece) == "\n".join(str(WIDE).split("\n")[:-1])


class Stream(io.TextIOWrapper):
    """A stream to a terminal, or with an encoding of few signs."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
def test_signs_that_an_encoding_lacks_are_no_fault(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream("ascii", terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    CommandResult({}, ("1 ± 0.1 µs", WIDE), as_json=False).show()
    assert "1 ? 0.1 ?s" in stream.text()


def test_a_terminal_shows_words_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream("utf-8", terminal=True)
    monkeypatch.setattr(sys, "stdout", stream)
    CommandResult({}, ("package.module:factory: [bold]x[/bold]",), as_json=False).show()
    assert "package.module:factory: [bold]x[/bold]" in stream.text()
