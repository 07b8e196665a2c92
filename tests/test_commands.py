"""The commands that README names, in a size of seconds."""

import json
import sys
from functools import partial

import pytest
from torch import nn

from benchmarks import models
from covprop import demo
from experiments import __main__ as experiments
from experiments import (
    accuracy,
    auto,
    cumulants,
    deep,
    drawing,
    filters,
    mnist,
    noisy,
    ood,
    ratio_methods,
    split,
    table1,
    table2,
    table3,
    training,
    uci,
)
from experiments.__main__ import EXPERIMENTS
from experiments.options import Options


def test_the_demo_agrees_with_sampling_and_writes_a_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "IMAGES", 6)
    monkeypatch.setattr(demo, "SHOWN", 2)
    monkeypatch.setattr(demo, "EPOCHS", 8)
    monkeypatch.setattr(demo, "SAMPLES", 4000)
    monkeypatch.setattr(demo, "TRACED", 500)
    told = demo.main(tmp_path / "report.html")
    assert len(told["decisions"]) == demo.SHOWN
    for decision in told["decisions"]:
        assert decision["misclassification"] == pytest.approx(decision["sampled"], abs=0.05)
        assert decision["noise_budget"] >= 0
    assert "GaussianLayers()" in capsys.readouterr().out
    assert "digits classifier" in (tmp_path / "report.html").read_text()


def needs_data(name: str) -> None:
    if name in (table2.NAME, training.NAME, ood.NAME) and mnist.found() is None:
        pytest.skip("no MNIST files: set COVPROP_DATA")
    if name == ood.NAME and mnist.found(collection=mnist.FASHION) is None:
        pytest.skip("no Fashion-MNIST files: set COVPROP_DATA")
    if name in (table3.NAME, deep.NAME, noisy.NAME) and uci.found() is None:
        pytest.skip("no UCI files: set COVPROP_DATA")


@pytest.fixture
def few(monkeypatch):
    """As many methods and tables as in any smoke run, of fewer instances and smaller networks."""
    fully, convolutional = models.fully_connected, models.convolutional
    small = {
        "FC-4": (partial(fully, 4, 8), (8,)), "FC-8": (partial(fully, 8, 8), (8,)),
        "CNN-4": (partial(convolutional, 4, 4, 2), (1, 4, 4)),
        "CNN-8": (partial(convolutional, 8, 4, 2), (1, 4, 4)),
    }  # fmt: skip
    monkeypatch.setattr(table1, "SMALL", small)
    monkeypatch.setattr(ratio_methods, "SMOKE_SAMPLES", 400)
    some = {name: accuracy.ARCHITECTURES[name] for name in ("VGG", "gated MLP")}
    monkeypatch.setattr(accuracy, "ARCHITECTURES", some)
    layers = nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)
    monkeypatch.setitem(split.MAKERS, "MLP", lambda: nn.Sequential(nn.Flatten(), *layers))
    parts = nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 10)
    monkeypatch.setitem(split.MAKERS, "CNN", lambda: nn.Sequential(*parts))
    monkeypatch.setattr(cumulants, "SMOKE_WIDTH", 4)
    monkeypatch.setattr(cumulants, "SMOKE_SAMPLES", 256)
    monkeypatch.setattr(cumulants, "DEPTHS", {2: 1, 3: 1})
    monkeypatch.setattr(auto, "SMOKE_POINTS", 2**12)
    monkeypatch.setattr(auto, "SAMPLES", (256, 1024))
    monkeypatch.setattr(filters, "SMOKE_STEPS", 2)
    monkeypatch.setattr(filters, "LORENZ_STEPS", 2)
    monkeypatch.setattr(drawing, "RESOLUTION", 40)
    monkeypatch.setattr(table1, "SMOKE_INSTANCES", 1)
    monkeypatch.setattr(table2, "SMOKE_INSTANCES", 1)
    monkeypatch.setattr(table3, "SMOKE_SPLITS", 2)
    monkeypatch.setattr(table3, "SMOKE_EPOCHS", 1)
    monkeypatch.setattr(ood, "SMOKE", {"width": 4, "images": 100, "judged": 50})


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_a_smoke_run_and_is_rendered(name, monkeypatch, tmp_path, capsys):
    needs_data(name)
    command = ["experiments", name, "--smoke", "--out", str(tmp_path / f"{name}.json")]
    monkeypatch.setattr(sys, "argv", command)
    experiments.main()
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["versions"]["torch"]
    assert record["settings"]
    assert list(record["results"]) == EXPERIMENTS[name].units(Options(smoke=True))
    assert "| --- |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["experiments", "render", "--out", str(tmp_path)])
    experiments.main()
    assert f"{name}.tex" in capsys.readouterr().out
    assert (tmp_path / f"{name}.md").read_text().startswith("# ")
    pictures = [path.stem for path in tmp_path.glob("*.png")]
    assert pictures or name in ("accuracy", "architectures", "mc_dropout")


@pytest.mark.parametrize("name", [None, *EXPERIMENTS, training.NAME, "render", "merge"])
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        experiments.parser().parse_args([*([name] if name else []), "--help"])
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["table2", "--weights", "nowhere.pt"], "run `python -m experiments train-mnist` first"),
        (["render", "figure9"], "'figure9' is none of figure2"),
        (["table1", "--only", "FC-5", "--smoke"], "no result of table1 begins with FC-5"),
        (
            ["table3", "--smoke", "--protocol", "long", "--datasets", "wine", "--out", "none.json"],
            "no result of table3 is of these options",
        ),
        (["render", "figure2", "--out", "nowhere"], "nowhere/figure2.json"),
        (["figure2", "--smoke", "--out", "."], "Is a directory"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, told, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    assert experiments.main() == 2
    sentence = capsys.readouterr().err
    assert told in sentence
    assert sentence.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_instances_are_refused(capsys):
    with pytest.raises(SystemExit):
        experiments.parser().parse_args(["table1", "--instances", "0"])
    assert "at least one instance" in capsys.readouterr().err


def test_training_has_a_smoke_run(monkeypatch, tmp_path, capsys):
    needs_data(training.NAME)
    out, weights = tmp_path / "record.json", tmp_path / "weights.pt"
    command = [training.NAME, "--smoke", "--out", str(out), "--weights", str(weights)]
    monkeypatch.setattr(sys, "argv", ["experiments", *command])
    experiments.main()
    record = json.loads(out.read_text())
    assert record["results"]["sha256"] == training.checksum(weights)
    assert "test accuracy" in capsys.readouterr().out
    training.trained(Options(smoke=True, weights=weights))
