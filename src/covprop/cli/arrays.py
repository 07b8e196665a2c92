"""Arrays from .npy, .npz, .csv and .pt files: numbers only, and nothing that is run.

Sizes are checked from headers before anything is allocated. Of a file with several arrays,
`file.npz:name` takes one.
"""

import io
import math
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TextIO, final

import numpy as np
import torch
from torch import Tensor

from covprop.cli.output import Refusal, quoted, reading
from covprop.flow.lineage import free_bytes
from covprop.text_table import in_bytes

SHARE = 0.5  # of the memory that is free: what one file may take, since reading needs a copy
ENTRIES = 100_000  # of a zip archive, at most
MATRIX = 2  # dimensions of a matrix, and of every .csv file
DOUBLE = 8  # bytes of a float64, in which numbers are kept until the model's dtype is known
NUMBERS = "biuf"  # kinds of numpy dtypes that are real numbers
TABLE = "a .csv file has numbers, commas between them, rows of one length and no heading"
LONGEST_CELL = 40  # characters that are shown of what is no number
HEADERS: dict[tuple[int, int], Callable[[BinaryIO], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check_affordable(path: Path, size: int, what: str = "it") -> None:
    """Refuse what does not fit into memory, before any of it is allocated."""
    allowed = int(SHARE * free_bytes(torch.device("cpu")))
    if size > allowed:
        raise Refusal(
            f"{path} is too large: {what} would take {in_bytes(size)}, and a file may take "
            f"{in_bytes(allowed)} of the memory that is free"
        )


def file_size(path: Path) -> int:
    """The size of a regular file that can be read, or a refusal."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise Refusal(f"{path} is a folder, not a file")
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device may never end
            raise Refusal(f"{path} is not a regular file")
        if not os.access(path, os.R_OK):
            raise Refusal(f"{path} may not be read: permission denied")
    except FileNotFoundError as error:
        raise Refusal(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(f"{str(path)!r} cannot be read: {reason}") from error
    return status.st_size


@final
class BoundedZip:
    """A zip archive whose entries together fit into memory, for a `with` block."""

    def __init__(self, path: Path) -> None:
        """Read the table of contents only."""
        check_affordable(path, file_size(path))
        self.path = path
        self._zip = zipfile.ZipFile(path)
        entries = self._zip.infolist()
        if len(entries) > ENTRIES:
            raise Refusal(f"{path} has {len(entries):,} entries; {ENTRIES:,} are the most")
        check_affordable(path, sum(entry.file_size for entry in entries), "its content")
        self.sizes = {entry.filename: entry.file_size for entry in entries}

    def __enter__(self) -> "BoundedZip":
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def check_checksums(self) -> None:
        """Refuse damaged entries, which torch's own reader does not notice."""
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


def split_name(text: str) -> tuple[Path, str | None]:
    """The file and, of `file.npz:name` and `file.pt:name`, the name."""
    for suffix in (".npz:", ".pt:"):
        head, matched, entry = text.rpartition(suffix)
        if matched and entry:
            return Path(head + suffix[:-1]), entry
    return Path(text), None


def load(text: str) -> Tensor:
    """The array that an option names, finite; float32 and float64 stay, others become float64."""
    path, entry = split_name(text)
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise Refusal(
            f"{path} is not an array that can be read: its name ends with none of "
            f"{', '.join(READERS)}"
        )
    check_affordable(path, file_size(path))
    with reading(path, f"a {suffix} file"):
        values = READERS[suffix](path, entry)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise Refusal(f"{text} has NaN or infinite entries")
    return values


def _npy(path: Path, _: str | None) -> Tensor:
    with path.open("rb") as file:
        return _numpy_array(path, file, file_size(path))


def _npz(path: Path, entry: str | None) -> Tensor:
    with BoundedZip(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.sizes if name.endswith(".npy")]
        content = archive.read(_choose(path, names, entry) + ".npy")
        return _numpy_array(path, io.BytesIO(content), len(content))


def _csv(path: Path, _: str | None) -> Tensor:
    """Rows of numbers separated by commas: always (rows, columns)."""
    check_affordable(path, DOUBLE * file_size(path), "its numbers")
    # Spreadsheets write a byte order mark.
    with path.open(encoding="utf-8-sig", newline=None) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's for a file without numbers, refused below
        try:
            values = np.loadtxt(file, delimiter=",", ndmin=2, dtype=np.float64)
        except UnicodeDecodeError as error:
            raise Refusal(f"{path} is no text: {TABLE}") from error
        except ValueError as error:
            file.seek(0)
            raise Refusal(f"{path} is no table of numbers: {_fault(file)}; {TABLE}") from error
    if not values.size:
        raise Refusal(f"{path} has no numbers")
    return torch.from_numpy(values)


def _fault(file: TextIO) -> str:
    """What is wrong with a table, and in which line; numpy counts rows without empty ones."""
    first, width = 0, 0
    for number, line in enumerate(file, 1):
        cells = line.partition("#")[0].strip().split(",")
        if cells == [""]:
            continue
        wrong = next((cell.strip() for cell in cells if not _is_number(cell)), None)
        if wrong is not None:
            return f"line {number} has {quoted(wrong[:LONGEST_CELL])} in place of a number"
        if first and len(cells) != width:
            return f"line {number} has {len(cells)} numbers, and line {first} has {width}"
        first, width = first or number, len(cells)
    return "it has numbers in another spelling"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _pt(path: Path, entry: str | None) -> Tensor:
    content = load_tensors(path)
    if isinstance(content, dict):
        names = [name for name, item in content.items() if isinstance(item, Tensor)]
        content = content[_choose(path, names, entry)]
    elif entry is not None:
        raise Refusal(f"{path} holds one tensor, and none named {entry!r}")
    return plain_tensor(path, content)


def load_tensors(path: Path) -> object:
    """What torch loads from a zip archive that fits into memory, without running code."""
    with BoundedZip(path) as archive:  # what is no archive may declare any size
        archive.check_checksums()
    return torch.load(path, map_location="cpu", weights_only=True)


def plain_tensor(path: Path, value: object) -> Tensor:
    """A copy of a value that has to be a dense tensor of real numbers."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        raise Refusal(f"{path} holds a {type(value).__name__}, and a tensor is wanted")
    dense = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    if value.is_complex() or not dense:
        raise Refusal(f"{path} holds a tensor that is not of plain real numbers")
    if value.untyped_storage().nbytes() > file_size(path):  # torch grows one that is too small
        raise Refusal(f"{path} is damaged: its tensor is larger than the file")
    check_affordable(path, value.numel() * max(DOUBLE, value.itemsize))
    return value.detach().clone(memory_format=torch.contiguous_format)


def _numpy_array(path: Path, file: BinaryIO, size: int) -> Tensor:
    """The array after its header, if the header is true."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise Refusal(f"{path} has version {version} of the .npy format; save it with numpy.save")
    shape, fortran, dtype = HEADERS[version](file)
    if dtype.hasobject:
        raise Refusal(f"{path} holds Python objects, which run code when they are loaded")
    if dtype.kind not in NUMBERS:
        raise Refusal(f"{path} holds {dtype}, and real numbers are wanted")
    if min(shape, default=0) < 0:
        raise Refusal(f"{path} is damaged: its header says the shape {shape}, which is negative")
    count, rest = math.prod(shape), size - file.tell()
    if count * dtype.itemsize != rest:
        raise Refusal(
            f"{path} is damaged: its header says {shape} of {dtype}, {count * dtype.itemsize:,} "
            f"bytes, and {rest:,} follow"
        )
    check_affordable(path, count * max(DOUBLE, dtype.itemsize))
    flat = np.frombuffer(file.read(rest), dtype=dtype, count=count)
    values = flat.reshape(shape, order="F" if fortran else "C")
    native = values.dtype.newbyteorder("=")
    wanted = native if native in (np.float32, np.float64) else np.dtype(np.float64)
    return torch.from_numpy(np.array(values, dtype=wanted, order="C"))


def _choose(path: Path, names: Iterable[object], entry: str | None) -> str:
    """The name that was asked for, or the only one."""
    known = [name for name in names if isinstance(name, str)]
    if entry is None and len(known) == 1:
        return known[0]
    if entry is None or entry not in known:
        listed = ", ".join(known[:10]) or "nothing"
        wanted = f"none named {entry!r}" if entry is not None else f"{len(known)} of them"
        raise Refusal(f"{path} holds arrays named {listed}, {wanted}; choose one with {path}:NAME")
    return entry


READERS: dict[str, Callable[[Path, str | None], Tensor]] = {
    ".npy": _npy, ".npz": _npz, ".csv": _csv, ".pt": _pt,
}  # fmt: skip
