"""The error bound of the series: never violated, attained where Cauchy-Schwarz is an equality."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import covprop as cp
from covprop.activations import Quadrature
from tests.cases import CASES, QUADRATURE
from tests.layers import propagate
from tests.oracles import assert_close, moments
from tests.test_oracle import HERE, NAMES, columns, gaussian

ORDERS = (1, 2, 3, 5, 8)
SLACK = 1e-10
"""Of the product of the standard deviations: rounding of the input far out in a tail."""
NOTHING = 1e-18
"""Where both elements are far out in a tail, the exact covariance is accurate absolutely."""


def random_pairs(name: str, count: int) -> cp.Gaussian:
    """Means near and far, sigma from 1e-6 to 10, correlations of every kind including +-1."""
    generator = torch.Generator().manual_seed(2)
    largest = 0.3 if name == "exp" else 1.0  # e^(sigma^2) beyond this is all there is to see
    uniform = torch.rand(count, 6, generator=generator, dtype=torch.float64)
    mean = 8 * uniform[:, :2] - 4
    mean[::7, 0] = 0
    stddev = 10 ** (7 * uniform[:, 2:4] - 6) * largest
    stddev[::11, 1] = stddev[::11, 0]
    mean[::11, 1] = mean[::11, 0]
    kind, sign = uniform[:, 4], torch.where(uniform[:, 5] < 0.5, -1.0, 1.0).double()
    rho = torch.where(kind < 0.6, kind / 0.6, 1 - 10 ** (-16 * (kind - 0.6)))
    rho = torch.where(kind > 0.9, 1.0, rho) * sign
    matrix = torch.diag_embed(stddev.square())
    matrix[:, 0, 1] = matrix[:, 1, 0] = rho * stddev.prod(-1)
    return cp.Gaussian(mean, matrix)


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_for_random_pairs(name):
    function, activation = CASES[name].function, CASES[name].activation()
    integrated = CASES[name].family == QUADRATURE or isinstance(activation, Quadrature)
    x = random_pairs(name, 40 if integrated else 1000)
    exact = propagate(function, x)
    scale = exact.stddev.prod(-1)
    for order in (1, 3, 8) if integrated else ORDERS:
        series = propagate(function, x, cp.Series(order)).covariance_matrix
        error = (series - exact.covariance_matrix).abs()[:, 0, 1]
        bound = cp.series_error_bound(activation, x, order)[:, 0, 1]
        assert float((error - bound - SLACK * scale).max()) <= NOTHING


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_holds_against_the_table(name):
    data = columns(HERE / "oracle_rows.csv", name)
    x = gaussian(data)
    scale = (data["var1"] * data["var2"]).sqrt()
    for order in (1, 2, 4, 8):
        series = propagate(CASES[name].function, x, cp.Series(order)).covariance_matrix[:, 0, 1]
        bound = cp.series_error_bound(CASES[name].activation(), x, order)[:, 0, 1]
        excess = (series - data["cov"]).abs() - bound - SLACK * scale
        assert float(excess.max()) <= NOTHING


@pytest.mark.parametrize("name", ["relu", "sign", "gelu", "tanh"])
def test_the_bound_is_the_papers_tail_and_no_larger(name):
    case, rho, order = CASES[name], 0.8, 3
    means, stddevs = (0.4, -0.8), (0.9, 1.6)
    rows = [
        moments(case.function, m, s, order, case.kinks) for m, s in zip(means, stddevs, strict=True)
    ]
    rest = [variance - float((a**2).sum()) for _, variance, a in rows]
    expected = rho ** (order + 1) * (rest[0] * rest[1]) ** 0.5
    cross = rho * stddevs[0] * stddevs[1]
    matrix = torch.tensor([[stddevs[0] ** 2, cross], [cross, stddevs[1] ** 2]]).double()
    x = cp.Gaussian(torch.tensor(means).double(), (matrix + matrix.mT) / 2)
    bound = cp.series_error_bound(case.activation(), x, order)
    assert_close(bound, expected * torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double(), rtol=1e-6)


@pytest.mark.parametrize("name", ["relu", "heaviside", "gelu", "tanh"])
def test_the_bound_is_attained_by_duplicated_units(name):
    matrix = torch.ones(2, 2, dtype=torch.float64)
    x = cp.Gaussian(torch.full((2,), 0.3, dtype=torch.float64), matrix)
    exact = propagate(CASES[name].function, x).covariance_matrix[0, 1]
    for order in (1, 2, 4):
        series = propagate(CASES[name].function, x, cp.Series(order)).covariance_matrix[0, 1]
        bound = cp.series_error_bound(CASES[name].activation(), x, order)[0, 1]
        assert_close(bound, exact - series, rtol=1e-9)


@pytest.mark.parametrize("name", ["relu", "hardtanh", "gelu", "sigmoid", "selu"])
def test_the_bound_holds_in_single_precision(name):
    x = random_pairs(name, 150)
    keep = (x.stddev > 1e-3).all(-1) & (x.correlation_matrix[:, 0, 1].abs() < 0.999)
    x = x[keep].to(torch.float32)
    exact = propagate(CASES[name].function, x.to(torch.float64))
    for order in ORDERS:
        series = propagate(CASES[name].function, x, cp.Series(order)).covariance_matrix
        bound = cp.series_error_bound(CASES[name].activation(), x, order)
        assert bound.dtype == torch.float32
        error = (series - exact.covariance_matrix).abs()[:, 0, 1]
        assert float((error - bound[:, 0, 1] * (1 + 1e-6)).max()) <= NOTHING


def test_the_bound_finds_a_torch_function_with_its_options():
    x = random_pairs("leaky_relu", 20)
    found = cp.series_error_bound(F.leaky_relu, x, 2, negative_slope=0.3)
    expected = cp.series_error_bound(CASES["leaky_relu(0.3)"].activation(), x, 2)
    assert_close(found, expected, rtol=0.0)
    smooth = cp.series_error_bound(partial(torch.tanh), x, 2)
    assert_close(smooth, cp.series_error_bound(torch.tanh, x, 2), rtol=1e-12, atol=1e-14)


def test_the_bound_of_a_series_without_terms_is_refused():
    with pytest.raises(ValueError, match="whole number from 1"):
        cp.series_error_bound(torch.relu, random_pairs("relu", 2), 0)
