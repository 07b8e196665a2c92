"""Archives of `torch.export` (.pt2): a program that is data, not code, and tensors as bytes.

`torch.export.load` unpickles, evaluates expressions of sizes as Python and calls any function of
torch that the file names. Here each call is one that `program` allows.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from covprop.cli.arrays import BoundedZip, check_affordable
from covprop.cli.output import Refusal
from covprop.cli.program import DTYPES, Description, Name, ProgramCall, parse
from covprop.errors import UnsupportedOperation
from covprop.flow.nests import map_leaves

LARGEST_TEXT = 2**28  # bytes of a description
LARGEST_TENSOR = 2**34  # elements: a view repeats a few numbers as often as a file says
Stored: TypeAlias = tuple[Tensor, tuple[int, ...], int]
"""A tensor, and its strides and offset in the file: others would be other numbers."""


@dataclass(frozen=True)
class Expected:
    """Shape and dtype that a model declares for its input; None is any size, or anything."""

    shape: tuple[int | None, ...] | None = None
    dtype: torch.dtype | None = None

    def fits(self, shape: torch.Size) -> bool:
        """Whether the model takes input of this shape."""
        return self.shape is None or (
            len(shape) == len(self.shape)
            and all(want in (None, have) for want, have in zip(self.shape, shape, strict=True))
        )

    def check(self, shape: torch.Size) -> None:
        """Refuse a mean of another shape."""
        if self.shape is None or self.fits(shape):
            return
        wanted = ", ".join("any" if size is None else str(size) for size in self.shape)
        sizes = [1 if size is None else size for size in self.shape]
        advice = "export the model with dynamic_shapes if it is to take others"
        if math.prod(sizes) == shape.numel():
            advice = f"give --shape {','.join(map(str, sizes))}"
        raise Refusal(
            f"the model takes input of shape ({wanted}), and the mean has {tuple(shape)}; {advice}"
        )


def load(path: Path) -> tuple["Program", Expected]:
    """The program in an archive, and the input that it takes."""
    with BoundedZip(path) as archive:
        root, name = _find_program(archive)
        if archive.read(f"{root}byteorder").decode() != sys.byteorder:
            raise Refusal(f"{path} was written on a machine with another order of bytes")
        content = _json(archive, f"{root}models/{name}.json")
        try:
            description = parse(content)
        except Refusal as refusal:
            raise Refusal(f"{path} cannot be run: {refusal}") from refusal
        tensors: dict[str, Stored] = {}
        for folder in ("weights", "constants"):
            tensors |= _tensors(archive, f"{root}data/{folder}/", f"{name}_{folder}_config.json")
    if len(description.inputs) != 1:
        raise Refusal(
            f"{path} is a program of {len(description.inputs)} inputs, and the command line gives "
            "one; use cp.propagate in Python"
        )
    _check_tensors(path, description, tensors)
    metadata = description.metadata[description.inputs[0]]
    expected = Expected(_sizes(metadata), DTYPES.get(metadata.get("dtype", 0)))
    values = {name: tensor for name, (tensor, *_) in tensors.items()}
    return Program(description, values, expected), expected


def _find_program(archive: BoundedZip) -> tuple[str, str]:
    """The folder that everything is in, and the name of the program."""
    programs = [name for name in archive.sizes if name.endswith(".json") and "models/" in name]
    if not programs:
        raise Refusal(
            f"{archive.path} holds no exported program; write one with "
            "torch.export.save(torch.export.export(model, (example,)), path)"
        )
    if len(programs) > 1:
        raise Refusal(f"{archive.path} holds {len(programs)} programs, and one is wanted")
    root, _, rest = programs[0].rpartition("models/")
    return root, rest.removesuffix(".json")


def _json(archive: BoundedZip, name: str) -> dict[str, Any]:
    if archive.sizes.get(name, 0) > LARGEST_TEXT:
        raise Refusal(f"{archive.path} has a description of more than {LARGEST_TEXT:,} bytes")
    content = json.loads(archive.read(name))
    if not isinstance(content, dict):
        raise Refusal(f"{archive.path} is damaged: {name!r} is no description")
    return content


def _tensors(archive: BoundedZip, folder: str, config: str) -> dict[str, Stored]:
    """The tensors of one folder, by their names in the network."""
    if folder + config not in archive.sizes:
        raise Refusal(
            f"{archive.path} has no {config!r}, so it comes from an older torch or holds pickles, "
            "which run code when they are loaded; export it again, or say --allow-pickle if you "
            "trust the file"
        )
    tensors = {}
    for name, entry in _json(archive, folder + config)["config"].items():
        metadata = entry["tensor_meta"]
        if entry["use_pickle"] or metadata is None:
            raise Refusal(
                f"{archive.path} holds {name!r} as a pickle, which runs code when it is loaded; "
                "say --allow-pickle if you trust the file"
            )
        tensors[name] = _tensor(archive, folder + entry["path_name"], metadata)
    return tensors


def _tensor(archive: BoundedZip, entry: str, metadata: dict[str, Any]) -> Stored:
    """A view of what is stored, all of which has to be there."""
    dtype = DTYPES[metadata["dtype"]]
    sizes, strides = ([step["as_int"] for step in metadata[key]] for key in ("sizes", "strides"))
    if any(type(size) is not int or size < 0 for size in sizes):
        raise Refusal(f"{archive.path} is damaged: {entry!r} has sizes {sizes}")
    check_affordable(archive.path, math.prod(sizes) * dtype.itemsize)
    content = archive.read(entry)
    offset = metadata["storage_offset"]["as_int"]
    if 0 in sizes:
        return torch.zeros(sizes, dtype=dtype), tuple(strides), offset
    steps = zip(sizes, strides, strict=True)
    needed = dtype.itemsize * (offset + 1 + sum((size - 1) * step for size, step in steps))
    if len(content) < needed or len(content) % dtype.itemsize:
        raise Refusal(
            f"{archive.path} is damaged: {entry!r} has {len(content):,} bytes, and its tensor "
            f"needs {needed:,}"
        )
    flat = torch.frombuffer(bytearray(content), dtype=dtype)
    view = torch.as_strided(flat, sizes, strides, offset)
    return view.contiguous(), tuple(strides), offset


def _check_tensors(path: Path, description: Description, tensors: Mapping[str, Stored]) -> None:
    """Refuse tensors that are missing, or are not those that the program was exported with."""
    for name, stored in description.tensors.items():
        if stored not in tensors:
            raise Refusal(f"{path} is damaged: it lacks the tensor {stored!r}")
        metadata, (tensor, strides, offset) = description.metadata[name], tensors[stored]
        shape, dtype = _sizes(metadata), DTYPES.get(metadata.get("dtype", 0))
        if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
            raise Refusal(
                f"{path} is damaged: {stored!r} is {tuple(tensor.shape)} of {tensor.dtype}, and "
                f"its program was exported with {shape} of {dtype}"
            )
        place = _sizes(metadata, "strides"), metadata.get("storage_offset", {}).get("as_int")
        if place != (strides, offset):
            raise Refusal(
                f"{path} is damaged: {stored!r} lies in its file with strides {strides} from "
                f"{offset}, and its program was exported with strides {place[0]} from {place[1]}"
            )


def _sizes(metadata: Mapping[str, Any], key: str = "sizes") -> tuple[int | None, ...] | None:
    """Sizes or strides of a tensor; None for those that may be any."""
    sizes = metadata.get(key)
    return None if sizes is None else tuple(size.get("as_int") for size in sizes)


@final
class Scope(nn.Module):
    """A module of the network that was exported, in whose name calls are made."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "module"  # or the class that it was exported from

    def _get_name(self) -> str:
        return self.kind  # for torch's and covprop's messages

    def run(self, call: ProgramCall, values: dict[str, Any]) -> None:
        """Run a call; covprop takes this module for the one that is running."""
        _run(call, values)


