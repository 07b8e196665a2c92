"""Whole networks with random weights, against weights that are sampled."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import covprop as cp
from covprop import bayes
from tests.bayes.sampled import assert_moments, drawn, generator, normal
from tests.bayes.test_layers import randomised
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients

SAMPLES = 200_000


def network(
    hidden: int = 1, activation: type[nn.Module] = nn.ReLU, **options: Any
) -> nn.Sequential:
    widths = [3, *[6] * hidden, 2]
    layers: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        layers += [bayes.BayesLinear(wide, next_wide, **options), activation()]
    return randomised(nn.Sequential(*layers[:-1]))


def weights(model: nn.Sequential) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in model:
        if isinstance(layer, bayes.BayesLinear):
            yield layer.weight_mean, layer.weight_log_stddev
            yield layer.bias_mean, layer.bias_log_stddev


def sampled(model: nn.Sequential, x: Tensor, seed: int = 20) -> Tensor:
    """Outputs (count, 2) of ReLU networks with drawn weights, for inputs (count, 3)."""
    parameters = [drawn(*pair, len(x), seed + i) for i, pair in enumerate(weights(model))]
    value = x
    for i in range(0, len(parameters), 2):
        value = torch.einsum("noi,ni->no", parameters[i], value) + parameters[i + 1]
        value = value.relu() if i + 2 < len(parameters) else value
    return value


@pytest.mark.parametrize(
    "method", [cp.Exact(), cp.Series(order=4), cp.Wu2019()], ids=lambda m: type(m).__name__
)
def test_one_hidden_layer_and_a_known_input_are_exact(method: Any) -> None:
    """Hidden units are independent there, so that all methods are right."""
    model, x = network(), normal(2, 3)
    y = bayes.predict(model, x, method)
    assert y.batch_shape == (2,)
    for i in range(2):
        samples = sampled(model, x[i].expand(SAMPLES, 3))
        assert_moments(y.mean[i].detach(), y.covariance_matrix[i].detach(), samples)


def test_variances_alone_are_right_for_one_hidden_layer() -> None:
    model, x = network(), normal(2, 3)
    exact, alone = bayes.predict(model, x), bayes.predict(model, x, cp.AssumedDensity())
    assert_close(alone.mean, exact.mean)
    assert_close(alone.variance, exact.variance)


def test_draws_of_a_network_have_its_moments() -> None:
    model, x = network(), normal(2, 3)
    y = bayes.predict(model, x)
    with torch.no_grad():
        samples = bayes.draws(model, x, SAMPLES, generator(3))
    assert samples.shape == (SAMPLES, 2, 2)
    assert_moments(y.mean[0].detach(), y.covariance_matrix[0].detach(), samples[:, 0])


def test_deeper_networks_are_near_sampling() -> None:
    """Not exact: hidden pre-activations of the second layer are no Gaussians, they are products."""
    model, x = network(hidden=3), normal(1, 3)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, bayes.BayesLinear):
                layer.weight_log_stddev.fill_(-2.0)
    y = bayes.predict(model, x).detach()
    samples = sampled(model, x.expand(SAMPLES, 3))
    assert_close(y.mean[0], samples.mean(0), rtol=0.05, atol=0.01)  # of the Gaussian assumption
    assert_close(y.variance[0], samples.var(0), rtol=0.05)


def test_uncertain_inputs_and_weights_together() -> None:
    model = network()
    factor = normal(2, 3, 3, seed=5) / 4
    x = cp.Gaussian(normal(2, 3), factor @ factor.mT)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, bayes.BayesLinear):
                layer.weight_log_stddev.fill_(-2.0)
    y = bayes.predict(model, x).detach()
    samples = sampled(model, x.sample(SAMPLES, generator(7))[:, 0])
    assert_close(y.mean[0], samples.mean(0), rtol=0.03, atol=0.01)  # of the Gaussian assumption
    assert_close(y.variance[0], samples.var(0), rtol=0.03)


@pytest.mark.parametrize("hidden", [1, 2])
@pytest.mark.parametrize(
    "method", [cp.Exact(), cp.Series(order=4), cp.Wu2019(), cp.AssumedDensity()],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_members_together_are_members_alone(method: Any, hidden: int) -> None:
    together, x = network(hidden, members=3), normal(3, 4, 3)
    y = bayes.predict(together, x, method)
    assert y.batch_shape == (3, 4)
    divergences = []
    for i in range(3):
        one = network(hidden)
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(together.get_parameter(name)[i])
        expected = bayes.predict(one, x[i], method)
        divergences.append(bayes.kl(one))
        assert_close(y.mean[i], expected.mean)
        assert_close(y.covariance_matrix[i], expected.covariance_matrix)
    assert_close(bayes.kl(together), torch.stack(divergences))


def test_sample_moments_are_differentiable_and_repeatable() -> None:
    model, x = network(), normal(4, 3)
    method = bayes.LocalReparametrisation(50, generator(2))
    y = bayes.predict(model, x, method)
    again = bayes.predict(model, x, bayes.LocalReparametrisation(50, generator(2)))
    assert torch.equal(y.mean, again.mean)
    draws = bayes.draws(model, x, 50, generator(2))
    assert_close(y.mean, draws.mean(0))
    assert_close(y.covariance_matrix[1], torch.cov(draws[:, 1].T))
    (y.mean.sum() + y.variance.sum()).backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())
    with pytest.raises(ValueError, match="samples is a whole number from 1"):
        bayes.LocalReparametrisation(0)


def test_one_draw_trains_but_has_no_variance() -> None:
    model, x, y = network(), normal(4, 3), normal(4, 2)
    likelihood = bayes.HomoskedasticGaussian(2.0, learned=False)
    one, many = (bayes.LocalReparametrisation(n, generator(n)) for n in (1, 100_000))
    elbo = bayes.ELBO(likelihood, 4)
    with torch.no_grad():
        losses = torch.stack([elbo(model, x, y, one).loss for _ in range(500)])
        expected = elbo(model, x, y, many).loss
    assert abs(losses.mean() - expected) < 5 * losses.std() / len(losses) ** 0.5
    with pytest.raises(ValueError, match="one draw has no variance"):
        bayes.predict(model, x, one)
    with pytest.raises(ValueError, match="one draw has no variance"):
        bayes.predict_target(model, likelihood, x, one)


def test_other_layers_are_ordinary() -> None:
    """A network that is Bayesian in its last layer only, and one that has dropout in training."""
    body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3)).double().eval()
    last = randomised(bayes.BayesLinear(8, 2))
    x = normal(5, 3)
    y = bayes.predict(nn.Sequential(body, last), x)
    assert_close(y.covariance_matrix, bayes.predict(last, body(x)).covariance_matrix)
    body.train()
    noisy = bayes.predict(nn.Sequential(body, last), x)
    assert bool((noisy.variance > y.variance).all())


def test_sampling_methods_see_random_weights() -> None:
    model, x = network(), normal(2, 3)
    torch.manual_seed(0)
    y = bayes.predict(model, x, cp.MonteCarlo(50_000))
    exact = bayes.predict(model, x).detach()
    assert bool(((y.mean - exact.mean).abs() < 5.5 * y.mean_stderr).all())
    off = (y.covariance_matrix - exact.covariance_matrix).abs() / y.covariance_stderr
    assert float(off.max()) < 5.5


def test_an_ordinary_network_trains_with_noise_on_its_inputs() -> None:
    """Gast & Roth: noise in, log-likelihood out, no random weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    x = normal(64, 2)
    target = x[:, :1].sin() + x[:, 1:].square() / 2
    noisy = cp.Gaussian.isotropic(x, stddev=0.2, batch_dims=1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)

    def loss() -> Tensor:
        y = bayes.predict(model, noisy)
        variance = y.variance + 0.01
        return ((target - y.mean).square() / variance + variance.log()).mean()

    before = float(loss().detach())
    for _ in range(60):
        optimiser.zero_grad()
        value = loss()
        value.backward()
        optimiser.step()
    assert float(value.detach()) < before - 1


