"""Arrays from .npy, .npz, .csv and .pt files: numbers only, and nothing that is run.

Sizes are checked from headers before anything is allocated. Of a file with several arrays,
`file.npz:name` takes one.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from covprop.cli.files import Archive, check_affordable, existing
from covprop.cli.refusals import Refusal, quoted, reading

MATRIX = 2
"""Dimensions of a matrix, and of every .csv file."""
DOUBLE = 8
"""Bytes of a float64, in which everything is kept until the model's dtype is known."""
NUMBERS = "biuf"
"""Kinds of numpy dtypes that are real numbers."""
TABLE = "a .csv file has numbers, commas between them, rows of one length and no heading"
LONGEST_CELL = 40
"""Characters that are shown of what is no number."""
HEADERS: dict[tuple[int, int], Callable[[BinaryIO], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class ArrayName(NamedTuple):
    """A file and, if need be, which of its arrays."""

    path: Path
    entry: str | None


def array_name(text: str) -> ArrayName:
    """`file.npz:name` and `file.pt:name`; a file that is really called so is itself."""
    for suffix in (".npz:", ".pt:"):
        head, found, entry = text.rpartition(suffix)
        if found and entry:
            return ArrayName(Path(head + suffix[:-1]), entry)
    return ArrayName(Path(text), None)


def load(text: str) -> Tensor:
    """The array that an option names, finite; float32 and float64 stay, others become float64."""
    path, entry = array_name(text)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise Refusal(
            f"{path} is not an array that can be read: its name ends with none of "
            f"{', '.join(READERS)}"
        )
    if entry is not None and path.suffix.lower() not in SEVERAL:
        raise Refusal(f"{path} holds one array, and none named {entry!r}")
    check_affordable(path, existing(path))
    with reading(path, f"a {path.suffix.lower()} file"):
        values = reader(path, entry)
    kept = values.dtype in (torch.float32, torch.float64)
    values = values if kept else values.to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise Refusal(f"{text} has NaN or infinite entries")
    return values


def _npy(path: Path, entry: str | None) -> Tensor:
    del entry
    with path.open("rb") as file:
        return _numpy_array(path, file, existing(path))


def _npz(path: Path, entry: str | None) -> Tensor:
    with Archive(path) as archive:
        names = [name for name in archive.sizes if name.endswith(".npy")]
        chosen = _choose(path, [name.removesuffix(".npy") for name in names], entry) + ".npy"
        content = archive.read(chosen)
        return _numpy_array(path, io.BytesIO(content), len(content))


def _csv(path: Path, entry: str | None) -> Tensor:
    """Rows of numbers separated by commas: always (rows, columns)."""
    del entry
    check_affordable(path, DOUBLE * existing(path), "its numbers")
    # utf-8-sig: spreadsheets begin a file with a byte order mark
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
    with Archive(path) as archive:  # its content fits; what is no archive may say any size
        archive.check_content()
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, dict):
        names = [name for name, item in content.items() if isinstance(item, Tensor)]
        content = content[_choose(path, names, entry)]
    elif entry is not None:
        raise Refusal(f"{path} holds one tensor, and none named {entry!r}")
    return checked_tensor(path, content)


def checked_tensor(path: Path, value: object) -> Tensor:
    """A plain tensor of real numbers, in memory of its own."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        raise Refusal(f"{path} holds a {type(value).__name__}, and a tensor is wanted")
    plain = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    if value.is_complex() or not plain:
        raise Refusal(f"{path} holds a tensor that is not of plain real numbers")
    stored = value.untyped_storage().nbytes()
    if stored > existing(path):  # torch grows a storage that is too small for its tensor
        raise Refusal(f"{path} is damaged: its tensor is larger than the file")
    check_affordable(path, value.numel() * max(DOUBLE, value.itemsize))
    return value.detach().clone(memory_format=torch.contiguous_format)


def _numpy_array(path: Path, file: BinaryIO, size: int) -> Tensor:
    """The array after its header, if the header tells the truth about it."""
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
    kept = values.dtype.newbyteorder("=") in (np.float32, np.float64)
    wanted = values.dtype.newbyteorder("=") if kept else np.dtype(np.float64)
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


SEVERAL = (".npz", ".pt")
READERS: dict[str, Callable[[Path, str | None], Tensor]] = {
    ".npy": _npy, ".npz": _npz, ".csv": _csv, ".pt": _pt,
}  # fmt: skip
