"""Arrays in files: numbers of every kind are read, and everything else is one sentence."""

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from covprop.cli import arrays
from covprop.cli.output import Refusal
from tests.cli.running import FEATURES, covprop, refused

MODEL = ("propagate", "model.pt2")


def mean(name: str | Path) -> str:
    return refused(*MODEL, "--mean", name, "--stddev", 0.1)


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    del folder


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", ">f4", ">f8", "i1", "u4", "i8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_every_kind_of_number(kind: str, order: str) -> None:
    values = np.asarray((np.arange(6) % 2).reshape(2, 3), dtype=kind, order=order)
    np.save("values.npy", values)
    found = arrays.load("values.npy")
    assert found.dtype == (torch.float32 if kind in ("f4", ">f4") else torch.float64)
    np.testing.assert_array_equal(found.numpy(), values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_pt_of_every_kind_of_number(dtype: torch.dtype) -> None:
    values = torch.arange(6).reshape(2, 3).T.to(dtype)
    torch.save(values, "values.pt")
    found = arrays.load("values.pt")
    torch.testing.assert_close(found, values.to(found.dtype), rtol=0, atol=0)
    assert found.dtype == (dtype if dtype == torch.float32 else torch.float64)


def test_an_expanded_tensor_is_read_and_has_its_own_memory() -> None:
    torch.save(torch.eye(2).expand(3, 2, 2), "values.pt")
    torch.testing.assert_close(arrays.load("values.pt"), torch.eye(2).expand(3, 2, 2))


def test_a_compressed_npz_is_read() -> None:
    np.savez_compressed("values.npz", only=np.arange(3.0))
    assert arrays.load("values.npz").tolist() == [0, 1, 2]
    assert arrays.load("values.npz:only").tolist() == [0, 1, 2]


def test_a_csv_is_a_table() -> None:
    Path("values.csv").write_text("1, 2,3\n4,5,6e0\n")
    assert arrays.load("values.csv").tolist() == [[1, 2, 3], [4, 5, 6]]
    Path("sheet.csv").write_text("1,2\n", encoding="utf-8-sig")  # as spreadsheets write it
    assert arrays.load("sheet.csv").tolist() == [[1, 2]]


def test_names_are_asked_for_where_there_are_several() -> None:
    assert mean("arrays.npz") == (
        "arrays.npz holds arrays named mean, covariance, 2 of them; choose one with arrays.npz:NAME"
    )
    assert "none named 'other'" in mean("arrays.npz:other")
    assert mean("mean.npy:mean").startswith("mean.npy:mean is not an array that can be read")
    assert "holds one tensor, and none named 'x'" in mean("mean.pt:x")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere.npy", "nowhere.npy does not exist"),
        (".", ". is not an array that can be read"),
        ("folder.npy", "folder.npy is a folder, not a file"),
        ("pipe.npy", "pipe.npy is not a regular file"),
        ("/dev/zero", "/dev/zero is not an array that can be read"),
        ("loop.npy", "cannot be read: Too many levels of symbolic links"),
        ("a\0b.npy", "cannot be read: embedded null byte"),
        ("x" * 300 + ".npy", "File name too long"),
        ("", "is not an array that can be read"),
        ("mean.txt", "ends with none of .npy, .npz, .csv, .pt"),
        ("empty.npy", "empty.npy cannot be read as a .npy file"),
        ("empty.npz", "empty.npz cannot be read as a .npz file"),
        ("empty.csv", "empty.csv has no numbers"),
        ("empty.pt", "empty.pt cannot be read as a .pt file"),
    ],
)
def test_what_is_no_file_of_numbers(name: str, told: str) -> None:
    Path("folder.npy").mkdir()
    os.mkfifo("pipe.npy")
    Path("loop.npy").symlink_to("loop.npy")
    for suffix in arrays.READERS:
        Path(f"empty{suffix}").touch()
    assert told in mean(name)


def test_a_file_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    assert "permission denied" in mean("mean.npy")


@pytest.mark.parametrize("suffix", list(arrays.READERS))
def test_nan_and_infinity_are_refused(suffix: str) -> None:
    for value in (np.nan, np.inf, -np.inf):
        values = np.array([[1.0, value, 0.0, 2.0]])
        name = f"values{suffix}"
        if suffix == ".npy":
            np.save(name, values)
        elif suffix == ".npz":
            np.savez(name, values)
        elif suffix == ".csv":
            np.savetxt(name, values, delimiter=",")
        else:
            torch.save(torch.from_numpy(values), name)
        assert mean(name) == f"{name} has NaN or infinite entries"


