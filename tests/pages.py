"""Code in pages: run it, compare what it prints with what the page shows, or write that anew.

A block of Python runs in the names that the blocks before it have left. A block of text that
follows it at once is what it prints. `python -m tests.pages docs/why.md ...` runs pages, writes
what they print into them, and puts the pictures that they save into docs/images.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.registry import registry_kept

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(?P<language>\w+)\n(?P<content>.*?)```", re.DOTALL)
OUTPUT = re.compile(r"\s*```text\n(?P<content>.*?)```", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
MEASURED = re.compile(r"[-±\d.]+(e-\d+)?( (µs|ms|s|kB|MB|B)\b)?")


@dataclass(frozen=True)
class Example:
    """A block of Python and what the page says it prints, if it does."""

    code: str
    shown: str | None
    line: int
    place: tuple[int, int] | None
    """Where in the page what is shown begins and ends."""


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return [found["content"] for found in BLOCK.finditer(text) if found["language"] == language]


def examples(text: str) -> list[Example]:
    """The blocks of Python of a page, each with what follows it."""
    found = []
    for block in BLOCK.finditer(text):
        if block["language"] != "python":
            continue
        output = OUTPUT.match(text, block.end())
        line = text.count("\n", 0, block.start()) + 2
        shown, place = (output["content"], output.span("content")) if output else (None, None)
        found.append(Example(block["content"], shown, line, place))
    return found


def run(
    text: str, names: Mapping[str, Any] | None = None, page: str = "page"
) -> Iterator[tuple[Example, str]]:
    """Run the examples of a page one after another; what each printed."""
    space: dict[str, Any] = {"__name__": "__main__", **(names or {})}
    with registry_kept():
        for example in examples(text):
            printed = io.StringIO()
            code = compile("\n" * (example.line - 1) + example.code, page, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, space)
            yield example, printed.getvalue()


def words(text: str) -> list[str]:
    """Everything but numbers, with their units where these are of times and sizes."""
    return MEASURED.sub(" ", text).replace("inf", " ").split()


def assert_agree(printed: str, shown: str, relative: float) -> None:
    """The same text, with numbers that differ by a part of them, or by five of the last digit."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    for found, expected in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        value, wanted = (float(number.replace(",", "")) for number in (found, expected))
        slack = max(relative * abs(wanted), 5 * last_digit(expected) if relative else 0.0)
        assert abs(value - wanted) <= slack, f"{found}, and the page has {expected}"


def last_digit(number: str) -> float:
    """What the last digit of a printed number counts."""
    digits, _, exponent = number.replace(",", "").partition("e")
    places = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - places)


def rewritten(page: Path, images: Path) -> str:
    """The text of a page with what its code prints now; the pictures it saves go to `images`."""
    text, pieces, end = page.read_text(), [], 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for example, printed in run(text, page=page.name):
            if example.place is not None:
                pieces += [text[end : example.place[0]], printed]
                end = example.place[1]
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, images / picture.name)
    return "".join([*pieces, text[end:]])


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in sys.argv[1:]:
        page = (ROOT / name).resolve()
        page.write_text(rewritten(page, ROOT / "docs" / "images"))
