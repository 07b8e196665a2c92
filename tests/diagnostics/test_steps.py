"""Streaming moments and the Kolmogorov distance against numpy, scipy and closed forms."""

import math

import pytest
import scipy.stats
import torch

from covprop.diagnostics.steps import (
    CHOSEN,
    DRAWS,
    NormalityTest,
    RunningMoments,
    kolmogorov_distance,
    kolmogorov_quantile,
    median_and_worst,
)
from tests.oracles import assert_close


def draws(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, *shape), dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("cuts", [[1000], [1, 999], [10, 500, 490], [1] * 20 + [980]])
def test_chunks_give_the_moments_of_all(cuts: list[int]) -> None:
    samples = draws(1000, 2, 3).exp() + 100  # an offset that naive sums of powers would lose
    running = RunningMoments()
    for part in samples.split(cuts):
        running.add(part)
    values = samples.numpy()
    assert running.count == 1000
    assert_close(running.mean, samples.mean(0), rtol=1e-12)
    assert_close(running.variance, samples.var(0), rtol=1e-10)
    assert_close(running.skewness, torch.from_numpy(scipy.stats.skew(values)), rtol=1e-9)
    kurtosis = torch.from_numpy(scipy.stats.kurtosis(values))
    assert_close(running.excess_kurtosis, kurtosis, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["normal", "relu", "exp"])
def test_kolmogorov_agrees_with_scipy(name: str) -> None:
    """The ReLU has an atom at zero."""
    x = draws(2000, 4)
    samples = {"normal": x, "relu": x.relu(), "exp": x.exp()}[name]
    expected = [
        scipy.stats.kstest(c.numpy(), "norm", args=(float(c.mean()), float(c.std()))).statistic
        for c in samples.unbind(1)
    ]
    assert_close(kolmogorov_distance(samples), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("samples", "runs"), [(100, 20_000), (1000, 4000)])
@pytest.mark.parametrize("doubt", [0.05, 0.01])
def test_gaussian_samples_exceed_the_quantile_as_often_as_it_says(
    samples: int, runs: int, doubt: float
) -> None:
    distances = kolmogorov_distance(draws(samples, runs))
    share = float((distances > kolmogorov_quantile(samples, doubt)).double().mean())
    error = math.sqrt(doubt / runs)
    assert abs(share - doubt) < 5 * error + 0.2 * doubt  # a fit, good to two digits


def test_the_atom_of_a_relu_is_its_distance() -> None:
    """relu(N(0, 1)): F jumps from 0 to 1/2 at 0, where the matched normal has Phi(-m / s)."""
    m, s = 1 / math.sqrt(2 * math.pi), math.sqrt(0.5 - 1 / (2 * math.pi))
    below = 0.5 * math.erfc(m / s / math.sqrt(2))
    (distance,) = kolmogorov_distance(draws(200_000, 1).relu()).tolist()
    assert abs(distance - max(below, 0.5 - below)) < 5 * 0.5 / math.sqrt(200_000)


def test_elements_that_hardly_vary_are_left_out() -> None:
    scales = torch.tensor([1.0, 1.0, 0.01, 0.0], dtype=torch.float64)
    test = NormalityTest(4)
    test.add(draws(500, 4) * scales + 3)
    told = test.result(torch.full((4,), 3.0).double(), scales.square(), batch_dims=0)
    for values in (told.skewness, told.excess_kurtosis, told.mean_error, told.variance_error):
        assert values.isnan().tolist() == [False, False, True, True]
    assert told.chosen.tolist() == [0, 1]
    assert told.kolmogorov.shape == (2,)


def test_every_element_of_a_batch_has_a_scale_of_its_own() -> None:
    scales = torch.tensor([[1.0, 1.0], [1e-3, 1e-3]], dtype=torch.float64)
    test = NormalityTest(4)
    test.add(draws(500, 2, 2) * scales)
    told = test.result(torch.zeros(2, 2).double(), scales.square(), batch_dims=1)
    assert not bool(told.skewness.isnan().any())


def test_errors_are_those_of_the_propagated_moments() -> None:
    samples = draws(4000, 3)
    test = NormalityTest(3)
    for part in samples.split(1500):
        test.add(part)
    told = test.result(*(torch.full((3,), v, dtype=torch.float64) for v in (0.5, 1.3)), 0)
    assert_close(told.mean_error, (0.5 - samples.mean(0)) / samples.std(0))
    assert_close(told.variance_error, 1.3 / samples.var(0) - 1)
    assert told.mean_stderr == 4000**-0.5
    assert float((told.variance_stderr / (2 / 4000) ** 0.5 - 1).abs().max()) < 0.1


def test_the_stated_errors_of_sampling_cover() -> None:
    """Variances of a skewed element: the spread over runs is the standard error it states."""
    errors, stated = [], []
    for seed in range(200):
        test = NormalityTest(1)
        test.add(draws(1000, 1, seed=seed).relu())
        m, v = 1 / math.sqrt(2 * math.pi), 0.5 - 1 / (2 * math.pi)
        told = test.result(torch.tensor([m]).double(), torch.tensor([v]).double(), 0)
        errors.append(float(told.variance_error))
        stated.append(float(told.variance_stderr))
    spread = float(torch.tensor(errors).std())
    assert abs(spread / (sum(stated) / len(stated)) - 1) < 5 / math.sqrt(2 * 200)


def test_a_wide_step_is_looked_at_in_evenly_spaced_places() -> None:
    test = NormalityTest(1000)
    assert len(test.chosen) == CHOSEN
    assert test.chosen[0] == 0
    assert test.chosen[-1] == 999
    assert set(test.chosen.diff().tolist()) == {15, 16}


def test_no_more_samples_are_kept_than_promised() -> None:
    test = NormalityTest(2)
    for _ in range(3):
        test.add(draws(DRAWS // 2 + 1, 2))
    kept = sum(len(part) for part in test._kept)
    assert kept == DRAWS
    assert test.moments.count == 3 * (DRAWS // 2 + 1)


def test_median_and_worst_of_sizes() -> None:
    assert median_and_worst(torch.tensor([math.nan, -3.0, 1.0, 2.0])) == (2.0, 3.0)
    assert all(math.isnan(value) for value in median_and_worst(torch.tensor([math.nan])))
