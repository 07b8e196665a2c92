"""Yes-or-no and counts against dense grids, Monte Carlo and limits."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit, gammaln, log_expit, logsumexp
from torch import Tensor

import covprop as cp
from covprop.bayes import Bernoulli, Poisson
from tests.bayes.integrals import average
from tests.oracles import assert_close

LOGITS = [(0.3, 0.5), (-2.0, 4.0), (6.0, 0.01), (-8.0, 1.0), (3.0, 100.0), (0.7, 0.0)]
RATES = [(0.3, 0.5, 2), (-2.0, 1.0, 0), (5.0, 0.2, 148), (2.0, 2.0, 0), (5.8, 0.04, 900),
         (1.0, 0.0, 3), (3.0, 4.0, 1000), (-3.0, 0.5, 4)]  # fmt: skip


def single(mean: float, variance: float) -> cp.Gaussian:
    value = torch.tensor([[mean]], dtype=torch.float64)
    return cp.Gaussian.diagonal(value, variance=torch.full_like(value, variance), batch_dims=1)


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(("mean", "variance"), LOGITS)
@pytest.mark.parametrize("t", [0, 1])
def test_bernoulli_is_the_integral(mean: float, variance: float, t: int) -> None:
    output, sign = single(mean, variance), 2 * t - 1
    expected = average(lambda f: log_expit(sign * f), mean, variance)
    found = Bernoulli().expected_log_prob(output, torch.tensor([t]))
    assert_close(found, number(expected), rtol=1e-8)
    predictive = math.log(average(lambda f: expit(sign * f), mean, variance))
    found = Bernoulli().log_predictive(output, torch.tensor([t]))
    assert_close(found, number(predictive), rtol=1e-10)


@pytest.mark.parametrize(("mean", "variance"), LOGITS)
def test_bernoulli_predicts_the_integrals(mean: float, variance: float) -> None:
    found = Bernoulli().predict(single(mean, variance))
    p = average(expit, mean, variance)
    assert_close(found.mean[0], number(p), rtol=1e-8)
    within = average(lambda f: expit(f) * expit(-f), mean, variance)
    assert_close(found.aleatoric[0], number(within), rtol=1e-7)
    between = average(lambda f: (expit(f) - p) ** 2, mean, variance)
    assert_close(found.epistemic[0], number(between), rtol=1e-7, atol=1e-15)
    assert_close(found.variance[0], number(p * (1 - p)), rtol=1e-7)
    assert_close(found.entropy, number(stats.bernoulli(p).entropy()), rtol=1e-7)
    inside = average(lambda f: -expit(f) * log_expit(f) - expit(-f) * log_expit(-f), mean, variance)
    assert_close(found.expected_entropy, number(inside), rtol=1e-7)


@pytest.mark.parametrize(("mean", "variance", "count"), RATES)
def test_poisson_is_the_integral(mean: float, variance: float, count: int) -> None:
    output, t = single(mean, variance), torch.tensor([count])

    def log_density(f: np.ndarray) -> np.ndarray:
        return count * f - np.exp(f) - gammaln(count + 1)

    expected = average(log_density, mean, variance, width=0.05)
    assert_close(Poisson().expected_log_prob(output, t), number(expected), rtol=1e-9)
    predictive = average(lambda f: np.exp(log_density(f)), mean, variance, width=0.01)
    found = Poisson().log_predictive(output, t)
    assert_close(found, number(math.log(predictive)), rtol=1e-9)


def test_poisson_predictive_probabilities_have_the_predicted_moments() -> None:
    counts = torch.arange(4000)
    mean = torch.full((4000, 1), 1.5, dtype=torch.float64)
    output = cp.Gaussian.diagonal(mean, variance=torch.full_like(mean, 0.6), batch_dims=1)
    p = Poisson().log_predictive(output, counts).exp()
    found = Poisson().predict(output[:1])
    assert float(p.sum()) == pytest.approx(1, abs=1e-9)
    average_count = (p * counts).sum()
    assert_close(found.mean[0, 0], average_count, rtol=1e-9)
    spread = (p * (counts - average_count).square()).sum()
    assert_close(found.variance[0, 0], spread, rtol=1e-7)
    assert_close(found.aleatoric, found.mean, rtol=0, atol=0)


def test_tails_keep_their_logarithm() -> None:
    """Where the density itself is no number: log E[sigmoid(f)] ~ mu + s^2 / 2, far below zero."""
    found = Bernoulli().log_predictive(single(-2000.0, 4.0), torch.tensor([1]))
    assert_close(found, number(-2000.0 + 2.0), rtol=1e-12)
    found = Poisson().log_predictive(single(50.0, 0.0), torch.tensor([3]))
    assert_close(found, number(150 - math.exp(50) - math.log(6)), rtol=1e-12)
    assert bool(torch.isfinite(Poisson().log_predictive(single(50.0, 0.5), torch.tensor([0]))))


@pytest.mark.parametrize(
    ("mean", "stddev", "count"), [(4.0, 0.2, 900), (8.0, 0.3, 0), (1.0, 0.3, 400), (30.0, 2.0, 0)]
)
def test_a_count_far_from_the_expected_rate(mean: float, stddev: float, count: int) -> None:
    """The integrand is many standard deviations of the log-rate from its mean."""
    z = np.linspace(-100, 100, 2_000_001)
    f = mean + stddev * z
    logs = count * f - np.exp(np.minimum(f, 100)) - gammaln(count + 1) - z**2 / 2
    exact = logsumexp(logs) + math.log(z[1] - z[0]) - math.log(2 * math.pi) / 2
    assert abs(z[logs.argmax()]) > 9
    found = Poisson().log_predictive(single(mean, stddev**2), torch.tensor([count]))
    assert_close(found, number(exact), rtol=1e-9)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_draws_agree_with_moments(likelihood) -> None:
    mean = torch.tensor([[0.4, -1.0], [1.0, 0.2]], dtype=torch.float64)
    output = cp.Gaussian.diagonal(mean, variance=torch.full_like(mean, 0.5), batch_dims=1)
    target = torch.tensor([[0, 1], [1, 0]])
    values = output.sample(400_000, torch.Generator().manual_seed(0))
    log_prob = likelihood.log_prob(values, target)
    error = log_prob.std(0) / math.sqrt(len(values))
    assert bool(
        ((log_prob.mean(0) - likelihood.expected_log_prob(output, target)).abs() < 5 * error).all()
    )
    sampled, found = likelihood.predict_draws(values), likelihood.predict(output)
    assert_close(sampled.mean, found.mean, rtol=0.01)
    assert_close(sampled.aleatoric, found.aleatoric, rtol=0.01)
    assert_close(sampled.epistemic, found.epistemic, rtol=0.02)
    one = output.marginal([0])
    density = likelihood.log_predictive_draws(values[..., :1], target[:, 0])
    assert_close(density, likelihood.log_predictive(one, target[:, 0]), atol=0.01)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
@pytest.mark.parametrize("name", ["expected_log_prob", "log_predictive"])
def test_gradients(likelihood, name: str) -> None:
    mean = torch.tensor([[0.4, -1.0], [1.0, 0.2]], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([[0.4, 1.0], [2.0, 0.2]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 1], [1, 0]])

    def value(mean: Tensor, variance: Tensor) -> Tensor:
        output = cp.Gaussian(mean, torch.diag_embed(variance), validate_args=False)
        return getattr(likelihood, name)(output, target)

    assert torch.autograd.gradcheck(value, (mean, variance))


@pytest.mark.parametrize(
    ("likelihood", "curvature"),
    [(Bernoulli(), -expit(0.4) * expit(-0.4)), (Poisson(), -math.exp(0.4))],
)
def test_gradients_where_nothing_varies(likelihood, curvature: float) -> None:
    """dE/dS = (log p)'' / 2 also at S = 0."""
    mean = torch.tensor([[0.4]], dtype=torch.float64)
    variance = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    output = cp.Gaussian(mean, torch.diag_embed(variance), validate_args=False)
    likelihood.expected_log_prob(output, torch.tensor([1])).sum().backward()
    assert_close(variance.grad, torch.tensor([[curvature / 2]], dtype=torch.float64), rtol=1e-8)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
@pytest.mark.parametrize("name", ["expected_log_prob", "log_predictive"])
def test_members_and_dtypes(likelihood, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    output = cp.Gaussian.diagonal(mean, variance=mean.square(), batch_dims=2)
    target = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    method = getattr(likelihood, name)
    found = method(output, target)
    assert found.shape == (3, 4)
    assert_close(found, torch.stack([method(member, target) for member in output]), rtol=1e-12)
    assert_close(method(output.to(torch.float32), target), found.float(), rtol=1e-5)


@pytest.mark.parametrize("name", ["log_prob", "expected_log_prob", "log_predictive"])
@pytest.mark.parametrize(
    ("likelihood", "wrong", "right"),
    [(Bernoulli(), (-1.0, 1.5, math.nan), (0.0, 0.3, 1.0)), (Poisson(), (-1.0, 0.5), (0.0, 7.0))],
)
def test_targets_of_another_kind_are_refused(likelihood, wrong, right, name: str) -> None:
    values = torch.zeros(1, 1)
    given = (
        values
        if name == "log_prob"
        else cp.Gaussian.diagonal(values, variance=values + 1, batch_dims=1)
    )
    method = getattr(likelihood, name)
    for target in wrong:
        with pytest.raises(ValueError, match=f"targets of {type(likelihood).__name__} are"):
            method(given, torch.tensor([target]))
    for target in right:
        assert bool(torch.isfinite(method(given, torch.tensor([target]))).all())


def test_a_huge_variance_of_the_log_rate_stays_finite() -> None:
    variance = torch.full((1, 1), 1e4, requires_grad=True)
    output = cp.Gaussian(torch.zeros(1, 1), torch.diag_embed(variance), validate_args=False)
    value = Poisson().expected_log_prob(output, torch.tensor([3]))
    value.sum().backward()
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(variance.grad).all())
    assert float(variance.grad) < 0
