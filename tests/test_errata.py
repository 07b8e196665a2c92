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
from experiments import mnist, table1
from experiments.options import Options
from experiments.rivals import CENTRED, METHODS, PIECEWISE
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
    published = cp.propagate(torch.relu, x, cp.Series(order=4, exact_variance=False)).variance
    terms = 1 / 4 + 1 / (4 * math.pi) + 1 / (48 * math.pi)  # the third vanishes
    assert float(published) == pytest.approx(terms, rel=1e-14)
    exact = 1 / 2 - 1 / (2 * math.pi)
    assert float(cp.propagate(torch.relu, x).variance) == pytest.approx(exact, rel=1e-14)
    assert 1 - terms / exact == pytest.approx(0.0136, abs=1e-4)


@torch.no_grad()
def test_exact_variances_take_the_bias_away():
    """The bias against the exact method, where no sampling is needed to see it: FC-4."""
    ratios = []
    for index in range(20):
        model, x = table1.instance(f"FC-4/published/{index}", Options())
        exact = cp.propagate(model, x).variance
        methods = (cp.Series(order=4, exact_variance=False), cp.Series(order=4))
        ratios.append(
            [float(exact / cp.propagate(model, x, method).variance) for method in methods]
        )
    published, with_variances = np.mean(ratios, axis=0)
    assert published == pytest.approx(1.010, abs=2e-3)
    assert with_variances == pytest.approx(1.000, abs=2e-4)


@torch.no_grad()
def test_pl_dnn_of_2018_has_a_variance_for_mean_zero():
    ratios = []
    for index in range(20):
        model, x = table1.instance(f"FC-4/published/{index}", Options())
        exact = cp.propagate(model, x).variance
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
    x = cp.Gaussian.isotropic(torch.tensor([mean], dtype=torch.float64), stddev)
    ours = cp.propagate(nn.GELU(), x, cp.Series(order=1, exact_variance=False)).stddev
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
    x = cp.Gaussian.isotropic(torch.tensor([-1.0], dtype=torch.float64), 1.0)
    found = float(cp.propagate(torch.relu, x).mean)
    assert found == pytest.approx(float(rectified_mean(-1.0)), rel=1e-13)
    assert found > 0


@pytest.mark.parametrize("mean", [-1.5, 0.6])
def test_the_third_hermite_polynomial_is_odd(mean):
    third = np.polynomial.hermite_e.hermeval(mean, [0, 0, 0, 1])
    assert third == pytest.approx(mean**3 - 3 * mean)
    assert third != pytest.approx(mean**3 - 3)
    x = cp.Gaussian.isotropic(torch.tensor([mean], dtype=torch.float64), 1.0)
    sums = [
        float(cp.propagate(torch.relu, x, cp.Series(order=k, exact_variance=False)).variance)
        for k in (4, 5)
    ]
    fifth = (third * float(normal_pdf(mean))) ** 2 / math.factorial(5)
    assert sums[1] - sums[0] == pytest.approx(fifth, rel=1e-9)


def test_nothing_is_skipped():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.cummax(x, -1).values

    x = cp.Gaussian.isotropic(torch.zeros(4), 1.0)
    with pytest.raises(cp.UnsupportedOperation, match=r"in module 1 \(Odd\).*cummax"):
        cp.propagate(nn.Sequential(nn.Linear(4, 4), Odd()), x)


@torch.no_grad()
def test_no_variance_is_no_special_case():
    model, x = table1.instance("FC-4/published/0", Options())
    still = cp.Gaussian(x.mean, torch.zeros_like(x.covariance_matrix))
    for method in (cp.Exact(), cp.Series(order=4), cp.Series(order=4, exact_variance=False)):
        y = cp.propagate(model, still, method)
        assert float(y.mean) == pytest.approx(float(model(x.mean)), rel=1e-5)
        assert float(y.variance) == 0
