"""The MNIST images: from a folder that has them, or from their public home, with checksums."""

import gzip
import hashlib
import os
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.options import ROOT

HOME = "https://ossci-datasets.s3.amazonaws.com/mnist/"
VARIABLE = "COVPROP_DATA"
FOLDERS = (ROOT.parent / "shared" / "data", ROOT / "data")
CHECKSUMS = {
    "train-images-idx3-ubyte.gz":
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz":
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz":
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz":
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}  # fmt: skip
MEAN, STDDEV = 0.1307, 0.3081
"""Of the training images' grey values in [0, 1]."""
DIMENSIONS_BYTE = 3
"""Where an idx file says how many dimensions it has; four bytes for each follow."""


class Digits(NamedTuple):
    """Images and their labels."""

    images: Tensor  # (count, 1, 28, 28)
    labels: Tensor  # (count,)


def found(folder: Path | None = None) -> Path | None:
    """The folder with all four files: as given, as the environment says, or one of the usual."""
    named = [Path(os.environ[VARIABLE])] if VARIABLE in os.environ else []
    for place in [folder] if folder else [*named, *FOLDERS]:
        for candidate in (place / "mnist", place):
            if all((candidate / name).exists() for name in CHECKSUMS):
                return candidate
    return None


def load(split: str, folder: Path | None = None) -> Digits:
    """The `train` or `t10k` digits; downloaded into /data where no folder has them.

    Grey values are standardised as usual, which sets the scale of an input noise.
    """
    place = found(folder) or downloaded(folder or FOLDERS[-1])
    images = _idx(place / f"{split}-images-idx3-ubyte.gz")
    labels = _idx(place / f"{split}-labels-idx1-ubyte.gz")
    pixels = torch.from_numpy(images.astype(np.float32) / np.iinfo(np.uint8).max)
    return Digits((pixels[:, None] - MEAN) / STDDEV, torch.from_numpy(labels.astype(np.int64)))


def downloaded(folder: Path) -> Path:
    """The four files, fetched into folder/mnist."""
    target = folder / "mnist"
    target.mkdir(parents=True, exist_ok=True)
    for name in CHECKSUMS:
        with urllib.request.urlopen(HOME + name) as answer:
            (target / name).write_bytes(answer.read())
    return target


def _idx(path: Path) -> np.ndarray:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[path.name]:
        raise ValueError(f"{path} is not the published file (its sha256 differs); delete it")
    raw = gzip.decompress(content)
    start = DIMENSIONS_BYTE + 1
    stop = start + 4 * raw[DIMENSIONS_BYTE]
    return np.frombuffer(raw, np.uint8, offset=stop).reshape(np.frombuffer(raw[start:stop], ">i4"))
