"""Moments over the masks of dropout, against stochastic passes."""

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop import bayes

PASSES, TOGETHER = 10_000, 500


def network(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).double().eval().requires_grad_(False)


def shallow() -> nn.Sequential:
    """Dropout behind the last activation: its moments are exact."""
    torch.manual_seed(0)
    return network(nn.Linear(6, 30), nn.Tanh(), nn.Dropout(0.4), nn.Linear(30, 3))


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return network(
        nn.Linear(6, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(50, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 3),
    )  # fmt: skip


def channels() -> nn.Sequential:
    torch.manual_seed(0)
    return network(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(6 * 36, 20),
        nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


def passes(model: nn.Module, x: Tensor) -> Tensor:
    """(passes, batch, outputs): many at a time, each row of which has a mask of its own."""
    torch.manual_seed(2)
    many = x.repeat(TOGETHER, *(1 for _ in x.shape[1:]))
    with cp.dropout_active(model):
        parts = [model(many).unflatten(0, (-1, len(x))) for _ in range(PASSES // TOGETHER)]
    return torch.cat(parts)


def standard_errors(drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the mean and the variance of passes."""
    square = (drawn - drawn.mean(0)).square()
    return drawn.std(0) / PASSES**0.5, square.std(0) / PASSES**0.5


@pytest.mark.parametrize("method", ["auto", "gaussian-layers", "cumulants"])
def test_one_layer_of_dropout_has_the_moments_of_passes(method: str) -> None:
    """Within 5 standard errors, and covariances as well."""
    model, x = shallow(), rows(4, 6)
    y, drawn = cp.mc_dropout(model, x, method=method), passes(model, x)
    mean_error, variance_error = standard_errors(drawn)
    assert ((y.mean - drawn.mean(0)).abs() < 5 * mean_error).all()
    assert ((y.variance - drawn.var(0)).abs() < 5 * variance_error).all()
    centred = drawn - drawn.mean(0)
    products = centred[..., :, None] * centred[..., None, :]
    error = products.std(0) / PASSES**0.5
    assert ((y.covariance_matrix - products.mean(0)).abs() < 5 * error).all()


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_one_layer_of_dropout_has_a_closed_form(p: float) -> None:
    """Var = p / (1 - p) sum_j w_ij^2 h_j^2, and the mean is that of evaluation mode."""
    model, x = shallow(), rows(4, 6)
    model[2].p = p
    y = cp.mc_dropout(model, x, method="gaussian-layers")
    hidden = model[:2](x)
    expected = p / (1 - p) * hidden.square() @ model[3].weight.square().T
    torch.testing.assert_close(y.mean, model(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y.variance, expected, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("method", ["auto", "cumulants"])
def test_two_layers_of_dropout_are_closer_than_two_hundred_passes(method: str) -> None:
    """Whose standard errors are 7 % of a deviation for means, and 5 % for deviations."""
    model, x = deep(), rows(6, 6)
    y, drawn = cp.mc_dropout(model, x, method=method), passes(model, x)
    mean_error, variance_error = standard_errors(drawn)
    spread = drawn.std(0)
    assert ((y.mean - drawn.mean(0)).abs() < 0.07 * spread + 5 * mean_error).all()
    stddev_error = variance_error / (2 * spread)
    assert ((y.stddev - spread).abs() < 0.05 * spread + 5 * stddev_error).all()


def test_class_probabilities_are_those_of_passes() -> None:
    model, x = deep(), rows(6, 6)
    found = bayes.Categorical().predict(cp.mc_dropout(model, 3 * x, method="cumulants")).mean
    drawn = passes(model, 3 * x).softmax(-1)
    error, _ = standard_errors(drawn)
    assert ((found - drawn.mean(0)).abs() < 0.07 * drawn.std(0) + 5 * error).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(6).double(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("method", ["auto", "gaussian-layers", "cumulants"])
@pytest.mark.parametrize("make", [deep, channels])
def test_the_estimate_covers_the_error(make, method: str) -> None:
    """Also of few masks of whole channels, of which the two orders know the same."""
    model = make()
    x = rows(6, 6) if make is deep else rows(3, 1, 8, 8)
    y, drawn = cp.mc_dropout(model, x, method=method), passes(model, x)
    _, variance_error = standard_errors(drawn)
    off = (y.stddev / drawn.std(0) - 1).abs() - 5 * variance_error / (2 * drawn.var(0))
    assert float(off.max()) < y.error.largest_stddev
    if make is channels:
        assert off.max() > 0.02  # so that there is something to cover


def test_a_batch_is_a_loop_and_the_model_stays_as_it_is() -> None:
    model, x = deep(), rows(5, 6)
    y = cp.mc_dropout(model, x, method="gaussian-layers")
    assert not any(layer.training for layer in model.modules())
    for i in range(5):
        alone = cp.mc_dropout(model, x[i : i + 1], method="gaussian-layers")
        torch.testing.assert_close(alone.covariance_matrix[0], y.covariance_matrix[i])
    one = cp.mc_dropout(shallow(), x[0], batch_dims=0, method="gaussian-layers")
    many = cp.mc_dropout(shallow(), x, method="gaussian-layers")
    torch.testing.assert_close(one.covariance_matrix, many.covariance_matrix[0])


@pytest.mark.filterwarnings("error::covprop.DropoutWarning")
def test_a_model_in_training_mode_gives_the_same_without_a_warning() -> None:
    expected = cp.mc_dropout(shallow(), rows(4, 6), method="gaussian-layers")
    model = shallow().train()
    y = cp.mc_dropout(model, rows(4, 6), method="gaussian-layers")
    assert torch.equal(y.variance, expected.variance)
    assert all(layer.training for layer in model.modules())


def test_noise_of_the_input_counts_as_well() -> None:
    """The law of total variance: that of the masks, averaged over inputs, and of the inputs."""
    model, x = shallow(), rows(4, 6)
    noisy = cp.Gaussian.isotropic(x, stddev=0.3, batch_dims=1)
    y = cp.mc_dropout(model, noisy, method="gaussian-layers")
    hidden = cp.propagate(model[:2], noisy, method="gaussian-layers")
    second = hidden.variance + hidden.mean.square()
    masks = 0.4 / 0.6 * second @ model[3].weight.square().T
    inputs = cp.propagate(model, noisy, method="gaussian-layers").variance
    torch.testing.assert_close(y.variance, masks + inputs, rtol=1e-9, atol=0.0)


def test_single_precision_follows_the_model() -> None:
    y = cp.mc_dropout(shallow().float(), rows(4, 6).float(), method="gaussian-layers")
    expected = cp.mc_dropout(shallow(), rows(4, 6), method="gaussian-layers")
    assert y.mean.dtype == torch.float32
    torch.testing.assert_close(y.stddev.double(), expected.stddev, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("model", [network(nn.Linear(6, 3)), network(nn.Dropout(0.0))])
def test_a_model_without_dropout_is_refused(model: nn.Module) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="no dropout layer with p > 0"):
        cp.mc_dropout(model, rows(4, 6))


def test_alpha_dropout_is_refused_and_may_be_sampled() -> None:
    torch.manual_seed(0)
    model = network(nn.Linear(6, 30), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(30, 3))
    with pytest.raises(cp.UnsupportedOperation, match=r"or use cp\.MonteCarlo\(\)"):
        cp.mc_dropout(model, rows(4, 6), method="gaussian-layers")
    y = cp.mc_dropout(model, rows(4, 6), method=cp.MonteCarlo(1000))
    assert (y.stddev > 0).all()
