"""The commands that README names, in a size of seconds."""

import json
import sys

import pytest

from covprop import demo
from experiments import __main__ as experiments


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


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_experiment_has_a_smoke_run(name, monkeypatch, tmp_path, capsys):
    out = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["experiments", name, "--smoke", "--out", str(out)])
    experiments.main()
    record = json.loads(out.read_text())
    assert record["versions"]["torch"]
    assert record["settings"]
    assert record["results"]
    assert capsys.readouterr().out
