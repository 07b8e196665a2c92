"""Verdicts on outputs that are hard to sample: right methods pass, wrong ones are caught."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.footprint import Footprint
from covprop.reference import Sampling, figures
from covprop.sampling import SamplingError

COMPARE = importlib.import_module("covprop.compare")  # the module, not the function
FINE = "within sampling error"
PLAIN = cp.MonteCarlo()


def gaussian(*mean: float) -> cp.Gaussian:
    return cp.Gaussian(torch.tensor(mean).double(), torch.eye(len(mean)).double())


def verdict(found: cp.Gaussian, sampled: cp.Gaussian, method: Any = PLAIN) -> str:
    reference = figures(Footprint(sampled, 1.0, 10), Sampling(method))
    return COMPARE.agree(found, reference).verdict


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled(model: Any, x: cp.Gaussian, samples: int, seed: int) -> cp.Gaussian:
    return cp.propagate(model, x, cp.MonteCarlo(samples, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("samples", "runs"), [(1000, 60), (10_000, 60), (75_000, 20)])
def test_units_that_are_seldom_active_raise_no_alarm(samples: int, runs: int) -> None:
    """One layer, of which Exact has the moments: 1 % by chance; 5 of 60 have one of 3e-4."""
    called = []
    for seed in range(runs):
        torch.manual_seed(seed)
        model = (
            nn.Sequential(nn.Linear(8, 20), nn.ReLU()).double().requires_grad_(requires_grad=False)
        )
        x = cp.Gaussian(torch.randn(8).double(), 0.25 * torch.eye(8).double())
        told = verdict(cp.propagate(model, x), sampled(model, x, samples, seed))
        called += [told] * (told != FINE)
    assert len(called) <= 4, called


@pytest.mark.parametrize(
    ("base", "stddev"), [(cp.Exact(), 0.5), (cp.Exact(), 0.05), (cp.Linearized(), 0.05)]
)
def test_a_control_variate_raises_no_alarm(base: Any, stddev: float) -> None:
    """One hidden layer, of which Exact has the moments: 1 % by chance."""
    called = []
    for seed in range(60):
        torch.manual_seed(seed)
        layers = nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 4)
        model = nn.Sequential(*layers).double().requires_grad_(requires_grad=False)
        x = cp.Gaussian.isotropic(torch.randn(8).double(), stddev)
        method = cp.ControlVariate(4096, base, _seeded(seed))
        told = verdict(cp.propagate(model, x), cp.propagate(model, x, method), method)
        called += [told] * (told != FINE)
    assert len(called) <= 4, called


@pytest.mark.parametrize("mean", [-4.0, -8.0, -20.0, -27.0])
def test_a_dying_unit_is_no_error_for_a_control_variate(mean: float) -> None:
    """At -27 its gain is 1e-160, whose square is nothing."""
    x = gaussian(mean, 1.0)
    right = cp.propagate(torch.relu, x)
    for seed in range(20):
        method = cp.ControlVariate(1024, generator=_seeded(seed))
        assert verdict(right, cp.propagate(torch.relu, x, method), method) == FINE


@pytest.mark.parametrize("distance", [2.5, 3.0, 3.5, 4.0])
def test_a_kink_that_samples_hardly_meet_is_no_error(distance: float) -> None:
    """All that is left of a control variate is beyond it, so that no sample tells its error."""
    x = gaussian(distance, 0.3)
    right = cp.propagate(torch.relu, x)
    method = cp.ControlVariate(2048)
    called = [
        verdict(right, cp.propagate(torch.relu, x, replace(method, generator=_seeded(i))), method)
        for i in range(60)
    ]
    assert sum(told != FINE for told in called) <= 4, set(called)


def test_a_control_variate_finds_a_small_error_of_a_nearly_linear_network() -> None:
    """Of 1 % in a variance, which 4,096 plain samples would miss."""
    x = cp.Gaussian(torch.ones(3).double(), 1e-4 * torch.eye(3).double())
    right = cp.propagate(torch.tanh, x)
    wrong = cp.Gaussian(right.mean, 1.01 * right.covariance_matrix)
    method = cp.ControlVariate(4096, generator=_seeded(0))
    truth = cp.propagate(torch.tanh, x, method)
    assert verdict(right, truth, method) == FINE
    assert verdict(wrong, truth, method).startswith("variance off by ")
    assert verdict(wrong, sampled(torch.tanh, x, 4096, 0)) == FINE


@pytest.mark.parametrize("samples", [2, 3, 5, 10, 30])
def test_a_handful_of_samples_raises_no_alarm(samples: int) -> None:
    x = gaussian(0.0, 1.0, 2.0)
    right = cp.propagate(torch.relu, x)
    called = [verdict(right, sampled(torch.relu, x, samples, seed)) for seed in range(100)]
    assert sum(told != FINE for told in called) <= 6, set(called)


@pytest.mark.parametrize("mean", [-3.0, -4.0, -5.0, -20.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_dying_unit_is_no_error(mean: float, offset: float, dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + offset

    x = gaussian(mean, 1.0).to(dtype)
    right = cp.propagate(model, x)
    called = [verdict(right, sampled(model, x, 5000, seed)) for seed in range(40)]
    assert sum(told != FINE for told in called) <= 4, set(called)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_a_variance_twenty_percent_off_is_caught_where_a_unit_is_active_enough(
    factor: float,
) -> None:
    """Active in 2.3 % of 300,000 samples."""
    x = gaussian(-2.0, 1.0)
    right = cp.propagate(torch.relu, x)
    matrix = right.covariance_matrix.clone()
    matrix[0, 0] *= factor
    truth = sampled(torch.relu, x, 300_000, 0)
    assert verdict(right, truth) == FINE
    assert verdict(cp.Gaussian(right.mean, matrix), truth).startswith("variance off by ")


def test_a_unit_that_a_method_holds_for_dead_is_caught() -> None:
    """Linearised at -3 nothing ever varies, and 1 in 740 samples does."""
    x = gaussian(-3.0, 1.0)
    wrong = cp.propagate(torch.relu, x, cp.Linearized())
    told = verdict(wrong, sampled(torch.relu, x, 5000, 0))
    assert told.startswith("mean off by")
    assert told.endswith("variance off by 100 %")


@pytest.mark.parametrize(
    ("mean", "variance", "expected"),
    [
        (1e-3, 1.0, FINE),  # as one value of 1000 in a million would have it
        (0.2, 1.0, "mean off by inf std, variance off by inf %"),  # at least 3.8 % are not zero
        (1e-30, 1e-30, FINE),
        (0.0, 1.0, "variance off by inf %"),
        (0.1, 0.0, "mean off by inf std"),
        (0.0, 0.0, FINE),
    ],
)
def test_a_unit_that_no_sample_shows_is_wrong_only_if_some_surely_would(
    mean: float, variance: float, expected: str
) -> None:
    zero = torch.zeros(1).double()
    truth = cp.Gaussian(
        zero, torch.zeros(1, 1).double(), sampling=SamplingError(1000, zero, zero[None])
    )
    found = cp.Gaussian(torch.full((1,), mean).double(), torch.full((1, 1), variance).double())
    assert verdict(found, truth) == expected


def test_rounding_is_no_error_of_all_moments_together() -> None:
    """In float32 a mean of 1000 is known to 6e-5, and the standard deviation is 0.01."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4).requires_grad_(requires_grad=False)
    model.bias.add_(1000)
    x = cp.Gaussian(torch.randn(5), 1e-4 * torch.eye(5))
    right = cp.propagate(model, x)
    assert {verdict(right, sampled(model, x, 75_000, seed)) for seed in range(5)} == {FINE}


