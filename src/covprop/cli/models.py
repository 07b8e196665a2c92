"""Models by name: an exported program, an ONNX file, or a function that makes one.

A file is known by what is in it. Pickles run code when they are loaded, and are refused unless the
user trusts them.
"""

import importlib
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covprop.cli import archive, onnx_files, weights
from covprop.cli.files import Archive, existing
from covprop.cli.gaussians import Expected
from covprop.cli.operators import check_graph
from covprop.cli.refusals import Note, Refusal, location, named, printable, reading
from covprop.validation import SUPPORTED

FACTORY = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*", re.ASCII)
KINDS = (
    "a torch.export archive (.pt2), an ONNX file (.onnx), or package.module:factory with --weights "
    "FILE.safetensors"
)
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib")
PICKLE_SIGN = b"\x80"
"""The first byte of a pickle of protocol 2 or later."""


@dataclass(frozen=True)
class Model:
    """A network that can be called, what to call it, and what it takes."""

    name: str
    module: Callable[..., Any]
    expected: Expected


def load(text: str, weights_file: str | None, allow_pickle: bool) -> Model:
    """The model that the user named, in evaluation mode and without gradients."""
    if not text:
        raise Refusal(f"MODEL is missing: it is {KINDS}")
    path = Path(text)
    if path.exists():
        if weights_file is not None:
            raise Refusal(f"{path} has its own weights; --weights goes with package.module:factory")
        module, expected = _from_file(path, allow_pickle)
        name = path.name
    elif FACTORY.fullmatch(text):
        module, expected, name = _made(text), Expected(), text
        if weights_file is not None:
            weights.fill(module, Path(weights_file), text)
        elif isinstance(module, nn.Module) and any(True for _ in module.parameters()):
            warnings.warn(
                f"without --weights, {text} has the weights that it is made with",
                Note,
                stacklevel=2,
            )
    else:
        raise Refusal(f"{text!r} does not exist, and is no name such as package.module:factory")
    if isinstance(module, nn.Module):
        module.requires_grad_(False)
        if not isinstance(module, torch.fx.GraphModule):  # an exported one has no other mode
            module.eval()
    return Model(printable(name), module, Expected(expected.shape, _dtype(text, module, expected)))


def _dtype(text: str, module: Any, expected: Expected) -> torch.dtype | None:
    """That of the parameters, or else what the model says of its input."""
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    found = {p.dtype for p in parameters if p.is_floating_point()}
    dtype = expected.dtype if expected.dtype in found or not found else None
    if dtype is None and found:
        dtype = next((known for known in SUPPORTED if known in found), sorted(found, key=str)[0])
    if dtype is not None and dtype not in SUPPORTED:
        raise Refusal(
            f"{text} computes in {dtype}, and covprop in float32 or float64; convert the network "
            "with .float() before it is saved"
        )
    return dtype


def _from_file(path: Path, allow_pickle: bool) -> tuple[Any, Expected]:
    """A file of any kind, by its content first and its name last."""
    size = existing(path)
    if not size:
        raise Refusal(f"{path} is empty")
    with path.open("rb") as file:
        sign = file.read(1)
    with reading(path, "a zip archive"):
        names = _entries(path, checked=allow_pickle)
    if names is not None:
        return _from_archive(path, names, allow_pickle)
    suffix = path.suffix.lower()
    if sign == PICKLE_SIGN or suffix in PICKLED:
        return _unpickled(path, allow_pickle), Expected()
    if suffix == ".onnx":
        with reading(path, "an ONNX file"):
            return onnx_files.load(path)
    if suffix == ".safetensors":
        raise Refusal(
            f"{path} holds weights and no network; name the network as package.module:factory and "
            f"give --weights {path}"
        )
    if suffix == ".pt2":
        raise Refusal(f"{path} is no torch.export archive: it is cut off, or something else")
    raise Refusal(f"{path} is none of the models that can be read: {KINDS}")


def _entries(path: Path, checked: bool) -> list[str] | None:
    """The names in a zip archive; checked for what torch reads, which asks for no checksums."""
    if not zipfile.is_zipfile(path):
        return None
    with Archive(path) as content:
        if checked:
            content.check_content()
        return list(content.sizes)


def _from_archive(path: Path, names: list[str], allow_pickle: bool) -> tuple[Any, Expected]:
    if archive.is_archive(names) or any("exported_program" in name for name in names):
        if allow_pickle:
            find_own_modules()
            with reading(path, "a torch.export archive"):
                return _loaded(path), Expected()
        with reading(path, "a torch.export archive"):
            return archive.load(path)
    if any("/code/" in name for name in names):
        raise Refusal(
            f"{path} is TorchScript, into which covprop cannot look; export the network with "
            "torch.export instead"
        )
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return _unpickled(path, allow_pickle), Expected()
    raise Refusal(f"{path} is a zip archive, and none of the models that can be read: {KINDS}")


def _loaded(path: Path) -> torch.fx.GraphModule:
    """A program as torch loads it, which keeps the mode that it was exported in."""
    module = torch.export.load(path).module()
    try:
        check_graph(module)
    except Refusal as refusal:
        raise Refusal(f"{path} cannot be run: {refusal}") from refusal
    return module


def _unpickled(path: Path, allow_pickle: bool) -> Any:
    if not allow_pickle:
        if _holds_weights(path):
            raise Refusal(
                f"{path} holds weights and no network; name the network as package.module:factory "
                f"and give --weights {path}"
            )
        raise Refusal(
            f"{path} is a pickle, which can run any code when it is loaded; write the network with "
            "torch.export.save, or say --allow-pickle if you trust the file"
        )
    find_own_modules()
    with reading(path, "a pickled network"):
        content = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(content, torch.export.ExportedProgram):
        content = content.module()
    if not isinstance(content, nn.Module):
        raise Refusal(f"{path} holds a {type(content).__name__}, and a torch.nn.Module is wanted")
    return content


def _holds_weights(path: Path) -> bool:
    """Whether it is a state_dict, which torch can tell without running anything."""
    try:
        with Archive(path):
            content = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # whatever else it is, it is not weights
        return False
    values = content.values() if isinstance(content, dict) else [None]
    return all(isinstance(value, Tensor) for value in values)


def find_own_modules() -> None:
    """Modules in the current folder come first, as for `python -m`; the entry undoes it."""
    sys.path.insert(0, os.getcwd())


def _made(text: str) -> Any:
    """What a factory returns; the user's code runs here, and its mistakes are named as such."""
    module_name, _, path = text.partition(":")
    find_own_modules()
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Refusal(
            f"there is no module {error.name!r} in {os.getcwd()} or among the installed ones"
        ) from error
    except (Exception, SystemExit) as error:
        where = location(error)
        raise Refusal(f"importing {module_name} failed at {where}: {named(error)}") from error
    for part in path.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if found is None:
        raise Refusal(f"the module {module_name} has no {path!r}")
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise Refusal(f"{text} is a {type(found).__name__}, not a function that makes a model")
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{text}() failed at {location(error)}: {named(error)}") from error
    if not callable(made):
        raise Refusal(f"{text}() returned a {type(made).__name__}, and a torch.nn.Module is wanted")
    return made
