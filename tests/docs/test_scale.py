"""The page on several processes: its code runs in two of them and prints what it shows."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pages import ROOT, examples, run
from tests.teams import started

PAGE = ROOT / "docs" / "scale.md"
MEASURED = ROOT / "docs" / "performance.md"


def _page(folder: Path) -> None:
    printed = [text for _, text in run(PAGE.read_text(), page=PAGE.name)]
    assert not dist.is_initialized()
    with (folder / "printed").open("a") as file:  # the first alone prints
        file.write("".join(printed))


def test_the_code_of_the_page_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    assert started(2, _page, tmp_path) == [0, 0]
    shown = "".join(example.shown or "" for example in examples(PAGE.read_text()))
    assert (tmp_path / "printed").read_text() == shown
    assert shown


@pytest.mark.parametrize(
    ("n", "processes", "held", "most", "sent"),
    [(1e5, 4, 10, 50, 7.5), (1e5, 8, 5, 25, 4.4), (1e5, 16, 2.5, 12.5, 2.3),
     (1e6, 64, 62.5, 313, 61.5), (1e6, 512, 7.8, 39, 7.8)],
)  # fmt: skip
def test_the_table_follows_from_the_formulas(
    n: float, processes: int, held: float, most: float, sent: float
) -> None:
    matrix = 4 * n**2 / 1e9
    values = matrix / processes, 5 * matrix / processes
    exchanged = matrix * (processes - 1) / processes**2
    assert f"| {held:g} GB | {most:g} GB | {sent:g} GB |" in MEASURED.read_text()
    assert (held, most) == pytest.approx(values, rel=0.01)
    assert sent == pytest.approx(exchanged, rel=0.02)
