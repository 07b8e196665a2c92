"""The paper's error analysis, measured again."""

import math

import numpy as np
import pytest
import torch

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close
from tests.paper import (
    MEASURED,
    PUBLISHED,
    RHO,
    exact_relu_covariance,
    means,
    wu_relu_covariance,
)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return exact_relu_covariance(*means().T, RHO, nodes=8)


def propagated(method: object) -> np.ndarray:
    mean = torch.from_numpy(means())
    matrix = torch.tensor([[1.0, RHO], [RHO, 1.0]], dtype=torch.float64)
    x = cp.Gaussian(mean, matrix.expand(len(mean), 2, 2).contiguous())
    return propagate(torch.relu, x, method).covariance_matrix[:, 0, 1].numpy()


def largest_error(name: str, exact: np.ndarray) -> float:
    if name == "wu2019":
        found = propagated(cp.Wu2019())
    else:
        found = propagated(cp.Series(order=int(name.split()[1])))
    return float(np.abs(found - exact).max())


def test_exact_covariances_agree_with_conditioning(exact):
    assert_close(torch.from_numpy(propagated(cp.Exact())), torch.from_numpy(exact), atol=1e-13)


@pytest.mark.parametrize("name", MEASURED)
def test_the_largest_error_is_what_we_measured(name, exact):
    assert largest_error(name, exact) == pytest.approx(MEASURED[name], rel=5e-3)  # three digits


def test_the_first_order_error_is_the_published_one(exact):
    assert largest_error("order 1", exact) == pytest.approx(PUBLISHED["order 1"], rel=5e-4)


@pytest.mark.parametrize("name", ["order 4", "wu2019"])
def test_the_other_published_errors_are_larger_than_the_true_ones(name, exact):
    assert PUBLISHED[name] > 4 * largest_error(name, exact)


def test_no_order_has_the_error_published_for_the_fourth(exact):
    errors = [largest_error(f"order {order}", exact) for order in range(1, 7)]
    assert errors == sorted(errors, reverse=True)
    assert min(abs(error / PUBLISHED["order 4"] - 1) for error in errors) > 0.01


def test_the_error_published_for_wu_exceeds_that_of_the_first_term_alone(exact):
    a, b = means().T
    first_term = propagated(cp.Series(order=1))
    assert float(np.abs(first_term - exact).max()) < PUBLISHED["wu2019"] / 5
    assert float(np.abs(wu_relu_covariance(a, b, RHO) - exact).max()) < PUBLISHED["wu2019"] / 500


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_wu_is_exact_at_zero_means(rho):
    zero = np.zeros(1)
    root = math.sqrt(1 - rho * rho)
    expected = (root + rho * (math.pi / 2 + math.asin(rho)) - 1) / (
        2 * math.pi
    )  # arc-cosine kernel
    assert wu_relu_covariance(zero, zero, rho)[0] == pytest.approx(expected, rel=1e-14)
