"""Verdicts on outputs that are hard to sample: right methods pass, wrong ones are caught.

And distances of Gaussians, against scipy's matrix square root and torch's own divergence.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import covprop as cp
from covprop.diagnostics.comparison import Agreement, Reference
from covprop.diagnostics.verdict import (
    Deviation,
    Grade,
    Judgement,
    kl_divergence,
    wasserstein_distance,
)
from covprop.error_estimate import SamplingError
from tests.layers import propagate
from tests.oracles import assert_close

FINE = "within sampling error"
STILL = "off where samples do not vary"
PLAIN = cp.MonteCarlo()


def gaussian(*mean: float) -> cp.Gaussian:
    return cp.Gaussian(torch.tensor(mean).double(), torch.eye(len(mean)).double())


def verdict(found: cp.Gaussian, sampled: cp.Gaussian, method: Any = PLAIN) -> str:
    return Agreement.of(found, Reference.of(sampled, 1.0, 10, method)).verdict


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled(model: Any, x: cp.Gaussian, samples: int, seed: int) -> cp.Gaussian:
    return propagate(model, x, cp.MonteCarlo(samples, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("samples", "runs"), [(1000, 30), (10_000, 30), (75_000, 10)])
def test_units_that_are_seldom_active_raise_no_alarm(samples: int, runs: int) -> None:
    """One layer, of which Exact has the moments: 1 % by chance; 5 of 60 have one of 3e-4."""
    called = []
    for seed in range(runs):
        torch.manual_seed(seed)
        model = (
            nn.Sequential(nn.Linear(8, 20), nn.ReLU()).double().requires_grad_(requires_grad=False)
        )
        x = cp.Gaussian(torch.randn(8).double(), 0.25 * torch.eye(8).double())
        told = verdict(propagate(model, x), sampled(model, x, samples, seed))
        called += [told] * (told != FINE)
    assert len(called) <= 3, called


@pytest.mark.parametrize(
    ("base", "stddev"), [(cp.Exact(), 0.5), (cp.Exact(), 0.05), (cp.Linearized(), 0.05)]
)
def test_a_control_variate_raises_no_alarm(base: Any, stddev: float) -> None:
    """One hidden layer, of which Exact has the moments: 1 % by chance."""
    called = []
    for seed in range(25):
        torch.manual_seed(seed)
        layers = nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 4)
        model = nn.Sequential(*layers).double().requires_grad_(requires_grad=False)
        x = cp.Gaussian.isotropic(torch.randn(8).double(), stddev=stddev)
        method = cp.ControlVariate(4096, base, _seeded(seed))
        told = verdict(propagate(model, x), propagate(model, x, method), method)
        called += [told] * (told != FINE)
    assert len(called) <= 2, called


@pytest.mark.parametrize("mean", [-4.0, -8.0, -20.0, -27.0])
def test_a_dying_unit_is_no_error_for_a_control_variate(mean: float) -> None:
    """At -27 its gain is 1e-160, whose square is nothing."""
    x = gaussian(mean, 1.0)
    right = propagate(torch.relu, x)
    for seed in range(20):
        method = cp.ControlVariate(1024, generator=_seeded(seed))
        assert verdict(right, propagate(torch.relu, x, method), method) == FINE


@pytest.mark.parametrize("distance", [2.5, 3.0, 3.5, 4.0])
def test_a_kink_that_samples_hardly_meet_is_no_error(distance: float) -> None:
    """All that is left of a control variate is beyond it, so that no sample tells its error."""
    x = gaussian(distance, 0.3)
    right = propagate(torch.relu, x)
    method = cp.ControlVariate(2048)
    called = [
        verdict(right, propagate(torch.relu, x, replace(method, generator=_seeded(i))), method)
        for i in range(30)
    ]
    assert sum(told != FINE for told in called) <= 3, set(called)


def test_a_control_variate_finds_a_small_error_of_a_nearly_linear_network() -> None:
    """Of 1 % in a variance, which 4,096 plain samples would miss."""
    x = cp.Gaussian(torch.ones(3).double(), 1e-4 * torch.eye(3).double())
    right = propagate(torch.tanh, x)
    wrong = cp.Gaussian(right.mean, 1.01 * right.covariance_matrix)
    method = cp.ControlVariate(4096, generator=_seeded(0))
    truth = propagate(torch.tanh, x, method)
    assert verdict(right, truth, method) == FINE
    assert verdict(wrong, truth, method).startswith("standard deviations 0.49 % off")
    assert verdict(wrong, sampled(torch.tanh, x, 4096, 0)) == FINE


@pytest.mark.parametrize("samples", [2, 3, 5, 10, 30])
def test_a_handful_of_samples_raises_no_alarm(samples: int) -> None:
    x = gaussian(0.0, 1.0, 2.0)
    right = propagate(torch.relu, x)
    called = [verdict(right, sampled(torch.relu, x, samples, seed)) for seed in range(50)]
    assert sum(told != FINE for told in called) <= 4, set(called)


@pytest.mark.parametrize("mean", [-3.0, -4.0, -5.0, -20.0])
@pytest.mark.parametrize(("offset", "dtype"), [(0.0, torch.float64), (1.0, torch.float32)])
def test_a_dying_unit_is_no_error(mean: float, offset: float, dtype: torch.dtype) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + offset

    x = gaussian(mean, 1.0).to(dtype)
    right = propagate(model, x)
    called = [verdict(right, sampled(model, x, 5000, seed)) for seed in range(40)]
    assert sum(told != FINE for told in called) <= 4, set(called)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_a_variance_twenty_percent_off_is_caught_where_a_unit_is_active_enough(
    factor: float,
) -> None:
    """Active in 2.3 % of 300,000 samples."""
    x = gaussian(-2.0, 1.0)
    right = propagate(torch.relu, x)
    matrix = right.covariance_matrix.clone()
    matrix[0, 0] *= factor
    truth = sampled(torch.relu, x, 300_000, 0)
    assert verdict(right, truth) == FINE
    assert verdict(cp.Gaussian(right.mean, matrix), truth).startswith("standard deviations ")


def test_a_unit_that_a_method_holds_for_dead_is_caught() -> None:
    """Linearised at -3 nothing ever varies, and 1 in 740 samples does."""
    x = gaussian(-3.0, 1.0)
    wrong = propagate(torch.relu, x, cp.Linearized())
    told = verdict(wrong, sampled(torch.relu, x, 5000, 0))
    assert told.startswith("standard deviations 100 % off (")
    assert ", means " in told


@pytest.mark.parametrize(
    ("mean", "variance", "expected"),
    [
        (1e-3, 1.0, FINE),  # as one value of 1000 in a million would have it
        (0.2, 1.0, f"standard deviations {STILL}, means {STILL}"),  # at least 3.8 % are not zero
        (1e-30, 1e-30, FINE),
        (0.0, 1.0, f"standard deviations {STILL}"),
        (0.1, 0.0, f"means {STILL}"),
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
    right = propagate(model, x)
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
    assert told == "covariance 1 % off (10 standard errors)"


# Grades and words.

UNSEEN = Deviation(0.004, 1.2, significant=False)
"""An error that sampling explains."""


def significant(size: float, standard_errors: float = 8.0) -> Deviation:
    return Deviation(size, standard_errors, significant=True)


@pytest.mark.parametrize(
    ("size", "grade", "words"),
    [
        (0.006, Grade.SMALL, "0.6 % off"), (0.02, Grade.MODERATE, "2 % off"),
        (0.099, Grade.MODERATE, "9.9 % off"), (0.1, Grade.WRONG, "10 % off"),
        (4.0, Grade.WRONG, "400 % off"), (34.0, Grade.WRONG, "a factor of 35 off"),
    ],
)  # fmt: skip
def test_a_grade_is_that_of_the_size_whatever_its_significance(
    size: float, grade: Grade, words: str
) -> None:
    for number, told in ((4.0, "4"), (4e5, ">999")):
        judged = Judgement(significant(size, number), UNSEEN, UNSEEN)
        assert judged.grade is grade
        assert judged.words == f"standard deviations {words} ({told} standard errors)"


def test_a_large_error_that_sampling_explains_is_none() -> None:
    rare = Deviation(0.5, 1.5, significant=False)
    judged = Judgement(rare, rare, rare)
    assert judged.grade is Grade.AGREES
    assert judged.words == FINE
    assert Judgement(rare, rare, rare, divergence=12.3).grade is Grade.JOINT


def test_the_worst_error_is_told_first() -> None:
    judged = Judgement(significant(0.02), significant(0.3, 40), UNSEEN)
    assert judged.grade is Grade.WRONG
    assert judged.words.startswith("means 0.3 standard deviations off (40 standard errors), stand")


def test_a_covariance_is_told_where_deviations_do_not_explain_it() -> None:
    """A variance is off by twice as much as its root, and so is a covariance for that reason."""
    explained = Judgement(significant(0.02), UNSEEN, significant(0.05))
    assert "covariance" not in explained.words
    lost = Judgement(significant(0.02), UNSEEN, significant(0.9))
    assert lost.words.startswith("covariance 90 % off (8 standard errors), standard deviations 2 %")
    assert lost.grade is Grade.WRONG


# Distances.


def random(seed: int, *batch: int, size: int = 4, rank: int = 6) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn((*batch, size, rank), dtype=torch.float64, generator=generator) / 2
    mean = torch.randn((*batch, size), dtype=torch.float64, generator=generator)
    return cp.Gaussian(mean, factor @ factor.mT)


def by_scipy(x: cp.Gaussian, y: cp.Gaussian) -> float:
    c, d = x.covariance_matrix.numpy(), y.covariance_matrix.numpy()
    root = scipy.linalg.sqrtm(c)
    middle = scipy.linalg.sqrtm(root @ d @ root)
    shift = float((x.mean - y.mean).square().sum())
    return math.sqrt(shift + float(np.trace(c + d - 2 * np.real(middle))))


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_wasserstein_agrees_with_scipys_matrix_square_root(seed: int) -> None:
    x, y = random(seed), random(seed + 100)
    assert_close(wasserstein_distance(x, y), number(by_scipy(x, y)))


@pytest.mark.parametrize("seed", range(5))
def test_kl_agrees_with_torch(seed: int) -> None:
    x, y = random(seed), random(seed + 100)
    ours = MultivariateNormal(x.mean, x.covariance_matrix)
    theirs = MultivariateNormal(y.mean, y.covariance_matrix)
    assert_close(kl_divergence(x, y), torch.distributions.kl_divergence(ours, theirs), rtol=1e-10)


def test_in_one_dimension_both_have_school_formulas() -> None:
    x = cp.Gaussian(number(1.0)[None], number(4.0)[None, None])
    y = cp.Gaussian(number(3.0)[None], number(1.0)[None, None])
    assert_close(wasserstein_distance(x, y), number(math.sqrt(2**2 + 1**2)))
    assert_close(kl_divergence(x, y), number(math.log(1 / 2) + (4 + 4) / 2 - 0.5))
    assert_close(kl_divergence(y, x), number(math.log(2) + (1 + 4) / 8 - 0.5))


def test_a_batch_is_its_elements() -> None:
    x, y = random(0, 2, 3), random(1, 2, 3)
    for measure in (wasserstein_distance, kl_divergence):
        together = measure(x, y)
        assert together.shape == (2, 3)
        apart = torch.stack([measure(x[i, j], y[i, j]) for i in range(2) for j in range(3)])
        assert_close(together.flatten(), apart)


def test_a_tiny_distance_is_not_lost_in_rounding() -> None:
    """A shift of 1e-9 and a scaling by 1 + 1e-9 of the deviations, against their first order."""
    x = random(3)
    scaled = cp.Gaussian(x.mean, x.covariance_matrix * (1 + 1e-9) ** 2)
    expected = 1e-9 * x.variance.sum().sqrt()
    assert_close(wasserstein_distance(x, scaled), expected, rtol=1e-3)  # rounding of 1 + 1e-9
    assert float(wasserstein_distance(x, x)) < 1e-14


def test_equal_gaussians_do_not_diverge() -> None:
    for x in (random(0), random(0, rank=2)):
        assert float(kl_divergence(x, x)) < 1e-12
        assert float(wasserstein_distance(x, x)) < 1e-7  # roots of eigenvalues that are rounding


def test_singular_covariances_have_a_wasserstein_distance() -> None:
    """Degenerate in other directions: for rank one, W^2 is a^2 + b^2 - 2 |a . b| (means equal)."""
    a, b = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.0, 1.0, 3.0]).double()
    zero = torch.zeros(3, dtype=torch.float64)
    x, y = cp.Gaussian(zero, torch.outer(a, a)), cp.Gaussian(zero, torch.outer(b, b))
    expected = (a.square().sum() + b.square().sum() - 2 * (a @ b).abs()).sqrt()
    assert_close(wasserstein_distance(x, y), expected)
    point = cp.Gaussian(b, torch.zeros(3, 3, dtype=torch.float64))
    assert_close(wasserstein_distance(x, point), (a.square().sum() + b.square().sum()).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kl_of_one_support_is_that_on_the_support(dtype: torch.dtype) -> None:
    """Both live on the image of one (5, 2) matrix; in its coordinates they are regular."""
    basis = torch.linalg.qr(random(7, 5, size=2).mean).Q.to(dtype)
    x, y = random(0, size=2).to(dtype), random(1, size=2).to(dtype)
    wide = [
        cp.Gaussian(g.mean @ basis.mT, basis @ g.covariance_matrix @ basis.mT, validate_args=False)
        for g in (x, y)
    ]
    expected = kl_divergence(x, y)
    assert_close(kl_divergence(*wide), expected, rtol=1e3 * torch.finfo(dtype).eps)


def test_kl_of_different_supports_is_infinite() -> None:
    regular, flat = random(0), random(1, rank=2)
    elsewhere, shifted = random(2, rank=2), cp.Gaussian(flat.mean + 1, flat.covariance_matrix)
    for pair in ((regular, flat), (flat, regular), (flat, elsewhere), (flat, shifted)):
        assert float(kl_divergence(*pair)) == math.inf


def test_points_coincide_or_not() -> None:
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    none = torch.zeros(2, 2, dtype=torch.float64)
    assert float(kl_divergence(cp.Gaussian(one, none), cp.Gaussian(one, none))) == 0
    assert float(kl_divergence(cp.Gaussian(one, none), cp.Gaussian(zero, none))) == math.inf


def test_shapes_must_agree() -> None:
    for measure in (wasserstein_distance, kl_divergence):
        with pytest.raises(ValueError, match="of one shape"):
            measure(random(0, size=3), random(0, size=4))
