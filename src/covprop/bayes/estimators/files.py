"""Estimators in safetensors files: tensors, and a description as JSON; nothing that is run.

A checksum of both is beside them, because safetensors has none of its own.
"""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covprop.bayes.estimators import settings
from covprop.bayes.likelihoods import Cubature, Delta, HomoskedasticGaussian
from covprop.errors import InvalidFile, warn_user
from covprop.files import write_atomically

KEY = "covprop"
CHECKSUM = "sha256"
FORMAT, WITHOUT_CHECKSUM = 2, 1
"""The format that is written, and the one before it, which is read with a warning."""
KIND = "type"
KNOWN: dict[str, type[Any]] = {
    kind.__name__: kind
    for table in (
        settings.METHODS, settings.PRIORS, settings.REGRESSION, settings.CLASSIFICATION,
        {"cubature": Cubature, "delta": Delta},
    )
    for kind in table.values()
}  # fmt: skip
"""Types that a file may name."""


def safetensors() -> Any:
    """Import the library when a file is read or written."""
    try:
        return importlib.import_module("safetensors"), importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "saving and loading need safetensors; install it with "
            "pip install '.[bayes]' in covprop's folder"
        ) from error


def write(path: Path, kind: str, described: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write one file atomically."""
    _, library = safetensors()
    text = json.dumps({"format": FORMAT, "estimator": kind, **described})
    content = library.save(tensors, metadata={KEY: text, CHECKSUM: checksum(text, tensors)})
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
def reading(path: Path, kind: str, device: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
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
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or bool(torch.isnan(tensor).any()):
                raise ValueError(f"{name} is not of numbers")
        yield described, tensors
    except KeyError as error:
        raise InvalidFile(f"{path} is not a file of {kind}.save: it lacks {error}") from error
    except (
        base.SafetensorError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError,
        OverflowError, OSError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidFile(f"{path} is not a file of {kind}.save: {reason}") from error


def fill(module: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Move all tensors of a module out of those of a file."""
    for name, own in module.state_dict().items():
        value = tensors.get(prefix + name)
        if value is None or value.shape != own.shape or value.dtype != own.dtype:
            what = "nothing" if value is None else f"{tuple(value.shape)} of {value.dtype}"
            raise ValueError(f"{prefix}{name} is {what}, not {tuple(own.shape)} of {own.dtype}")
    state = {name: tensors.pop(prefix + name) for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_(True)


def encode(value: Any) -> Any:
    """Encode parameters for JSON, objects by the name of their type and their fields."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if type(value) in KNOWN.values():
        return {KIND: type(value).__name__, **encode(_fields(value))}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise ValueError(f"a file cannot hold the parameter {value!r}; use a name, or pickle")


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, HomoskedasticGaussian):
        stddev = (value.log_variance.detach() / 2).exp().tolist()
        return {"stddev": stddev, "learned": isinstance(value.log_variance, nn.Parameter)}
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: item for name, item in fields.items() if item is not None and item != {}}


def decode(value: Any) -> Any:
    """Decode parameters from JSON; only known types are constructed."""
    if isinstance(value, list):
        items = [decode(item) for item in value]
        return tuple(items) if all(isinstance(item, int) for item in items) else items
    if not isinstance(value, dict):
        return value
    fields = {name: decode(item) for name, item in value.items() if name != KIND}
    if KIND not in value:
        return fields
    if value[KIND] not in KNOWN:
        raise ValueError(f"it names an unknown type {value[KIND]!r}")
    if isinstance(fields.get("stddev"), list):
        fields["stddev"] = torch.tensor(fields["stddev"])
    return KNOWN[value[KIND]](**fields)
