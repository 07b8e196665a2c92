"""Files that are written as a whole or not at all."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LONGEST_NAME = 100  # characters of a name that its temporary file repeats


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file in the same folder, then rename it to `path`.

    Whatever fails, even an interrupt, leaves the old file as it was and no temporary file.
    """
    temporary = path.with_name(f".{path.name[:LONGEST_NAME]}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
