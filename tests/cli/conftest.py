"""Files that most tests of the command line read."""

import shutil
from pathlib import Path

import pytest

from tests.cli.running import write_files


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, written once: exporting takes a while."""
    folder = tmp_path_factory.mktemp("cli")
    write_files(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, as the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
