"""`covprop propagate`: the moments that the library gives, from files and into files."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import covprop as cp
from covprop.cli import request
from covprop.cli.propagation import table
from tests.cli.running import FEATURES, covprop, network, refused

GIVEN = ("--mean", "mean.npy", "--covariance", "covariance.npy")


@pytest.fixture
def x(folder: Path) -> cp.Gaussian:
    mean, covariance = (np.load(folder / f"{name}.npy") for name in ("mean", "covariance"))
    return cp.Gaussian(torch.from_numpy(mean), torch.from_numpy(covariance).float())


@torch.no_grad()
def expected(x: cp.Gaussian, method: object = None) -> cp.Gaussian:
    return cp.propagate(network(), x, method or cp.Auto())


def check(told: dict, y: cp.Gaussian) -> None:
    torch.testing.assert_close(torch.tensor(told["mean"]), y.mean)
    torch.testing.assert_close(torch.tensor(told["covariance"]), y.covariance_matrix)
    torch.testing.assert_close(torch.tensor(told["stddev"]), y.stddev)


@pytest.mark.parametrize("mean", ["mean.npy", "mean.csv", "mean.pt", "arrays.npz:mean"])
@pytest.mark.parametrize(
    "covariance", ["covariance.npy", "covariance.csv", "covariance.pt", "arrays.npz:covariance"]
)
def test_every_kind_of_array_gives_the_same(x: cp.Gaussian, mean: str, covariance: str) -> None:
    ended = covprop("propagate", "model.pt2", "--mean", mean, "--covariance", covariance, "--json")
    assert (ended.code, ended.err) == (0, "")
    check(ended.told, expected(x))


@pytest.mark.parametrize(
    "model",
    [
        ["model.pt2"],
        ["model.pt2", "--allow-pickle"],
        ["made_by_test:make", "--weights", "weights.safetensors"],
        ["made_by_test:make", "--weights", "weights.pt"],
        ["pickled.pt", "--allow-pickle"],
    ],
    ids=lambda words: " ".join(words),
)
def test_every_kind_of_model_gives_the_same(x: cp.Gaussian, model: list[str]) -> None:
    ended = covprop("propagate", *model, *GIVEN, "--json")
    assert ended.code == 0, ended.err
    check(ended.told, expected(x))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("exact", cp.Exact()), ("gaussian-layers", cp.GaussianLayers()),
        ("series:4", cp.Series(order=4)), ("series", cp.Series()),
        ("series:1e-3", cp.Series(tolerance=1e-3)), ("linearized", cp.Linearized()),
        ("unscented", cp.Unscented()), ("wu2019", cp.Wu2019()), ("assumed", cp.AssumedDensity()),
        ("split", cp.Split()), ("split:5", cp.Split(5)), ("piecewise", cp.PiecewiseLinear()),
        ("piecewise:0", cp.PiecewiseLinear(0)),
    ],
)  # fmt: skip
def test_every_method_has_a_name(x: cp.Gaussian, name: str, method: object) -> None:
    ended = covprop("propagate", "model.pt2", *GIVEN, "--method", name, "--json")
    assert ended.code == 0, ended.err
    check(ended.told, expected(x, method))


def test_a_sketch_is_seeded(x: cp.Gaussian) -> None:
    ended = covprop(
        "propagate", "model.pt2", *GIVEN, "--method", "sketched:32", "--json", "--seed", 3
    )
    method = cp.Sketched(32, generator=torch.Generator().manual_seed(3))
    check(ended.told, expected(x, method))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("montecarlo", "1,000,000,000 samples"), ("controlvariate", "1,000,000,000 samples"),
        ("sketched", "1,000,000 tangents"),
        ("series", "512 terms"), ("split", "256 components"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("digits", [0, 9, 99])
def test_a_number_that_would_never_end_is_refused(name: str, most: str, digits: int) -> None:
    too_many = int(most.split()[0].replace(",", "")) + 1
    text = f"{name}:{too_many}{'9' * digits}"
    told = refused("propagate", "model.pt2", *GIVEN, "--method", text)
    assert f"it takes {most} at most" in told
    request.method(f"{name}:{too_many - 1}", seed=0)  # what it does take


@pytest.mark.parametrize("command", ["compare", "robustness"])
def test_samples_without_end_are_refused(command: str) -> None:
    told = refused(command, "model.pt2", *GIVEN, "--samples", 99999999999999)
    assert "'--samples'" in told
    assert "1000000000 (" in told


@pytest.mark.parametrize("kind", [cp.MonteCarlo, cp.ControlVariate])
def test_samples_follow_the_seed_and_tell_their_errors(x: cp.Gaussian, kind: Any) -> None:
    name = f"{kind.__name__.lower()}:512"
    words = ("propagate", "model.pt2", *GIVEN, "--method", name, "--json", "--seed")
    first, again, other = (covprop(*words, seed).told for seed in (7, 7, 8))
    assert first == again
    assert first["mean"] != other["mean"]
    method = kind(512, generator=torch.Generator().manual_seed(7))
    check(first, expected(x, method))
    assert first["samples"] == 512
    assert np.shape(first["covariance_stderr"]) == (3, 3)


@pytest.mark.parametrize("suffix", ["npz", "pt", "json"])
def test_results_go_to_a_file_of_every_format(x: cp.Gaussian, folder: Path, suffix: str) -> None:
    before = set(os.listdir(folder))
    ended = covprop("propagate", "model.pt2", *GIVEN, "--out", f"y.{suffix}")
    assert ended.code == 0
    assert set(os.listdir(folder)) - before == {f"y.{suffix}"}
    path = folder / f"y.{suffix}"
    if suffix == "npz":
        found = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    elif suffix == "pt":
        found = torch.load(path, weights_only=True)
    else:
        told = json.loads(path.read_text())
        found = {name: torch.tensor(told[name]) for name in ("mean", "covariance")}
    y = expected(x)
    assert list(found)[:2] == ["mean", "covariance"]
    torch.testing.assert_close(found["mean"], y.mean)
    torch.testing.assert_close(found["covariance"], y.covariance_matrix)


def test_a_result_is_an_input_again(folder: Path) -> None:
    covprop("propagate", "model.pt2", *GIVEN, "--out", "y.pt")
    (folder / "relu_by_test.py").write_text("import torch\n\nmake = torch.nn.ReLU\n")
    again = covprop(
        "propagate", "relu_by_test:make", "--mean", "y.pt:mean", "--covariance", "y.pt:covariance",
        "--json",
    )  # fmt: skip
    y = torch.load(folder / "y.pt", weights_only=True)
    check(again.told, cp.propagate(torch.relu, cp.Gaussian(y["mean"], y["covariance"])))


def test_a_link_to_a_file_of_another_kind_is_refused(folder: Path) -> None:
    (folder / "link.npz").symlink_to("mean.npy")
    before = (folder / "mean.npy").read_bytes()
    ended = covprop("propagate", "model.pt2", *GIVEN, "--out", "link.npz")
    assert ended.code == 2
    assert "--out 'link.npz' is a link to 'mean.npy', which ends with none of" in ended.err
    assert (folder / "mean.npy").read_bytes() == before


def test_a_file_that_exists_is_replaced_with_its_rights_by_the_umask(folder: Path) -> None:
    (folder / "y.json").write_text("old")
    (folder / "link.json").symlink_to("y.json")
    assert covprop("propagate", "model.pt2", *GIVEN, "--out", "link.json").code == 0
    assert (folder / "link.json").is_symlink()
    assert json.loads((folder / "y.json").read_text())["method"] == "Cumulants()"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((folder / "y.json").stat().st_mode) == 0o666 & ~umask


@pytest.mark.usefixtures("folder")
def test_people_read_a_table() -> None:
    ended = covprop("propagate", "model.pt2", *GIVEN)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == "model.pt2: 1x4 in, 1x3 out, by Cumulants()"
    assert lines[1].split() == ["output", "mean", "stddev", "2.5", "%", "97.5", "%"]
    told = covprop("propagate", "model.pt2", *GIVEN, "--json").told
    cells = [float(cell) for cell in lines[3].split()[1:]]
    mean, stddev = told["mean"][0][1], told["stddev"][0][1]
    assert cells[:2] == pytest.approx([mean, stddev], rel=1e-4)
    skewness = told["skewness"][0][1]  # which intervals use
    centre, width = (torch.tensor([number], dtype=torch.float64) for number in (mean, stddev))
    y = cp.Skewed(centre, stddev=width, skewness=skewness)
    assert cells[2:] == pytest.approx([float(end) for end in y.interval(0.95)], rel=1e-3)
    assert lines[5].startswith("estimated error: means up to ")
    assert lines[6] == "third cumulants are followed from layer to layer"
    assert "strongest correlation: outputs 0,0 and 0," in lines[7] or "outputs 0,1" in lines[7]


def test_a_long_result_is_cut_in_the_table_and_whole_in_json(folder: Path) -> None:
    np.save("long.npy", np.zeros(50))
    (folder / "tanh_by_test.py").write_text("import torch\n\nmake = torch.nn.Tanh\n")
    words = ("propagate", "tanh_by_test:make", "--mean", "long.npy", "--stddev", 0.5)
    ended = covprop(*words)
    assert "and 30 more: --out and --json have them all" in ended.out
    assert "no two outputs are correlated" in ended.out
    assert len(covprop(*words, "--json").told["mean"]) == 50


@pytest.mark.parametrize("covariances", [1, 3])
@pytest.mark.usefixtures("folder")
def test_a_batch_may_share_its_covariance(covariances: int) -> None:
    means = np.random.default_rng(0).normal(size=(3, FEATURES)).astype(np.float32)
    matrix = np.load("covariance.npy")
    np.save("means.npy", means)
    np.save("matrices.npy", matrix if covariances == 1 else np.stack([matrix] * 3))
    ended = covprop(
        "propagate", "model.pt2", "--mean", "means.npy", "--covariance", "matrices.npy",
        "--batch-dims", 1, "--json",
    )  # fmt: skip
    x = cp.Gaussian(torch.from_numpy(means), torch.from_numpy(matrix).float().expand(3, -1, -1))
    assert ended.told["batch_shape"] == [3]
    check(ended.told, expected(x))


@pytest.mark.usefixtures("folder")
def test_a_batch_that_is_not_named_is_told() -> None:
    np.save("means.npy", np.random.default_rng(0).normal(size=(3, FEATURES)))
    words = ("propagate", "model.pt2", "--mean", "means.npy", "--stddev", 0.1)
    assert "its first dimension, of 3, as a batch" in covprop(*words).err
    assert covprop(*words, "--batch-dims", 1).err == ""


@pytest.mark.parametrize("kind", ["number", "array", "table", "each"])
def test_standard_deviations_are_one_or_many(x: cp.Gaussian, kind: str) -> None:
    values = np.full(FEATURES, 0.3) if kind == "number" else np.linspace(0, 0.3, FEATURES)
    np.save("array.npy", values)
    np.save("each.npy", values[None])
    np.savetxt("table.csv", values, delimiter=",")
    name = {"number": "0.3", "array": "array.npy", "table": "table.csv", "each": "each.npy"}[kind]
    ended = covprop("propagate", "model.pt2", "--mean", "mean.npy", "--stddev", name, "--json")
    variance = torch.from_numpy(values).float().square()[None]
    check(ended.told, expected(cp.Gaussian.diagonal(x.mean, variance=variance)))


def test_the_dtype_is_that_of_the_parameters(folder: Path) -> None:
    np.save("mean64.npy", np.load("mean.npy").astype(np.float64))
    (folder / "double_by_test.py").write_text(
        "from tests.cli.running import network\n\ndef make():\n    return network().double()\n"
    )
    rest = ("--stddev", 0.1, "--json")
    assert covprop("propagate", "model.pt2", "--mean", "mean64.npy", *rest).told["dtype"] == (
        "float32"
    )
    ended = covprop("propagate", "double_by_test:make", "--mean", "mean.npy", *rest)
    assert ended.told["dtype"] == "float64"


def test_a_model_without_parameters_takes_the_dtype_of_the_mean(folder: Path) -> None:
    (folder / "sine_by_test.py").write_text("import torch\n\ndef make():\n    return torch.sin\n")
    for dtype, wanted in (("f4", "float32"), ("f8", "float64"), ("i2", "float64")):
        np.save("values.npy", np.arange(3).astype(dtype))
        ended = covprop(
            "propagate", "sine_by_test:make", "--mean", "values.npy", "--stddev", 1, "--json"
        )
        assert ended.told["dtype"] == wanted


def test_a_model_of_several_outputs_needs_a_choice(folder: Path) -> None:
    (folder / "several_by_test.py").write_text(
        "import torch\nfrom dataclasses import dataclass\nfrom typing import Any\n\n"
        "@dataclass\nclass Both:\n    a: Any\n    b: Any\n\n"
        "def record():\n    return lambda x: Both(torch.relu(x), torch.sin(x))\n\n"
        "def pair():\n    return lambda x: (torch.relu(x), torch.sin(x))\n\n"
        "def named():\n    return lambda x: {'a': torch.relu(x), 'b': torch.sin(x)}\n\n"
        "def fixed():\n    return lambda x: torch.ones(3)\n"
    )
    given = ("--mean", "mean.npy", "--stddev", 0.2)
    words = ("propagate", "several_by_test:pair", *given)
    several = "the model returns 2 values; choose one with --output, from 0 to 1"
    assert refused(*words) == several
    assert refused("compare", *words[1:]) == several
    assert "the model has no output '7'; there are 0, 1" in refused(*words, "--output", 7)
    alone = refused("propagate", "model.pt2", *given, "--output", 1)
    assert alone == "the model has one output only, so leave out --output"
    named = ("propagate", "several_by_test:named", *given)
    record = ("propagate", "several_by_test:record", *given)
    second = covprop(*words, "--output", 1, "--json").told
    for command in (named, record):
        assert refused(*command) == "the model returns a, b; choose one with --output"
        chosen = covprop(*command, "--output", "b", "--json").told
        assert second["mean"] == chosen["mean"]
    x = cp.Gaussian.isotropic(torch.from_numpy(np.load("mean.npy")), stddev=0.2)
    check(second, cp.propagate(torch.sin, x))
    fixed = ("propagate", "several_by_test:fixed", *given)
    assert refused(*fixed) == "the output of the model does not depend on its input"


def test_what_a_model_prints_is_not_in_the_answer(folder: Path) -> None:
    (folder / "loud_by_test.py").write_text(
        "import torch\nprint('imported')\n\n"
        "def make():\n    print('made')\n    return torch.nn.ReLU()\n"
    )
    ended = covprop("propagate", "loud_by_test:make", "--mean", "mean.npy", "--stddev", 1, "--json")
    assert ended.told["model"] == "loud_by_test:make"
    assert "imported" in ended.err
    assert "made" in ended.err


def test_a_rough_approximation_is_noted(folder: Path) -> None:
    (folder / "softmax_by_test.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Softmax(-1)\n"
    )
    words = ("propagate", "softmax_by_test:make", "--mean", "mean.npy", "--stddev", 3)
    ended = covprop(*words, "--method", "gaussian-layers")
    assert ended.code == 0
    assert ended.err.startswith("covprop: note: ")
    wanted = covprop(*words, "--method", "auto:1e-7")
    assert wanted.code == 0
    assert "the result of cp.QuasiMonteCarlo may be off" in wanted.err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["auto", "gaussian-layers", "cumulants"])
def test_every_result_says_how_far_it_may_be_off(name: str) -> None:
    words = ("propagate", "model.pt2", *GIVEN, "--method", name)
    told = covprop(*words, "--json").told
    assert set(told["error"]) == {"mean", "stddev", "basis"}
    assert np.shape(told["error"]["mean"]) == np.shape(told["mean"])
    assert f"({told['error']['basis']})" in covprop(*words).out


@pytest.mark.usefixtures("folder")
def test_auto_takes_a_tolerance_and_points_have_a_number() -> None:
    rough, fine = (
        covprop("propagate", "model.pt2", *GIVEN, "--method", name, "--json").told["samples"]
        for name in ("auto:0.1", "auto:0.001")
    )
    assert rough < fine
    words = ("propagate", "model.pt2", *GIVEN, "--method")
    assert covprop(*words, "quasimontecarlo:128", "--json").told["samples"] == 128
    assert "tolerance is a share" in refused(*words, "auto:2")
    assert "no method" in refused(*words, "auto:few")
    assert "whole number from 16" in refused(*words, "quasimontecarlo:3")


def test_a_shape_may_be_given_for_the_mean(x: cp.Gaussian) -> None:
    np.save("flat.npy", np.load("mean.npy")[0])
    words = ("propagate", "model.pt2", "--mean", "flat.npy", "--covariance", "covariance.npy")
    assert refused(*words) == (
        "the model takes input of shape (any, 4), and the mean has (4,); give --shape 1,4"
    )
    check(covprop(*words, "--shape", "1,4", "--json").told, expected(x))
    check(covprop(*words, "--shape", "1x4", "--json").told, expected(x))


def test_a_negative_variance_is_told_and_not_shown_as_zero() -> None:
    variance = torch.diag(torch.tensor([1.0, -0.25]))
    shown = str(table(cp.Gaussian(torch.zeros(2), variance, validate_args=False)))
    assert "negative variance (the least is -0.25; outputs 1)" in shown
