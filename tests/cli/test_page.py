"""What the page on the command line shows is what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from covprop.cli.output import ExitCode
from covprop.methods.names import METHODS
from tests.cli.running import covprop
from tests.pages import blocks, words

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_every_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for times and memory, and for digits that another version of torch may draw otherwise."""
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    (code,) = blocks(page, "python")
    exec(code, {})
    commands = [text for text in blocks(page, "sh") if text.startswith("covprop")]
    shown = blocks(page, "text")
    assert len(commands) == len(shown) == 5
    for command, expected in zip(commands, shown, strict=True):
        ended = covprop(*shlex.split(command)[1:])
        assert (ended.code, ended.err) == (0, "")
        assert words(ended.out) == words(expected)


def test_the_page_has_every_exit_code_and_method() -> None:
    text = PAGE.read_text()
    listed = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    codes = {int(code) for cell in listed for code in cell.split(",")}
    assert codes == {int(code) for code in ExitCode}
    for name in METHODS:
        assert f"`{name}" in text
