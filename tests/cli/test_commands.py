"""`compare`, `plan`, `demo`, `doctor`: what they say, and with which exit code."""

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import covprop as cp
from covprop import demo
from covprop.cli import doctor
from tests.cli.running import covprop, refused
from tests.oracles import oracle_rows

GIVEN = ("model.pt2", "--mean", "mean.npy", "--covariance", "covariance.npy")


@pytest.fixture(autouse=True)
def here(folder: Path) -> None:
    del folder


def test_compare_tells_every_method_and_its_verdict() -> None:
    ended = covprop("compare", *GIVEN, "--samples", 2000, "--json")
    assert (ended.code, ended.err) == (0, "")
    names = [row["name"] for row in ended.told["rows"]]
    assert names == [
        "Auto()", "GaussianLayers()", "Cumulants()", "Split()", "Series(order=4)", "Linearized()",
        "Unscented()", "PiecewiseLinear()", "AssumedDensity()", "Wu2019()",
    ]  # fmt: skip
    assert ended.told["reference"]["samples"] == 2000
    assert ended.told["rows"][0]["verdict"] == "within sampling error"


def test_compare_says_no_beyond_a_tolerance() -> None:
    words = ("compare", *GIVEN, "--samples", 4000, "--json", "--method")
    good = covprop(*words, "exact", "--tolerance", 0.3)
    assert good.code == 0
    assert good.told["within_tolerance"] is True
    assert 0 < good.told["error"] < 0.3
    bad = covprop(*words, "assumed", "--method", "exact", "--tolerance", 0.3)
    assert bad.code == 3
    assert bad.told["within_tolerance"] is False
    assert bad.told["error"] > 0.3
    table = covprop(*words[:-2], "--method", "assumed", "--tolerance", 0.3)
    assert table.code == 3
    assert "AssumedDensity() is off by" in table.out.splitlines()[-1]
    assert "beyond the tolerance 0.3" in table.out.splitlines()[-1]


def test_compare_offers_what_is_right_where_the_first_method_is_not() -> None:
    ended = covprop("compare", *GIVEN, "--samples", 4000, "--method", "assumed")
    call = ended.out.splitlines()[-1]
    assert call == "on the command line: covprop propagate ... --method controlvariate:10000"
    assert covprop("propagate", *GIVEN, *call.split()[-2:]).code == 0
    fine = covprop("compare", *GIVEN, "--samples", 2000, "--method", "exact")
    assert "command line" not in fine.out


def test_compare_samples_no_more_than_it_needs() -> None:
    reference = covprop("compare", *GIVEN, "--method", "exact", "--json").told["reference"]
    name = reference["reason"].split(",")[0]
    assert name == "a control variate by cp.GaussianLayers()"
    assert reference["samples"] <= 75_000 / 2


def test_a_method_that_refuses_is_beyond_any_tolerance(folder: Path) -> None:
    (folder / "smooth_by_test.py").write_text("import torch\n\nmake = torch.nn.Tanh\n")
    ended = covprop(
        "compare", "smooth_by_test:make", *GIVEN[1:], "--samples", 100, "--method", "wu2019",
        "--tolerance", 1e9, "--json",
    )  # fmt: skip
    assert ended.code == 3
    assert ended.told["error"] == "inf"
    assert "Wu et al." in ended.told["rows"][0]["refusal"]


def test_plan_lists_operations_by_module() -> None:
    ended = covprop("plan", *GIVEN, "--json")
    assert ended.code == 0
    assert [step["operation"] for step in ended.told["steps"]] == ["linear", "relu", "linear"]
    assert [step["module"] for step in ended.told["steps"]] == ["0", "1", "2"]
    assert ended.told["fits"] is True
    assert covprop("plan", *GIVEN).out.splitlines()[-1] == "it fits"


def test_a_plan_that_does_not_fit_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.methods.planning.free_bytes", lambda _: 10)
    ended = covprop("plan", *GIVEN, "--json")
    assert ended.code == 3
    assert ended.told["fits"] is False


def test_sampling_has_no_plan() -> None:
    assert "a plan lists the covariances" in refused("plan", *GIVEN, "--method", "montecarlo:10")


def test_the_demo_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # tests/test_commands.py has the other
    monkeypatch.setattr(demo, "network", lambda: linear)
    monkeypatch.setattr(demo, "IMAGES", 2)
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.setattr(demo, "SAMPLES", 200)
    monkeypatch.setattr(demo, "TRACED", 200)
    ended = covprop("demo", "--json", "--report", "page.html")
    assert ended.code == 0, ended.err
    assert len(ended.told["decisions"]) == 2
    assert ended.told["report"] == str(Path("page.html").resolve())
    assert Path("page.html").read_text().rstrip().endswith("</html>")
    assert "accuracy on" in ended.err


