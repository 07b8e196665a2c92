"""The tutorial on Bayesian networks runs, and says what it prints."""

from pathlib import Path

import pytest

from tests.pages import NUMBER, ROOT, run

PAGE = ROOT / "docs" / "tutorial-bayes.md"
SHARE, PERCENT = 0.05, 8.0
"""How far other machines, whose rounding is another, may be off: of numbers to one, and others."""


def printed_and_shown(text: str, folder: Path) -> list[tuple[str, str]]:
    """What each example printed, and what the page says."""
    pytest.importorskip("safetensors")
    pytest.importorskip("matplotlib")
    found = [
        (printed, example.shown) for example, printed in run(text) if example.shown is not None
    ]
    assert (folder / "tutorial-calibration.png").stat().st_size > 10_000
    for printed, shown in found:
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown)
    return found


def test_the_tutorial_runs_with_few_epochs(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().replace("early_stopping=True", "early_stopping=True, epochs=3")
    small = text.replace("epochs=100", "epochs=2").replace("epochs=20", "epochs=3")
    assert len(printed_and_shown(small, tmp_path)) == 5


@pytest.mark.slow
def test_the_tutorial_prints_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for printed, shown in printed_and_shown(PAGE.read_text(), tmp_path):
        for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
            assert abs(float(one) - float(other)) <= (SHARE if float(other) < 1 else PERCENT)
