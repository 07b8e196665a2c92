"""Classes: cubature and the delta method against dense grids, their errors, gradients."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import covprop as cp
from covprop.bayes import Bernoulli, Categorical, Cubature, Delta
from tests.bayes.integrals import average_of_pair
from tests.oracles import assert_close

FINE = Categorical(Cubature(4096), Cubature(4096))


def logits(
    scale: float, size: int = 3, batch: tuple[int, ...] = (4,), seed: int = 0
) -> cp.Gaussian:
    """Random logits whose average variance is scale^2."""
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(*batch, size, generator=generator, dtype=torch.float64)
    root = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT
    trace = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return cp.Gaussian(mean, scale**2 * matrix / trace[..., None, None])


@cache
def on_grids(scale: float) -> tuple[Tensor, Tensor]:
    """E[log sum exp(f)] and E[softmax(f)] of `logits(scale)`."""
    totals, probabilities = zip(*(on_a_grid(logits(scale), row) for row in range(4)), strict=True)
    return torch.tensor(totals, dtype=torch.float64), torch.tensor(np.stack(probabilities))


def on_a_grid(output: cp.Gaussian, row: int) -> tuple[float, np.ndarray]:
    """The same of three logits, by their differences from the first."""
    differ = torch.tensor([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    mean = (differ @ output.mean[row]).numpy()
    matrix = (differ @ output.covariance_matrix[row] @ differ.mT).numpy()

    def log_sum(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.logaddexp(np.logaddexp(0, u), v)

    total = float(output.mean[row, 0]) + average_of_pair(log_sum, mean, matrix)
    p = [average_of_pair(lambda u, v: np.exp(-log_sum(u, v)), mean, matrix)]
    p += [average_of_pair(lambda u, v: np.exp(u - log_sum(u, v)), mean, matrix)]
    p += [average_of_pair(lambda u, v: np.exp(v - log_sum(u, v)), mean, matrix)]
    return total, np.array(p)


@pytest.mark.parametrize(
    ("expectation", "errors"),
    [  # worst of four Gaussians at these deviations of the logits
        (Delta(), {0.1: 1e-5, 0.3: 1e-3, 1.0: 0.1}),
        (Cubature(128), {0.1: 2e-6, 0.3: 2e-4, 1.0: 1e-2, 3.0: 0.1}),
        (Cubature(1024), {0.1: 1e-6, 0.3: 5e-5, 1.0: 2e-3, 3.0: 0.02}),
    ],
)
def test_expected_log_likelihood_within_the_documented_error(expectation, errors) -> None:
    for scale, error in errors.items():
        output, target = logits(scale), torch.tensor([0, 1, 2, 0])
        found = Categorical(expectation).expected_log_prob(output, target)
        expected = output.mean.gather(-1, target[:, None])[:, 0] - on_grids(scale)[0]
        assert_close(found, expected, atol=error)


def test_predictive_probabilities_within_the_documented_error() -> None:
    for scale, error in {0.1: 2e-6, 0.3: 1e-4, 1.0: 1e-3, 3.0: 5e-3}.items():
        output = logits(scale)
        found = Categorical().predict(output)
        assert_close(found.mean, on_grids(scale)[1], atol=error)
        for label in range(3):
            log_p = Categorical().log_predictive(output, torch.full((4,), label))
            assert_close(log_p.exp(), found.mean[:, label], rtol=1e-9)


def test_more_points_are_better() -> None:
    output, target = logits(1.0, 10, (6,)), torch.arange(6)
    best = Categorical(Cubature(2**16)).expected_log_prob(output, target)
    worst = [
        float((Categorical(Cubature(count)).expected_log_prob(output, target) - best).abs().max())
        for count in (16, 128, 1024, 8192)
    ]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] < 1e-3


def test_points_have_the_moments_of_the_gaussian() -> None:
    """Means, covariances and odd moments, hence any polynomial of degree 3, singular or not."""
    output = logits(1.0, 5, (3,))
    matrix = output.covariance_matrix.clone()
    matrix[1] = matrix[1, :1, :1] * torch.ones(5, 5)
    matrix[2] = 0
    points = Cubature(64).around(output.mean, matrix)
    away = points - output.mean
    assert_close(away.mean(0), torch.zeros(3, 5, dtype=torch.float64), atol=1e-12)
    assert_close(torch.einsum("s...i,s...j->...ij", away, away) / 64, matrix, atol=1e-12)
    cubes = torch.einsum("s...i,s...j,s...k->...ijk", away, away, away)
    assert_close(cubes, torch.zeros(3, 5, 5, 5, dtype=torch.float64), atol=1e-10)
    assert len(Cubature(64).nodes(40)) == 160


def test_what_all_logits_share_does_not_matter() -> None:
    output, target = logits(0.5), torch.tensor([0, 1, 2, 0])
    shifted = cp.Gaussian(output.mean + 7, output.covariance_matrix + 50)
    for likelihood in (Categorical(), Categorical(Delta())):
        found = likelihood.expected_log_prob(shifted, target)
        assert_close(found, likelihood.expected_log_prob(output, target), rtol=1e-9)
        density = likelihood.log_predictive(shifted, target)
        assert_close(density, likelihood.log_predictive(output, target), rtol=1e-9)


def test_two_classes_are_yes_or_no() -> None:
    output, target = logits(1.5, 2), torch.tensor([0, 1, 1, 0])
    differ = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    one = cp.Gaussian(output.mean @ differ.mT, differ @ output.covariance_matrix @ differ.mT)
    assert_close(
        FINE.expected_log_prob(output, target),
        Bernoulli().expected_log_prob(one, target),
        atol=1e-3,
    )
    found, expected = FINE.predict(output), Bernoulli().predict(one)
    assert_close(found.mean[:, 1:], expected.mean, atol=1e-3)
    assert_close(found.aleatoric[:, 1:], expected.aleatoric, atol=1e-3)
    assert_close(found.epistemic[:, 1:], expected.epistemic, atol=1e-3)
    assert_close(found.entropy, expected.entropy, atol=2e-3)
    assert_close(found.mutual_information, expected.mutual_information, atol=2e-3)


@pytest.mark.parametrize("expectation", [Cubature(), Delta()])
def test_without_uncertainty_all_three_are_the_plain_probability(expectation) -> None:
    mean = logits(1.0, 4).mean
    still = cp.Gaussian.diagonal(mean, variance=torch.zeros_like(mean), batch_dims=1)
    target, likelihood = torch.tensor([3, 1, 2, 0]), Categorical(expectation)
    expected = -torch.nn.functional.cross_entropy(mean, target, reduction="none")
    for found in (
        likelihood.log_prob(mean, target),
        likelihood.expected_log_prob(still, target),
        likelihood.log_predictive(still, target),
    ):
        assert_close(found, expected, rtol=1e-12)
    prediction = likelihood.predict(still)
    assert_close(prediction.epistemic, torch.zeros_like(mean), atol=1e-15)
    assert_close(prediction.mutual_information, torch.zeros(4, dtype=torch.float64), atol=1e-14)


def test_draws_agree_with_cubature() -> None:
    output, target = logits(1.0, 5, (3,)), torch.tensor([4, 1, 0])
    values = output.sample(400_000, torch.Generator().manual_seed(0))
    log_prob = FINE.log_prob(values, target)
    error = log_prob.std(0) / math.sqrt(len(values))
    gap = (log_prob.mean(0) - FINE.expected_log_prob(output, target)).abs()
    assert bool((gap < 5 * error + 5e-4).all())
    sampled, found = FINE.predict_draws(values), FINE.predict(output)
    for name in ("mean", "aleatoric", "epistemic", "entropy", "expected_entropy"):
        assert_close(getattr(sampled, name), getattr(found, name), atol=2e-3)


@pytest.mark.parametrize(
    ("likelihood", "name"),
    [(Categorical(Delta()), "expected_log_prob"), (FINE, "expected_log_prob"),
     (FINE, "log_predictive")],
)  # fmt: skip
def test_gradients_against_finite_differences(likelihood, name: str) -> None:
    """Cubature has the gradient of the average, so that it differs by the error of the points."""
    output, target = logits(0.5, 3, (2,)), torch.tensor([2, 0])

    def value(mean: Tensor, root: Tensor) -> Tensor:
        gaussian = cp.Gaussian(mean, root @ root.mT, validate_args=False)
        return getattr(likelihood, name)(gaussian, target)

    root = torch.linalg.cholesky(output.covariance_matrix)
    inputs = (output.mean.clone().requires_grad_(), root.requires_grad_())
    loose = 2e-3 if likelihood is FINE else 1e-6
    assert torch.autograd.gradcheck(value, inputs, atol=loose, rtol=0)


@pytest.mark.parametrize("expectation", [Cubature(), Delta()])
def test_gradients_where_nothing_varies(expectation) -> None:
    mean = torch.tensor([[0.2, -1.0, 0.5]], dtype=torch.float64)
    matrix = torch.zeros(1, 3, 3, dtype=torch.float64, requires_grad=True)
    output = cp.Gaussian(mean, matrix, validate_args=False)
    Categorical(expectation).expected_log_prob(output, torch.tensor([1])).sum().backward()
    p = mean[0].softmax(-1)
    expected = -(torch.diag(p) - p[:, None] * p) / 2
    assert_close(matrix.grad[0], expected, rtol=1e-10)


def test_blocks_members_and_dtypes(monkeypatch) -> None:
    output, target = logits(1.0, 4, (3, 5)), torch.tensor([3, 1, 2, 0, 0])
    likelihood = Categorical()
    for name in ("expected_log_prob", "log_predictive"):
        method = getattr(likelihood, name)
        found = method(output, target)
        assert_close(found, torch.stack([method(one, target) for one in output]), rtol=1e-12)
        assert_close(method(output, target.expand(3, 5)), found, rtol=0, atol=0)
        assert_close(method(output.to(torch.float32), target), found.float(), rtol=1e-4)
    whole = likelihood.predict(output)
    monkeypatch.setattr("covprop.bayes.discrete_likelihoods.BLOCK", 1024 * 4 * 2)
    blocks = likelihood.predict(output)
    assert whole.mean.shape == (3, 5, 4)
    assert whole.mutual_information.shape == (3, 5)
    assert_close(blocks.mean, whole.mean, rtol=1e-12)
    assert_close(blocks.mutual_information, whole.mutual_information, rtol=1e-9)
    assert likelihood.predict(output.to(torch.float32)).mean.dtype == torch.float32


def test_targets_that_are_no_classes_are_refused() -> None:
    output = logits(1.0)
    with pytest.raises(ValueError, match="class numbers"):
        Categorical().expected_log_prob(output, torch.zeros(4))
    with pytest.raises(ValueError, match="one class"):
        Categorical().expected_log_prob(output, torch.zeros(4, 3, dtype=torch.long))
    for name in ("expected_log_prob", "log_predictive"):
        for wrong in (-1, output.event_shape.numel()):
            target = torch.full(output.batch_shape, wrong)
            with pytest.raises(ValueError, match=f"class numbers from 0 .* {wrong} to {wrong}"):
                getattr(Categorical(), name)(output, target)
    with pytest.raises(ValueError, match="pairs"):
        Cubature(7)
