"""The notebooks run, and print and draw what is kept in them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.site.notebooks import declared, markdown, on_config, web_address
from tests.notebooks import NOTEBOOKS, code_cells, executed, outputs, pictures_of, printed_by, read
from tests.pages import NUMBER, assert_agree

SMALLEST_PICTURE, LARGEST_PICTURE = 5_000, 150_000
TRAINED = "regression"
"""Takes its numbers from networks that other machines round differently; see the slow test."""
SHARE, PERCENT = 0.05, 8.0
"""How far these may be off: numbers up to one, and others."""
FEW = {"early_stopping=True": "early_stopping=True, epochs=3", "epochs=100": "epochs=2",
       "epochs=20": "epochs=3"}  # fmt: skip


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem != TRAINED], ids=lambda path: path.stem
)
def test_a_notebook_prints_and_draws_what_it_keeps(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    for cell, printed, drawn in executed(read(path), path.name):
        assert_agree(printed, printed_by(cell), relative=0.1)
        kept = pictures_of(cell)
        assert len(kept) == len(drawn)
        assert all(SMALLEST_PICTURE < len(each) < LARGEST_PICTURE for each in kept)


def test_the_notebook_of_trained_networks_runs_with_few_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in NOTEBOOKS if path.stem == TRAINED)
    notebook = read(path)
    for cell in code_cells(notebook):
        source = "".join(cell["source"])
        for long, short in FEW.items():
            source = source.replace(long, short)
        cell["source"] = [source]
    for cell, printed, drawn in executed(notebook, path.name):
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", printed_by(cell))
        assert len(drawn) == len(pictures_of(cell))


@pytest.mark.slow
def test_the_notebook_of_trained_networks_prints_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = (path for path in NOTEBOOKS if path.stem == TRAINED)
    for cell, printed, _ in executed(read(path), path.name):
        numbers = zip(NUMBER.findall(printed), NUMBER.findall(printed_by(cell)), strict=True)
        for one, other in numbers:
            assert abs(float(one) - float(other)) <= (SHARE if float(other) < 1 else PERCENT)


def test_a_notebook_becomes_a_page() -> None:
    code = {"cell_type": "code", "source": ["print(1)\n", "x"], "outputs": outputs("1\n", [b"png"])}
    text = markdown({"cells": [{"cell_type": "markdown", "source": ["# One"]}, code]})
    assert text.startswith("# One\n\n```python\nprint(1)\nx\n```\n\n```text\n1\n```\n\n<img ")
    assert printed_by(code) == "1\n"
    assert pictures_of(code) == [b"png"]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@host.org:team/covprop.git\n", "https://host.org/team/covprop"),
        ("ssh://git@host.org/team/covprop.git", "https://host.org/team/covprop"),
        ("https://host.org/team/covprop.git\n", "https://host.org/team/covprop"),
        ("https://host.org/team/covprop/", "https://host.org/team/covprop"),
        ("/work/covprop", ""),
        ("", ""),
    ],
)
def test_a_remote_repository_has_an_address(remote: str, address: str) -> None:
    assert web_address(remote) == address


def test_pages_link_to_the_repository_that_the_package_declares(tmp_path: Path) -> None:
    config = SimpleNamespace(config_file_path=str(tmp_path / "mkdocs.yml"), repo_url=None)
    urls = 'Repository = "https://host.org/team/covprop"\nPaper = "https://arxiv.org/abs/1"'
    (tmp_path / "pyproject.toml").write_text(f"[project]\n[project.urls]\n{urls}\n")
    on_config(config)
    assert vars(config)["repo_url"] == "https://host.org/team/covprop"
    assert vars(config)["repo_name"] == "team/covprop"
    assert declared("[project]\nname = 'covprop'") == ""
