"""Moments of layers with random weights, against weights that are sampled."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop import bayes
from covprop.bayes.layers import BayesLayer
from covprop.covariance import Dense, Diagonal
from tests.bayes.sampled import assert_moments, bilinear_covariance, generator, normal, outputs
from tests.layers import propagate
from tests.oracles import assert_close

SAMPLES = 15_000
Case = tuple[Callable[..., BayesLayer], Callable[..., Tensor], tuple[int, ...]]

LAYERS: dict[str, Case] = {
    "linear": (partial(bayes.BayesLinear, 4, 3), F.linear, (4,)),
    "linear in three positions": (partial(bayes.BayesLinear, 3, 2), F.linear, (3, 3)),
    "linear in two by two positions": (partial(bayes.BayesLinear, 2, 2), F.linear, (2, 2, 2)),
    "conv1d": (partial(bayes.BayesConv1d, 2, 3, 3), F.conv1d, (2, 5)),
    "conv1d with groups and a stride": (
        partial(bayes.BayesConv1d, 2, 4, 3, stride=2, padding=1, groups=2),
        partial(F.conv1d, stride=2, padding=1, groups=2),
        (2, 5),
    ),
    "conv2d": (partial(bayes.BayesConv2d, 2, 2, 2), F.conv2d, (2, 3, 3)),
    "conv2d with all options": (
        partial(bayes.BayesConv2d, 2, 2, (2, 3), (2, 1), (1, 2), (1, 2), 2),
        partial(F.conv2d, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        (2, 3, 3),
    ),
    "conv2d of the same size": (
        partial(bayes.BayesConv2d, 1, 2, (1, 3), padding="same"),
        partial(F.conv2d, padding="same"),
        (1, 2, 3),
    ),
    "conv2d in one place": (partial(bayes.BayesConv2d, 2, 3, 2), F.conv2d, (2, 2, 2)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def randomised(layer: nn.Module, seed: int = 3) -> Any:
    """Parameters of any size, doubles."""
    layer.double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.6 * normal(*parameter.shape, seed=seed + i))
    return layer


def constant(mean: Tensor) -> cp.Gaussian:
    return cp.Gaussian.constant(mean, batch_dims=1)


def diagonal(mean: Tensor) -> cp.Gaussian:
    return cp.Gaussian.diagonal(mean, variance=normal(*mean.shape, seed=8).square(), batch_dims=1)


def dense(mean: Tensor) -> cp.Gaussian:
    size = mean[0].numel()
    factor = normal(len(mean), size, size, seed=9) / 2
    return cp.Gaussian(mean, factor @ factor.mT)


INPUTS = {"constant": constant, "diagonal": diagonal, "dense": dense}
every_input = pytest.mark.parametrize("kind", INPUTS)


@every_layer
@every_input
def test_moments_are_those_of_sampled_weights(name: str, kind: str) -> None:
    make, function, event = LAYERS[name]
    layer, x = randomised(make()), INPUTS[kind](normal(2, *event))
    y = propagate(layer, x)
    points = x.sample(SAMPLES, generator(4))[:, 1]
    weight = (layer.weight_mean, layer.weight_log_stddev)
    samples = outputs(function, points, weight, (layer.bias_mean, layer.bias_log_stddev))
    assert y.mean.shape[1:] == samples.shape[1:]
    assert_moments(y.mean[1].flatten(), y.covariance_matrix[1], samples.flatten(1))


@every_layer
@every_input
def test_covariances_are_exact(name: str, kind: str) -> None:
    make, function, event = LAYERS[name]
    layer, x = randomised(make()), INPUTS[kind](normal(2, *event))
    y = propagate(layer, x).detach()
    for i in range(2):
        expected = bilinear_covariance(
            function, x.mean[i], x.covariance_matrix[i],
            (layer.weight_mean, layer.weight_log_stddev), (layer.bias_mean, layer.bias_log_stddev),
        )  # fmt: skip
        assert_close(y.covariance_matrix[i], expected, rtol=1e-12, atol=1e-12)


@every_layer
@every_input
def test_draws_have_the_same_moments(name: str, kind: str) -> None:
    make, _, event = LAYERS[name]
    layer, x = randomised(make()), INPUTS[kind](normal(2, *event))
    y = propagate(layer, x)
    with torch.no_grad():
        samples = bayes.draws(layer, x, SAMPLES, generator(5))
    assert_moments(y.mean[1].flatten(), y.covariance_matrix[1], samples[:, 1].flatten(1))


@every_layer
def test_variances_alone_are_those_of_independent_inputs(name: str) -> None:
    make, _, event = LAYERS[name]
    layer, x = randomised(make()), diagonal(normal(2, *event))
    exact, alone = propagate(layer, x), propagate(layer, x, cp.AssumedDensity())
    assert_close(alone.mean, exact.mean)
    assert_close(alone.variance, exact.variance)


@every_layer
@every_input
def test_without_variances_it_is_the_ordinary_layer(name: str, kind: str) -> None:
    make, function, event = LAYERS[name]
    layer, x = randomised(make()), INPUTS[kind](normal(2, *event))
    with torch.no_grad():
        layer.weight_log_stddev.fill_(-torch.inf)
        layer.bias_log_stddev.fill_(-torch.inf)
    y = propagate(layer, x)
    expected = propagate(lambda t: function(t, layer.weight_mean, layer.bias_mean), x)
    assert_close(y.mean, expected.mean)
    assert_close(y.covariance_matrix, expected.covariance_matrix)


@every_layer
@every_input
def test_members_are_networks_of_their_own(name: str, kind: str) -> None:
    make, _, event = LAYERS[name]
    together = randomised(make(members=3))
    x = INPUTS[kind](normal(6, *event))
    side = cp.Gaussian(
        x.mean.unflatten(0, (3, 2)), x.covariance.map(lambda t: t.unflatten(0, (3, 2)))
    )
    for method in (cp.Exact(), cp.AssumedDensity()):
        y = propagate(together, side, method)
        assert y.batch_shape == (3, 2)
        for i in range(3):
            one = make().double()
            with torch.no_grad():
                for key, parameter in one.named_parameters():
                    parameter.copy_(together.get_parameter(key)[i])
            expected = propagate(one, side[i], method)
            assert_close(y[i].mean, expected.mean)
            assert_close(y[i].covariance_matrix, expected.covariance_matrix)


def test_draws_of_members_have_their_moments() -> None:
    layer = randomised(bayes.BayesConv1d(2, 2, 2, members=2))
    x = normal(2, 3, 2, 4)
    y = bayes.predict(layer, x)
    with torch.no_grad():
        samples = bayes.draws(layer, x, SAMPLES, generator(1))
    assert samples.shape == (SAMPLES, 2, 3, 2, 3)
    assert_moments(y.mean[1, 2].flatten(), y.covariance_matrix[1, 2], samples[:, 1, 2].flatten(1))


def test_a_layer_without_a_bias() -> None:
    for make, event in ((bayes.BayesLinear, (2, 3)), (bayes.BayesConv1d, (3, 4))):
        layer = make(3, 2, *(() if make is bayes.BayesLinear else (2,)), bias=False)
        layer = randomised(layer)
        assert layer.bias_variance is None
        x = dense(normal(1, *event))
        y = propagate(layer, x)
        function = F.linear if make is bayes.BayesLinear else F.conv1d
        points = x.sample(SAMPLES, generator(4))[:, 0]
        nothing = torch.zeros(2, dtype=torch.float64)
        weight = (layer.weight_mean, layer.weight_log_stddev)
        samples = outputs(function, points, weight, (nothing, nothing - torch.inf))
        assert_moments(y.mean[0].flatten(), y.covariance_matrix[0], samples.flatten(1))


def test_a_known_input_gives_independent_outputs_and_no_matrix() -> None:
    layer = bayes.BayesLinear(5, 4)
    y = bayes.predict(layer, torch.ones(3, 5))
    assert isinstance(y.covariance, Diagonal)
    after = nn.Sequential(layer, bayes.BayesLinear(4, 2))
    assert isinstance(bayes.predict(after, torch.ones(3, 5)).covariance, Dense)


def test_a_wide_known_input_takes_no_memory_of_its_square() -> None:
    """An input of a million features would have a covariance of four terabytes."""
    layer = bayes.BayesLinear(1_000_000, 1)
    y = bayes.predict(nn.Sequential(nn.ReLU(), layer), torch.ones(2, 1_000_000))
    assert y.variance.shape == (2, 1)


@every_layer
@every_input
def test_a_single_gaussian_needs_no_batch(name: str, kind: str) -> None:
    make, _, event = LAYERS[name]
    layer, x = randomised(make()), INPUTS[kind](normal(2, *event))
    y, one = propagate(layer, x), propagate(layer, x[1])
    assert one.batch_shape == ()
    assert_close(one.mean, y.mean[1])
    assert_close(one.covariance_matrix, y.covariance_matrix[1])


def test_new_noise_is_independent_of_what_came_before() -> None:
    """y = x + W x: Cov(x, W x) = S E[W]^T, and all of it against sampling."""
    layer, x = randomised(bayes.BayesLinear(3, 3)), dense(normal(1, 3))
    y = propagate(lambda t: t + layer(t), x)
    points = x.sample(SAMPLES, generator(6))[:, 0]
    weight = (layer.weight_mean, layer.weight_log_stddev)
    samples = outputs(
        lambda t, w, b: t + F.linear(t, w, b), points, weight,
        (layer.bias_mean, layer.bias_log_stddev),
    )  # fmt: skip
    assert_moments(y.mean[0], y.covariance_matrix[0], samples)


def test_a_constant_joins_what_varies() -> None:
    layer, x = randomised(bayes.BayesLinear(3, 3)), constant(normal(2, 3))
    joined = propagate(lambda t: torch.cat([t, t + layer(t)], dim=-1), x)
    alone = propagate(layer, x)
    assert_close(joined.mean[:, 3:], alone.mean + x.mean)
    assert_close(joined.covariance_matrix[:, 3:, 3:], alone.covariance_matrix)
    assert not joined.covariance_matrix[:, :3].any()


def test_a_layer_that_is_used_twice_is_refused() -> None:
    layer = bayes.BayesLinear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    x = torch.ones(2, 3)
    for use in (
        bayes.predict,
        lambda m, t: bayes.draws(m, t, 4),
        lambda m, t: bayes.predict(m, t, cp.MonteCarlo(4)),
    ):
        with pytest.raises(cp.UnsupportedOperation, match=r"used twice.*shared=True"):
            use(model, x)
    bayes.predict(model[:2], x)  # a new pass is a new use
    tied = bayes.BayesLinear(3, 3)
    tied.weight_mean = layer.weight_mean
    with pytest.raises(cp.UnsupportedOperation, match="used twice"):
        bayes.predict(nn.Sequential(layer, tied), x)


def test_uses_that_are_declared_are_taken_as_independent() -> None:
    layer = randomised(bayes.BayesLinear(3, 3, shared=True))
    x = normal(2, 3)
    y = bayes.predict(nn.Sequential(layer, layer), x)
    first, second = bayes.BayesLinear(3, 3).double(), bayes.BayesLinear(3, 3).double()
    for copy in (first, second):
        copy.load_state_dict(layer.state_dict())
    expected = bayes.predict(nn.Sequential(first, second), x)
    assert_close(y.covariance_matrix, expected.covariance_matrix)
    assert bayes.draws(nn.Sequential(layer, layer), x, 4).shape == (4, 2, 3)
    assert bayes.predict(nn.Sequential(layer, layer), x, cp.MonteCarlo(4)).batch_shape == (2,)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (bayes.BayesLinear(3, 2), (2, 4), "takes 3 features"),
        (bayes.BayesConv1d(3, 2, 2), (2, 4, 5), "takes 3 channels and 1 dimension"),
        (bayes.BayesConv2d(3, 2, 2), (2, 3, 5), "takes 3 channels and 2 dimension"),
        (bayes.BayesLinear(3, 2, members=4), (5, 2, 3), r"shape \(4, batch, ...\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    layer: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    for use in (bayes.predict, lambda m, t: bayes.draws(m, t, 4)):
        with pytest.raises(cp.UnsupportedOperation, match=message):
            use(layer, torch.zeros(shape))


def test_constructors_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="members is a whole number from 1"):
        bayes.BayesLinear(2, 2, members=0)
    with pytest.raises(TypeError, match="a prior is an object"):
        bayes.BayesLinear(2, 2, prior="he")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups do not divide"):
        bayes.BayesConv1d(3, 4, 2, groups=2)
    with pytest.raises(ValueError, match="not one number for each of 2 dimensions"):
        bayes.BayesConv2d(3, 4, (2,))


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Linear"])
def test_layers_take_torchs_arguments_in_torchs_order(name: str) -> None:
    own = inspect.signature(getattr(bayes, f"Bayes{name}")).parameters
    torchs = [n for n in inspect.signature(getattr(nn, name)).parameters if n != "padding_mode"]
    assert [n for n in own if n in torchs] == torchs
    kept = [n for n, one in own.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert kept == [n for n in torchs if n not in ("device", "dtype")]


def test_a_plan_draws_nothing_and_knows_the_shapes() -> None:
    model = nn.Sequential(
        bayes.BayesConv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), bayes.BayesLinear(8, 3)
    )
    state = torch.get_rng_state()
    planned = cp.plan(model, cp.Gaussian.constant(torch.ones(2, 1, 4, 4), batch_dims=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [step.features for step in planned.steps] == [8, 8, 8, 3]


def test_a_plan_counts_what_is_kept() -> None:
    """Nothing of a constant, variances of independent units, matrices of the rest."""
    model = nn.Sequential(
        nn.Linear(5, 4), bayes.BayesLinear(4, 6), nn.ReLU(), bayes.BayesLinear(6, 3)
    )
    x = cp.Gaussian.constant(torch.ones(2, 5), batch_dims=1)
    planned = cp.plan(model, x)
    assert [step.covariance_bytes for step in planned.steps] == [0, 2 * 6 * 4, 2 * 6 * 4, 2 * 9 * 4]
    alone = cp.plan(model, x, method=cp.AssumedDensity())
    assert [step.covariance_bytes for step in alone.steps] == [2 * n * 4 for n in (4, 6, 6, 3)]
    members = nn.Sequential(bayes.BayesLinear(4, 6, members=2), nn.ReLU())
    side = cp.Gaussian.constant(torch.ones(2, 7, 4), batch_dims=2)
    assert [step.covariance_bytes for step in cp.plan(members, side).steps] == [14 * 6 * 4] * 2


def test_a_trace_sees_bayesian_layers() -> None:
    model = randomised(nn.Sequential(bayes.BayesLinear(3, 4), nn.ReLU(), bayes.BayesLinear(4, 2)))
    x = cp.Gaussian.isotropic(normal(2, 3), stddev=0.1, batch_dims=1)
    torch.manual_seed(0)
    with torch.no_grad():
        trace = cp.trace(model, x, samples=2000)
    found = [step.normality for step in trace.steps]
    assert len(found) == 4  # the input is the first
    assert all(normality is not None for normality in found)
