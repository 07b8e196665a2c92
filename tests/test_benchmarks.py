"""The benchmarks in sizes of seconds: what they write, and what they compare with."""

import json
import sys

import pytest
import torch

import covprop as cp
from benchmarks import __main__ as bench
from benchmarks import bayes, inputs, models, naive, plots, reference, render, scaling
from tests.layers import propagate
from tests.oracles import assert_close


def test_figures_are_written_and_rendered(monkeypatch, tmp_path, capsys):
    out = tmp_path / "bench.json"
    command = ["benchmarks", "--smoke", "--only", "layers", "cost", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert bench.main() == 0
    record = json.loads(out.read_text())
    assert record["settings"]["threads"] == torch.get_num_threads()
    assert list(record["results"]) == ["layers", "cost"]
    assert record["results"]["layers"]["error"]["exact"] < 1e-12
    monkeypatch.setattr(sys, "argv", ["render", str(out), "--out", str(tmp_path / "rendered")])
    render.main()
    assert "ReLU, Exact: naive / ours" in capsys.readouterr().out
    made = {path.name for path in (tmp_path / "rendered").iterdir()}
    assert made == {"table.md", "cost.png", "layers.png"}
    table = (tmp_path / "rendered" / "table.md").read_text()
    assert "| layers: ReLU, Exact: naive / ours | at least 30 |" in table


def test_a_benchmark_that_fails_is_recorded_and_the_next_one_runs(monkeypatch, tmp_path):
    def fail(smoke):
        raise MemoryError(f"smoke {smoke}")

    out = tmp_path / "bench.json"
    monkeypatch.setitem(bench.BENCHMARKS, "layers", fail)
    command = ["benchmarks", "--smoke", "--only", "layers", "batch", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert bench.main() == 1
    record = json.loads(out.read_text())
    assert record["results"]["layers"]["failure"] == "MemoryError: smoke True"
    assert record["results"]["batch"]["figures"]
    assert "| layers | | failed: MemoryError: smoke True | **no** |" in render.table(record)


def test_training_of_bayesian_networks_is_measured():
    result = bench.measured("bayes-step", smoke=True)
    assert {figure["figure"] for figure in result["figures"]} > {"exact / MCVI with 10 samples"}
    assert set(result["step"]) == set(bayes.METHODS)
    result = bench.measured("bayes-deep", smoke=True)
    assert set(result["step"]) == set(bayes.DEEP)
    result = bench.measured("bayes-members", smoke=True)
    assert set(result["median"]) == {"together", "one after another"}
    assert result["figures"][0]["target"] == "at least 5"


def test_third_cumulants_are_measured_beside_exact_propagation(monkeypatch):
    monkeypatch.setattr("benchmarks.memory.spawned", lambda function, *given: function(*given))
    result = bench.measured("cumulants", smoke=True)
    assert result.get("failure") is None
    assert [row["units"] for row in result["rows"]] == [10, 20]
    assert all(row["time"] > 0 and row["bytes"]["exact"] > 0 for row in result["rows"])
    assert len(result["figures"]) == 6


def test_recurrent_networks_are_measured_beside_samples():
    result = bench.measured("recurrent", smoke=True)
    assert result.get("failure") is None
    assert result["steps"] == [2, 4]
    assert [figure["target"] for figure in result["figures"][:2]] == ["at most 3", "at most 1.3"]
    assert all(figure["reached"] > 0 for figure in result["figures"])


def test_sketches_of_residual_networks_are_measured(monkeypatch):
    with monkeypatch.context() as here:  # one process of its own is enough, below
        here.setattr("benchmarks.memory.spawned", lambda function, *given: function(*given))
        here.setattr("benchmarks.sketched.ROUNDS", 1)
        here.setattr("benchmarks.sketched.PASSES", 1)
        result = bench.measured("sketched-units", smoke=True)
    assert result.get("failure") is None
    assert len(result["rows"]) == len(result["sides"]) == 2
    assert all(row["seconds"] > 0 and row["units"] > 0 for row in result["rows"])
    result = bench.measured("sketched-resnet50", smoke=True)
    assert result.get("failure") is None
    assert 0 < result["stderr"] < 0.5


@torch.no_grad()
def test_the_naive_network_is_the_published_series():
    torch.manual_seed(0)
    model = models.convolutional(3, side=5, channels=2)
    mean, covariance = inputs.paper(1, 5, 5)
    published = cp.Series(order=4, exact_variance=False)
    y = propagate(model, cp.Gaussian(mean, covariance), published)
    naive_mean, naive_covariance = naive.network(model, mean, covariance)
    assert_close(y.mean, naive_mean, rtol=1e-12)
    assert_close(y.covariance_matrix, naive_covariance, rtol=1e-10)


@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.3, 0.99])
def test_the_reference_is_the_arc_cosine_kernel_at_zero_means(rho):
    covariance = torch.tensor([[4.0, 2 * rho], [2 * rho, 1.0]], dtype=torch.float64)
    found = reference.relu_covariance(
        torch.zeros(2, dtype=torch.float64), covariance, torch.tensor([[0], [1]])
    )
    r = torch.tensor([rho], dtype=torch.float64)
    expected = ((1 - r * r).sqrt() + r * (torch.pi / 2 + r.asin()) - 1) / (2 * torch.pi)
    assert_close(found, expected, atol=1e-13)


def test_the_fit_finds_a_power():
    power, factor = scaling.exponent([10, 100, 1000], [3.0 * n**2 for n in (10, 100, 1000)])
    assert power == pytest.approx(2)
    assert factor == pytest.approx(3)


def test_the_growth_of_a_sketch_is_drawn(tmp_path):
    rows = [{"units": n, "seconds": 1e-6 * n, "bytes": 300 * n} for n in (10_000, 40_000, 90_000)]
    result = {"rows": rows, "fits": {"seconds": (1.0, 1e-6), "bytes": (1.0, 300.0)}}
    (made,) = plots.draw({"sketched-units": result}, tmp_path)
    assert made.name == "units.png"
    assert made.stat().st_size > 10_000
    assert plots.draw({"sketched-units": {"failure": "no memory"}}, tmp_path) == []
