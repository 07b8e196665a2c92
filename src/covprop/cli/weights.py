"""Weights of a network from .safetensors, or from .pt with tensors only: all, and in shape."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covprop.cli.arrays import checked_tensor
from covprop.cli.files import Archive, check_affordable, existing
from covprop.cli.refusals import Refusal, reading


def fill(module: Any, path: Path, name: str) -> None:
    """Put the weights of a file into a network; its dtype becomes theirs."""
    if not isinstance(module, nn.Module):
        raise Refusal(f"{name} makes a {type(module).__name__}, which has no weights to load")
    check_affordable(path, existing(path))
    suffix = path.suffix.lower()
    if suffix not in (".safetensors", ".pt"):
        raise Refusal(
            f"{path} is no file of weights: its name ends neither with .safetensors nor .pt"
        )
    with reading(path, "a file of weights"):
        tensors = _safetensors(path) if suffix == ".safetensors" else _pt(path)
    own = module.state_dict()
    missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or foreign:
        what = (
            f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}, which the network has not"
        )
        raise Refusal(f"{path} does not fit {name}: it {what}")
    for key, tensor in tensors.items():
        if tensor.shape != own[key].shape:
            raise Refusal(
                f"{path} does not fit {name}: {key!r} has shape {tuple(tensor.shape)}, and "
                f"{tuple(own[key].shape)} is wanted"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise Refusal(f"{path} has NaN or infinite entries in {key!r}")
    with reading(path, f"the weights of {name}"):
        module.load_state_dict(tensors, assign=True)


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        library = importlib.import_module("safetensors")
    except ImportError as error:
        raise Refusal(
            "weights in .safetensors need safetensors; install it with "
            "pip install '.[cli]' in covprop's folder"
        ) from error
    with library.safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _pt(path: Path) -> dict[str, Tensor]:
    with Archive(path) as archive:
        archive.check_content()
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise Refusal(f"{path} holds a {type(content).__name__}, not the weights of a network")
    return {str(name): checked_tensor(path, value) for name, value in content.items()}
