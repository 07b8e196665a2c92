"""Divergences from priors, against torch.distributions and numerical integration."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import invgamma
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from covprop import bayes
from tests.bayes.sampled import normal
from tests.oracles import assert_close

CLOSED = {
    "fixed": (bayes.FixedPrior(0.7), 0.7),
    "he": (bayes.HePrior(), math.sqrt(2 / 6)),
    "wide he": (bayes.WideHePrior(), math.sqrt(8 / 6)),
    "xavier": (bayes.XavierPrior(), math.sqrt(2 / (6 + 8))),
}
every_closed = pytest.mark.parametrize("name", CLOSED)


def layer(prior: bayes.Prior, members: int | None = None) -> bayes.BayesConv1d:
    """Fan-in 3 * 2, fan-out 4 * 2."""
    made = bayes.BayesConv1d(3, 4, 2, prior=prior, members=members).double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=i))
    return made


def posteriors(made: bayes.BayesConv1d) -> list[Normal]:
    pairs = (
        (made.weight_mean, made.weight_log_stddev),
        (made.bias_mean, made.bias_log_stddev),
    )
    return [Normal(mean.detach(), log.detach().exp()) for mean, log in pairs]


@every_closed
def test_gaussian_priors_have_the_divergence_of_torch(name: str) -> None:
    prior, stddev = CLOSED[name]
    made = layer(prior)
    nothing = torch.zeros((), dtype=torch.float64)
    expected = sum(kl_divergence(q, Normal(nothing, stddev)).sum() for q in posteriors(made))
    assert_close(bayes.kl(made), expected)


@every_closed
def test_members_have_divergences_of_their_own(name: str) -> None:
    prior, stddev = CLOSED[name]
    made = layer(prior, members=3)
    nothing = torch.zeros((), dtype=torch.float64)
    expected = sum(
        kl_divergence(q, Normal(nothing, stddev)).flatten(1).sum(1) for q in posteriors(made)
    )
    assert_close(bayes.kl(made), expected)


def true_divergence(q: Normal, prior: bayes.ScaleMixturePrior) -> float:
    """By integration, in pieces that see the narrow component."""
    mean, stddev = float(q.mean), float(q.stddev)

    def log_density(w: float, scale: float) -> float:
        return -0.5 * (w / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))

    def integrand(w: float) -> float:
        own = log_density(w - mean, stddev)
        mixture = np.logaddexp(
            math.log(prior.share) + log_density(w, prior.wide),
            math.log(1 - prior.share) + log_density(w, prior.narrow),
        )
        return math.exp(own) * (own - mixture)

    ends = sorted(
        [mean - 12 * stddev, mean + 12 * stddev]
        + [s * t * prior.narrow for s in (-1, 1) for t in (0, 2, 5, 10)]
    )
    ends = [e for e in ends if mean - 12 * stddev <= e <= mean + 12 * stddev]
    return sum(quad(integrand, a, b, limit=200)[0] for a, b in pairwise(ends))


@pytest.mark.parametrize("mean", [0.0, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("stddev", [1e-4, 0.003, 0.05, 0.5, 4.0])
@pytest.mark.parametrize(
    "prior",
    [
        bayes.ScaleMixturePrior(),
        bayes.ScaleMixturePrior(0.4, 0.8, 0.01),
        bayes.ScaleMixturePrior(0.9, 0.8, 0.7),
    ],
)
def test_the_divergence_from_a_mixture(
    prior: bayes.ScaleMixturePrior, stddev: float, mean: float
) -> None:
    q = Normal(torch.tensor(mean, dtype=torch.float64), stddev)
    given = bayes.Posterior(q.mean[None], q.stddev.log()[None], 1, 1)
    assert float(prior.divergence(given)) == pytest.approx(
        true_divergence(q, prior), rel=1e-8, abs=1e-8
    )


def test_members_of_a_mixture() -> None:
    prior = bayes.ScaleMixturePrior()
    assert bayes.kl(layer(prior, members=3)).shape == (3,)
    assert bayes.kl(layer(prior)).shape == ()


def test_the_variance_of_empirical_bayes_is_the_best() -> None:
    prior = bayes.EmpiricalBayes(3.0, 0.5)
    made = layer(prior)
    total = 0.0
    for q, posterior in zip(posteriors(made), made.posteriors(), strict=True):

        def objective(log_variance: float, q: Normal = q) -> float:
            variance = math.exp(log_variance)
            given = Normal(torch.zeros((), dtype=torch.float64), math.sqrt(variance))
            return float(kl_divergence(q, given).sum()) - invgamma.logpdf(variance, 3.0, scale=0.5)

        best = minimize_scalar(objective, bounds=(-6, 6), method="bounded", options={"xatol": 1e-9})
        variance = prior.variance(posterior).detach()
        assert float(variance) == pytest.approx(math.exp(best.x), rel=1e-5)
        total += best.fun
    assert float(bayes.kl(made).detach()) == pytest.approx(total, rel=1e-9)


def test_empirical_bayes_of_members() -> None:
    made = layer(bayes.EmpiricalBayes(), members=3)
    alone = []
    for i in range(3):
        one = layer(bayes.EmpiricalBayes())
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(made.get_parameter(name)[i])
        alone.append(bayes.kl(one))
    assert_close(bayes.kl(made), torch.stack(alone))


def test_gradients_of_all_divergences() -> None:
    priors = [prior for prior, _ in CLOSED.values()]
    priors += [bayes.ScaleMixturePrior(0.4, 0.8, 0.05), bayes.EmpiricalBayes()]
    for prior in priors:

        def total(mean: Tensor, log_stddev: Tensor, prior: bayes.Prior = prior) -> Tensor:
            return prior.divergence(bayes.Posterior(mean, log_stddev, 2, 3))

        inputs = [normal(2, 3, seed=s).requires_grad_() for s in (1, 2)]
        assert torch.autograd.gradcheck(total, inputs)


def test_divergences_add_up_over_layers() -> None:
    first, second = layer(bayes.HePrior()), layer(bayes.FixedPrior(2.0))
    both = nn.Sequential(first, nn.ReLU(), second)
    assert_close(bayes.kl(both), bayes.kl(first) + bayes.kl(second))


def test_nonsense_is_refused() -> None:
    for make in (
        lambda: bayes.FixedPrior(0.0),
        lambda: bayes.WideHePrior(-1.0),
        lambda: bayes.ScaleMixturePrior(1.5),
        lambda: bayes.ScaleMixturePrior(0.5, 1.0, 0.0),
        lambda: bayes.ScaleMixturePrior(0.5, 0.1, 0.2),
        lambda: bayes.EmpiricalBayes(0.0),
        lambda: bayes.TrainedPrior(-0.1),
    ):
        with pytest.raises(ValueError, match=r"positive number|between 0 and 1|less than wide"):
            make()
    with pytest.raises(ValueError, match="no Bayesian layers"):
        bayes.kl(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="centred at trained weights"):
        bayes.kl(layer(bayes.TrainedPrior()))