def test_the_decomposition_adds_up() -> None:
    model = network()
    x = cp.Gaussian.isotropic(normal(4, 3), stddev=0.3, batch_dims=1)
    whole, parts = bayes.predict(model, x), bayes.decompose(model, x)
    assert_close(parts.total, whole.variance)
    assert_close(parts.epistemic, bayes.predict(model, x.mean).variance)
    assert not parts.aleatoric.any()
    with_noise = bayes.decompose(model, x, bayes.HeteroskedasticGaussian())
    noise = (whole.mean[:, 1:] + whole.variance[:, 1:] / 2).exp()
    assert_close(with_noise.total, whole.variance[:, :1] + noise)
    assert with_noise.epistemic.shape == (4, 1)


def test_a_variance_beyond_all_numbers_is_infinite_and_not_no_number() -> None:
    model, x = network(), 1e4 * normal(4, 3)
    for given in (x, cp.Gaussian.isotropic(x, stddev=0.3, batch_dims=1)):
        parts = bayes.decompose(model, given, bayes.Poisson())
        variance = bayes.predict_target(model, bayes.Poisson(), given).variance
        assert bool(variance.isinf().any())
        assert not parts.input.isnan().any()
        assert torch.equal(parts.total.isinf(), variance.isinf())


@pytest.mark.parametrize("wrong", ["poisson", bayes.Poisson, cp.Exact()])
def test_a_decomposition_is_by_an_object(wrong) -> None:
    with pytest.raises(TypeError, match=r"such as bayes.Poisson\(\)"):
        bayes.decompose(network(), normal(4, 3), wrong)


