"""What a command found: an object for scripts, tables for people, an exit code."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from covprop.cli.refusals import ExitCode
from covprop.report.table import Table, plain

GAP = 2
"""Blanks between columns."""


@dataclass(frozen=True)
class Answer:
    """An answer; `as_json` chooses how it is shown."""

    told: dict[str, Any]
    parts: tuple[str | Table, ...]
    as_json: bool
    code: ExitCode = ExitCode.FINE


def show(answer: Answer) -> None:
    """On standard output: JSON alone, tables that fit a terminal, or plain text in a pipe."""
    if answer.as_json:
        text = json.dumps(plain(answer.told), allow_nan=False) + "\n"
    elif sys.stdout.isatty():
        text = _drawn(answer)
    else:
        text = "".join(f"{part}\n" for part in answer.parts)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _drawn(answer: Answer) -> str:
    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        for part in answer.parts:
            _draw(console, part)
    return captured.get()


def _draw(console: Console, part: str | Table) -> None:
    if isinstance(part, str):
        console.print(part)
        return
    for number, piece in enumerate(fitted(part, console.width)):
        if number:
            console.print()
        console.print(_rich(piece))
    for note in part.notes:
        console.print(note, style="dim")


def fitted(table: Table, width: int) -> list[Table]:
    """The table in pieces that fit a width, each with the first column again."""
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    pieces: list[list[int]] = [[]]
    used = widths[0]
    for column in range(1, len(widths)):
        if pieces[-1] and used + GAP + widths[column] > width:
            pieces.append([])
            used = widths[0]
        pieces[-1].append(column)
        used += GAP + widths[column]
    return [_part(table, [0, *piece]) for piece in pieces]


def _part(table: Table, columns: list[int]) -> Table:
    last = len(table.head) - table.remarks
    rows = tuple(tuple(row[column] for column in columns) for row in table.rows)
    return Table(
        tuple(table.head[column] for column in columns), rows,
        words=sum(column < table.words for column in columns),
        remarks=sum(column >= last for column in columns),
    )  # fmt: skip


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    last = len(table.head) - table.remarks
    for number, title in enumerate(table.head):
        word = number < table.words or number >= last
        drawn.add_column(title, justify="left" if word else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
