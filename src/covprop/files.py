"""Files that are written as a whole or not at all, and those of tensors with a description.

The latter are of safetensors: tensors, and a description as JSON; nothing that is run. A checksum
of both is beside them, because safetensors has none of its own.
"""

import hashlib
import importlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from covprop.errors import InvalidFile, warn_user

KEY = "covprop"
CHECKSUM = "sha256"
FORMAT, WITHOUT_CHECKSUM = 2, 1
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


def safetensors() -> Any:
    """Import the library when a file is read or written."""
    try:
        return importlib.import_module("safetensors"), importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving and loading need safetensors; install it with "
            "pip install '.[bayes]' in covprop's folder"
        ) from error


def write_tensors(
    path: Path, kind: str, described: dict[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write tensors and a description of what kind of thing they are of, atomically."""
    _, library = safetensors()
    text = json.dumps({"format": FORMAT, "estimator": kind, **described})
    content = library.save(dict(tensors), metadata={KEY: text, CHECKSUM: checksum(text, tensors)})
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to")
    write_atomically(path, lambda file: file.write(content))


def checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a description as it is written, and of name, dtype, shape and bytes of tensors."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked(path: Path, metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(metadata[KEY])
    if described["format"] == WITHOUT_CHECKSUM and CHECKSUM not in metadata:
        warn_user(
            f"{path} is of an earlier covprop and has no checksum, so damage to its numbers would "
            "go unnoticed; save it again to add one"
        )
        return described
    if described["format"] != FORMAT:
        raise ValueError(f"it has format {described['format']!r}, and this is for {FORMAT}")
    if metadata[CHECKSUM] != checksum(metadata[KEY], tensors):
        raise ValueError("it is damaged, because its checksum is not that of its content")
    return described


@contextmanager
def reading_tensors(
    path: Path, kind: str, device: str
) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Read the description and the tensors of a file; errors become one sentence."""
    base, _ = safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; write one with {kind}.save(path)")
    try:
        with base.safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            described = _checked(path, file.metadata() or {}, tensors)
        if described["estimator"] != kind:
            raise ValueError(f"it is of a {described['estimator']}")
        yield described, tensors
    except KeyError as error:
        raise InvalidFile(f"{path} is not a file of {kind}.save: it lacks {error}") from error
    except (
        base.SafetensorError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError,
        OverflowError, OSError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidFile(f"{path} is not a file of {kind}.save: {reason}") from error
