"""Archives of `torch.export` (.pt2): the description of a program, and its tensors as bytes."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covprop.cli.description import DTYPES, Description, describe
from covprop.cli.files import Archive, check_affordable
from covprop.cli.gaussians import Expected
from covprop.cli.program import Program
from covprop.cli.refusals import Refusal

LARGEST_TEXT = 2**28
"""Bytes of a description."""
FOLDERS = ("weights", "constants")


class _Stored(NamedTuple):
    """A tensor, and how it lies in what is stored: another way would be other numbers."""

    tensor: Tensor
    strides: tuple[int, ...]
    offset: int


def is_archive(names: list[str]) -> bool:
    """Whether a zip archive is one of torch.export, by its entries."""
    return any(name.endswith("archive_format") or "/models/" in name for name in names)


def load(path: Path) -> tuple[Program, Expected]:
    """The program in an archive, and what it takes."""
    with Archive(path) as archive:
        root, name = _program_of(archive)
        if archive.read(f"{root}byteorder").decode() != sys.byteorder:
            raise Refusal(f"{path} was written on a machine with another order of bytes")
        description = _described(archive, f"{root}models/{name}.json")
        tensors: dict[str, _Stored] = {}
        for folder in FOLDERS:
            tensors |= _tensors(archive, f"{root}data/{folder}/", f"{name}_{folder}_config.json")
    if len(description.inputs) != 1:
        raise Refusal(
            f"{path} is a program of {len(description.inputs)} inputs, and the command line gives "
            "one; use cp.propagate in Python"
        )
    _check_tensors(path, description, tensors)
    expected = _expected(description)
    values = {name: stored.tensor for name, stored in tensors.items()}
    return Program(description, values, expected), expected


def _described(archive: Archive, name: str) -> Description:
    content = _json(archive, name)
    try:
        return describe(content)
    except Refusal as refusal:
        raise Refusal(f"{archive.path} cannot be run: {refusal}") from refusal


def _program_of(archive: Archive) -> tuple[str, str]:
    """The folder that everything is in, and the name of the program."""
    found = [name for name in archive.sizes if name.endswith(".json") and "models/" in name]
    if not found:
        raise Refusal(
            f"{archive.path} holds no exported program; write one with "
            "torch.export.save(torch.export.export(model, (example,)), path)"
        )
    if len(found) > 1:
        raise Refusal(f"{archive.path} holds {len(found)} programs, and one is wanted")
    root, _, rest = found[0].rpartition("models/")
    return root, rest.removesuffix(".json")


def _json(archive: Archive, name: str) -> dict[str, Any]:
    if archive.sizes.get(name, 0) > LARGEST_TEXT:
        raise Refusal(f"{archive.path} has a description of more than {LARGEST_TEXT:,} bytes")
    content = json.loads(archive.read(name))
    if not isinstance(content, dict):
        raise Refusal(f"{archive.path} is damaged: {name!r} is no description")
    return content


def _tensors(archive: Archive, folder: str, config: str) -> dict[str, _Stored]:
    """The tensors of one folder, by their names in the network."""
    if folder + config not in archive.sizes:
        raise Refusal(
            f"{archive.path} has no {config!r}, so it comes from an older torch or holds pickles, "
            "which run code when they are loaded; export it again, or say --allow-pickle if you "
            "trust the file"
        )
    tensors = {}
    for name, entry in _json(archive, folder + config)["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta is None:
            raise Refusal(
                f"{archive.path} holds {name!r} as a pickle, which runs code when it is loaded; "
                "say --allow-pickle if you trust the file"
            )
        tensors[name] = _tensor(archive, folder + entry["path_name"], meta)
    return tensors


def _check_tensors(path: Path, description: Description, tensors: Mapping[str, _Stored]) -> None:
    """Refuse tensors that are missing, or are not what the program was exported with."""
    for name, stored in description.tensors.items():
        if stored not in tensors:
            raise Refusal(f"{path} is damaged: it lacks the tensor {stored!r}")
        known, (tensor, strides, offset) = description.known[name], tensors[stored]
        shape, dtype = _shape(known), DTYPES.get(known.get("dtype", 0))
        if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
            raise Refusal(
                f"{path} is damaged: {stored!r} is {tuple(tensor.shape)} of {tensor.dtype}, and "
                f"its program was exported with {shape} of {dtype}"
            )
        lies = _shape(known, "strides"), known.get("storage_offset", {}).get("as_int")
        if lies != (strides, offset):
            raise Refusal(
                f"{path} is damaged: {stored!r} lies in its file with strides {strides} from "
                f"{offset}, and its program was exported with strides {lies[0]} from {lies[1]}"
            )


def _tensor(archive: Archive, entry: str, meta: dict[str, Any]) -> _Stored:
    """A view of what is stored, which has to be there as a whole."""
    dtype = DTYPES[meta["dtype"]]
    sizes, strides = ([step["as_int"] for step in meta[key]] for key in ("sizes", "strides"))
    if any(type(size) is not int or size < 0 for size in sizes):
        raise Refusal(f"{archive.path} is damaged: {entry!r} has sizes {sizes}")
    check_affordable(archive.path, math.prod(sizes) * dtype.itemsize)
    content = archive.read(entry)
    offset = meta["storage_offset"]["as_int"]
    if 0 in sizes:
        return _Stored(torch.zeros(sizes, dtype=dtype), tuple(strides), offset)
    steps = zip(sizes, strides, strict=True)
    needed = dtype.itemsize * (offset + 1 + sum((size - 1) * step for size, step in steps))
    if len(content) < needed or len(content) % dtype.itemsize:
        raise Refusal(
            f"{archive.path} is damaged: {entry!r} has {len(content):,} bytes, and its tensor "
            f"needs {needed:,}"
        )
    flat = torch.frombuffer(bytearray(content), dtype=dtype)
    view = torch.as_strided(flat, sizes, strides, offset)
    return _Stored(view.contiguous(), tuple(strides), offset)


def _expected(description: Description) -> Expected:
    """Shape and dtype of the input, as far as they are fixed."""
    (name,) = description.inputs
    known = description.known[name]
    return Expected(_shape(known), DTYPES.get(known.get("dtype", 0)))


def _shape(known: Mapping[str, Any], key: str = "sizes") -> tuple[int | None, ...] | None:
    """Sizes, or strides, that a program says of a tensor; None for those that may be any."""
    sizes = known.get(key)
    return None if sizes is None else tuple(size.get("as_int") for size in sizes)
