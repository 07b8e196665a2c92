"""Derivatives of probabilities against finite differences of quadrature that knows none of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import covprop as cp
from covprop import robustness
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import (
    factor_gaussian,
    generator,
    one_factor,
    random_gaussian,
    two_factors,
)
from tests.robustness.test_probabilities import LOADING, MEAN, STDDEV

STEP = 1e-4


def jacobians(x: cp.Gaussian, points: int = 2**13) -> tuple[Tensor, Tensor]:
    """dp_c/dmu (classes, classes) and dp_c/dS (classes, classes, classes) by autograd."""
    mean, matrix = x.mean.clone().requires_grad_(), x.covariance_matrix.clone().requires_grad_()
    found = robustness.class_probabilities(
        cp.Gaussian(mean, matrix, validate_args=False), points=points, generator=generator()
    ).probability
    rows = [torch.autograd.grad(value, (mean, matrix), retain_graph=True) for value in found]
    by_mean, by_matrix = (torch.stack(part) for part in zip(*rows, strict=True))
    return by_mean, by_matrix


def differences(function: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> Tensor:
    """Central differences of p_c with respect to every entry, (classes, entries)."""
    columns = []
    for i in range(len(at)):
        step = np.zeros(len(at))
        step[i] = STEP
        columns.append((function(at + step) - function(at - step)) / (2 * STEP))
    return torch.from_numpy(np.stack(columns, axis=-1))


@pytest.mark.parametrize(("classes", "error"), [(2, 1e-7), (3, 1e-7), (4, 1e-7), (5, 2e-4)])
def test_derivatives_are_those_of_quadrature(classes: int, error: float) -> None:
    """Up to four classes they have closed forms; STEP^2 is the error of the differences."""
    mean, stddev, loading = MEAN[:classes], STDDEV[:classes], LOADING[:classes]
    by_mean, by_matrix = jacobians(factor_gaussian(mean, stddev, loading))
    assert_close(by_mean, differences(lambda m: one_factor(m, stddev, loading), mean), atol=error)
    by_variance = by_matrix.diagonal(dim1=-2, dim2=-1)
    expected = differences(lambda v: one_factor(mean, np.sqrt(v), loading), stddev**2)
    assert_close(by_variance, expected, atol=error)
    by_loading = 2 * by_matrix @ torch.from_numpy(loading)
    expected = differences(lambda column: one_factor(mean, stddev, column), loading)
    assert_close(by_loading, expected, atol=3 * error)


def test_one_logit_has_the_derivatives_of_the_normal_distribution() -> None:
    mean = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)

    def second(mean: Tensor, variance: Tensor) -> Tensor:
        x = cp.Gaussian(mean, variance, validate_args=False)
        return robustness.class_probabilities(x).probability

    assert torch.autograd.gradcheck(second, (mean, variance))


def test_the_gradient_of_the_estimate_is_near_its_finite_difference() -> None:
    """The points are fixed, so that the estimate is a smooth function with nearly this slope."""
    x = random_gaussian(size=7, seed=6)
    direction = torch.randn(7, dtype=torch.float64, generator=generator(9))
    mean = x.mean.clone().requires_grad_()

    def wrong(mean: Tensor) -> Tensor:
        y = cp.Gaussian(mean, x.covariance_matrix, validate_args=False)
        found = robustness.misclassification_probability(y, 2, points=2**14, generator=generator())
        return found.probability

    (gradient,) = torch.autograd.grad(wrong(mean), mean)
    step = 1e-3 * direction
    expected = (wrong(x.mean + step) - wrong(x.mean - step)) / 2e-3
    assert float(gradient @ direction) == pytest.approx(float(expected), rel=2e-3)


def test_a_singular_covariance_has_the_derivatives_of_those_beside_it() -> None:
    """Also in directions that leave its range, where a Cholesky factor has none."""
    loading = np.stack([LOADING, LOADING[::-1] ** 2], axis=1)
    by_mean, by_matrix = jacobians(factor_gaussian(MEAN, np.zeros(6), loading))
    expected = differences(lambda mean: two_factors(mean, loading), MEAN)
    assert_close(by_mean, expected, atol=1e-4)  # kinks in the oracle's integrand
    nodes, weights = np.polynomial.hermite_e.hermegauss(9)
    weights = weights / weights.sum()
    at = two_factors(MEAN, loading)
    for own in (0, 3):

        def noisy(variance: float, own: int = own) -> np.ndarray:
            """With independent noise on one logit."""
            step = np.zeros(6)
            step[own] = np.sqrt(variance)
            rows = [two_factors(MEAN + node * step, loading) for node in nodes]
            return weights @ np.stack(rows)

        slope = (4 * noisy(1e-4) - noisy(2e-4) - 3 * at) / 2e-4  # at zero, to second order
        assert_close(by_matrix[:, own, own], torch.from_numpy(slope), atol=5e-4)


def test_a_line_of_logits_has_exact_derivatives_off_the_line() -> None:
    """y = mu + slope z: classes 2, 0, 1, 3 meet at z = -0.2, 0.3, 0.4, each time two of them.

    There p_left grows as Phi(u / rate) of the margin u of left over right, whose rate is the
    difference of the slopes.
    """
    mean, slope = np.array([0.0, -0.3, -0.2, -0.5]), np.array([0.0, 1.0, -1.0, 1.5])
    by_mean, by_matrix = jacobians(factor_gaussian(mean, np.zeros(4), slope))
    first = torch.zeros(4, 4, dtype=torch.float64)
    second = torch.zeros(4, 4, 4, dtype=torch.float64)
    for z, left, right, rate in [(-0.2, 2, 0, 1.0), (0.3, 0, 1, 1.0), (0.4, 1, 3, 0.5)]:
        height = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        pair = torch.zeros(4, dtype=torch.float64)
        pair[left], pair[right] = 1, -1
        for own, sign in ((left, 1), (right, -1)):
            first[own] += sign * height / rate * pair
            second[own] += sign * -z * height / rate**2 * torch.outer(pair, pair)
    assert_close(by_mean, first, atol=1e-12)
    assert_close(by_matrix, second / 2, atol=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_without_noise_there_are_no_derivatives_and_no_nan(classes: int) -> None:
    mean = torch.arange(classes).double().requires_grad_()
    for matrix in (torch.zeros(classes, classes), torch.ones(classes, classes)):
        covariance = matrix.double().requires_grad_()
        x = cp.Gaussian(mean, covariance, validate_args=False)
        found = robustness.class_probabilities(x).probability
        for value in found:
            for gradient in torch.autograd.grad(value, (mean, covariance), retain_graph=True):
                assert_close(gradient, torch.zeros_like(gradient), atol=0)


def test_far_in_the_tail_the_relative_derivative_is_right() -> None:
    """p_1 = Phi(-20 / sqrt(2)) nearly, whose logarithm has the slope of a normal tail."""
    mean = torch.tensor([20.0, 0.0, -1.0, -2.0]).double().requires_grad_()
    x = cp.Gaussian(mean, torch.eye(4).double())
    wrong = robustness.misclassification_probability(x, 0, generator=generator()).probability
    (gradient,) = torch.autograd.grad(wrong.log(), mean)
    z = 20 / np.sqrt(2)
    hazard = np.sqrt(2 / np.pi) / float(torch.special.erfcx(torch.tensor(z / np.sqrt(2)).double()))
    assert float(wrong.detach()) < 1e-40
    assert float(gradient[1]) == pytest.approx(hazard / np.sqrt(2), rel=1e-3)


def test_second_derivatives_are_refused() -> None:
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    x = cp.Gaussian(mean, torch.eye(3).double())
    found = robustness.class_probabilities(x).probability[0]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(found, mean, create_graph=True)


def test_gradients_reach_the_input_of_a_network() -> None:
    weight = torch.randn(4, 3, dtype=torch.float64, generator=generator(3))
    variance = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)

    def wrong(variance: Tensor) -> Tensor:
        x = cp.Gaussian.diagonal(torch.tensor([0.1, -0.4, 0.2]).double(), variance=variance)
        y = propagate(torch.nn.functional.linear, x, weight)
        return robustness.misclassification_probability(y, 0, generator=generator()).probability

    (gradient,) = torch.autograd.grad(wrong(variance), variance)
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-4
        expected = (wrong(variance.detach() + step) - wrong(variance.detach() - step)) / 2e-4
        assert float(gradient[i]) == pytest.approx(float(expected), abs=2e-4)
