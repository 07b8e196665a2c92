"""Expected softmax and entropies against quadrature, samples and the library's own rule."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import covprop as cp
from covprop import robustness
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import (
    factor_gaussian,
    generator,
    network,
    normal_rule,
    random_gaussian,
    within,
)


def expected_softmax(x: cp.Gaussian, **options: object) -> robustness.Probabilities:
    return robustness.expected_softmax(x, **({"generator": generator()} | options))


def of_line(mean: np.ndarray, loading: np.ndarray) -> np.ndarray:
    """E[softmax(mean + loading z)] by quadrature."""
    z, weight = normal_rule()
    values = np.exp(mean + z[:, None] * loading)
    return weight @ (values / values.sum(1, keepdims=True))


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_line_of_logits_is_what_quadrature_says(classes: int) -> None:
    mean, loading = np.linspace(-1, 1, classes), np.array([0.5, -1.0, 2.0, 0.3, -0.7])[:classes]
    found = expected_softmax(factor_gaussian(mean, np.zeros(classes), loading))
    expected = torch.from_numpy(of_line(mean, loading))
    if classes == 2:
        assert_close(found.stderr, torch.zeros(2, dtype=torch.float64), atol=0)
        assert_close(found.probability, expected, atol=1e-8)
    assert float(found.stderr.max()) < 1e-4
    assert within(found.probability, expected, found.stderr + 1e-8)


def test_one_logit_is_the_expected_sigmoid() -> None:
    x = cp.Gaussian.isotropic(torch.tensor([[0.4], [-2.0]]).double(), stddev=1.3, batch_dims=1)
    found = expected_softmax(x)
    assert_close(found.probability[:, 1:], propagate(torch.sigmoid, x).mean, atol=1e-12)
    assert_close(found.probability.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-8)
    z, weight = normal_rule()
    assert float(found.probability[0, 1]) == pytest.approx(
        float(weight @ (1 / (1 + np.exp(-0.4 - 1.3 * z)))), abs=1e-8
    )


def test_samples_of_logits_and_through_a_network_agree() -> None:
    x = random_gaussian(2, size=6, seed=1)
    model = network(6, 4)  # linear: its output is Gaussian
    for logits, draws in (
        (x, x.sample(200_000, generator(2))),
        (propagate(model, x), model(x.sample(200_000, generator(2)))),
    ):
        found = expected_softmax(logits)
        values = draws.softmax(-1)
        error = values.std(0) / math.sqrt(len(values)) + found.stderr
        assert within(found.probability, values.mean(0), error)


def test_rows_sum_to_one_and_shared_noise_changes_nothing() -> None:
    x = random_gaussian(3, size=5)
    found = expected_softmax(x).probability
    assert_close(found.sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-14)
    shared = cp.Gaussian(x.mean, x.covariance_matrix + 50.0)
    assert_close(expected_softmax(shared).probability, found, atol=1e-10)


def test_without_noise_it_is_softmax() -> None:
    mean = torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
    for x in (cp.Gaussian.constant(mean), cp.Gaussian(mean, torch.full((4, 4), 2.0).double())):
        found = expected_softmax(x)
        assert_close(found.probability, mean.softmax(-1), atol=1e-13)
    two = cp.Gaussian.constant(mean[:2])
    assert_close(expected_softmax(two).probability, mean[:2].softmax(-1), atol=1e-13)


def test_the_rule_of_softmax_is_near_it_for_narrow_logits_and_not_for_wide_ones() -> None:
    x = random_gaussian(size=5, seed=2)
    errors = []
    for scale in (0.01, 0.1, 1.0):
        narrow = cp.Gaussian(x.mean, scale * x.covariance_matrix)
        rule = propagate(functional.softmax, narrow, dim=-1).mean
        found = expected_softmax(narrow, points=2**14)
        errors.append(float((rule - found.probability).abs().max()))
    assert errors[0] < 1e-4
    assert errors[1] < 1e-2
    assert errors[2] > 10 * errors[1]


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_derivatives_are_those_of_the_average(classes: int) -> None:
    """Price's theorem holds for the integral; the points' average follows it to their error."""
    x = random_gaussian(2, size=classes, seed=7)
    mean, matrix = x.mean.clone().requires_grad_(), x.covariance_matrix.clone().requires_grad_()
    weights = torch.randn(2, max(2, classes), dtype=torch.float64, generator=generator(3))

    def loss(mean: Tensor, matrix: Tensor) -> Tensor:
        y = cp.Gaussian(mean, matrix, validate_args=False)
        return (expected_softmax(y, points=2**14).probability * weights).sum()

    by_mean, by_matrix = torch.autograd.grad(loss(mean, matrix), (mean, matrix))
    step = 1e-3 * torch.randn(x.mean.shape, dtype=torch.float64, generator=generator(4))
    expected = (loss(x.mean + step, matrix) - loss(x.mean - step, matrix)).detach() / 2
    assert float((by_mean * step).sum()) == pytest.approx(float(expected), rel=1e-3)
    noise = 1e-3 * random_gaussian(2, size=classes, seed=9).covariance_matrix
    expected = loss(mean, x.covariance_matrix + noise) - loss(mean, x.covariance_matrix - noise)
    size = float((by_matrix * noise).abs().sum())
    slope = float((by_matrix * noise).sum())
    assert slope == pytest.approx(float(expected.detach()) / 2, abs=5e-3 * size)


def test_a_singular_covariance_has_finite_derivatives() -> None:
    mean = torch.tensor([0.3, -1.0, 2.0]).double().requires_grad_()
    matrix = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    found = expected_softmax(cp.Gaussian(mean, matrix, validate_args=False)).probability
    by_mean, by_matrix = torch.autograd.grad(found[0], (mean, matrix))
    jacobian = torch.autograd.functional.jacobian(lambda m: m.softmax(-1), mean.detach())
    hessian = torch.autograd.functional.hessian(lambda m: m.softmax(-1)[0], mean.detach())
    assert_close(by_mean, jacobian[0], atol=1e-12)
    assert_close(by_matrix, hessian / 2, atol=1e-12)


def test_entropy_is_that_of_the_probabilities() -> None:
    x = random_gaussian(3, size=4)
    for found in (expected_softmax(x), robustness.class_probabilities(x)):
        p = found.probability
        assert_close(robustness.entropy(found), -(p * p.log()).sum(-1), rtol=1e-12)
        assert_close(robustness.entropy(p), robustness.entropy(found), atol=0)


def test_entropy_of_a_certain_decision_is_zero_with_a_finite_gradient() -> None:
    mean = torch.tensor([3.0, 0.0, -1.0]).double().requires_grad_()
    x = cp.Gaussian(mean, torch.zeros(3, 3).double())
    found = robustness.entropy(robustness.class_probabilities(x))
    assert found.item() == 0
    (gradient,) = torch.autograd.grad(found, mean)
    assert_close(gradient, torch.zeros(3, dtype=torch.float64), atol=0)