def test_numbers_too_large_for_the_models_dtype_are_refused() -> None:
    np.save("large.npy", np.full((1, FEATURES), 1e300))
    assert "too large for torch.float32, the model's dtype" in mean("large.npy")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.array([[1, "a"]], dtype=object), "holds Python objects, which run code"),
        (np.array([["a", "b"]]), "and real numbers are wanted"),
        (np.array([1j]), "and real numbers are wanted"),
        (np.array([1], dtype="M8[s]"), "and real numbers are wanted"),
        (np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]), "and real numbers are wanted"),
        (np.array([(1, "x")], dtype=[("a", int), ("b", object)]), "holds Python objects"),
    ],
    ids=["objects", "words", "complex", "dates", "records", "records of objects"],
)
def test_what_is_not_numbers(values: np.ndarray, told: str) -> None:
    np.save("values.npy", values, allow_pickle=True)
    np.savez("values.npz", allow_pickle=True, values=values)
    assert told in mean("values.npy")
    assert told in mean("values.npz")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("code_was_run",)


def test_pickles_in_arrays_are_never_run() -> None:
    np.save("evil.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    Path("plain.npy").write_bytes(pickle.dumps(Evil()))
    Path("plain.pt").write_bytes(pickle.dumps(Evil()))
    torch.save(Evil(), "evil.pt")
    torch.save({"x": Evil()}, "nested.pt")
    torch.save(torch.zeros(1, 4), "old.pt", _use_new_zipfile_serialization=False)
    for name in ("evil.npy", "plain.npy", "plain.pt", "evil.pt", "nested.pt", "old.pt"):
        mean(name)
        assert not Path("code_was_run").exists()
    pickle.loads(Path("plain.pt").read_bytes())
    assert Path("code_was_run").exists()  # it would have


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, 2).to_sparse(), torch.zeros(2, dtype=torch.complex64), [torch.zeros(2)],
        {"a": 1}, 3.0,
    ],
    ids=["sparse", "complex", "list", "no tensor", "number"],
)  # fmt: skip
def test_what_is_no_plain_tensor(value: object) -> None:
    torch.save(value, "value.pt")
    mean("value.pt")


