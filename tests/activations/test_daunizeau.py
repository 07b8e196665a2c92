"""The approximate sigmoid, against the five formulas of the paper's appendix."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close

MEANS = torch.tensor([-3.0, -0.7, 0.0, 0.4, 2.0], dtype=torch.float64)
STDDEVS = torch.tensor([0.2, 1.0, 2.0, 1.5, 3.0], dtype=torch.float64)
FACTORIALS = torch.tensor([1.0, 2.0, 6.0, 24.0, 120.0], dtype=torch.float64)
ALPHAS = pytest.mark.parametrize("alpha", [0.368, math.pi / 8])


def gaussian() -> cp.Gaussian:
    generator = torch.Generator().manual_seed(3)
    factor = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    rough = factor @ factor.mT
    rough = rough / (rough.diag()[:, None] * rough.diag()).sqrt()
    return cp.Gaussian(MEANS, rough * torch.outer(STDDEVS, STDDEVS))


def derivatives(alpha: float) -> torch.Tensor:
    """sigma^k d^k E[z] / d mu^k for k = 1 ... 5, as printed.

    The signs of the even ones are printed the wrong way round; in products they cancel.
    """
    beta = (1 + alpha * STDDEVS.square()).sqrt()
    e = torch.exp(MEANS / beta)
    numerators = [
        torch.ones_like(e),
        -1 + e,
        1 - 4 * e + e**2,
        -1 + 11 * e - 11 * e**2 + e**3,
        1 - 26 * e + 66 * e**2 - 26 * e**3 + e**4,
    ]
    rows = [
        (STDDEVS / beta) ** k * e * numerator / (1 + e) ** (k + 1)
        for k, numerator in enumerate(numerators, start=1)
    ]
    return torch.stack(rows)


@ALPHAS
@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_the_series_is_made_of_the_papers_formulas(alpha, order):
    method = cp.Series(
        order=order,
        exact_variance=False,
        activations={torch.sigmoid: partial(cp.DaunizeauSigmoid, alpha)},
    )
    x = gaussian()
    result = propagate(torch.sigmoid, x, method)
    rows, rho = derivatives(alpha), x.covariance_matrix / torch.outer(STDDEVS, STDDEVS)
    expected = sum(
        rho**k * torch.outer(rows[k - 1], rows[k - 1]) / math.factorial(k)
        for k in range(1, order + 1)
    )
    assert_close(result.covariance_matrix, expected, atol=1e-14)
    position = MEANS / (1 + alpha * STDDEVS.square()).sqrt()
    assert_close(result.mean, 1 / (1 + torch.exp(-position)), rtol=1e-14)


def test_signs_of_the_derivatives_are_those_of_the_sigmoid():
    rows = cp.DaunizeauSigmoid().coefficients(MEANS, STDDEVS.square(), 5)
    flips = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)[:, None]
    expected = flips * derivatives(0.368) / FACTORIALS[:, None].sqrt()
    assert_close(rows * STDDEVS, expected, rtol=1e-13, atol=1e-16)


@ALPHAS
def test_it_is_close_to_the_accurate_sigmoid(alpha):
    replaced = {torch.sigmoid: partial(cp.DaunizeauSigmoid, alpha=alpha)}
    result = propagate(nn.Sigmoid(), gaussian(), cp.Series(order=4, activations=replaced))
    exact = propagate(nn.Sigmoid(), gaussian())
    assert_close(result.mean, exact.mean, atol=2e-2)  # the approximation's own error
    # The series is asymptotic: where its truncated sum exceeds the accurate variance, it stays.
    truncated = (derivatives(alpha)[:4].square() / FACTORIALS[:4, None]).sum(0)
    assert_close(result.variance, torch.maximum(exact.variance, truncated), rtol=1e-12)
    assert_close(result.covariance_matrix, exact.covariance_matrix, atol=2e-2)
    assert float((result.mean - exact.mean).abs().max()) > 1e-4


def test_every_spelling_of_the_function_is_replaced():
    method = cp.Series(order=4, activations={torch.sigmoid: cp.DaunizeauSigmoid})
    expected = propagate(nn.Sigmoid(), gaussian(), method).mean
    for spelling in (torch.sigmoid, lambda x: x.sigmoid(), torch.special.expit):
        assert_close(propagate(spelling, gaussian(), method).mean, expected, rtol=0.0)
    accurate = propagate(nn.Sigmoid(), gaussian(), cp.Series(order=4)).mean
    assert float((expected - accurate).abs().max()) > 1e-4


def test_without_variance_it_is_the_sigmoid():
    none = torch.zeros_like(MEANS)
    value = torch.sigmoid(MEANS)
    approximate = cp.DaunizeauSigmoid()
    assert_close(approximate.mean(MEANS, none), value, rtol=1e-15)
    expected = torch.stack([value * (1 - value), none, none])
    assert_close(approximate.coefficients(MEANS, none, 3), expected, rtol=1e-14)


def test_it_has_no_exact_covariance():
    method = cp.Exact(activations={torch.sigmoid: cp.DaunizeauSigmoid})
    with pytest.raises(cp.UnsupportedOperation, match=r"cp\.Series"):
        propagate(torch.sigmoid, gaussian(), method)


@ALPHAS
def test_it_keeps_every_low_order_positive_semi_definite(alpha):
    replaced = {torch.sigmoid: partial(cp.DaunizeauSigmoid, alpha)}
    for order in range(1, 9):
        result = propagate(torch.sigmoid, gaussian(), cp.Series(order, activations=replaced))
        assert float(torch.linalg.eigvalsh(result.covariance_matrix)[0]) > -1e-15
