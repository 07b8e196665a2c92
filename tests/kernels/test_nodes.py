"""Gauss-Legendre on [0, 1] and on panels."""

import pytest
import torch

from covprop.kernels.nodes import Panels, unit_interval
from tests.oracles import assert_close


@pytest.mark.parametrize("count", [1, 2, 6, 12, 14])
def test_unit_interval_integrates_every_polynomial_up_to_degree_2n_minus_1(count):
    rule = unit_interval(count)
    for degree in range(2 * count):
        integral = sum(weight * node**degree for node, weight in rule)
        assert integral == pytest.approx(1 / (degree + 1), rel=1e-13)


BREAKPOINTS = torch.tensor(
    [[-2.0, -0.5, 0.0, 0.0, 1.0, 3.0], [-1.0, -1.0, -0.25, 0.0, 0.5, 0.5]], dtype=torch.float64
)
"""Uneven, with empty panels at zero and at the ends."""


def test_panels_integrate_over_the_whole_range():
    panels = Panels(BREAKPOINTS, 10)
    assert panels.nodes.shape == panels.weights.shape == (2, 5, 10)
    found = (panels.weights * torch.exp(panels.nodes)).sum((-2, -1))
    expected = torch.exp(BREAKPOINTS[:, -1]) - torch.exp(BREAKPOINTS[:, 0])
    assert_close(found, expected, rtol=1e-14)


def test_panels_integrate_from_zero_to_every_node():
    panels = Panels(BREAKPOINTS, 10)
    found = panels.integral_from_zero(panels.nodes**9 - 3 * panels.nodes**4)
    assert_close(found, panels.nodes**10 / 10 - 3 * panels.nodes**5 / 5, atol=1e-11)


def test_what_happens_far_out_does_not_blur_the_integral_near_zero():
    panels = Panels(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64), 10)
    huge = torch.where(panels.nodes.abs() > 1, 1e20, 1.0).double()
    near = panels.nodes.abs() < 1
    found = panels.integral_from_zero(huge)
    assert_close(found[near], panels.nodes[near], rtol=1e-13)


def test_panels_follow_the_dtype_of_their_breakpoints():
    panels = Panels(BREAKPOINTS.float(), 4)
    values = panels.integral_from_zero(panels.nodes)
    assert values.dtype == panels.weights.dtype == torch.float32
    assert_close(values, panels.nodes.square() / 2, atol=1e-6)
