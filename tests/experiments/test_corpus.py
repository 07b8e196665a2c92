"""The corpus is always the same, and its truths are true."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from experiments import corpus, corpus_networks, corpus_truth
from experiments.corpus_networks import Fit, Tabular, trained
from experiments.corpus_targets import TARGETS
from experiments.corpus_truth import Truth, sampled
from tests.oracles import assert_close

CASES = {case.name: case for case in corpus.cases()}
MOST = 2**18


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(corpus_networks.VARIABLE, str(tmp_path / "corpus"))
    trained.cache_clear()


def moments(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, dtype=torch.float64, generator=generator)
    return torch.randn(size, dtype=torch.float64, generator=generator), factor @ factor.T


def test_there_are_300_cases_of_all_families_and_noises():
    assert len(CASES) == len(corpus.cases()) >= 300
    for family in corpus.FAMILIES:
        noises = {case.noise for case in CASES.values() if case.family == family}
        assert noises == set(corpus.NOISES)
    few = [case for case in CASES.values() if case.family == corpus.TRAINED]
    assert len(few) >= 150
    assert {fit.target for fit in corpus.FITS} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_finite_and_varies(name):
    target = TARGETS[name]
    x = corpus_networks.cube(1000, target.inputs)
    y = target(x)
    assert 2 <= target.inputs <= 8
    assert y.dim() == 2
    assert y.isfinite().all()
    assert (y.std(0) > 0.01).all()


@pytest.mark.parametrize("name", ["random/3/0.3", "architecture/gated MLP/0.1"])
def test_a_case_is_built_the_same_again(name):
    (model, x), (again, same) = CASES[name].build(), CASES[name].build()
    assert x.dtype == torch.float64
    assert torch.equal(x.mean, same.mean)
    assert torch.equal(x.covariance_matrix, same.covariance_matrix)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize(
    "network", [Fit("regulator", 8, 2, steps=30), Tabular("iris", (8,), "Tanh", steps=30)]
)
def test_a_network_is_trained_once_and_always_the_same(network, tmp_path, monkeypatch):
    first = trained(network)
    monkeypatch.setattr(type(network), "train", lambda *_: pytest.fail("it was kept"))
    trained.cache_clear()
    kept = trained(network)
    monkeypatch.undo()
    monkeypatch.setenv(corpus_networks.VARIABLE, str(tmp_path / "other"))
    trained.cache_clear()
    for other in (kept, trained(network)):
        assert other.residual == first.residual
        weights = other.model.state_dict().values()
        assert all(map(torch.equal, first.model.state_dict().values(), weights))
        assert all(weight.dtype == torch.float64 for weight in weights)


def test_training_fits():
    short, long = (trained(Fit("regulator", 8, 2, steps=steps)) for steps in (5, 200))
    assert long.residual < 0.5 * short.residual


def test_noise_of_fitted_functions_has_the_size_that_it_says():
    fit = Fit("cruise", 8, 2, steps=1)
    for number in range(12):
        model, x = corpus.fitted(fit, 0.1, name=f"number {number}")
        assert x.variance.mean() == pytest.approx(0.01)
        assert model(x.mean).shape == (1,)


def test_a_flat_point_is_flat():
    fit = Fit("cruise", 8, 2, steps=20)
    model, anywhere = corpus.fitted(fit, 0.1, name="same")
    _, flat = corpus.fitted(fit, 0.1, name="same", flat=True)
    points = torch.stack([anywhere.mean, flat.mean])
    there, least = corpus.steepness(model, points)
    assert least < there


def test_noise_of_low_rank_moves_digits():
    network = Tabular(corpus.SHIFTED, (8,), steps=1)
    _, x = corpus.tabulated(network, 0.1, name="any")
    assert torch.linalg.matrix_rank(x.covariance_matrix) == 3


@pytest.mark.parametrize("inputs", [3, 12])
def test_truth_of_a_linear_network(inputs):
    mean, covariance = moments(inputs)
    model = nn.Linear(inputs, 4).double()
    truth = sampled(model, mean, covariance, 0, MOST)
    weight = model.weight.detach()
    torch.testing.assert_close(truth.mean, model(mean).detach(), atol=1e-2, rtol=0)
    expected = weight @ covariance @ weight.T
    assert ((truth.covariance - expected).abs() < 5 * truth.covariance_stderr + 1e-9).all()
    assert truth.stddev_error.max() < 2e-3


def test_truth_of_a_singular_input():
    mean, covariance = moments(3)
    covariance[:, 1] = covariance[1, :] = 0
    truth = sampled(nn.Identity(), mean, covariance, 0, MOST)
    torch.testing.assert_close(truth.covariance, covariance, rtol=5e-3, atol=5e-3)
    assert truth.counted.tolist() == [True, False, True]
    assert len(truth.stddev_error) == len(truth.mean_error) == 2


def test_what_happens_far_away_is_seen():
    shift = 4.5
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU()).double().requires_grad_(requires_grad=False)
    model[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
    model[0].bias.fill_(-shift)
    truth = sampled(model, torch.zeros(2).double(), torch.eye(2).double(), 0, MOST)
    tail, density = math.erfc(shift / 2**0.5) / 2, math.exp(-(shift**2) / 2) / (2 * math.pi) ** 0.5
    mean = density - shift * tail
    square = (1 + shift**2) * tail - shift * density
    assert truth.stddev_error[0] < 5e-3
    assert float(truth.mean[0]) == pytest.approx(mean, rel=0.02)
    assert float(truth.covariance[0, 0]) == pytest.approx(square - mean**2, rel=0.04)


def test_a_truth_is_kept_until_something_changes(tmp_path):
    mean, covariance = moments(2)
    made = []

    def make() -> Truth:
        made.append(None)
        return sampled(nn.Identity(), mean, covariance, 0, 2**10)

    path = tmp_path / "truth" / "one.pt"
    first, second = (corpus_truth.kept(path, "a", make) for _ in range(2))
    assert len(made) == 1
    assert torch.equal(first.covariance, second.covariance)
    corpus_truth.kept(path, "b", make)
    assert len(made) == 2
    prints = {
        corpus_truth.fingerprint(model, mean + shift, covariance)
        for shift in (0, 1)
        for model in (nn.Identity(), nn.ReLU())
    }
    assert len(prints) == 4


def test_errors_are_of_outputs_that_vary():
    covariance = torch.diag(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64))
    mean, zero = torch.zeros(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    truth = Truth(mean, covariance, mean, zero, 1)
    y = cp.Gaussian(mean + 1, torch.diag(torch.tensor([9.0, 1.0, 5.0], dtype=torch.float64)))
    expected = {"std_error": 0.5, "std_rms": 0.125**0.5, "mean_error": 1.0, "mean_rms": 0.625**0.5}
    assert corpus.errors(y, truth) == pytest.approx(expected)


def test_the_command_writes_lines_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "MOST", dict.fromkeys(corpus.FAMILIES, 1))
    monkeypatch.setattr(corpus_truth, "FIRST", 2**6)
    names = ["random/2/0.1", "architecture/gated MLP/0.1"]
    for _ in range(2):
        corpus.main(["--truth", "--only", *names, "--out", str(tmp_path / "lines")])
    rows = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["truth_error"] < 0.1
        assert row["left_out"] == 0
        assert row["layers"] > 1
        for method in ("exact", "cumulants"):
            assert row[method]["std_error"] < 0.1
            assert row[method]["seconds"] > 0
            assert row[method]["notes"] >= 0
    printed = capsys.readouterr().out
    assert "| architecture | 1 | 16-16 |" in printed
    corpus.main(["--only", "random/2"])
    assert capsys.readouterr().out.splitlines() == [
        name for name in CASES if name.startswith("random/2")
    ]


def test_the_halves_of_a_truth_together_are_the_truth():
    mean, covariance = moments(3)
    truth = sampled(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).double(), mean, covariance, 0, 1)
    first, own, second, other = truth.halves
    assert not torch.equal(first, second)
    assert_close(truth.mean, (first + second) / 2)
    shift = (first - second) / 2
    assert_close(truth.covariance, (own + other) / 2 + torch.outer(shift, shift))
