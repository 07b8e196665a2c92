"""Results in files, there as a whole or not at all."""

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from covprop.cli.refusals import Refusal
from covprop.gaussian import Gaussian
from covprop.report.table import in_bytes
from covprop.room import free_bytes

COPIES = 3
"""Matrices at a time: the result, the one that is written, and its bytes."""
LONGEST_NAME = 100
"""Characters of a name that its temporary file repeats."""


def wanted(text: str | None, suffixes: tuple[str, ...], option: str) -> Path | None:
    """The path of an output file that may be left out."""
    return None if text is None else check_writable(text, suffixes, option)


def check_writable(text: str, suffixes: tuple[str, ...], option: str) -> Path:
    """The path of an output file, refused before any work if it could not be written."""
    path = Path(text)
    if path.suffix.lower() not in suffixes:
        raise Refusal(f"{option} {text!r}: the name ends with none of {', '.join(suffixes)}")
    try:
        path = path.resolve()  # a link stays, and what it points at is replaced
        if not path.parent.is_dir():
            raise Refusal(f"{option} {text!r}: the folder {path.parent} does not exist")
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise Refusal(f"{option} {text!r} exists and is not a regular file")
        if not os.access(path.parent, os.W_OK):
            raise Refusal(f"{option} {text!r}: the folder {path.parent} may not be written to")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(f"{option} {text!r} cannot be written: {reason}") from error
    return path


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name when all of it is there; else nothing stays."""
    beside = path.with_name(f".{path.name[:LONGEST_NAME]}.{secrets.token_hex(4)}")
    try:
        try:
            with beside.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise Refusal(f"{path} cannot be written: {error.strerror or error}") from error


def check_dense(y: Gaussian) -> None:
    """Refuse to write out a covariance that memory would not bear."""
    size = y.event_shape.numel()
    needed = COPIES * y.batch_shape.numel() * size**2 * y.mean.itemsize
    free = free_bytes(y.device)
    if needed > free:
        raise Refusal(
            f"the covariance of {size:,} outputs would take {in_bytes(needed)} to write, and "
            f"{in_bytes(free)} are free; leave out --out and --json"
        )


def moments(y: Gaussian) -> dict[str, Tensor]:
    """What a file of results holds."""
    check_dense(y)
    found = {
        "mean": y.mean, "covariance": y.covariance_matrix, "mean_stderr": y.mean_stderr,
        "covariance_stderr": y.covariance_stderr,
    }  # fmt: skip
    return {name: tensor.contiguous() for name, tensor in found.items() if tensor is not None}


def _npz(file: BinaryIO, tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    del told
    np.savez(file, allow_pickle=False, **{name: t.numpy() for name, t in tensors.items()})


def _pt(file: BinaryIO, tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    del told
    torch.save(tensors, file)


def _json(file: BinaryIO, tensors: dict[str, Tensor], told: dict[str, Any]) -> None:
    del tensors
    file.write(json.dumps(told).encode() + b"\n")


WRITERS: dict[str, Callable[[BinaryIO, dict[str, Tensor], dict[str, Any]], None]] = {
    ".npz": _npz, ".pt": _pt, ".json": _json,
}  # fmt: skip
"""`.npz` and `.pt` hold the tensors, `.json` what `--json` prints."""


def write_moments(path: Path, y: Gaussian, told: dict[str, Any]) -> None:
    """A Gaussian in the format that the name asks for."""
    with written(path) as file:
        WRITERS[path.suffix.lower()](file, moments(y), told)