def test_the_demo_tells_people_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(report: Path) -> dict[str, object]:
        sys.stdout.write(f"at work on {report.name}\n")
        return {}

    monkeypatch.setattr(demo, "main", told)
    ended = covprop("demo")
    assert (ended.code, ended.out, ended.err) == (0, "at work on covprop-demo.html\n", "")
    assert "ends with none of .html" in refused("demo", "--report", "page.txt")


def test_the_demo_asks_for_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "covprop.demo")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert refused("demo").endswith("install it with pip install '.[demo]' in covprop's folder")


def test_the_doctor_finds_everything_right() -> None:
    ended = covprop("doctor", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.told["passed"] is True
    assert ended.told["versions"]["torch"] == torch.__version__
    assert ended.told["versions"]["covprop"] == cp.__version__
    assert len(ended.told["checks"]) == 2 * len(doctor.ROWS)
    assert covprop("doctor").out.splitlines()[-1] == "all is well"


def test_the_doctor_says_no_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: object, x: cp.Gaussian, method: object) -> cp.Gaussian:
        y = cp.propagate(function, x, method)  # type: ignore[arg-type]
        return cp.Gaussian(y.mean * (1 + 1e-3), y.covariance_matrix, validate_args=False)

    monkeypatch.setattr(doctor, "propagate", wrong)
    ended = covprop("doctor", "--json")
    assert ended.code == 3
    assert ended.told["passed"] is False
    assert "a self-test failed" in covprop("doctor").out.splitlines()[-1]


def test_the_doctor_does_not_take_nan_for_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, x: cp.Gaussian, method: object) -> cp.Gaussian:
        del function, method
        return cp.Gaussian(x.mean * math.nan, x.covariance, validate_args=False)

    monkeypatch.setattr(doctor, "propagate", broken)
    assert covprop("doctor", "--json").code == 3


def test_the_doctors_values_are_those_of_the_table_of_oracles() -> None:
    rows = oracle_rows(Path(__file__).parents[1] / "oracle_rows.csv")
    keys = ("mu1", "mu2", "sigma1", "sigma2", "rho", "mean1", "mean2", "var1", "var2", "cov")
    known = {(row["activation"], *(row[key] for key in keys)) for row in rows}
    for row in doctor.ROWS:
        values = (*row.means, *row.stddevs, row.correlation, *row.mean, *row.variance)
        assert (row.name, *values, row.covariance) in known


@pytest.mark.parametrize(
    "command", ["propagate", "compare", "budget", "plan", "robustness", "demo", "doctor"]
)
def test_every_command_explains_itself_and_has_json(command: str) -> None:
    ended = covprop(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert "--json" in ended.out


def test_json_is_one_line_without_nan() -> None:
    out = covprop("compare", *GIVEN, "--samples", 50, "--json").out
    assert out.count("\n") == 1
    json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_budget_tells_the_shares_of_inputs_and_of_groups() -> None:
    words = ("budget", *GIVEN, "--method", "gaussian-layers")
    table = covprop(*words)
    assert (table.code, table.err) == (0, "")
    assert table.out.split()[:4] == ["output", "input", "uncertainty", "sensitivity"]
    told = covprop(*words, "--json").told
    assert told["names"] == ["0,0", "0,1", "0,2", "0,3"]
    assert torch.tensor(told["share"]).sum(0).flatten().tolist() == pytest.approx([1.0] * 3)
    grouped = covprop(*words, "--group", "left=0:2", "--group", "right=2,3", "--json").told
    assert grouped["names"] == ["left", "right"]
    assert torch.tensor(grouped["share"]).sum(0).flatten().tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--group", "left"], "takes NAME=0:8,12"),
        (["--group", "=1"], "takes NAME=0:8,12"),
        (["--group", "a=3:1"], "has no elements"),
        (["--group", "a=0:999999999"], "or too many"),
        (["--group", "a=9"], "group a: the input has 4 elements"),
        (["--group", "a=1", "--group", "a=2"], "names a twice"),
        (["--group", "a=1", "--group", "b=0:2"], "in two groups"),
        (["--method", "assumed"], "has variances alone"),
    ],
)
def test_what_budget_refuses(words: list[str], told: str) -> None:
    assert told in refused("budget", *GIVEN, *words)


