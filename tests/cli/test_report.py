"""`--report`: a page on every command that finds something to show, whole or not at all."""

import os
from pathlib import Path

import pytest

from covprop.report import page
from tests.cli.running import covprop, refused

GIVEN = ("model.pt2", "--mean", "mean.npy", "--covariance", "covariance.npy")
FEW = ("--samples", "200")


@pytest.mark.parametrize(
    "words",
    [
        ["propagate", *GIVEN],
        ["propagate", *GIVEN, "--method", "montecarlo:200"],
        ["compare", *GIVEN, *FEW],
        ["compare", *GIVEN, *FEW, "--method", "unscented"],
        ["budget", *GIVEN, "--method", "gaussian-layers"],
        ["robustness", *GIVEN, *FEW],
        ["robustness", *GIVEN, *FEW, "--method", "linearized"],
    ],
    ids=" ".join,
)
def test_a_page_is_written_beside_the_answer(words: list[str], folder: Path) -> None:
    before = set(os.listdir(folder))
    ended = covprop(*words, "--report", "page.html", "--json")
    assert ended.code == 0, ended.err
    assert ended.told["model"] == "model.pt2"
    assert set(os.listdir(folder)) - before == {"page.html"}
    text = (folder / "page.html").read_text()
    assert text.rstrip().endswith("</html>")
    assert "<title>" in text
    assert "model.pt2" in text


def test_a_page_needs_a_name_that_can_be_written(folder: Path) -> None:
    assert "ends with none of .html" in refused("propagate", *GIVEN, "--report", "page.pdf")
    assert "does not exist" in refused("compare", *GIVEN, "--report", "nowhere/page.html")
    assert not (folder / "page.pdf").exists()


def test_a_page_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(folder))
    monkeypatch.setattr(page, "write", full)
    told = refused("propagate", *GIVEN, "--report", "page.html")
    assert told.endswith("page.html cannot be written: No space left on device")
    assert sorted(os.listdir(folder)) == before


def test_a_hostile_name_is_text_in_the_page(folder: Path) -> None:
    name = "<script>alert(1)<"
    (folder / f"{name}.pt2").write_bytes((folder / "model.pt2").read_bytes())
    assert covprop("propagate", f"{name}.pt2", *GIVEN[1:], "--report", "page.html").code == 0
    assert name not in (folder / "page.html").read_text()
