"""The tutorial on Bayesian networks runs, and says what it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-bayes.md"
NUMBER = r"\d+(?:\.\d+)?"
SHARE, PERCENT = 0.05, 8.0
"""How far other machines, whose rounding is another, may be off: of numbers to one, and others."""


def run(text: str, monkeypatch, folder) -> list[tuple[str, str]]:
    """What each example printed, and what the page says."""
    pytest.importorskip("safetensors")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    found, printed = [], ""
    for kind, content in re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL):
        if kind == "text":
            found.append((printed, content))
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(content, names)
        printed = output.getvalue()
    assert (folder / "calibration.png").stat().st_size > 10_000
    return found


def test_the_tutorial_runs_with_few_epochs(monkeypatch, tmp_path):
    text = PAGE.read_text().replace("early_stopping=True", "early_stopping=True, epochs=3")
    small = text.replace("epochs=100", "epochs=2").replace("epochs=20", "epochs=3")
    for printed, shown in run(small, monkeypatch, tmp_path):
        assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", shown)


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(monkeypatch, tmp_path):
    for printed, shown in run(PAGE.read_text(), monkeypatch, tmp_path):
        assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", shown)
        pairs = zip(re.findall(NUMBER, printed), re.findall(NUMBER, shown), strict=True)
        for one, other in pairs:
            assert abs(float(one) - float(other)) <= (SHARE if float(other) < 1 else PERCENT)
