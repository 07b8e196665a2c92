"""The ELBO: its terms, their weights, and its gradient."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import covprop as cp
from covprop.bayes import (
    ELBO,
    BayesLinear,
    Bernoulli,
    Categorical,
    Delta,
    FixedPrior,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    LinearAnnealing,
    LocalReparametrisation,
    Poisson,
    metrics,
    predict,
)
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, outputs)).double()


def noisy_inputs(count: int) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    root = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64) / 3
    return cp.Gaussian(mean, root @ root.mT)


def target(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def test_terms_add_up_with_every_weight() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -6.0], [-3.0, -3.0, -3.0]], dtype=torch.float64)
    divergence = torch.tensor([10.0, 20.0], dtype=torch.float64)
    records: list[dict[str, float]] = []
    elbo = ELBO(
        HeteroskedasticGaussian(),
        100,
        annealing=LinearAnnealing(10, start=0.2),
        likelihood_temperature=2.0,
        kl_temperature=0.5,
        log=records.append,
    )
    terms = elbo.combine(log_prob, divergence, step=5)
    assert terms.kl_weight == pytest.approx(0.6 * 0.5)
    assert_close(terms.expected_log_prob, torch.tensor([-3.0, -3.0], dtype=torch.float64))
    expected = 3.0 / 2 * 2 + 0.3 * (10 + 20) / 100
    assert float(terms.loss) == pytest.approx(expected)
    assert_close(terms.elbo, torch.tensor([-3.1, -3.2], dtype=torch.float64))
    assert records == [terms.record()]
    assert records[0]["kl"] == 15.0
    assert records[0]["elbo"] == pytest.approx(-3.15)


def test_the_divergence_is_divided_by_the_data_and_not_by_the_batch() -> None:
    for batch in (1, 7):
        terms = ELBO(HeteroskedasticGaussian(), 50).combine(
            torch.full((batch,), -1.0), torch.tensor(25.0)
        )
        assert float(terms.loss) == pytest.approx(1.5)
    own = ELBO(HeteroskedasticGaussian(), torch.tensor([50, 100]))
    terms = own.combine(torch.full((2, 3), -1.0), torch.tensor([25.0, 25.0]))
    assert_close(terms.elbo, torch.tensor([-1.5, -1.25]))


def test_padding_does_not_count() -> None:
    log_prob = torch.tensor([[-1.0, -2.0, -6.0], [-3.0, -5.0, math.pi]])
    weight = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    terms = ELBO(HeteroskedasticGaussian(), 10).combine(log_prob, torch.zeros(2), weight=weight)
    assert_close(terms.expected_log_prob, torch.tensor([-3.0, -4.0]))


def test_annealing_is_a_line_and_then_one() -> None:
    schedule = LinearAnnealing(4, start=0.5)
    assert [schedule(step) for step in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_size": 0}, "data_size"),
        ({"data_size": math.inf}, "data_size"),
        ({"data_size": torch.tensor([3, 0])}, "data_size"),
        ({"data_size": 1, "likelihood_temperature": 0.0}, "temperature"),
        ({"data_size": 1, "kl_temperature": -1.0}, "temperature"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ELBO(HeteroskedasticGaussian(), **options)
    with pytest.raises(ValueError, match="annealing"):
        LinearAnnealing(0)
    for size in ("10", None, True):
        with pytest.raises(TypeError, match=f"number of training data, not {size!r}"):
            ELBO(HeteroskedasticGaussian(), size)


def test_noise_in_likelihood_out() -> None:
    """Gast & Roth: without weights of its own uncertainty the ELBO is the expected likelihood."""
    model, x, t = network(), noisy_inputs(5), target(5)
    terms = ELBO(HeteroskedasticGaussian(), 5)(model, x, t)
    output = propagate(model, x, method=cp.Exact())
    expected = HeteroskedasticGaussian().expected_log_prob(output, t).mean()
    assert_close(-terms.loss, expected, rtol=1e-12)
    assert float(terms.kl) == 0
    certain = ELBO(HeteroskedasticGaussian(), 5)(model, x.mean, t)
    plain = HeteroskedasticGaussian().log_prob(model(x.mean), t).mean()
    assert_close(-certain.loss, plain, rtol=1e-12)


def test_draws_average_to_the_moments() -> None:
    """On a linear network, where the outputs are Gaussian and the moments exact."""
    torch.manual_seed(0)
    model, x, t = nn.Linear(3, 2).double(), noisy_inputs(4), target(4)
    elbo = ELBO(HeteroskedasticGaussian(), 4)
    exact = elbo.log_likelihood(model, x, t)
    few = [
        elbo.log_likelihood(
            model, x, t, LocalReparametrisation(2_000, torch.Generator().manual_seed(seed))
        )
        for seed in range(20)
    ]
    sampled = torch.stack(few)
    error = sampled.std(0) / math.sqrt(len(few))
    assert bool(((sampled.mean(0) - exact).abs() < 5 * error).all())
    assert float((error / exact.abs()).detach().max()) < 5e-3


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=3), cp.AssumedDensity()])
@pytest.mark.parametrize("likelihood", [HeteroskedasticGaussian(), HomoskedasticGaussian(0.5)])
def test_gradient_against_finite_differences(method, likelihood) -> None:
    model, x, t = network(likelihood.outputs(1)), noisy_inputs(4), target(4)
    elbo = ELBO(likelihood, 4)
    names = list(dict(model.named_parameters()))

    class Called(nn.Module):
        def __init__(self, values: tuple[Tensor, ...]) -> None:
            super().__init__()
            self.values = dict(zip(names, values, strict=True))

        def forward(self, inputs):
            return functional_call(model, self.values, (inputs,))

    values = [value.detach() for value in model.parameters()]
    assert_gradients(lambda *v: elbo(Called(v), x, t, method).loss, values, atol=1e-5)


def test_training_with_noise_learns_the_noise() -> None:
    """t = 2 x + noise of 0.3: the log-variance comes out of the same loss as the mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 2 - 1
    t = 2 * x[:, 0] + 0.3 * torch.randn(400, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    elbo = ELBO(HeteroskedasticGaussian(), 400)
    for _ in range(400):
        optimiser.zero_grad()
        elbo(model, x, t).loss.backward()
        optimiser.step()
    assert float(model.weight[0, 0].detach()) == pytest.approx(2, abs=0.1)
    assert float(model.bias[1].detach()) == pytest.approx(2 * math.log(0.3), abs=0.25)


def bayesian(outputs: int, members: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    wide = {"members": members, "dtype": torch.float64}
    return nn.Sequential(BayesLinear(3, 5, **wide), nn.ReLU(), BayesLinear(5, outputs, **wide))


@pytest.mark.parametrize(
    ("likelihood", "classes"),
    [
        (HeteroskedasticGaussian(), False),
        (HomoskedasticGaussian(torch.tensor(0.5, dtype=torch.float64)), False),
        (Bernoulli(), False),
        (Poisson(), False),
        (Categorical(Delta()), True),
    ],
)
@pytest.mark.parametrize("noise", [False, True])
def test_gradient_with_random_weights(likelihood, classes: bool, noise: bool) -> None:
    """Along random directions of all parameters, the likelihood's own among them."""
    model = bayesian(likelihood.outputs(3 if classes else 1))
    inputs = noisy_inputs(4)
    x = inputs if noise else inputs.mean
    t = torch.tensor([0, 1, 1, 0])
    elbo = ELBO(likelihood, 4)
    parameters = [*model.parameters(), *likelihood.parameters()]
    gradient = torch.autograd.grad(elbo(model, x, t).loss, parameters)
    generator = torch.Generator().manual_seed(3)
    start = [parameter.detach().clone() for parameter in parameters]
    step = 1e-5

    def moved(size: float, direction: list[Tensor]) -> float:
        with torch.no_grad():
            for parameter, origin, way in zip(parameters, start, direction, strict=True):
                parameter.copy_(origin + size * way)
            return float(elbo(model, x, t).loss)

    for _ in range(5):
        way = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
        slope = sum(float((g * w).sum()) for g, w in zip(gradient, way, strict=True))
        found = (moved(step, way) - moved(-step, way)) / (2 * step)
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-8)
    moved(0.0, start)


def test_members_train_as_if_they_were_alone() -> None:
    """Loss is their sum, terms are their own, and gradients do not mix."""
    model, x, t = bayesian(2, members=3), noisy_inputs(4).mean, target(4)
    elbo = ELBO(HeteroskedasticGaussian(), 20)
    together = elbo(model, x.expand(3, 4, 3), t)
    together.loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for member in range(3):
        alone = bayesian(2)
        values = {name: value.detach()[member] for name, value in model.named_parameters()}
        alone.load_state_dict(values)
        terms = elbo(alone, x, t)
        terms.loss.backward()
        total = total + terms.loss.detach()
        assert_close(together.kl[member], terms.kl, rtol=1e-10)
        assert_close(together.expected_log_prob[member], terms.expected_log_prob, rtol=1e-10)
        for name, parameter in alone.named_parameters():
            own = model.get_parameter(name).grad[member]
            assert_close(own, parameter.grad, rtol=1e-8, atol=1e-12)
    assert_close(together.loss.detach(), total, rtol=1e-12)


def test_a_linear_bayesian_network_finds_the_exact_posterior() -> None:
    """t = w x + noise with a fixed prior: the optimum of the ELBO is the conjugate posterior."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    t = 0.7 * x[:, 0] + 0.4 * torch.randn(50, generator=generator, dtype=torch.float64)
    model = BayesLinear(1, 1, bias=False, prior=FixedPrior(stddev=0.5), dtype=torch.float64)
    likelihood = HomoskedasticGaussian(torch.tensor(0.4, dtype=torch.float64), learned=False)
    elbo = ELBO(likelihood, 50)
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_change=0.0,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = elbo(model, x, t).loss
        loss.backward()
        return loss

    optimiser.step(closure)
    precision = x.square().sum() / 0.16 + 4
    mean = (x[:, 0] * t).sum() / 0.16 / precision
    assert_close(model.weight_mean.detach()[0, 0], mean, rtol=1e-6)
    assert_close(model.weight_variance.detach()[0, 0], 1 / precision, rtol=1e-5)
    # The bound is tight: it is the logarithm of the evidence, of t ~ N(0, x x^T / 4 + 0.16).
    covariance = x @ x.mT / 4 + 0.16 * torch.eye(50, dtype=torch.float64)
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(t), covariance).log_prob(t)
    assert_close(elbo(model, x, t).elbo.detach() * 50, evidence, rtol=1e-9)


def test_draws_and_moments_agree_for_random_weights() -> None:
    torch.manual_seed(0)
    model, x = BayesLinear(3, 2, dtype=torch.float64), noisy_inputs(4).mean
    elbo, t = ELBO(HeteroskedasticGaussian(), 4), target(4)
    exact = elbo(model, x, t)
    method = LocalReparametrisation(200_000, torch.Generator().manual_seed(0))
    sampled = elbo(model, x, t, method)
    assert_close(sampled.expected_log_prob, exact.expected_log_prob, rtol=2e-3)
    assert_close(sampled.kl, exact.kl, rtol=0, atol=0)


def test_draws_are_those_of_the_generator() -> None:
    model, x, t = bayesian(2), noisy_inputs(4), target(4)
    elbo = ELBO(HeteroskedasticGaussian(), 4)
    first, second, other = (
        elbo(model, x, t, LocalReparametrisation(3, torch.Generator().manual_seed(seed))).loss
        for seed in (0, 0, 1)
    )
    assert_close(first, second, rtol=0, atol=0)
    assert float((first - other).detach().abs()) > 1e-6


def test_classes_are_learned_and_what_is_unlike_them_is_uncertain() -> None:
    """Two blobs: found again by the class, and the epistemic score is higher far from both."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(2).repeat(40)
    x = torch.randn(80, 2, generator=generator) * 0.3 + 2.0 * t[:, None] - 1.0
    torch.manual_seed(0)
    model = nn.Sequential(BayesLinear(2, 10), nn.ReLU(), BayesLinear(10, 2))
    likelihood = Categorical()
    elbo = ELBO(likelihood, 80, annealing=LinearAnnealing(50))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(150):
        optimiser.zero_grad()
        elbo(model, x, t, step=step).loss.backward()
        optimiser.step()
    with torch.no_grad():
        known = likelihood.predict(predict(model, x))
        away = (
            4 * torch.randn(80, 2, generator=generator) @ torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        )
        unknown = likelihood.predict(predict(model, away))
    assert float(metrics.accuracy(known.mean, t)) > 0.95
    scores = unknown.mutual_information, known.mutual_information
    assert float(metrics.auroc(*scores)) > 0.9
