"""The commands that README names, in a size of seconds."""

import json
import sys

import pytest

from covprop import demo
from experiments import __main__ as experiments
from experiments import mnist, table2, training
from experiments.__main__ import EXPERIMENTS
from experiments.options import Options


def test_the_demo_agrees_with_sampling(monkeypatch, capsys):
    monkeypatch.setattr(demo, "IMAGES", 6)
    monkeypatch.setattr(demo, "EPOCHS", 8)
    monkeypatch.setattr(demo, "SAMPLES", 4000)
    demo.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "..." in line]
    assert len(rows) == demo.SHOWN
    for *_, analytic, sampled, lowest, _, highest in rows:
        assert float(analytic) == pytest.approx(float(sampled), abs=0.05)
        assert float(lowest) > 0.93
        assert float(highest) < 1.07


def needs_data(name: str) -> None:
    if name in (table2.NAME, training.NAME) and mnist.found() is None:
        pytest.skip("no MNIST files: set COVPROP_DATA")


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
    assert pictures or name == "accuracy"


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
