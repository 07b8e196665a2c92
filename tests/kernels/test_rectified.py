"""Mean and variance of a ReLU in few operations, against numbers of many digits."""

import mpmath as mp
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from covprop.kernels.rectified import rectified_coefficients, rectified_moments

MEANS = [-30.0, -8.0, -2.0, -0.1, 0.0, 0.1, 2.0, 8.0, 30.0, 1e4]
DEVIATIONS = [1e-6, 1e-2, 1.0, 20.0]


def expected(mean: float, stddev: float) -> tuple[mp.mpf, mp.mpf]:
    """From the definition, with 60 digits against the cancellation."""
    with mp.workdps(60):
        mu, sigma = mp.mpf(mean), mp.mpf(stddev)
        a = mu / sigma
        below = mp.erfc(-a / mp.sqrt(2)) / 2
        height = mp.exp(-(a**2) / 2) / mp.sqrt(2 * mp.pi)
        first = mu * below + sigma * height
        second = (mu**2 + sigma**2) * below + mu * sigma * height
        return first, second - first**2


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("stddev", DEVIATIONS)
def test_moments_are_accurate_relative_to_themselves(mean: float, stddev: float) -> None:
    got = rectified_moments(
        torch.tensor([mean], dtype=torch.float64), torch.tensor([stddev], dtype=torch.float64) ** 2
    )
    for value, want in zip(got, expected(mean, stddev), strict=True):
        if want > 1e-290:  # far below zero all of it underflows
            assert float(value) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("stddev", DEVIATIONS)
def test_coefficients_are_those_of_the_step_and_of_its_derivative(
    mean: float, stddev: float
) -> None:
    place, spread = (torch.tensor([each], dtype=torch.float64) for each in (mean, stddev**2))
    *moments, rows = rectified_coefficients(place, spread)
    assert moments == list(rectified_moments(place, spread))
    with mp.workdps(30):
        a = mp.mpf(mean) / mp.mpf(stddev)
        wanted = mp.erfc(-a / mp.sqrt(2)) / 2, mp.exp(-(a**2) / 2) / mp.sqrt(4 * mp.pi)
    for value, want in zip(rows[:, 0], wanted, strict=True):
        if want > 1e-290:
            assert float(value) == pytest.approx(float(want), rel=1e-12)


def inputs() -> list[Tensor]:
    mean = torch.tensor([-3.0, -0.5, 0.0, 0.7, 4.0, 300.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 0.2], dtype=torch.float64)
    return [mean.requires_grad_(), variance.requires_grad_()]


def test_derivatives_are_right_the_first_and_the_second_time() -> None:
    assert gradcheck(rectified_moments, inputs())
    assert gradgradcheck(rectified_moments, inputs())


def test_what_does_not_vary_has_the_limits() -> None:
    mean = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    variance = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    value, spread = rectified_moments(mean, variance)
    assert value.tolist() == [0.0, 0.0, 3.0]
    assert spread.tolist() == [0.0, 0.0, 0.0]
    of_mean = torch.autograd.grad(value.sum(), (mean, variance), retain_graph=True)
    of_spread = torch.autograd.grad(spread.sum(), (mean, variance))
    assert of_mean[0].tolist() == [0.0, 1.0, 1.0]
    assert of_mean[1].tolist() == [0.0, 0.0, 0.0]
    assert of_spread[0].tolist() == [0.0, 0.0, 0.0]
    assert of_spread[1].tolist() == [0.0, 1.0, 1.0]