def test_what_is_known_has_no_part_in_it() -> None:
    known = bayes.decompose(network(), normal(4, 3))
    assert not known.input.any()
    assert bool((known.epistemic > 0).all())
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = cp.Gaussian.isotropic(normal(4, 3), stddev=0.3, batch_dims=1)
    parts = bayes.decompose(plain, x)
    assert not parts.epistemic.any()
    assert_close(parts.input, bayes.predict(plain, x).variance)


def test_a_network_without_randomness_predicts_itself() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = normal(4, 3)
    y = bayes.predict(plain, x)
    assert_close(y.mean, plain(x))
    assert not y.variance.any()


def test_inputs_need_a_batch() -> None:
    model = network()
    with pytest.raises(ValueError, match="and then features"):
        bayes.predict(model, normal(3))
    with pytest.raises(ValueError, match="needs a batch of shape"):
        bayes.predict(model, cp.Gaussian.isotropic(normal(3), stddev=0.1))
    with pytest.raises(TypeError, match=r"a tensor or a cp\.Gaussian"):
        bayes.predict(model, [1.0])  # type: ignore[arg-type]
    with pytest.raises(cp.UnsupportedOperation, match="different members"):
        bayes.predict(
            nn.Sequential(bayes.BayesLinear(3, 3), bayes.BayesLinear(3, 3, members=2)),
            normal(2, 2, 3),
        )
    bad = normal(2, 3)
    bad[0, 0] = torch.nan
    with pytest.raises(cp.InvalidGaussian, match="NaN"):
        bayes.predict(model, bad)


@pytest.mark.parametrize("hidden", [1, 2])
@pytest.mark.parametrize("zero", [False, True], ids=["random", "zero variances"])
def test_gradients_are_those_of_finite_differences(hidden: int, zero: bool) -> None:
    model, x = network(hidden), normal(2, 3)
    parameters = dict(model.named_parameters())
    if zero:  # where nothing varies, the moments have their limits
        parameters = {
            name: torch.full_like(p, -torch.inf) if "log_stddev" in name else p
            for name, p in parameters.items()
        }
    free = [name for name in parameters if not (zero and "log_stddev" in name)]

    def moments(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        given = {**parameters, **dict(zip(free, values, strict=True))}
        y = propagate(lambda t: functional_call(model, given, (t,)), cp.Gaussian.constant(x, 1))
        return y.mean, y.covariance_matrix

    inputs = [t.detach().clone().requires_grad_() for t in (x, *(parameters[n] for n in free))]
    assert_gradients(moments, inputs, atol=1e-6)


@pytest.mark.parametrize("x", [torch.zeros(2, 3).double(), normal(2, 3)], ids=["zero", "random"])
def test_gradients_are_finite_where_nothing_varies(x: Tensor) -> None:
    """Also at a ReLU whose input is exactly zero, and for draws."""
    for use in (bayes.predict, lambda m, t: bayes.predict(m, t, bayes.LocalReparametrisation(3))):
        model = network(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "log_stddev" in name:
                    parameter.fill_(-torch.inf)
                elif "bias" in name:
                    parameter.zero_()
        y = use(model, x)
        assert not y.variance.any()
        (y.mean.sum() + y.covariance_matrix.sum()).backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_gradients_of_draws() -> None:
    model, x = network(), normal(2, 3)
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]

    class Given(nn.Module):
        def __init__(self, values: Any) -> None:
            super().__init__()
            self.values = values

        def forward(self, t: Tensor) -> Any:
            return functional_call(model, dict(zip(names, self.values, strict=True)), (t,))

    def function(*values: Tensor) -> Tensor:
        return bayes.draws(Given(values), x, 3, generator(1))

    assert torch.autograd.gradcheck(function, values, atol=1e-6)
