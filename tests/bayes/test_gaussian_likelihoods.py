"""Gaussian likelihoods against dense grids, Monte Carlo and limits."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal

import covprop as cp
from covprop.bayes import (
    BayesLinear,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    decompose,
    predict,
)
from covprop.bayes.gaussian_likelihoods import exponential
from tests.bayes.integrals import average_of_pair
from tests.oracles import assert_close

PAIRS = [  # mu_m, mu_l, S_mm, S_ml, S_ll, t
    (0.3, -0.5, 0.4, 0.1, 0.2, 0.9),
    (0.3, -0.5, 0.4, -0.55, 0.9, -1.5),
    (-2.0, 1.0, 1e-4, 0.0, 2.0, 3.0),
    (1.0, -4.0, 1.0, 0.19, 0.04, 1.5),
    (0.0, 0.0, 2.0, 1.9, 2.0, 8.0),
    (0.5, 0.2, 0.7, 0.0, 0.0, 0.1),
    (0.5, -1.0, 0.0, 0.0, 1.5, 2.5),
    (0.5, -1.0, 0.0, 0.0, 0.0, 2.5),
]


def pair(mu_m: float, mu_l: float, s_mm: float, s_ml: float, s_ll: float) -> cp.Gaussian:
    mean = torch.tensor([[mu_m, mu_l]], dtype=torch.float64)
    matrix = torch.tensor([[[s_mm, s_ml], [s_ml, s_ll]]], dtype=torch.float64)
    return cp.Gaussian(mean, matrix)


def log_density(m: np.ndarray, log_variance: np.ndarray, t: float) -> np.ndarray:
    return -0.5 * (math.log(2 * math.pi) + log_variance + (m - t) ** 2 / np.exp(log_variance))


def random_output(batch: tuple[int, ...], size: int, dtype=torch.float64, seed=0) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*batch, size, generator=generator, dtype=torch.float64)
    root = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64) / 2
    return cp.Gaussian(mean, root @ root.mT).to(dtype)


@pytest.mark.parametrize("case", PAIRS)
def test_expected_log_likelihood_is_the_integral(case) -> None:
    *moments, t = case
    output = pair(*moments)
    found = HeteroskedasticGaussian().expected_log_prob(
        output, torch.tensor([t], dtype=torch.float64)
    )
    mean, matrix = output.mean[0].numpy(), output.covariance_matrix[0].numpy()
    expected = average_of_pair(lambda m, v: log_density(m, v, t), mean, matrix)
    assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-10)


@pytest.mark.parametrize("case", PAIRS)
def test_predictive_density_is_the_integral(case) -> None:
    *moments, t = case
    output = pair(*moments)
    found = HeteroskedasticGaussian().log_predictive(output, torch.tensor([t], dtype=torch.float64))
    mean, matrix = output.mean[0].numpy(), output.covariance_matrix[0].numpy()
    density = average_of_pair(lambda m, v: np.exp(log_density(m, v, t)), mean, matrix, width=0.1)
    assert_close(found, torch.tensor([math.log(density)], dtype=torch.float64), rtol=1e-9)


def test_predictive_density_integrates_to_one_and_has_the_predicted_moments() -> None:
    output, likelihood = pair(0.3, -0.5, 0.4, -0.3, 0.9), HeteroskedasticGaussian()
    t = torch.linspace(-60, 60, 4001, dtype=torch.float64)
    many = output.__class__(
        output.mean.expand(len(t), 2), output.covariance_matrix.expand(len(t), 2, 2)
    )
    density = likelihood.log_predictive(many, t).exp() * (t[1] - t[0])
    assert float(density.sum()) == pytest.approx(1, abs=1e-9)
    mean = (density * t).sum()
    variance = (density * (t - mean).square()).sum()
    prediction = likelihood.predict(output)
    assert_close(prediction.mean[0, 0], mean, rtol=1e-9)
    assert_close(prediction.variance[0, 0], variance, rtol=1e-7)  # the tail beyond the grid


def test_a_far_target_and_a_narrow_peak_keep_their_density() -> None:
    """In the limit S_ll = 0 it is a Gaussian; correlated with l it is a narrow peak in l."""
    likelihood = HeteroskedasticGaussian()
    output = pair(0.0, -1.0, 0.5, 0.0, 0.0)
    t = torch.tensor([1e4], dtype=torch.float64)
    exact = Normal(torch.zeros((), dtype=torch.float64), math.sqrt(0.5 + math.exp(-1)))
    assert_close(likelihood.log_predictive(output, t), exact.log_prob(t), rtol=1e-12)
    narrow = pair(0.0, -14.0, 1.0, 0.1, 0.01)  # m follows l, and the noise is a thousandth of it
    exact = Normal(torch.zeros((), dtype=torch.float64), math.sqrt(1 + math.exp(-14)))
    found = likelihood.log_predictive(narrow, torch.tensor([0.7], dtype=torch.float64))
    assert_close(found, exact.log_prob(torch.tensor([0.7], dtype=torch.float64)), atol=1e-5)


@pytest.mark.parametrize(
    ("mu_l", "s_mm", "s_ll", "rho", "t"),
    [(-3.0, 1.0, 4.0, -0.999, 4.0), (-3.0, 1.0, 0.01, -0.999, 50.0), (-8.0, 100.0, 4.0, 0.99, 0.0),
     (0.0, 0.01, 1.0, 0.5, 8.0)],
)  # fmt: skip
def test_peaks_of_different_width_are_all_found(mu_l, s_mm, s_ll, rho, t) -> None:
    """One where l explains the target, one where it makes the noise large: a dense grid in l."""
    z = np.linspace(-200, 200, 1_600_001)
    total = np.logaddexp(math.log(s_mm * (1 - rho**2)), mu_l + math.sqrt(s_ll) * z)
    residual = (t - rho * math.sqrt(s_mm) * z) ** 2 * np.exp(-total)
    log_density = -(2 * math.log(2 * math.pi) + total + residual + z**2) / 2
    expected = logsumexp(log_density) + math.log(z[1] - z[0])
    output = pair(0.0, mu_l, s_mm, rho * math.sqrt(s_mm * s_ll), s_ll)
    found = HeteroskedasticGaussian().log_predictive(output, torch.tensor([t], dtype=torch.float64))
    assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-5)


def test_draws_agree_with_moments() -> None:
    likelihood, output = HeteroskedasticGaussian(), random_output((3,), 4)
    target = torch.tensor([[0.1, 1.0], [-1.0, 0.5], [2.0, 0.0]], dtype=torch.float64)
    values = output.sample(400_000, torch.Generator().manual_seed(1))
    log_prob = likelihood.log_prob(values, target)
    error = log_prob.std(0) / math.sqrt(len(values))
    gap = (log_prob.mean(0) - likelihood.expected_log_prob(output, target)).abs()
    assert bool((gap < 5 * error).all())
    sampled, found = likelihood.predict_draws(values), likelihood.predict(output)
    assert_close(sampled.mean, found.mean, atol=0.01)
    assert_close(sampled.aleatoric, found.aleatoric, rtol=0.03)
    assert_close(sampled.epistemic, found.epistemic, rtol=0.01)


@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.7)])
def test_without_uncertainty_all_three_are_the_plain_density(likelihood) -> None:
    size = likelihood.outputs(2)
    mean = torch.randn(5, size, dtype=torch.float64)
    still = cp.Gaussian.diagonal(mean, variance=torch.zeros_like(mean), batch_dims=1)
    target = torch.randn(5, 2, dtype=torch.float64)
    scale = (mean[:, 2:] / 2).exp() if size == 4 else torch.tensor(0.7).double()
    expected = Normal(mean[:, :2], scale).log_prob(target).sum(-1)
    loose = 1e-7 if size == 2 else 1e-12  # 0.7 in float32
    for found in (
        likelihood.log_prob(mean, target),
        likelihood.expected_log_prob(still, target),
        likelihood.log_predictive(still, target),
    ):
        assert_close(found.detach(), expected, rtol=loose, atol=loose)


def test_homoskedastic_terms_are_torchs() -> None:
    likelihood, output = (
        HomoskedasticGaussian(torch.tensor([0.5, 2.0]).double()),
        random_output((4,), 2),
    )
    target = torch.randn(4, 2, dtype=torch.float64)
    noise = torch.tensor([0.25, 4.0], dtype=torch.float64)
    exact = MultivariateNormal(output.mean, output.covariance_matrix + torch.diag(noise))
    assert_close(
        likelihood.log_predictive(output, target).detach(), exact.log_prob(target), rtol=1e-12
    )
    plain = Normal(output.mean, noise.sqrt()).log_prob(target)
    expected = (plain - output.variance / noise / 2).sum(-1)
    assert_close(likelihood.expected_log_prob(output, target).detach(), expected, rtol=1e-12)
    prediction = likelihood.predict(output)
    assert_close(prediction.variance.detach(), output.variance + noise, rtol=1e-12)


def test_noise_is_learned_or_fixed() -> None:
    assert [p.shape for p in HomoskedasticGaussian(0.1).parameters()] == [()]
    assert list(HomoskedasticGaussian(0.1, learned=False).parameters()) == []
    assert list(HeteroskedasticGaussian().parameters()) == []
    with pytest.raises(ValueError, match="positive"):
        HomoskedasticGaussian(0.0)
    likelihood = HomoskedasticGaussian(torch.tensor(1.0, dtype=torch.float64))
    output, target = random_output((200,), 1), torch.randn(200, dtype=torch.float64)
    rate = 1.0
    for _ in range(200):
        loss = -likelihood.expected_log_prob(output, target).mean()
        (gradient,) = torch.autograd.grad(loss, likelihood.parameters())
        with torch.no_grad():
            likelihood.log_variance -= rate * gradient
    best = (output.variance[:, 0] + (output.mean[:, 0] - target).square()).mean()
    assert_close(likelihood.log_variance.exp().detach(), best, rtol=1e-9)


@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.7)])
@pytest.mark.parametrize("name", ["expected_log_prob", "log_predictive"])
def test_gradients(likelihood, name: str) -> None:
    size = likelihood.outputs(1)
    output = random_output((3,), size)
    target = torch.tensor([0.2, -1.0, 3.0], dtype=torch.float64)

    def value(mean: Tensor, root: Tensor) -> Tensor:
        gaussian = cp.Gaussian(mean, root @ root.mT, validate_args=False)
        return getattr(likelihood, name)(gaussian, target)

    root = torch.linalg.cholesky(output.covariance_matrix)
    inputs = [output.mean.clone().requires_grad_(), root.clone().requires_grad_()]
    assert torch.autograd.gradcheck(value, inputs)


def test_gradients_where_nothing_varies_are_those_of_the_formula() -> None:
    mean = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    covariance = torch.zeros(1, 2, 2, dtype=torch.float64, requires_grad=True)
    output = cp.Gaussian(mean, covariance, validate_args=False)
    t = torch.tensor([2.0], dtype=torch.float64)
    HeteroskedasticGaussian().expected_log_prob(output, t).sum().backward()
    precision, gap = math.exp(1.0), -1.5
    shared = precision * gap / 2  # by the entry above the diagonal, and by the one below
    expected = [[[-precision / 2, shared], [shared, -precision * gap**2 / 4]]]
    assert_close(covariance.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s_ll", [1e2, 1e4, 1e10])
def test_a_huge_variance_of_the_log_variance_stays_finite(dtype, s_ll: float) -> None:
    mean = torch.tensor([[0.5, -1.0]], dtype=dtype)
    variance = torch.tensor([[0.5, s_ll]], dtype=dtype, requires_grad=True)
    output = cp.Gaussian(mean, torch.diag_embed(variance), validate_args=False)
    value = HeteroskedasticGaussian().expected_log_prob(output, torch.tensor([2.0], dtype=dtype))
    value.sum().backward()
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(variance.grad).all())
    assert bool((variance.grad < 0).all())  # less variance is better
    density = HeteroskedasticGaussian().log_predictive(output, torch.tensor([2.0], dtype=dtype))
    assert bool(torch.isfinite(density).all())


def test_the_exponential_is_itself_up_to_the_bound_and_then_straight() -> None:
    for dtype, bound in ((torch.float32, 44.36), (torch.float64, 354.89)):
        x = torch.tensor([-3.0, 0.0, 20.0, 44.0], dtype=dtype)
        assert_close(exponential(x), x.exp(), rtol=1e-6)
        beyond = torch.tensor([bound + 1, bound + 2, bound + 3], dtype=dtype)
        steps = exponential(beyond).diff()
        assert_close(steps[0], steps[1], rtol=1e-4)


@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.7)])
@pytest.mark.parametrize("name", ["expected_log_prob", "log_predictive"])
def test_members_and_dtypes(likelihood, name: str) -> None:
    """A batch of members is a loop over them, and float32 is near float64."""
    output = random_output((3, 4), likelihood.outputs(1))
    target = torch.randn(4, dtype=torch.float64)
    method = getattr(likelihood, name)
    found = method(output, target).detach()
    looped = torch.stack([method(member, target) for member in output]).detach()
    assert_close(found, looped, rtol=1e-12)
    assert_close(method(output, target[:, None]).detach(), found, rtol=0, atol=0)
    own = target.expand(3, 4)
    assert_close(method(output, own).detach(), found, rtol=0, atol=0)
    assert_close(method(output, own[..., None]).detach(), found, rtol=0, atol=0)
    single = method(output.to(torch.float32), target.float()).detach()
    assert_close(single, found.float(), rtol=2e-3 if name == "expected_log_prob" else 1e-4)


def test_members_may_have_noise_of_their_own() -> None:
    output, target = random_output((3, 4), 2), torch.randn(4, 2, dtype=torch.float64)
    noise = torch.tensor([[0.1, 0.2], [1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
    together = HomoskedasticGaussian(noise[:, None])
    values = output.sample(5, torch.Generator().manual_seed(0))
    for member, stddev in enumerate(noise):
        alone, one = HomoskedasticGaussian(stddev), output[member]
        for name in ("expected_log_prob", "log_predictive"):
            found = getattr(together, name)(output, target)[member]
            assert_close(found, getattr(alone, name)(one, target), rtol=1e-12)
        found = together.predict(output).aleatoric[member]
        assert_close(found, alone.predict(one).aleatoric, rtol=1e-12)
        drawn = alone.log_prob(values[:, member], target)
        assert_close(together.log_prob(values, target)[:, member], drawn, rtol=1e-12)


def test_an_empty_batch_is_no_error() -> None:
    output = cp.Gaussian(torch.zeros(0, 2), torch.zeros(0, 2, 2))
    assert HeteroskedasticGaussian().expected_log_prob(output, torch.zeros(0)).shape == (0,)
    assert HeteroskedasticGaussian().log_predictive(output, torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.7)])
def test_parts_of_the_variance_add_up(likelihood) -> None:
    """Of noisy inputs the epistemic part of `predict` is the sum of weights and input."""
    torch.manual_seed(0)
    model = nn.Sequential(BayesLinear(3, 4), nn.ReLU(), BayesLinear(4, likelihood.outputs(2)))
    x = cp.Gaussian.isotropic(torch.randn(5, 3), stddev=0.3, batch_dims=1)
    parts = decompose(model, x, likelihood)
    whole = likelihood.predict(predict(model, x))
    assert_close(parts.aleatoric.detach(), whole.aleatoric.detach(), rtol=1e-6)
    assert_close(parts.total.detach(), whole.variance.detach(), rtol=1e-5)
    assert_close((parts.epistemic + parts.input).detach(), whole.epistemic.detach(), rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    output = random_output((3, 4), 4)
    for shape in ((4,), (3, 4), (4, 4), (2, 4, 2), (3, 4, 3), (5, 3, 4, 2)):
        with pytest.raises(ValueError, match="targets of shape"):
            HeteroskedasticGaussian().expected_log_prob(output, torch.zeros(shape))
    with pytest.raises(ValueError, match="two outputs for each"):
        HeteroskedasticGaussian().expected_log_prob(random_output((3,), 3), torch.zeros(3))
