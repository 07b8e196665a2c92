"""The nine UCI regression sets with their standard splits, as members of one computation."""

import gzip
import io
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from experiments import files
from experiments.randomness import seed_of

FOLDER = "uci"
CHECKSUMS = {
    "boston": ("bdadb3287834db0780130f26a16d511d2489f45475dfed78cd2bf4f2f0b336b6",
               "a9aa0ae26fd93239c1335b35f034f9f128780945282e735dd562d9ce4f1ac51c"),
    "concrete": ("6f0beeda386dc0c77d77e24eeafff2ffd657fcf1a60ba752560b4ee3609fb743",
                 "be795fb63896bebb5f2e988d986e238f90f4ff54680129cf51793d628fcd7072"),
    "energy": ("021348650c6d74c99c37975d8ce00790cd60b3891f78fc1e987c1bdb3ae36629",
               "4ed88f2afaa4d829f6dcc904b21f8f8fcc0665804a109841a75e58e5da1d839d"),
    "kin8nm": ("0bfc160393b078105a841ad00b321b03d5799b7600ec1b5a4f774ed93761bf40",
               "4491c9a9e28b705c314919fff664b9e4dd4cce3817cba4c87ec203a6af9419c2"),
    "naval": ("741b1a910bcc1cd94b48d1a3585e35e21c6c4d47abdd1288142343237d50d9ff",
              "2bd796b837abc73616e668d630546cd982c6768f95ae3e0ae0d9e966a68f2d32"),
    "power": ("a5c1c9ebe84fc4e39bb4c1ed41d3116bd88b5797e254e3682fb379239a5c3448",
              "7adabeb4388a6f2ec04c1207513672119426565142adbd2742eec3cce28d2f71"),
    "protein": ("5dafcc9ce4127885ce5db37383ffe8c4706738d0f9483eb9f0521a44b717f81c",
                "72890aa607ad20b2db768bc1bf2ed990bd554454d4d12761c6ecdd108d632438"),
    "wine": ("195a53201e2a5f2161a834459c2f695d5f6a1676bc65dca8090336800eef03ca",
             "cf56b4778756b6ffc5b8610c0f757d893a3279d7fd0043c7450af2b299375de8"),
    "yacht": ("c0065f46ec2048f6ce75a2f0df87eb2c8b1567c4e85cd36cb8bcdaa9d1341f8a",
              "59b18305d40276c80a60e4e9f7d3e4b2b021e81cd88b13140148e4fdfb818494"),
}  # fmt: skip
"""Of the table and of its splits."""
HELD_OUT = 10
"""One in so many training rows validates."""


@final
class Rows(NamedTuple):
    """Standardised features and targets of every member."""

    x: Tensor  # (members, rows, features)
    y: Tensor  # (members, rows)


@final
class Members(NamedTuple):
    """Data sets that are trained on together, each standardised by its own training rows."""

    train: Rows
    test: Rows
    scale: Tensor  # (members,), the targets' unit

    def first(self, count: int) -> "Members":
        """So many of them, or all there are."""
        train, test = (Rows(rows.x[:count], rows.y[:count]) for rows in (self.train, self.test))
        return Members(train, test, self.scale[:count])

    def repeated(self, times: int) -> "Members":
        """Every member so many times, one after another."""
        train, test = (
            Rows(rows.x.repeat_interleave(times, 0), rows.y.repeat_interleave(times, 0))
            for rows in (self.train, self.test)
        )
        return Members(train, test, self.scale.repeat_interleave(times, 0))


def found(folder: Path | None = None) -> Path | None:
    """The folder with all tables and splits."""
    names = [name for each in CHECKSUMS for name in (f"{each}.csv.gz", f"splits/{each}.npz")]
    return files.folder_with(names, FOLDER, folder)


def table(name: str, folder: Path | None = None) -> np.ndarray:
    """All rows, the target last, (rows, features + 1)."""
    content = files.checked(_place(name, folder) / f"{name}.csv.gz", CHECKSUMS[name][0])
    return np.loadtxt(io.BytesIO(gzip.decompress(content)), delimiter=",", skiprows=1)


def splits(name: str, folder: Path | None = None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train and to test with (Hernandez-Lobato & Adams 2015), 20 times, protein 5 times."""
    content = files.checked(_place(name, folder) / "splits" / f"{name}.npz", CHECKSUMS[name][1])
    arrays = np.load(io.BytesIO(content))
    return [(arrays[f"train_{k}"], arrays[f"test_{k}"]) for k in range(len(arrays.files) // 2)]


def standard(name: str, folder: Path | None = None, most: int | None = None) -> Members:
    """The standard splits, a member each; `most` of them and of their rows for a smoke run."""
    rows, indices = table(name, folder), splits(name, folder)[: most or None]
    train, test = (np.stack([rows[pair[part]] for pair in indices]) for part in (0, 1))
    return standardised(_few(train, most), _few(test, most))


def validation(
    name: str, count: int, folder: Path | None = None, most: int | None = None, seed: int = 0
) -> Members:
    """The training rows of the first split alone, cut `count` times at random into 9 : 1."""
    rows, indices = table(name, folder), splits(name, folder)[0][0]
    random = np.random.default_rng(seed_of(seed, "validation", name))
    held_out = len(indices) // HELD_OUT
    shuffled = np.stack([rows[random.permutation(indices)] for _ in range(count)])
    return standardised(_few(shuffled[:, held_out:], most), _few(shuffled[:, :held_out], most))


def standardised(train: np.ndarray, test: np.ndarray) -> Members:
    """Mean 0 and deviation 1 by the training rows; what is constant there becomes 0 everywhere.

    train, test: (members, rows, features + 1), the target last. In float32, as torch's layers are.
    """
    mean = train.mean(1, keepdims=True)
    constant = np.ptp(train, axis=1, keepdims=True) == 0  # a deviation has rounding errors
    deviation = np.where(constant, 1, train.std(1, keepdims=True))

    def rows(values: np.ndarray) -> Rows:
        scaled = np.where(constant, 0, (values - mean) / deviation)
        tensor = torch.from_numpy(scaled.astype(np.float32))
        return Rows(tensor[..., :-1].contiguous(), tensor[..., -1].contiguous())

    if constant[..., -1].any():
        raise ValueError("the target is the same in all training rows; there is nothing to learn")
    return Members(rows(train), rows(test), torch.from_numpy(deviation[:, 0, -1]))


def _few(rows: np.ndarray, most: int | None) -> np.ndarray:
    return rows if most is None else rows[:, : most * HELD_OUT]


def _place(name: str, folder: Path | None) -> Path:
    if name not in CHECKSUMS:
        raise ValueError(f"{name!r} is none of {', '.join(CHECKSUMS)}")
    place = files.folder_with([f"{name}.csv.gz", f"splits/{name}.npz"], FOLDER, folder)
    if place is None:
        looked = ", ".join(map(str, files.places(folder)))
        raise FileNotFoundError(
            f"no {FOLDER}/{name}.csv.gz with splits/{name}.npz in {looked}; set {files.VARIABLE} "
            "or give --data"
        )
    return place
