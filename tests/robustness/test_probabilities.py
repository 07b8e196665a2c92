"""Class probabilities against quadrature, scipy's Fortran, closed forms and samples."""

import math

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import multivariate_normal

import covprop as cp
from covprop import robustness
from tests.layers import propagate
from tests.oracles import assert_close
from tests.robustness.integrals import (
    factor_gaussian,
    generator,
    network,
    one_factor,
    random_gaussian,
    two_factors,
    within,
)

MEAN = np.array([0.5, 0.1, -0.4, 0.9, -1.3, 0.2])
STDDEV = np.array([0.7, 1.2, 0.5, 0.3, 1.5, 0.9])
LOADING = np.array([0.6, -0.8, 1.1, 0.2, -0.5, 0.9])


def probabilities(x: cp.Gaussian, **options: object) -> robustness.Probabilities:
    return robustness.class_probabilities(x, **({"generator": generator()} | options))


# Two classes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_classes_are_the_normal_distribution_of_the_difference(dtype: torch.dtype) -> None:
    mean = torch.tensor([[1.0, 0.5], [-2.0, 3.0], [0.0, 0.0]], dtype=dtype)
    matrix = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=dtype).expand(3, 2, 2)
    found = probabilities(cp.Gaussian(mean, matrix))
    z = (mean[:, 0] - mean[:, 1]).double().numpy() / math.sqrt(2)
    both = torch.from_numpy(np.stack([ndtr(z), ndtr(-z)], axis=-1)).to(dtype)
    # d log Phi(z) = (phi / Phi)(z) dz, at most (1 + |z|) |z| of what relative rounding does to z.
    worst = float((1 + abs(z)).max() * abs(z).max())
    assert_close(found.probability, both, rtol=8 * (1 + worst) * torch.finfo(dtype).eps)
    assert_close(found.stderr, torch.zeros(3, 2, dtype=dtype))


def test_a_small_probability_is_accurate_relative_to_itself() -> None:
    x = cp.Gaussian.isotropic(torch.tensor([20.0, 0.0]).double(), stddev=1.0)
    expected = math.erfc(20 / 2) / 2
    found = float(probabilities(x).probability[1])
    assert found == pytest.approx(expected, rel=1e-12)
    wrong = robustness.misclassification_probability(x, 0).probability
    assert float(wrong) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("first", "expected"), [(1.0, (1.0, 0.0)), (-1.0, (0.0, 1.0)), (0.0, (0.5, 0.5))]
)
def test_without_noise_the_larger_wins_and_ties_share(first: float, expected: tuple) -> None:
    mean = torch.tensor([first, 0.0]).double()
    for matrix in (torch.zeros(2, 2), torch.ones(2, 2)):  # of which the difference does not vary
        found = probabilities(cp.Gaussian(mean, matrix.double()))
        assert found.probability.tolist() == list(expected)
    assert probabilities(cp.Gaussian.constant(mean)).probability.tolist() == list(expected)


def test_one_logit_is_the_log_odds_of_class_one() -> None:
    mean, stddev = torch.tensor([[0.3], [-1.0]]).double(), 0.8
    x = cp.Gaussian.isotropic(mean, stddev=stddev, batch_dims=1)
    found = probabilities(x).probability
    expected = ndtr(mean[:, 0].numpy() / stddev)
    assert_close(found[:, 1], torch.from_numpy(expected), rtol=1e-14)
    assert_close(found[:, 0], 1 - torch.from_numpy(expected), rtol=1e-14)
    assert_close(
        robustness.misclassification_probability(x, 1).probability, found[:, 0], rtol=1e-14
    )
    certain = probabilities(cp.Gaussian.constant(torch.tensor([2.0])))
    assert certain.probability.tolist() == [0.0, 1.0]


# Three and more.


