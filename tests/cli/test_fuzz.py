"""Damaged files and odd words: never a traceback, never a partial output, always an exit code."""

import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn

from covprop.methods.names import MOST_SAMPLES
from tests.cli.mutations import (
    DESCRIPTIONS,
    ENTRIES,
    MUTATIONS,
    NUMBERS,
    OPERATORS,
    Mutation,
)
from tests.cli.running import Ended, check_refused, covprop, export, write_files
from tests.cli.test_models import save_onnx

LONGEST = 60.0
"""Seconds; what takes longer hangs. Most examples take some milliseconds."""
QUICK = 25
LONG = int(os.environ.get("COVPROP_FUZZ", "400"))


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files to damage, in the current folder; it is put back when the module is done."""
    folder, before = tmp_path_factory.mktemp("fuzz"), Path.cwd()
    os.chdir(folder)
    write_files(folder)
    save_onnx()
    convolutional = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8, 2),
    ).eval()  # fmt: skip
    export(convolutional, folder / "image.pt2", 1, 4, 4)
    np.save("image.npy", np.zeros((1, 1, 4, 4), dtype=np.float32))
    yield folder
    os.chdir(before)


def check(ended: Ended, folder: Path, before: set[str], out: str | None) -> None:
    """What holds whatever a file or an option was."""
    assert ended.code in (0, 2, 3), ended
    left = set(os.listdir(folder)) - before
    if ended.code == 2:
        check_refused(ended)
        assert left == set(), "a refused command left files"
        return
    told = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if "mean" in told:
        assert all(map(math.isfinite, torch.tensor(told["mean"]).flatten().tolist()))
    assert left == ({out} if out else set())
    if out:
        found = np.load(folder / out)
        assert found["covariance"].shape[-1] == math.prod(told["event_shape"])
        np.testing.assert_array_equal(found["mean"], np.float32(told["mean"]))


def run(name: str, content: bytes, *words: Any) -> None:
    """Put a damaged file into a folder, name it in a command, and look at what is left."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        damaged = folder / name
        damaged.write_bytes(content)
        before = set(os.listdir(folder))
        out = str(folder / "y.npz")
        named = [str(damaged) if word == name else word for word in words]
        ended = covprop(*named, "--out", out, "--json")
        check(ended, folder, before, "y.npz")
    assert time.monotonic() - started < LONGEST


def examples(*strategies: SearchStrategy[Any]) -> Callable[[Any], Any]:
    """A quick test, and the same with many examples for `-m slow`."""

    def decorate(body: Callable[..., None]) -> Any:
        def sized(count: int) -> Any:
            return settings(
                max_examples=count,
                deadline=None,
                derandomize=count == QUICK,
                database=None,
                suppress_health_check=list(HealthCheck),
            )

        @pytest.mark.parametrize(
            "count", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
        )
        def test(count: int) -> None:
            sized(count)(given(*strategies)(body))()

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate


def read(name: str) -> bytes:
    return Path(name).read_bytes()


ARRAYS = {
    "mean.npy": ("propagate", "model.pt2", "--mean", "mean.npy", "--stddev", 0.1),
    "mean.pt": ("propagate", "model.pt2", "--mean", "mean.pt", "--stddev", 0.1),
    "mean.csv": ("propagate", "model.pt2", "--mean", "mean.csv", "--stddev", 0.1),
    "covariance.npy": (
        "propagate", "model.pt2", "--mean", "mean.npy", "--covariance", "covariance.npy",
    ),
    "covariance.pt": (
        "propagate", "model.pt2", "--mean", "mean.npy", "--covariance", "covariance.pt",
    ),
}  # fmt: skip
MEAN = ("--mean", "mean.npy", "--stddev", 0.1)


@examples(st.sampled_from(sorted(ARRAYS)), MUTATIONS)
def test_damaged_arrays(name: str, mutation: Mutation) -> None:
    run(name, mutation(read(name)), *ARRAYS[name])


@examples(st.sampled_from(["covariance.pt", "mean.pt"]), ENTRIES)
def test_damaged_entries_of_tensors(name: str, mutation: Mutation) -> None:
    run(name, mutation(read(name)), *ARRAYS[name])


@examples(MUTATIONS | ENTRIES)
def test_damaged_npz(mutation: Mutation) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        path.write_bytes(mutation(read("arrays.npz")))
        ended = covprop("propagate", "model.pt2", "--mean", f"{path}:mean", "--covariance",
                        f"{path}:covariance", "--json")  # fmt: skip
        check(ended, Path(folder), {"a.npz"}, None)


@examples(st.sampled_from(["weights.safetensors", "weights.pt"]), MUTATIONS)
def test_damaged_weights(name: str, mutation: Mutation) -> None:
    run(name, mutation(read(name)), "propagate", "made_by_test:make", "--weights", name, *MEAN)


@examples(MUTATIONS)
def test_damaged_onnx(mutation: Mutation) -> None:
    run("model.onnx", mutation(read("model.onnx")), "propagate", "model.onnx", *MEAN)


@examples(MUTATIONS | ENTRIES)
def test_damaged_archives(mutation: Mutation) -> None:
    run("model.pt2", mutation(read("model.pt2")), "propagate", "model.pt2", *MEAN)


