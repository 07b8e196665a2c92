"""Data files: where they may be, and whether they are the published ones."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.options import ROOT

VARIABLE = "COVPROP_DATA"
FOLDERS = (ROOT.parent / "shared" / "data", ROOT / "data")


def places(given: Path | None) -> Iterator[Path]:
    """Folders to look in: as given, or as the environment says and the usual ones."""
    if given is not None:
        yield given
        return
    if VARIABLE in os.environ:
        yield Path(os.environ[VARIABLE])
    yield from FOLDERS


def folder_with(names: Iterable[str], subfolder: str, given: Path | None) -> Path | None:
    """The first folder that has all of these files, itself or in its subfolder."""
    wanted = list(names)
    for place in places(given):
        for candidate in (place / subfolder, place):
            if all((candidate / name).exists() for name in wanted):
                return candidate
    return None


def checked(path: Path, sha256: str) -> bytes:
    """The content, which must be what was published."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is not the published file (its sha256 differs); delete it")
    return content