def test_a_divergence_is_told_in_units_of_the_outputs_that_count() -> None:
    """Two outputs that only differ together, beside twenty of which samples know little."""
    size = 22
    truth, found = torch.eye(size).double(), torch.eye(size).double()
    truth[0, 1] = truth[1, 0] = 0.999
    found[0, 1] = found[1, 0] = 0.9995
    stderr = torch.full((size, size), 0.3).double()
    stderr[:2, :2] = 0.01
    mean = torch.ones(size).double()
    error = SamplingError(20_000, torch.full_like(mean, 0.01), stderr)
    told = verdict(cp.Gaussian(mean, found), cp.Gaussian(mean, truth, sampling=error))
    ratios = torch.tensor([2.0, 1.999 / 1.9995])
    expected = float((ratios - 1 - ratios.log()).sum() / 2) / (2 * 5 / (4 * 20_000))
    (times,) = (float(word) for word in told.split() if word[0].isdigit())
    assert abs(times / expected - 1) < 0.05  # two digits


def test_the_covariance_error_is_that_of_the_elements_that_are_off() -> None:
    """Element 0 is sampled badly and right, element 1 precisely and slightly wrong."""
    truth = torch.eye(2).double().repeat(2, 1, 1)
    found = truth.clone()
    found[0, 0, 1] = found[0, 1, 0] = 0.1
    found[1, 0, 1] = found[1, 1, 0] = 0.01
    stderr = torch.full((2, 2, 2), 0.07).double()
    stderr[1] = 1e-3
    mean = torch.zeros(2, 2).double()
    error = SamplingError(40_000, torch.full_like(mean, 0.05), stderr)
    told = verdict(cp.Gaussian(mean, found), cp.Gaussian(mean, truth, sampling=error))
    assert told == "covariance off by 1 %"