CHECKED = {
    "model.pt2": ("propagate", "model.pt2", *MEAN),
    "weights.pt": ("propagate", "made_by_test:make", "--weights", "weights.pt", *MEAN),
    "mean.pt": ARRAYS["mean.pt"],
    "arrays.npz": ("propagate", "model.pt2", "--mean", "arrays.npz:mean", "--stddev", 0.1),
}
"""Files with checksums, and commands that read them."""


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize(
    "count", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_a_flipped_bit_changes_no_number_that_has_a_checksum(name: str, count: int) -> None:
    generator = random.Random(0)
    content = read(name)
    whole = covprop(*CHECKED[name], "--json").told
    for _ in range(count):
        place = generator.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(damaged)
            named = [str(word).replace(name, str(path)) for word in CHECKED[name]]
            ended = covprop(*named, "--json")
        if ended.code == 0:
            assert ended.told["covariance"] == whole["covariance"], place
            assert ended.told["mean"] == whole["mean"], place
        else:
            check_refused(ended)


@examples(st.sampled_from([("model.pt2", "mean.npy"), ("image.pt2", "image.npy")]),
          DESCRIPTIONS | OPERATORS,
          st.sampled_from(["exact", "montecarlo:20", "linearized", "split"]))  # fmt: skip
def test_other_programs(files: tuple[str, str], mutation: Mutation, method: str) -> None:
    model, mean = files
    words = ("propagate", model, "--mean", mean, "--stddev", 0.1, "--method", method)
    run(model, mutation(read(model)), *words)


KINDS = ["f2", "f4", "f8", ">f8", "i1", "i8", "u8", "?", "c8", "O", "U3", "S2", "M8[s]", "V4"]


@st.composite
def odd_arrays(draw: DrawFn) -> bytes:
    """A .npy file that is whole, but of any kind and shape, with any numbers."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    kind = draw(st.sampled_from(KINDS))
    count = math.prod(shape)
    numbers = draw(
        st.lists(st.floats() | st.just(0.1) | st.just(1e300), min_size=count, max_size=count)
    )
    with np.errstate(all="ignore"):
        if kind in ("O", "U3", "S2", "M8[s]", "V4"):
            values = np.zeros(shape, dtype=kind)
        else:
            finite = (
                np.nan_to_num(numbers) if kind[-2:] not in ("f2", "f4", "f8", "c8") else numbers
            )
            values = np.array(finite).reshape(shape).astype(kind)
    path = Path("odd.npy")
    np.save(path, values, allow_pickle=True)
    return path.read_bytes()


@examples(odd_arrays(), st.sampled_from(["mean", "covariance", "stddev"]), st.integers(0, 3))
def test_arrays_of_any_kind_and_shape(content: bytes, role: str, dims: int) -> None:
    words = {"mean": MEAN, "covariance": ("--mean", "mean.npy", "--covariance", "odd.npy"),
             "stddev": ("--mean", "mean.npy", "--stddev", "odd.npy")}[role]  # fmt: skip
    words = tuple("odd.npy" if role == "mean" and word == "mean.npy" else word for word in words)
    run("odd.npy", content, "propagate", "model.pt2", *words, "--batch-dims", dims)


HUGE = st.tuples(NUMBERS, NUMBERS)


@examples(HUGE, st.sampled_from(["<f8", "<f4", "|O", "<i8", "<f16", "|b1", "<U9"]))
def test_sizes_that_are_only_declared(sizes: tuple[int, int], kind: str) -> None:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {sizes}, }}".encode()
    content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 64
    run("odd.npy", content, "propagate", "model.pt2", "--mean", "odd.npy", "--stddev", 1)


WORDS = (
    st.text(max_size=12)
    | st.sampled_from(["", "-", "--", "nan", "-inf", "1e999", "0x10", "١", "1_000", "\0", "\ud800"])
    | NUMBERS.map(str)
    | st.sampled_from(["mean.npy", "covariance.npy", "model.pt2", "arrays.npz:mean", ".", "/", "~"])
    | st.sampled_from(["exact", "series:3", "series:1e-3", "unscented:", "piecewise:1", "assumed"])
    | st.sampled_from(["montecarlo:99999999999999", "series:100000", "split:1000000"])
)
OPTIONS = st.sampled_from(["--mean", "--covariance", "--stddev", "--method", "--batch-dims",
                           "--shape", "--weights", "--output", "--seed", "--samples",
                           "--tolerance", "--nonsense", "-x", "--label", "--norm", "--radius",
                           "--probability", "--require-probability", "--group",
                           "--orders"])  # fmt: skip
COMMANDS = st.sampled_from(["propagate", "compare", "budget", "plan", "robustness"])


def is_long(word: str) -> bool:
    """Work that a user may ask for, and a test does not wait for; more than that is refused."""
    digits = word.rpartition(":")[2]
    return digits.isdecimal() and 10_000 < int(digits) <= MOST_SAMPLES


@examples(COMMANDS, st.lists(st.tuples(OPTIONS, WORDS), max_size=4), WORDS | st.just("model.pt2"))
def test_odd_words(command: str, options: list[tuple[str, str]], model: str) -> None:
    chosen = [(name, word) for name, word in options if not is_long(word)]
    words = [part for pair in chosen for part in pair]
    few = ["--samples", "50"] if command in ("compare", "robustness") else []
    before = set(os.listdir())
    ended = covprop(command, model, *MEAN, *few, *words, "--json")
    check(ended, Path(), before, None)


@examples(st.text(max_size=20) | WORDS, st.sampled_from(["", ".npz", ".json", ".pt"]))
def test_odd_names_of_outputs(name: str, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        target = f"{path}/{name.replace('/', '_')}{suffix}"
        ended = covprop("propagate", "model.pt2", *MEAN, "--out", target, "--json")
        assert ended.code in (0, 2)
        left = os.listdir(path)
        assert len(left) == (1 if ended.code == 0 else 0)


@examples(st.text(alphabet="abmdeysto_.:0", max_size=24) | WORDS)
def test_odd_names_of_models(name: str) -> None:
    """Letters that spell no module of Python's own that does something when it is called."""
    ended = covprop("propagate", name, *MEAN, "--json")
    check(ended, Path(), set(os.listdir()), None)
