"""What the command line refuses, in one sentence, and the exit codes that scripts see."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

LONGEST = 600
"""Characters of a sentence; a message that quotes a hostile file stays readable."""


class ExitCode(IntEnum):
    """What a command ended with."""

    FINE = 0
    BUG = 1
    REFUSED = 2
    NO = 3
    """The work was done, and the answer is no: see the command."""
    LOST = 4
    """Of several processes one was lost."""
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class Refusal(Exception):
    """Bad input or usage: one sentence for standard error, and exit code 2."""


def sentence(error: BaseException) -> str:
    """What an error says, on one line and without control characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)


def printable(text: str) -> str:
    """Text for a terminal: no control characters, and an end."""
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def named(error: BaseException) -> str:
    """The same with the kind of error, for errors that others raise."""
    text = sentence(error)
    kind = type(error).__name__
    return kind if text == kind else f"{kind}: {text}"


def location(error: BaseException) -> str:
    """The file and line where an error arose, for mistakes in a user's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Whatever goes wrong with a file becomes one sentence: it may hold anything."""
    try:
        yield
    except Refusal:
        raise
    except MemoryError as error:
        raise Refusal(f"{path} needs more memory than there is") from error
    except Exception as error:
        raise Refusal(f"{path} cannot be read as {what}: {named(error)}") from error


def quoted(text: str) -> str:
    """A word of the user's, as it was written but on one line."""
    return re.sub(r"\s+", " ", repr(text))
