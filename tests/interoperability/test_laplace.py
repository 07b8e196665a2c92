"""Diagonal posteriors of laplace-torch: carried through a network, neither sampled nor linearised.

Networks here have one nonlinearity and known inputs, for which covprop's moments are exact, so that
laplace-torch's own samples have to agree with them.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import covprop as cp
from covprop import bayes
from tests.oracles import assert_close

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # asdfghjkl, which it imports, uses TorchScript
    from laplace import DiagLaplace, Laplace

D = torch.float64
SAMPLES = 4000
NOISE = 0.1


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    """laplace-torch makes tensors of torch's default type."""
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


def trained(model: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model.eval()


def curve() -> tuple[Tensor, Tensor, nn.Module]:
    """Noisy points on a sine, and a network that knows them."""
    torch.manual_seed(0)
    x = 4 * torch.rand(200, 1) - 2
    y = torch.sin(2 * x) + NOISE * torch.randn(200, 1)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    return x, y, trained(model, x, y, nn.MSELoss(), 400)


def fitted(
    x: Tensor, y: Tensor, model: nn.Module, likelihood: str, of: str = "all",
    structure: str = "diag", **options: Any,
) -> DiagLaplace:  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of its backends use TorchScript
        posterior = Laplace(
            model, likelihood, subset_of_weights=of, hessian_structure=structure, **options
        )
        posterior.fit(DataLoader(TensorDataset(x, y), batch_size=50))
    return posterior


def by_parameter(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """A vector over all parameters, cut into them: the order is that of `named_parameters`."""
    named = dict(model.named_parameters())
    parts = vector.split([parameter.numel() for parameter in named.values()])
    return {name: part.view_as(named[name]) for name, part in zip(named, parts, strict=True)}


def bayesian(model: nn.Module, posterior: DiagLaplace) -> nn.Module:
    mean, variance = posterior.mean, posterior.posterior_variance
    return bayes.with_posterior(model, by_parameter(model, mean), by_parameter(model, variance))


def assert_within_sampling_error(network: nn.Module, posterior: Any, x: Tensor) -> None:
    """Mean and variance of every output, within 5 standard errors of laplace-torch's samples."""
    with torch.no_grad():
        y = bayes.predict(network, x)
        generator = torch.Generator().manual_seed(1)
        drawn = posterior.functional_samples(
            x, pred_type="nn", n_samples=SAMPLES, generator=generator
        )
    assert drawn.shape == (SAMPLES, *y.mean.shape)
    centred = drawn - drawn.mean(0)
    variance = drawn.var(0)
    assert float(((drawn.mean(0) - y.mean) / (variance / SAMPLES).sqrt()).abs().max()) < 5
    error = (centred.square().var(0) / SAMPLES).sqrt()
    assert float(((variance - y.variance) / error).abs().max()) < 5
    assert float((error / variance).max()) < 0.05  # so that a tenth too much would be seen


def test_a_regression_posterior_predicts_what_its_samples_do() -> None:
    x, y, model = curve()
    posterior = fitted(x, y, model, "regression", sigma_noise=NOISE, prior_precision=1.0)
    network, points = bayesian(model, posterior), torch.linspace(-3, 3, 13)[:, None]
    assert_within_sampling_error(network, posterior, points)
    taken = bayes.from_laplace(posterior)
    torch.testing.assert_close(taken.state_dict(), network.state_dict())


def test_a_convolutional_posterior_predicts_what_its_samples_do() -> None:
    """Positions share their weights, so that they are correlated before and after the ReLU."""
    torch.manual_seed(0)
    x = torch.randn(120, 1, 6, 6)
    y = (x[:, 0, :, :3].sum((1, 2)) > x[:, 0, :, 3:].sum((1, 2))).long()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    trained(model, x, y, nn.CrossEntropyLoss(), 60)
    posterior = fitted(x, y, model, "classification", prior_precision=5.0)
    assert_within_sampling_error(bayesian(model, posterior), posterior, x[:8])


def test_it_meets_the_linearised_predictive_where_weights_are_certain() -> None:
    """laplace-torch's default linearises in the weights: right to first order in their variances.

    From 20 points and a wide prior the variances differ by 18 %; from there the difference falls
    with the variance of the weights, and that of the means in standard deviations with its root.
    """
    x, y, model = curve()
    points = torch.linspace(-2, 2, 9)[:, None]
    variances, means = [], []
    for precision in (1.0, 1e3, 1e4):
        posterior = fitted(
            x[:20], y[:20], model, "regression", sigma_noise=0.3, prior_precision=precision
        )
        mean, variance = posterior(points)
        with torch.no_grad():
            found = bayes.predict(bayesian(model, posterior), points)
        variances.append(float((found.variance / variance[..., 0] - 1).abs().max()))
        means.append(float(((found.mean - mean) / found.stddev).abs().max()))
    assert 0.1 < variances[0] < 0.25
    assert variances[2] < 2e-4
    assert 8 < variances[1] / variances[2] < 12
    assert 2.5 < means[1] / means[2] < 4


def test_the_divergence_is_that_of_the_posterior_from_its_prior() -> None:
    x, y, model = curve()
    posterior = fitted(x, y, model, "regression", sigma_noise=NOISE, prior_precision=4.0)
    names = (
        by_parameter(model, vector) for vector in (posterior.mean, posterior.posterior_variance)
    )
    made = bayes.with_posterior(model, *names, prior=bayes.FixedPrior(0.5))
    ours = torch.distributions.Normal(posterior.mean, posterior.posterior_variance.sqrt())
    prior = torch.distributions.Normal(torch.zeros(()), torch.full((), 0.5))
    assert_close(
        bayes.kl(made).detach(), torch.distributions.kl_divergence(ours, prior).sum(), rtol=1e-10
    )


@pytest.mark.parametrize("damping", [False, True])
def test_a_kronecker_posterior_predicts_what_its_samples_do(damping: bool) -> None:
    x, y, model = curve()
    posterior = fitted(
        x, y, model, "regression", structure="kron", sigma_noise=NOISE, damping=damping
    )
    network = bayes.from_laplace(posterior)
    assert_within_sampling_error(network, posterior, torch.linspace(-3, 3, 13)[:, None])


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_posterior_of_the_last_layer_is_exact(structure: str, bias: bool) -> None:
    """The output is linear in its weights, so that laplace-torch's linearisation is exact, too."""
    x, y, model = curve()
    model = nn.Sequential(*model[:-1], nn.Linear(20, 2, bias))
    target = torch.cat([y, -y], 1)
    posterior = fitted(x, target, model, "regression", "last_layer", structure, sigma_noise=NOISE)
    points = torch.linspace(-3, 3, 5)[:, None]
    mean, covariance = posterior(points)
    found = bayes.predict(bayes.from_laplace(posterior), points)
    # Some hundred terms in float64, behind eigenvalues of a Hessian that spread over 1e6.
    torch.testing.assert_close(found.mean, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=1e-7, atol=1e-9)


def test_draws_of_correlated_weights_have_their_moments() -> None:
    x, y, model = curve()
    points = torch.linspace(-2, 2, 3)[:, None]
    for structure in ("kron", "full"):
        posterior = fitted(x, y, model, "regression", "last_layer", structure, sigma_noise=NOISE)
        network = bayes.from_laplace(posterior)
        with torch.no_grad():
            expected = bayes.predict(network, points).variance
            rows = network(points.repeat(2000, 1))  # each with weights of its own
        drawn = rows.reshape(2000, 3, 1).var(0)
        # The variance of a variance is 2 v^2 / n: five of its standard errors.
        assert float((drawn / expected - 1).abs().max()) < 5 * (2 / 2000) ** 0.5


def test_what_is_not_followed_is_refused() -> None:
    x, y, model = curve()
    whole = fitted(x, y, model, "regression", structure="full", sigma_noise=NOISE)
    with pytest.raises(cp.UnsupportedOperation, match="all layers depend on each other"):
        bayes.from_laplace(whole)
    kron = fitted(x, y, model, "regression", structure="kron", sigma_noise=NOISE)
    with pytest.raises(cp.UnsupportedOperation, match="divergence of correlated weights"):
        bayes.kl(bayes.from_laplace(kron))
    pictures, names = torch.randn(20, 1, 6, 6), torch.randint(0, 2, (20,))
    plane = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
    posterior = fitted(pictures, names, plane, "classification", structure="kron")
    with pytest.raises(cp.UnsupportedOperation, match="Kronecker factors of"):
        bayes.from_laplace(posterior)
