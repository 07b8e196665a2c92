"""What a command leaves behind: an exit code, one sentence or a result, and whole files."""

import importlib
import json
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from covprop.files import write_atomically
from covprop.flow.lineage import free_bytes
from covprop.gaussian import Gaussian
from covprop.text_table import Table, in_bytes, plain

LONGEST_MESSAGE = 600  # characters, so that a message that quotes a hostile file stays readable
GAP = 2  # blanks between columns
COPIES = 3  # matrices at a time: the result, the one that is written, and its bytes


class ExitCode(IntEnum):
    """What a command ends with."""

    OK = 0
    BUG = 1
    REFUSED = 2
    NO = 3  # the work was done, and the answer is no: see the command
    LOST = 4  # one of several processes was lost
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class Refusal(Exception):
    """Bad input or usage: one sentence for standard error, and exit code 2."""


class Note(UserWarning):
    """What a user should know beside the result: one sentence on standard error."""


def printable(text: str) -> str:
    """Text for a terminal: without control characters, and cut off where it is too long."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."


def sentence(error: BaseException | str) -> str:
    """The first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)


def describe_error(error: BaseException) -> str:
    """The class and first line of an error that covprop did not raise."""
    text, kind = sentence(error), type(error).__name__
    return kind if text == kind else f"{kind}: {text}"


def raised_in(error: BaseException) -> tuple[FrameType, int]:
    """The frame and line in which an error was raised."""
    *_, innermost = traceback.walk_tb(error.__traceback__)
    return innermost


def quoted(text: str) -> str:
    """A user's word on one line."""
    return re.sub(r"\s+", " ", repr(text))


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever goes wrong with a file into one sentence: it may hold anything."""
    try:
        yield
    except Refusal:
        raise
    except MemoryError as error:
        raise Refusal(f"{path} needs more memory than there is") from error
    except Exception as error:
        raise Refusal(f"{path} cannot be read as {what}: {describe_error(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command: `record` is printed with --json, `parts` without."""

    record: dict[str, Any]
    parts: tuple[str | Table, ...]
    as_json: bool
    code: ExitCode = ExitCode.OK

    def show(self) -> None:
        """Print JSON only, tables that fit a terminal, or plain text into a pipe."""
        if self.as_json:
            text = json.dumps(plain(self.record), allow_nan=False) + "\n"
        elif sys.stdout.isatty():
            text = _drawn(self.parts)
        else:
            text = "".join(f"{part}\n" for part in self.parts)
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def _drawn(parts: tuple[str | Table, ...]) -> str:
    rich = importlib.import_module("rich.console")  # of the extra `cli`
    console = rich.Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            if isinstance(part, str):
                console.print(part)
                continue
            if part.lead:
                console.print(part.lead)
            for number, piece in enumerate(split_columns(part, console.width)):
                if number:
                    console.print()
                console.print(_rich_table(piece))
            for note in part.notes:
                console.print(note, style="dim")
    text: str = captured.get()
    return text


def split_columns(table: Table, width: int) -> list[Table]:
    """Cut a table into pieces that fit a width, each with the first column again."""
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    pieces: list[list[int]] = [[0]]
    used = widths[0]
    for column, size in enumerate(widths[1:], 1):
        if len(pieces[-1]) > 1 and used + GAP + size > width:
            pieces.append([0])
            used = widths[0]
        pieces[-1].append(column)
        used += GAP + size
    last = len(table.head) - table.remarks
    return [
        Table(
            tuple(table.head[column] for column in columns),
            tuple(tuple(row[column] for column in columns) for row in table.rows),
            words=sum(column < table.words for column in columns),
            remarks=sum(column >= last for column in columns),
        )
        for columns in pieces
    ]


def _rich_table(table: Table) -> Any:
    rich, text = importlib.import_module("rich.table"), importlib.import_module("rich.text")
    drawn = rich.Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    last = len(table.head) - table.remarks
    for number, title in enumerate(table.head):
        word = number < table.words or number >= last
        drawn.add_column(title, justify="left" if word else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(text.Text, row))
    return drawn


def check_writable(text: str, suffixes: tuple[str, ...], option: str) -> Path:
    """The path of an output file, refused before any work if it could not be written."""
    path, listed = Path(text), ", ".join(suffixes)
    if path.suffix.lower() not in suffixes:
        raise Refusal(f"{option} {text!r}: the name ends with none of {listed}")
    try:
        path = path.resolve()  # a link stays, and what it points at is replaced
        if path.suffix.lower() not in suffixes:
            raise Refusal(
                f"{option} {text!r} is a link to {path.name!r}, which ends with none of {listed}"
            )
        if not path.parent.is_dir():
            raise Refusal(f"{option} {text!r}: the folder {path.parent} does not exist")
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise Refusal(f"{option} {text!r} exists and is not a regular file")
        if not os.access(path.parent, os.W_OK):
            raise Refusal(f"{option} {text!r}: the folder {path.parent} may not be written to")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(f"{option} {text!r} cannot be written: {reason}") from error
    return path


def check_dense(y: Gaussian) -> None:
    """Refuse to write out a covariance that does not fit into memory."""
    size = y.event_shape.numel()
    needed = COPIES * y.batch_shape.numel() * size**2 * y.mean.itemsize
    free = free_bytes(y.device)
    if needed > free:
        raise Refusal(
            f"the covariance of {size:,} outputs would take {in_bytes(needed)} to write, and "
            f"{in_bytes(free)} are free; leave out --out and --json"
        )


WRITERS: dict[str, Callable[[BinaryIO, dict[str, Tensor], dict[str, Any]], object]] = {
    ".npz": lambda file, tensors, _: np.savez(
        file, allow_pickle=False, **{name: tensor.numpy() for name, tensor in tensors.items()}
    ),
    ".pt": lambda file, tensors, _: torch.save(tensors, file),
    ".json": lambda file, _, record: file.write(json.dumps(record).encode() + b"\n"),
}
"""`.npz` and `.pt` hold the tensors, `.json` what `--json` prints."""


def write_moments(path: Path, y: Gaussian, record: dict[str, Any]) -> None:
    """Write a Gaussian in the format of the path's suffix."""
    check_dense(y)
    moments = {
        "mean": y.mean, "covariance": y.covariance_matrix, "mean_stderr": y.mean_stderr,
        "covariance_stderr": y.covariance_stderr, "skewness": y.skewness,
    }  # fmt: skip
    tensors = {name: value.contiguous() for name, value in moments.items() if value is not None}
    with writing(path):
        write_atomically(path, lambda f: WRITERS[path.suffix.lower()](f, tensors, record))