def header(shape: str, kind: str = "<f8") -> bytes:
    """The beginning of a .npy file, whatever follows."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(9223372036854775807, 4)", "(-4,)", "(5,)"])
def test_a_header_that_lies_allocates_nothing(shape: str) -> None:
    content = header(shape) + b"\0" * 32
    Path("lie.npy").write_bytes(content)
    with zipfile.ZipFile("lie.npz", "w") as file:
        file.writestr("x.npy", content)
    assert "lie.npy is damaged: its header says" in mean("lie.npy")
    assert "lie.npz is damaged: its header says" in mean("lie.npz")


def test_a_negative_shape_is_told_as_such() -> None:
    Path("lie.npy").write_bytes(header("(-4, 2)") + b"\0" * 64)
    assert mean("lie.npy") == (
        "lie.npy is damaged: its header says the shape (-4, 2), which is negative"
    )


@pytest.mark.parametrize(
    "text", ["(__import__('os').mkdir('code_was_run'),)", "(1,), 'x': [" + "[" * 5000]
)
def test_a_header_is_not_evaluated(text: str) -> None:
    Path("evil.npy").write_bytes(header(text) + b"\0" * 8)
    assert "evil.npy cannot be read as a .npy file" in mean("evil.npy")
    assert not Path("code_was_run").exists()


def test_a_tensor_that_lies_about_its_size_is_damage() -> None:
    """torch enlarges a storage that its tensor does not fit into."""
    torch.save(torch.zeros(4), "small.pt")
    with zipfile.ZipFile("small.pt") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    before = b"K\x04\x85"  # the size of the tensor: (4,)
    assert entries[name].count(before) == 1
    entries[name] = entries[name].replace(before, b"J\x00\x00\x10\x00\x85")
    with zipfile.ZipFile("lie.pt", "w") as file:
        for entry, content in entries.items():
            file.writestr(entry, content)
    assert "lie.pt" in mean("lie.pt")


def test_files_beyond_memory_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("large.npy", np.zeros(20_000))
    np.savez_compressed("large.npz", np.zeros(20_000))
    np.savetxt("large.csv", np.zeros((1, 20_000)), delimiter=",")
    torch.save(torch.zeros(20_000), "large.pt")
    monkeypatch.setattr(arrays, "free_bytes", lambda _: 100_000)
    for name in ("large.npy", "large.npz", "large.csv", "large.pt"):
        with pytest.raises(Refusal, match=r"is too large: .* would take"):
            arrays.load(name)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a,b\n1,2\n", "line 1 has 'a' in place of a number"),
        ("# a remark\n\n1,2\n1;2\n", "line 4 has '1;2' in place of a number"),
        ("1,2\n\n3\n", "line 3 has 1 numbers, and line 1 has 2"),
        ("1,2,\n", "line 1 has '' in place of a number"),
        ("1\t2\n", "line 1 has '1\\t2' in place of a number"),
        ("x" * 900, f"line 1 has '{'x' * 40}' in place of a number"),
        ("\x00\x01\x02", "line 1 has '\\x00\\x01\\x02' in place of a number"),
        ("1_000,2\n", "it has numbers in another spelling"),
    ],
)
def test_a_csv_of_something_else_is_told_what_is_wanted_and_where(text: str, fault: str) -> None:
    Path("other.csv").write_text(text)
    assert mean("other.csv") == (
        f"other.csv is no table of numbers: {fault}; a .csv file has numbers, commas between them, "
        "rows of one length and no heading"
    )


def test_a_csv_that_is_no_text() -> None:
    Path("other.csv").write_bytes(b"\xff\xfe1")
    assert mean("other.csv").startswith("other.csv is no text: a .csv file has numbers")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give the noise as one of --stddev"),
        (["--stddev", "1", "--covariance", "covariance.npy"], "give the noise as one of"),
        (["--stddev", "-1"], "a standard deviation cannot be negative"),
        (["--stddev", "1", "--variance", "1"], "give the noise as one of"),
        (["--variance", "-1"], "a variance cannot be negative"),
        (["--variance", "nan"], "--variance takes a finite number or a file"),
        (["--variance", "covariance.npy"], "has shape (4, 4); variances are one number"),
        (["--stddev", "nan"], "--stddev takes a finite number or a file"),
        (["--stddev", "1e400"], "--stddev takes a finite number or a file"),
        (["--stddev", "1e39"], "too large for torch.float32"),
        (["--stddev", "much"], "much is not an array that can be read"),
        (["--stddev", "covariance.npy"], "has shape (4, 4); standard deviations are one number"),
        (["--covariance", "mean.npy"], "mean.npy has shape (1, 4), and a covariance (n, n)"),
        (["--covariance", "three.npy"], "so the covariance has (4, 4)"),
        (["--covariance", "batch.npy"], "so the covariance has (4, 4)"),
        (["--covariance", "skew.npy"], "the covariance is not symmetric"),
        (["--covariance", "negative.npy"], "the covariance is not positive semi-definite"),
        (["--stddev", "1", "--batch-dims", "3"], "cannot have 3 batch dimensions"),
        (["--stddev", "1", "--shape", "2,3"], "--shape 2,3 has 6 elements, and mean.npy 4"),
        (["--stddev", "1", "--shape", "-1,4"], "--shape takes whole numbers such as 1,8,8"),
        (["--stddev", "1", "--shape", "٤"], "--shape takes whole numbers such as 1,8,8"),
        (["--stddev", "1", "--shape", "9" * 18], "has 999,999"),
        (["--stddev", "1", "--shape", "9" * 5000], "--shape"),
    ],
)
def test_what_describes_no_gaussian(words: list[str], told: str) -> None:
    np.save("three.npy", np.eye(3))
    np.save("batch.npy", np.stack([np.eye(4)] * 2))
    np.save("skew.npy", np.eye(4) + np.triu(np.ones((4, 4)), 1) / 8)
    np.save("negative.npy", np.eye(4) - 0.5 * np.ones((4, 4)))
    assert told in refused(*MODEL, "--mean", "mean.npy", *words)


def test_an_empty_mean_is_refused() -> None:
    np.save("none.npy", np.zeros((0, FEATURES)))
    assert mean("none.npy") == "none.npy is empty: it has shape (0, 4)"


def test_zero_noise_is_no_noise() -> None:
    told = covprop(*MODEL, "--mean", "mean.npy", "--stddev", 0, "--json").told
    assert np.abs(told["covariance"]).max() == 0


@pytest.mark.usefixtures("folder")
def test_a_variance_is_the_square_of_a_standard_deviation() -> None:
    given = (*MODEL, "--mean", "mean.npy", "--method", "gaussian-layers", "--json")
    by_stddev, by_variance = (
        covprop(*given, *noise).told for noise in (("--stddev", 0.5), ("--variance", 0.25))
    )
    assert by_stddev["stddev"] == by_variance["stddev"]