def test_robustness_tells_probabilities_budget_and_sensitivity() -> None:
    words = ("robustness", *GIVEN, "--samples", 500, "--label", 1, "--json")
    ended = covprop(*words)
    assert (ended.code, ended.err) == (0, "")
    told = ended.told
    assert told["label"] == 1
    assert told["lowest_probability"] == pytest.approx(told["probabilities"]["probability"][1])
    assert sum(told["probabilities"]["probability"]) == pytest.approx(1, abs=1e-4)
    assert np.shape(told["sensitivity"]) == (1, 4)
    assert told["required_probability"] is None
    assert covprop(*words).told == told  # by the seed


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self) -> bool:
        return True


def test_robustness_shows_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("robustness", *GIVEN, "--samples", 50, "--json")
    quiet = covprop(*words)
    assert quiet.err == ""
    monkeypatch.setattr(io, "StringIO", Terminal)
    shown = covprop(*words)
    assert "100%" in shown.err
    assert shown.told == quiet.told


def test_samples_decide_what_is_required_where_they_disagree(folder: Path) -> None:
    (folder / "bumps_by_test.py").write_text(
        "import torch\n\n\nclass Bumps(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.cat([torch.tanh(20 * x) + 0.5, 0 * x], -1)\n"
    )
    np.save(folder / "zero.npy", np.zeros((1, 1)))
    words = ("--mean", "zero.npy", "--stddev", 1, "--label", 0, "--json")
    assert covprop("robustness", "bumps_by_test:Bumps", *words).told["agrees"] is True
    words = (*words, "--method", "gaussian-layers")
    told = covprop("robustness", "bumps_by_test:Bumps", *words).told
    assert told["agrees"] is False  # tanh is at one of its ends: 0.51, not Phi(0.5)
    assert told["probabilities"]["probability"][0] > 0.65
    assert told["lowest_probability"] == pytest.approx(told["sampled"]["probability"][0])
    assert told["lowest_probability"] < 0.55


def test_robustness_says_no_below_the_required_probability() -> None:
    words = ("robustness", *GIVEN, "--samples", 100, "--json")
    kept = covprop(*words).told["lowest_probability"]
    assert 0 < kept < 1
    good = covprop(*words, "--require-probability", kept - 1e-3)
    bad = covprop(*words, "--require-probability", (kept + 1) / 2)
    assert (good.code, good.told["enough"]) == (0, True)
    assert (bad.code, bad.told["enough"]) == (3, False)
    table = covprop(*words[:-1], "--require-probability", 1)
    assert table.code == 3
    assert table.out.splitlines()[-1].endswith("less than the required 1")


@pytest.mark.parametrize("label", ["2,0", "labels.npy", "labels.csv"])
def test_labels_are_numbers_or_a_file(label: str) -> None:
    np.save("means.npy", np.eye(2, 4, dtype=np.float32))
    np.save("labels.npy", np.array([2, 0]))
    np.savetxt("labels.csv", np.array([2, 0]), delimiter=",")
    ended = covprop(
        "robustness", "model.pt2", "--mean", "means.npy", "--stddev", 0.1, "--batch-dims", 1,
        "--label", label, "--samples", 50, "--json",
    )  # fmt: skip
    assert ended.told["label"] == [2, 0], ended.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--label", "7"], "a label is none of the 3 classes, 0 to 2"),
        (["--label", "-1"], "--label -1: a label is a class number from 0, several with commas"),
        (["--label", "1.5"], "--label 1.5: a label is a class number from 0, several with commas"),
        (["--label", "x"], "or a file of them (.npy, .npz, .csv, .pt)"),
        (["--label", "1,2"], "the labels have shape (2,) and the batch ()"),
        (["--label", "mean.npy"], "mean.npy holds numbers that are no class numbers"),
        (["--norm", "3"], "--norm is 2 or inf, and not '3'"),
        (["--probability", "2"], "probability is between 0 and 1, not 2.0"),
        (["--require-probability", "2"], "less than or equal to 1"),
    ],
)
def test_what_robustness_refuses(words: list[str], told: str) -> None:
    assert told in refused("robustness", *GIVEN, "--samples", 50, *words)


def test_a_batch_that_is_not_named_is_told_how_to() -> None:
    np.save("means.npy", np.zeros((2, 4), dtype=np.float32))
    words = ("robustness", "model.pt2", "--mean", "means.npy", "--stddev", 0.1, "--samples", 50)
    assert refused(*words) == (
        "the model returns (2, 3) for this mean, and logits have the shape (classes,); if the mean "
        "is a batch of inputs, say --batch-dims 1"
    )
    assert covprop(*words, "--batch-dims", 1).code == 0
