"""The MNIST and Fashion-MNIST images: from a folder, or from their public home, with checksums."""

import gzip
import urllib.request
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from experiments import files

DIGITS, FASHION = "mnist", "fashion-mnist"
HOMES = {
    DIGITS: "https://ossci-datasets.s3.amazonaws.com/mnist/",
    FASHION: "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
}
CHECKSUMS = {
    DIGITS: {
        "train-images-idx3-ubyte.gz":
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz":
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz":
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz":
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    FASHION: {
        "train-images-idx3-ubyte.gz":
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz":
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz":
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz":
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
}  # fmt: skip
MEAN, STDDEV = 0.1307, 0.3081
"""Of the training digits' grey values in [0, 1]."""
DIMENSIONS_BYTE = 3
"""Where an idx file says how many dimensions it has; four bytes for each follow."""


@final
class Digits(NamedTuple):
    """Images and their labels."""

    images: Tensor  # (count, 1, 28, 28)
    labels: Tensor  # (count,)


def found(folder: Path | None = None, collection: str = DIGITS) -> Path | None:
    """The folder with all four files: as given, as the environment says, or one of the usual."""
    return files.folder_with(CHECKSUMS[collection], collection, folder)


def load(split: str, folder: Path | None = None, collection: str = DIGITS) -> Digits:
    """The `train` or `t10k` images; downloaded into /data where no folder has them.

    Grey values are standardised as is usual for digits, which sets the scale of an input noise;
    those of fashion alike, as a network that knows digits would be given them.
    """
    place = found(folder, collection) or downloaded(folder or files.FOLDERS[-1], collection)
    images = _idx(place / f"{split}-images-idx3-ubyte.gz", collection)
    labels = _idx(place / f"{split}-labels-idx1-ubyte.gz", collection)
    pixels = torch.from_numpy(images.astype(np.float32) / np.iinfo(np.uint8).max)
    return Digits((pixels[:, None] - MEAN) / STDDEV, torch.from_numpy(labels.astype(np.int64)))


def downloaded(folder: Path, collection: str = DIGITS) -> Path:
    """The four files, fetched into a subfolder."""
    target = folder / collection
    target.mkdir(parents=True, exist_ok=True)
    for name in CHECKSUMS[collection]:
        with urllib.request.urlopen(HOMES[collection] + name) as answer:
            (target / name).write_bytes(answer.read())
    return target


def _idx(path: Path, collection: str) -> np.ndarray:
    raw = gzip.decompress(files.checked(path, CHECKSUMS[collection][path.name]))
    start = DIMENSIONS_BYTE + 1
    stop = start + 4 * raw[DIMENSIONS_BYTE]
    return np.frombuffer(raw, np.uint8, offset=stop).reshape(np.frombuffer(raw[start:stop], ">i4"))
