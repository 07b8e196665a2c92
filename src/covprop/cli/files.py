"""Files that are there, regular and of a size that memory bears; zip archives, read in bounds."""

import os
import stat
import zipfile
from pathlib import Path
from typing import final

import torch

from covprop.cli.refusals import Refusal
from covprop.report.table import in_bytes
from covprop.room import free_bytes

SHARE = 0.5
"""Of the memory that is free: what one file may take; reading needs a copy."""
ENTRIES = 100_000
"""In a zip archive, at most."""


def budget() -> int:
    """Bytes that one file may take."""
    return int(SHARE * free_bytes(torch.device("cpu")))


def check_affordable(path: Path | str, size: int, what: str = "it") -> None:
    """Refuse what memory would not bear, before any of it is allocated."""
    allowed = budget()
    if size > allowed:
        raise Refusal(
            f"{path} is too large: {what} would take {in_bytes(size)}, and a file may take "
            f"{in_bytes(allowed)} of the memory that is free"
        )


def existing(path: Path) -> int:
    """The size of a regular file that can be read, or a refusal."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise Refusal(f"{path} is a folder, not a file")
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device may never end
            raise Refusal(f"{path} is not a regular file")
        if not os.access(path, os.R_OK):
            raise Refusal(f"{path} may not be read: permission denied")
    except FileNotFoundError as error:
        raise Refusal(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(f"{str(path)!r} cannot be read: {reason}") from error
    return found.st_size


@final
class Archive:
    """A zip archive whose entries together fit into memory, for a `with` block."""

    def __init__(self, path: Path) -> None:
        """Look at its table of contents only."""
        check_affordable(path, existing(path))
        self.path = path
        self._zip = zipfile.ZipFile(path)
        entries = self._zip.infolist()
        if len(entries) > ENTRIES:
            raise Refusal(f"{path} has {len(entries):,} entries; {ENTRIES:,} are the most")
        check_affordable(path, sum(entry.file_size for entry in entries), "its content")
        self.sizes = {entry.filename: entry.file_size for entry in entries}

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def check_content(self) -> None:
        """Refuse damage by the checksums of all entries, which torch's own reader does not ask."""
        damaged = self._zip.testzip()
        if damaged is not None:
            raise Refusal(f"{self.path} is damaged: the checksum of {damaged!r} is another")

    def read(self, name: str) -> bytes:
        """One entry with the right checksum, and as long as the table of contents says."""
        if name not in self.sizes:
            raise Refusal(f"{self.path} is damaged: it lacks {name!r}")
        content = self._zip.read(name)
        if len(content) != self.sizes[name]:
            raise Refusal(f"{self.path} is damaged: {name!r} is shorter than it says")
        return content
