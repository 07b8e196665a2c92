"""The experiments' numerical integration against the test suite's own."""

import numpy as np
import pytest
import torch

from experiments import figure5, grid, truth
from tests.cases import CASES
from tests.oracles import assert_close, pair_covariance, plackett
from tests.paper import exact_relu_covariance, means


def test_relu_agrees_with_conditioning():
    a, b = means(21).T
    expected = exact_relu_covariance(a, b, 0.5, nodes=8)
    assert_close(
        torch.from_numpy(truth.relu_covariance(a, b, 0.5)), torch.from_numpy(expected), atol=3e-14
    )


@pytest.mark.parametrize("rho", [0.5, 0.9, 0.999])
@pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (1.0, -0.5), (-2.0, -2.1), (4.0, 3.0)])
def test_relu_agrees_with_high_precision(a, b, rho):
    _, ramps = plackett(a, b, rho)
    cdfs = [float(truth.ndtr(mean)) for mean in (a, b)]
    expected = rho * cdfs[0] * cdfs[1] + float(ramps)
    found = truth.relu_covariance(np.array([a]), np.array([b]), rho)[0]
    assert found == pytest.approx(expected, abs=2e-15)


@pytest.mark.parametrize("name", ["tanh", "gelu", "sign", "hardshrink(0.5)", "softsign"])
def test_the_map_agrees_with_nested_quadrature(name):
    case, axis = CASES[name], np.array([-2.0, 0.3, 1.7])
    found = truth.covariance_map(case.function, case.kinks, axis, 0.5)
    for i, j in ((0, 0), (0, 2), (2, 1)):
        pair = (float(axis[i]), float(axis[j]))
        expected = pair_covariance(case.function, pair, (1.0, 1.0), 0.5, case.kinks)
        assert found[i, j] == pytest.approx(expected, abs=1e-13)


def test_the_grid_is_packed_and_unpacked():
    values = np.arange(9.0).reshape(3, 3)
    symmetric = values + values.T
    assert np.array_equal(grid.square(np.array(grid.packed(symmetric)), 3), symmetric)


def test_every_declared_activation_has_a_map():
    assert {case.declaration for case in CASES.values()} <= set(figure5.functions())
