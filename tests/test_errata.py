"""docs/errata.md, row by row."""

import math
import re
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
import torch
from torch import nn

import covprop as cp
from covprop import bayes
from experiments import mnist, regression, table1, table3, uci
from experiments.options import Options
from experiments.ratio_methods import CENTRED, METHODS, PIECEWISE
from tests.layers import propagate
from tests.oracles import normal_cdf, normal_pdf, rectified_mean

HERE = Path(__file__).parent
POINTS = [(-1.3, 0.7), (0.4, 1.0), (2.0, 1.5)]


def test_every_row_names_a_test_that_exists():
    rows = [
        line for line in (HERE.parent / "docs" / "errata.md").read_text().splitlines()
        if line.startswith("|") and not line.startswith(("| ---", "| where", "| what"))
    ]  # fmt: skip
    tests = "".join((HERE / name).read_text() for name in ("test_errata.py", "test_paper.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named or "measured," in row, row
        for name in named:
            assert f"def {name}(" in tests, name


def test_torch_s_default_has_a_sixth_of_kaiming_s_variance():
    torch.manual_seed(0)
    layer = nn.Linear(100, 1000)
    default = float(layer.weight.detach().var())
    nn.init.kaiming_normal_(layer.weight)
    assert default / float(layer.weight.detach().var()) == pytest.approx(1 / 6, rel=0.02)


@pytest.mark.parametrize(
    ("network", "expected"), [("FC-4", 0.087), ("CNN-4", 0.5 / math.sqrt(400 / 3))]
)
def test_a_unit_frobenius_norm_is_a_small_variance(network, expected):
    _, x = table1.instance(f"{network}/published/0", Options())
    assert float(torch.linalg.matrix_norm(x.covariance_matrix)) == pytest.approx(1, rel=1e-5)
    assert float(x.variance.mean()) == pytest.approx(expected, rel=0.05)
    _, x = table1.instance(f"{network}/text/0", Options())
    assert float(x.variance.max()) == pytest.approx(1, rel=1e-5)


def test_four_terms_lack_a_percent_of_a_rectified_variance():
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    x = cp.Gaussian(zero, one)
    published = propagate(torch.relu, x, cp.Series(order=4, exact_variance=False)).variance
    terms = 1 / 4 + 1 / (4 * math.pi) + 1 / (48 * math.pi)  # the third vanishes
    assert float(published) == pytest.approx(terms, rel=1e-14)
    exact = 1 / 2 - 1 / (2 * math.pi)
    assert float(propagate(torch.relu, x).variance) == pytest.approx(exact, rel=1e-14)
    assert 1 - terms / exact == pytest.approx(0.0136, abs=1e-4)


@torch.no_grad()
def test_exact_variances_take_the_bias_away():
    """The bias against the exact method, where no sampling is needed to see it: FC-4."""
    ratios = []
    for index in range(20):
        model, x = table1.instance(f"FC-4/published/{index}", Options())
        exact = propagate(model, x).variance
        methods = (cp.Series(order=4, exact_variance=False), cp.Series(order=4))
        ratios.append([float(exact / propagate(model, x, method).variance) for method in methods])
    published, with_variances = np.mean(ratios, axis=0)
    assert published == pytest.approx(1.010, abs=2e-3)
    assert with_variances == pytest.approx(1.000, abs=2e-4)


@torch.no_grad()
def test_pl_dnn_of_2018_has_a_variance_for_mean_zero():
    ratios = []
    for index in range(20):
        model, x = table1.instance(f"FC-4/published/{index}", Options())
        exact = propagate(model, x).variance
        both = [METHODS[name](model, x).variance for name in (CENTRED, PIECEWISE)]
        ratios.append([float(exact / variance) for variance in both])
    old, new = np.mean(ratios, axis=0)
    assert 1.05 < old < 1.35
    assert 0.8 < new < 0.95


def test_a_noise_of_unit_norm_is_small_beside_a_standardised_image():
    size = 28 * 28
    noise = 0.5 / math.sqrt(size / 3)  # the mean of uniform eigenvalues of unit norm
    assert noise == pytest.approx(0.03, abs=2e-3)
    assert noise / mnist.STDDEV**2 == pytest.approx(0.33, abs=0.01)  # grey values in [0, 1]


@pytest.mark.parametrize(("mean", "stddev"), POINTS)
def test_gelu_s_derivative_has_a_factor_mu(mean, stddev):
    def expected_value(m: mp.mpf) -> mp.mpf:
        root = mp.sqrt(1 + mp.mpf(stddev) ** 2)
        return m * normal_cdf(m / root) + stddev**2 / root * normal_pdf(m / root)

    derivative = float(mp.diff(expected_value, mean))
    root = math.sqrt(1 + stddev**2)
    first, density = float(normal_cdf(mean / root)), float(normal_pdf(mean / root))
    assert first + mean * density / root**3 == pytest.approx(derivative, rel=1e-9)
    assert first + density / root**3 != pytest.approx(derivative, rel=1e-2)
    x = cp.Gaussian.isotropic(torch.tensor([mean], dtype=torch.float64), stddev=stddev)
    ours = propagate(nn.GELU(), x, cp.Series(order=1, exact_variance=False)).stddev
    assert float(ours) == pytest.approx(stddev * abs(derivative), rel=1e-9)


@pytest.mark.parametrize("frequency", [0.0, 0.2])
def test_the_fourier_pair_of_the_proof_lacks_a_two(frequency):
    stddev = 0.8

    def transform(divisor: float) -> float:
        density = 1 / math.sqrt(2 * math.pi * stddev**2)
        return float(mp.quad(
            lambda m: density * mp.exp(-m * m / (divisor * stddev**2))
            * mp.cos(2 * mp.pi * frequency * m), [-mp.inf, 0, mp.inf],
        ))  # fmt: skip

    expected = math.exp(-2 * (math.pi * frequency * stddev) ** 2)
    assert transform(2) == pytest.approx(expected, rel=1e-12)
    assert transform(1) != pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("order", range(1, 6))
@pytest.mark.parametrize("value", [-0.7, 1.9])
def test_the_even_derivatives_of_the_sigmoid_have_the_other_sign(value, order):
    numerators = {1: [1], 2: [-1, 1], 3: [1, -4, 1], 4: [-1, 11, -11, 1], 5: [1, -26, 66, -26, 1]}
    e = math.exp(value)
    printed = e * sum(c * e**k for k, c in enumerate(numerators[order])) / (1 + e) ** (order + 1)
    true = float(mp.diff(lambda m: 1 / (1 + mp.exp(-m)), value, order))
    assert (-1) ** (order + 1) * printed == pytest.approx(true, rel=1e-9)


def test_a_density_of_root_two_pi_makes_a_rectified_mean_negative():
    wrong = math.exp(-1 / 2) / (math.sqrt(2) * math.pi)
    assert wrong / float(normal_pdf(1)) == pytest.approx(0.564, abs=5e-4)
    assert -float(normal_cdf(-1)) + wrong < 0
    x = cp.Gaussian.isotropic(torch.tensor([-1.0], dtype=torch.float64), stddev=1.0)
    found = float(propagate(torch.relu, x).mean)
    assert found == pytest.approx(float(rectified_mean(-1.0)), rel=1e-13)
    assert found > 0


@pytest.mark.parametrize("mean", [-1.5, 0.6])
def test_the_third_hermite_polynomial_is_odd(mean):
    third = np.polynomial.hermite_e.hermeval(mean, [0, 0, 0, 1])
    assert third == pytest.approx(mean**3 - 3 * mean)
    assert third != pytest.approx(mean**3 - 3)
    x = cp.Gaussian.isotropic(torch.tensor([mean], dtype=torch.float64), stddev=1.0)
    sums = [
        float(propagate(torch.relu, x, cp.Series(order=k, exact_variance=False)).variance)
        for k in (4, 5)
    ]
    fifth = (third * float(normal_pdf(mean))) ** 2 / math.factorial(5)
    assert sums[1] - sums[0] == pytest.approx(fifth, rel=1e-9)


def test_nothing_is_skipped():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cummax(x, -1).values

    x = cp.Gaussian.isotropic(torch.zeros(4), stddev=1.0)
    with pytest.raises(cp.UnsupportedOperation, match=r"in module 1 \(Odd\).*cummax"):
        propagate(nn.Sequential(nn.Linear(4, 4), Odd()), x)


@torch.no_grad()
def test_no_variance_is_no_special_case():
    model, x = table1.instance("FC-4/published/0", Options())
    still = cp.Gaussian(x.mean, torch.zeros_like(x.covariance_matrix))
    for method in (cp.Exact(), cp.Series(order=4), cp.Series(order=4, exact_variance=False)):
        y = propagate(model, still, method)
        assert float(y.mean) == pytest.approx(float(model(x.mean)), rel=1e-5)
        assert float(y.variance) == 0


def bayesian(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    make = {"dtype": torch.float64, "members": 1}
    model = nn.Sequential(
        bayes.BayesLinear(3, 20, **make), nn.ReLU(), bayes.BayesLinear(20, 2, **make)
    )
    for layer in (model[0], model[2]):
        layer.weight_log_stddev.data.fill_(-1.0)
    return model.requires_grad_(False)


def test_one_hidden_layer_uses_no_covariance():
    x = torch.randn(1, 9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact, wu, diagonal = (
        bayes.predict(bayesian(), x, method)
        for method in (cp.Exact(), cp.Wu2019(), cp.AssumedDensity())
    )
    hidden = bayes.predict(bayesian()[0], x)
    assert float((hidden.covariance_matrix - torch.diag_embed(hidden.variance)).abs().max()) == 0
    for other in (wu.covariance_matrix, exact.covariance_matrix):
        assert torch.allclose(other, exact.covariance_matrix, rtol=1e-12)
    assert torch.allclose(diagonal.variance, exact.variance, rtol=1e-12)


@pytest.mark.parametrize(("name", "rows", "expected"), [("boston", 455, 0.0455),
                                                        ("protein", 41157, 4.1157)])  # fmt: skip
def test_the_published_loss_has_a_temperature_of_its_own(name, rows, expected):
    kl, log_prob = torch.tensor(123.0), torch.full((10,), -1.5)
    temperature = table3.recipe(name, table3.PAPER, "Xavier", rows, smoke=False).kl_temperature
    elbo = bayes.ELBO(regression.LIKELIHOOD, data_size=rows, kl_temperature=temperature)
    assert float(elbo.combine(log_prob, kl).loss) == pytest.approx(1e-3 * 123 / 10 + 1.5)
    assert temperature == pytest.approx(expected)


def test_a_score_at_the_mean_leaves_variances_out():
    mean = torch.tensor([[0.0, math.log(0.01)]], dtype=torch.float64)
    target = torch.tensor([1.0], dtype=torch.float64)  # ten deviations of the noise, one of m
    sure, unsure = (
        cp.Gaussian(mean, torch.diag(torch.tensor([width, 0.0], dtype=torch.float64))[None])
        for width in (0.0, 1.0)
    )
    at_mean = float(regression.LIKELIHOOD.log_prob(mean, target))
    assert at_mean == pytest.approx(float(regression.LIKELIHOOD.log_predictive(sure, target)))
    found = float(regression.LIKELIHOOD.log_predictive(unsure, target))
    assert found == pytest.approx(-0.5 * (math.log(2 * math.pi * 1.01) + 1 / 1.01))
    assert found - at_mean > 40


def test_mcvi_is_scored_by_another_quantity():
    model = bayesian()
    x = torch.randn(1, 50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows, one = uci.Rows(x, bayes.predict(model, x).mean[..., 0]), torch.ones(1)
    generator = torch.Generator().manual_seed(0)
    dvi = regression.epoch_scores(model, rows, cp.Exact(), one)
    mcvi = regression.epoch_scores(model, rows, bayes.LocalReparametrisation(10, generator), one)
    assert float(dvi["at the mean"] - mcvi["at the mean"]) > 0.1
    assert float(dvi["expected"]) < float(dvi["at the mean"])


def test_a_lone_last_row_counts_like_ten():
    model = bayesian()
    x = torch.randn(1, 51, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = bayes.predict(model, x).mean[..., 0].clone()
    before = regression.epoch_scores(model, uci.Rows(x, target), cp.Exact(), torch.ones(1))
    target[0, -1] += 1
    after = regression.epoch_scores(model, uci.Rows(x, target), cp.Exact(), torch.ones(1))
    lost = {name: float(before[name] - after[name]) for name in before}
    assert lost["by batches"] / lost["at the mean"] == pytest.approx(51 / 6)


def test_the_best_epoch_by_the_test_rows_is_above_chance():
    # 50 epochs that are equally good, on 51 rows of deviation 1: scores are their errors.
    scores = torch.randn(50, 2000, generator=torch.Generator().manual_seed(0)) / math.sqrt(51)
    assert float(regression.best(scores).mean()) == pytest.approx(2.25 / math.sqrt(51), rel=0.02)
    assert float(scores[-1].mean()) == pytest.approx(0, abs=0.02)


@pytest.mark.skipif(uci.found() is None, reason="no UCI files: set COVPROP_DATA")
def test_red_wine_has_1599_rows():
    assert len(uci.table("wine")) == 1599
