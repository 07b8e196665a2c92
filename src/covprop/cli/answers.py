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
        sys.stdout.write(json.dumps(plain(answer.told), allow_nan=False) + "\n")
    elif sys.stdout.isatty():
        console = Console(file=sys.stdout, highlight=False)
        for part in answer.parts:
            console.print(part if isinstance(part, str) else _rich(part), markup=False)
            if isinstance(part, Table):
                for note in part.notes:
                    console.print(note, style="dim", markup=False)
    else:
        text = "\n".join(map(str, answer.parts)) + "\n"
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _rich(table: Table) -> RichTable:
    """The same table, folded into the width of the terminal."""
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    last = len(table.head) - table.remarks
    for number, title in enumerate(table.head):
        word = number < table.words or number >= last
        drawn.add_column(title, justify="left" if word else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