def _run(call: ProgramCall, values: dict[str, Any]) -> None:
    """Run a call, store its results and release what no later call uses."""
    args = [_filled(item, values) for item in call.args]
    kwargs = {key: _filled(item, values) for key, item in call.kwargs.items()}
    result = call.function(*args, **kwargs)
    for item in result if isinstance(result, list | tuple) else [result]:
        if isinstance(item, Tensor) and item.numel() > LARGEST_TENSOR:
            raise Refusal(f"the program makes a tensor of {item.numel():,} numbers")
    results = result if len(call.results) > 1 else [result]
    for name, value in zip(call.results, results, strict=True):
        if isinstance(name, list):
            values.update(zip(name, value, strict=True))
        elif isinstance(name, Name):
            values[name] = value
    for name in call.released:
        values.pop(name, None)


def _filled(nest: Any, values: Mapping[str, Any]) -> Any:
    """A nest with the values of its names."""
    return map_leaves(nest, lambda leaf: values[leaf] if isinstance(leaf, Name) else leaf)


@final
class Program(nn.Module):
    """A network of one input: the calls of a description, with its tensors."""

    def __init__(
        self, description: Description, tensors: Mapping[str, Tensor], expected: Expected
    ) -> None:
        """Keep the tensors as parameters, so that their dtype and device are known."""
        super().__init__()
        self._description, self._expected = description, expected
        self._tensors = {name: tensors[stored] for name, stored in description.tensors.items()}
        self.weights = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False)
            for tensor in self._tensors.values()
            if tensor.is_floating_point()
        )
        kinds = {call.module: call.module_class for call in description.calls}
        self._scopes = {path: self._scope(path) for path in sorted(kinds)}
        for path, scope in self._scopes.items():
            if scope is not None:
                scope.kind = kinds[path]

    def _scope(self, path: str) -> Scope | None:
        """The module of that path, made if need be; its parent where the name is taken."""
        owner: nn.Module = self
        for part in path.split(".") if path else []:
            child = owner._modules.get(part)
            if child is None and not hasattr(owner, part):
                owner.add_module(part, child := Scope())
            if not isinstance(child, Scope):
                break
            owner = child
        return owner if isinstance(owner, Scope) else None

    def forward(self, x: Any) -> Any:
        """What the exported network returns for input of a shape that it was exported for."""
        if not self._expected.fits(x.shape):
            raise UnsupportedOperation(
                f"the program was exported for input of shape {self._expected.shape}, and not "
                f"{tuple(x.shape)}"
            )
        description = self._description
        values = {**description.constants, **self._tensors, description.inputs[0]: x}
        del x
        for call in description.calls:
            scope = self._scopes[call.module]
            (_run if scope is None else scope.run)(call, values)
        outputs = [_filled(output, values) for output in description.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
