"""Files are written as a whole or not at all."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from covprop.files import write_atomically


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".bin")  # the temporary name is no longer than the system takes
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"new")
        assert path.read_bytes() == b"old"

    write_atomically(path, write)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "y.bin"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [path.name]
