"""Averages of kernels over narrow ramps, against integrals of the ramps themselves."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from covprop.kernels.ramps import NARROW, SHARP, ramp_relu, ramp_step
from tests.activations.ramps import Linear, covariance

EPS = torch.finfo(torch.float64).eps
CORRELATIONS = [0.0, 0.6, -0.95, 0.999, -1 + 1e-4, 1 - 1e-6, 1.0, -1.0]
RAMPS = [
    (0.3, 0.05, 0.3, 0.05), (0.3, 0.04, 0.28, 0.01), (0.3, 0.01, 0.3, 0.0),
    (-1.0, 1e-3, -0.5, 0.02), (0.0, 1e-6, 0.0, 1e-6), (0.0, 0.0, 0.0, 0.03),
]  # fmt: skip


def rise(y: Tensor, a: float, width: float) -> Tensor:
    """The share of thresholds -t, t in [a - width, a], that y exceeds."""
    return ((y + a) / width).clamp(0, 1) if width else (y + a >= 0).to(y)


def ramp(a: float, width: float) -> Linear:
    function = partial(rise, a=a, width=width)
    if not width:
        return Linear(function, [-a], [0.0, 0.0], [1.0], 0.0)
    return Linear(function, [-a, width - a], [0.0, 1 / width, 0.0], [0.0, 0.0], 0.0)


def vectors(*numbers: float) -> list[Tensor]:
    return [torch.tensor([number], dtype=torch.float64) for number in numbers]


@pytest.mark.parametrize("rho", CORRELATIONS)
@pytest.mark.parametrize("place", RAMPS)
def test_averages_of_steps_are_covariances_of_ramps(place, rho):
    a, width_a, b, width_b = place
    b = -b + width_b if rho < 0 else b
    found = float(ramp_step(*vectors(a, width_a, b, width_b, rho)))
    expected = covariance(ramp(a, width_a), ramp(b, width_b), [0.0] * 2, [1.0] * 2, rho)
    # Positions of ramps of width w are known to eps, of which a step of the oracle is eps / w.
    blur = max((1 - rho**2) ** 0.5, width_a, width_b, EPS**0.5)
    assert abs(found - expected) <= 32 * EPS * (1 + 1 / blur) + 1e-13


@pytest.mark.parametrize("rho", [0.6, -0.95, 0.999, 1 - 1e-6, 1.0, -1.0])
@pytest.mark.parametrize("width", [0.05, 0.01, 1e-6])
def test_averages_with_a_relu_are_covariances_of_a_ramp_with_it(width, rho):
    b = 0.29 if rho > 0 else -0.29
    found = ramp_relu(*vectors(0.3, width, b, rho))
    relu = Linear(lambda y: torch.relu(y + b), [-b], [0.0, 1.0], [0.0], 0.0)
    expected = covariance(ramp(0.3, width), relu, [0.0] * 2, [1.0] * 2, rho)
    density = covariance(ramp(0.3, width), Linear(lambda y: y, [0.0], [1.0, 1.0], [0.0], 0.0),
                         [0.0] * 2, [1.0] * 2, 1.0)  # fmt: skip
    above = float(torch.special.ndtr(torch.tensor(b, dtype=torch.float64)))
    assert abs(float(found) + rho * density * above - expected) <= 1e-12


@pytest.mark.parametrize("width", [0.01, NARROW])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
def test_formulas_meet_where_they_change(width, ratio):
    """A last bit of rho on either side of each switch changes nothing but rounding."""
    for limit in {width, width * ratio} - {0.0}:
        rho = (1 - (SHARP * limit) ** 2) ** 0.5
        sides = [rho * (1 - 1e-12), rho * (1 + 1e-12)]
        low, high = (
            float(ramp_step(*vectors(0.3, width, 0.3, width * ratio, rho))) for rho in sides
        )
        assert abs(low - high) <= 1e-12 / limit + 1e-13


@pytest.mark.parametrize("rho", [0.3, -0.9, 0.999, -1 + 1e-4])
@pytest.mark.parametrize("place", RAMPS[:4])
def test_gradients_agree_with_finite_differences(place, rho):
    a, width_a, b, width_b = place
    inputs = [t.requires_grad_() for t in vectors(a, width_a, b if rho > 0 else -b, width_b, rho)]
    inputs[3].requires_grad_(width_b > 0)
    step = 1e-8 if abs(rho) > 0.99 else 1e-6
    assert gradcheck(ramp_step, inputs, eps=step, atol=1e-6, rtol=1e-4)
    del inputs[3]
    assert gradcheck(ramp_relu, inputs, eps=step, atol=1e-6, rtol=1e-4)