def test_three_classes_are_exact() -> None:
    found = probabilities(factor_gaussian(MEAN[:3], STDDEV[:3], LOADING[:3]))
    expected = torch.from_numpy(one_factor(MEAN[:3], STDDEV[:3], LOADING[:3]))
    assert_close(found.probability, expected, atol=1e-12)
    assert_close(found.stderr, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("classes", [4, 5, 6])
def test_more_classes_are_right_within_their_standard_error(classes: int) -> None:
    mean, stddev, loading = MEAN[:classes], STDDEV[:classes], LOADING[:classes]
    expected = torch.from_numpy(one_factor(mean, stddev, loading))
    found = probabilities(factor_gaussian(mean, stddev, loading))
    assert float(found.stderr.max()) < 3e-4
    assert within(found.probability, expected, found.stderr)
    many = probabilities(factor_gaussian(mean, stddev, loading), points=2**17)
    assert float(many.stderr.max()) < 2e-5
    assert within(many.probability, expected, many.stderr)


def test_the_standard_error_is_the_spread_of_repetitions() -> None:
    x = factor_gaussian(MEAN, STDDEV, LOADING)
    runs = [probabilities(x, generator=generator(seed), points=512) for seed in range(40)]
    spread = torch.stack([run.probability for run in runs]).std(0)
    told = torch.stack([run.stderr.square() for run in runs]).mean(0).sqrt()
    assert bool(((told / spread > 0.6) & (told / spread < 1.6)).all())  # of 40 runs: +-11 % each


def test_ten_classes_agree_with_another_implementation() -> None:
    x = random_gaussian(size=10, seed=3)
    found = probabilities(x, points=2**15)
    for own in (0, 4, 9):
        others = [c for c in range(10) if c != own]
        change = torch.zeros(9, 10, dtype=torch.float64)
        change[torch.arange(9), others] = -1
        change[:, own] = 1
        mean, matrix = change @ x.mean, change @ x.covariance_matrix @ change.mT
        expected = multivariate_normal(-mean.numpy(), matrix.numpy()).cdf(
            np.zeros(9), rng=np.random.default_rng(0)
        )  # P(-d < 0)
        assert abs(float(found.probability[own]) - expected) < 5 * float(found.stderr[own]) + 5e-5


def test_rows_sum_to_one() -> None:
    found = probabilities(random_gaussian(7, size=8))
    assert_close(found.probability.sum(-1), torch.ones(7, dtype=torch.float64), atol=1e-12)


def test_probabilities_agree_with_samples_of_the_logits() -> None:
    x = random_gaussian(3, size=7, seed=5)
    found = probabilities(x)
    samples = 200_000
    best = x.sample(samples, generator(1)).argmax(-1)
    shares = torch.stack([(best == c).double().mean(0) for c in range(7)], dim=-1)
    error = (shares * (1 - shares) / samples).sqrt() + found.stderr
    assert within(found.probability, shares, error)


def test_probabilities_agree_with_samples_through_a_network() -> None:
    """A linear network keeps the Gaussian, so that nothing but sampling is between the two."""
    model = network(9, 5)
    x = random_gaussian(2, size=9, seed=2)
    found = probabilities(propagate(model, x))
    sampled = robustness.sampled_probabilities(model, x, 100_000, generator(1))
    assert within(found.probability, sampled.probability, sampled.stderr + found.stderr)
    deep = network(9, 60, 60, 5)
    narrow = cp.Gaussian(x.mean, 0.01 * x.covariance_matrix)
    found = probabilities(propagate(deep, narrow))
    sampled = robustness.sampled_probabilities(deep, narrow, 50_000, generator(1))
    assert_close(found.probability, sampled.probability, atol=0.02)  # the Gaussian assumption


# Singular covariances.


def test_a_covariance_of_rank_two_is_right() -> None:
    loading = np.stack([LOADING, LOADING[::-1] ** 2], axis=1)
    x = factor_gaussian(MEAN, np.zeros(6), loading)
    expected = torch.from_numpy(two_factors(MEAN, loading))
    found = probabilities(x)
    assert float(found.stderr.max()) < 1e-4
    assert within(found.probability, expected, found.stderr + 1e-6)  # the oracle's kinks


def test_a_covariance_of_rank_one_is_exact() -> None:
    """A line through the classes: each has an interval, and nothing is left to sample."""
    mean, slope = np.array([0.0, -0.3, -0.2, -2.0, -0.1]), np.array([0.0, 1.0, -1.0, 0.5, 0.05])
    found = probabilities(factor_gaussian(mean, np.zeros(5), slope))
    expected = np.zeros(5)
    expected[[2, 0, 1]] = np.diff(ndtr(np.array([-np.inf, -0.2, 0.3, np.inf])))
    assert_close(found.probability, torch.from_numpy(expected), atol=1e-14)
    assert float(found.stderr.max()) < 1e-16


def test_noise_that_all_logits_share_changes_nothing() -> None:
    x = random_gaussian(size=6)
    shared = cp.Gaussian(x.mean, x.covariance_matrix + 100.0)
    ours, theirs = probabilities(x), probabilities(shared)
    assert_close(ours.probability, theirs.probability, atol=1e-10)
    alone = cp.Gaussian(x.mean, torch.full((6, 6), 3.0).double())
    certain = torch.zeros(6, dtype=torch.float64)
    certain[x.mean.argmax()] = 1
    assert_close(probabilities(alone).probability, certain, atol=0)


def test_equal_logits_share_alike() -> None:
    x = random_gaussian(size=3, seed=4)
    index = torch.tensor([0, 1, 1, 2, 1])
    repeated = cp.Gaussian(x.mean[index], x.covariance_matrix[index[:, None], index])
    found, once = probabilities(repeated), probabilities(x).probability
    expected = once[index] / torch.tensor([1, 3, 3, 1, 3])
    assert float(found.stderr.max()) < 1e-4
    assert within(found.probability, expected, found.stderr)
    assert probabilities(cp.Gaussian.constant(torch.zeros(4))).probability.tolist() == [0.25] * 4


@pytest.mark.parametrize("classes", [3, 4, 6])
def test_a_logit_that_does_not_vary_is_a_threshold(classes: int) -> None:
    mean = np.array([0.4, *MEAN[1:classes]])
    stddev = STDDEV[:classes].copy()
    stddev[0] = 0
    found = probabilities(factor_gaussian(mean, stddev, np.zeros(classes)))
    expected = float(np.prod(ndtr((mean[0] - mean[1:]) / stddev[1:])))
    assert float(found.probability[0]) == pytest.approx(expected, abs=1e-12)


def test_nearly_singular_covariances_come_near_the_singular_one() -> None:
    loading = np.stack([LOADING, LOADING[::-1] ** 2], axis=1)
    limit = probabilities(factor_gaussian(MEAN, np.zeros(6), loading))
    for width in (1e-3, 1e-5, 1e-7, 1e-9):
        near = probabilities(factor_gaussian(MEAN, np.full(6, width), loading))
        error = 5 * (near.stderr + limit.stderr) + 10 * width
        assert bool(((near.probability - limit.probability).abs() < error).all())


def test_awkward_covariances_agree_with_samples() -> None:
    """Random ranks, scales over eight decades, equal and constant logits, noise that all share."""
    draw = generator(11)
    samples = 20_000
    for trial in range(60):
        classes = int(torch.randint(2, 8, (), generator=draw))
        rank = int(torch.randint(1, classes + 1, (), generator=draw))
        factor = torch.randn(classes, rank, dtype=torch.float64, generator=draw)
        factor = factor * 10 ** (8 * torch.rand(rank, dtype=torch.float64, generator=draw) - 6)
        mean = torch.randn(classes, dtype=torch.float64, generator=draw)
        if trial % 5 == 0:
            factor[1], mean[1] = factor[0], mean[0]
        if trial % 7 == 0:
            factor[-1] = 0
        if trial % 3 == 0:
            factor = factor + 10 * torch.randn(1, rank, dtype=torch.float64, generator=draw)
        x = cp.Gaussian(mean, (factor @ factor.mT), validate_args=False)
        matrix = x.covariance_matrix.requires_grad_()
        found = probabilities(cp.Gaussian(mean, matrix, validate_args=False))
        (gradient,) = torch.autograd.grad(found.probability[0], matrix)
        assert bool(torch.isfinite(gradient).all())
        numbers = torch.randn(samples, rank, dtype=torch.float64, generator=draw)
        logits = mean + numbers @ factor.mT
        best = (logits >= logits.amax(-1, keepdim=True) - 1e-9).double()  # rounding of equal ones
        shares = (best / best.sum(-1, keepdim=True)).mean(0)
        guess = (samples * shares + 1) / (samples + 2)
        error = (guess * (1 - guess) / samples).sqrt() + found.stderr
        assert within(found.probability.detach(), shares, error), f"trial {trial}"


# Batches, dtypes, generators, arguments.


def test_a_batch_is_its_elements() -> None:
    x = random_gaussian(2, 3, size=5)
    found = probabilities(x)
    assert found.probability.shape == (2, 3, 5)
    one = probabilities(x[1, 2])
    assert_close(found.probability[1, 2], one.probability, atol=1e-14)
    assert_close(found.stderr[1, 2], one.stderr, atol=1e-14)
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    wrong = robustness.misclassification_probability(x, labels, generator=generator())
    kept = found.probability.gather(-1, labels[..., None])[..., 0]
    assert wrong.probability.shape == (2, 3)
    assert bool(((wrong.probability + kept - 1).abs() < 5 * found.stderr.sum(-1)).all())
    empty = cp.Gaussian(torch.zeros(0, 5), torch.zeros(0, 5, 5))
    assert probabilities(empty).probability.shape == (0, 5)


def test_the_order_of_the_classes_does_not_matter() -> None:
    x = random_gaussian(size=5)
    order = torch.tensor([3, 0, 4, 1, 2])
    turned = cp.Gaussian(x.mean[order], x.covariance_matrix[order[:, None], order])
    found, other = probabilities(x), probabilities(turned)
    assert_close(other.probability, found.probability[order], atol=1e-12)


def test_float32_is_near_float64() -> None:
    x = random_gaussian(4, size=6)
    found = probabilities(x.to(torch.float32))
    assert found.probability.dtype == torch.float32
    assert_close(found.probability.double(), probabilities(x).probability, atol=1e-5)


def test_a_seed_fixes_everything() -> None:
    x = random_gaussian(size=6)
    assert torch.equal(probabilities(x).probability, probabilities(x).probability)
    other = probabilities(x, generator=generator(1)).probability
    assert not torch.equal(probabilities(x).probability, other)
    state = torch.get_rng_state()
    probabilities(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_margins_are_the_label_less_the_others() -> None:
    x = random_gaussian(2, size=4)
    labels = torch.tensor([2, 0])
    found = robustness.margins(x, labels)
    draws = x.sample(5, generator(3))
    for i, (label, others) in enumerate([(2, [0, 1, 3]), (0, [1, 2, 3])]):
        change = torch.zeros(3, 4, dtype=torch.float64)
        change[:, label] = 1
        change[torch.arange(3), others] -= 1
        assert_close(found.mean[i], change @ x.mean[i], atol=1e-14)
        matrix = change @ x.covariance_matrix[i] @ change.mT
        assert_close(found.covariance_matrix[i], matrix, atol=1e-13)
        assert_close(draws[:, i] @ change.mT, draws[:, i, label, None] - draws[:, i][:, others])
    assert robustness.margins(x.to(torch.float32), 1).dtype == torch.float32


def test_margins_and_entropy_agree_with_samples_through_a_network() -> None:
    model, samples = network(5, 4), 100_000  # linear: its output is Gaussian
    x = random_gaussian(size=5, seed=8)
    y = propagate(model, x)
    logits = model(x.sample(samples, generator(2)))
    others = logits[:, 1, None] - logits[:, [0, 2, 3]]
    found = robustness.margins(y, 1)
    assert within(found.mean, others.mean(0), others.std(0) / math.sqrt(samples))
    error = others.std(0) / math.sqrt(2 * samples)
    assert within(found.stddev, others.std(0), error)
    shares = torch.bincount(logits.argmax(-1), minlength=4).double() / samples
    decided = robustness.entropy(probabilities(y))
    slope = (1 + shares.log()).abs() * (shares * (1 - shares) / samples).sqrt()
    assert within(decided, -(shares * shares.log()).sum(), slope.sum())


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (4, "none of the 4 classes"),
        (-1, "none of the 4 classes"),
        (1.0, "class numbers"),
        (torch.tensor([True, False]), "class numbers"),
        (torch.tensor([0, 1, 2]), "one for each element of the batch"),
    ],
)
def test_labels_that_are_none_are_refused(label: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        robustness.misclassification_probability(random_gaussian(2, size=4), label)


def test_other_arguments_that_cannot_be_are_refused() -> None:
    x = random_gaussian(size=4)
    with pytest.raises(ValueError, match="points is a whole number"):
        probabilities(x, points=0)
    with pytest.raises(TypeError, match=r"torch\.Generator"):
        probabilities(x, generator=3)
    with pytest.raises(ValueError, match=r"event of shape \(classes,\)"):
        probabilities(cp.Gaussian.isotropic(torch.zeros(2, 3), stddev=1.0))
    with pytest.raises(TypeError, match=r"cp\.Gaussian"):
        probabilities(torch.zeros(3))  # type: ignore[arg-type]
    assert probabilities(
        cp.Gaussian.isotropic(torch.zeros(1, 3), stddev=1.0)
    ).probability.shape == (3,)


@pytest.mark.parametrize("label", [None, "cat", [1, [2]]])
def test_a_label_that_is_no_number_is_refused(label: object) -> None:
    logits = cp.Gaussian(torch.zeros(3), torch.eye(3))
    with pytest.raises(TypeError, match="a label is a class number, or a tensor of one for each"):
        robustness.misclassification_probability(logits, label)
    with pytest.raises(TypeError, match="a label is a class number"):
        robustness.margins(logits, label)
