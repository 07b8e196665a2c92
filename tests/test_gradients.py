"""Gradients through propagate: right everywhere, finite at the singular points."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian
from torch.func import functional_call

import covprop as cp
from tests.cases import CASES, CONTINUOUS
from tests.gaussians import numbers
from tests.layers import propagate
from tests.oracles import assert_close
from tests.oracles import assert_gradients as assert_gradients_along_lines

EXACT, SERIES = cp.Exact(), cp.Series(order=4)
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.2),
    "hardtanh": nn.Hardtanh(),
    "tanh": nn.Tanh(),
    "gelu": nn.GELU(),
    "elu": nn.ELU(),
}


def moments(
    model: Callable[[Any], Any], mean: Tensor, factor: Tensor, method: Any = EXACT
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the output, the input's covariance being factor factor^T."""
    x = cp.Gaussian(mean, factor @ factor.mT, validate_args=False)
    y = propagate(model, x, method)
    return y.mean, y.covariance_matrix


def assert_gradients(
    model: nn.Module, mean: Tensor, factor: Tensor, method: Any, *, one_by_one: bool = False
) -> None:
    """With respect to mean, factor and every parameter of the model: along lines, or each."""
    parameters = dict(model.named_parameters())

    def function(mean: Tensor, factor: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        given = dict(zip(parameters, values, strict=True))
        return moments(lambda x: functional_call(model, given, (x,)), mean, factor, method)

    inputs = [t.detach().clone().requires_grad_() for t in (mean, factor, *parameters.values())]
    if one_by_one:
        assert gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)
    else:
        assert_gradients_along_lines(function, inputs, atol=1e-6)


def test_a_gradient_that_is_wrong_in_one_entry_is_found() -> None:
    wrong = torch.zeros(3, 3, dtype=torch.float64)
    wrong[1, 2] = 3e-6

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        extra = wrong @ x
        return torch.sin(x), x.exp() + extra - extra.detach()

    inputs = [numbers(3)]
    with pytest.raises(AssertionError, match="the derivative along a line"):
        assert_gradients_along_lines(function, inputs, atol=1e-6)
    wrong.zero_()
    assert_gradients_along_lines(function, inputs, atol=1e-6)


@pytest.mark.parametrize("method", [EXACT, SERIES], ids=repr)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_a_network_are_right(name: str, method: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), ACTIVATIONS[name], nn.Linear(4, 2)).double()
    assert_gradients(model, numbers(2, 3), numbers(2, 3, 3) / 2, method)


def test_gradients_of_a_convolutional_network_are_right() -> None:
    torch.manual_seed(1)
    layers = nn.Conv1d(1, 2, 3, padding="same"), nn.BatchNorm1d(2), nn.ReLU(), nn.AvgPool1d(2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 1)).double().eval()
    assert_gradients(model, numbers(2, 1, 4), numbers(2, 4, 2) / 2, EXACT)


def test_gradients_of_two_layers_are_right() -> None:
    torch.manual_seed(2)
    layers = nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 1)
    model = nn.Sequential(*layers).double()
    assert_gradients(model, numbers(2), numbers(2, 2) / 2, EXACT, one_by_one=True)


def test_gradients_through_blocks_computed_again_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", 6)
    monkeypatch.setattr("covprop.covariance.dense.KEPT", 0)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.GELU()).double()
    assert_gradients(model, numbers(2), numbers(2, 2) / 2, EXACT)


@pytest.mark.parametrize("method", [EXACT, SERIES], ids=repr)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_with_a_constant_unit_are_right(name: str, method: Any) -> None:
    """A unit whose weights are zero has no variance; its derivatives exist all the same."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), ACTIVATIONS[name], nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight[1] = 0.0
    assert_gradients(model, numbers(3), numbers(3, 3) / 2, method)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_with_duplicated_units_are_right(name: str) -> None:
    """Two equal units and one opposite: correlations are exactly 1 and -1."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), ACTIVATIONS[name], nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter[1], parameter[2] = parameter[0], -parameter[0]
    assert_gradients(model, numbers(3), numbers(3, 3) / 2, EXACT)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_with_a_singular_covariance_are_right(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), ACTIVATIONS[name], nn.Linear(4, 2)).double()
    assert_gradients(model, numbers(3), numbers(3, 1) / 2, EXACT)


@pytest.mark.parametrize("method", [EXACT, SERIES], ids=repr)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_without_variance_the_gradients_are_those_of_the_linearised_network(
    name: str, method: Any
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), ACTIVATIONS[name], nn.Linear(4, 2)).double()
    mean = numbers(3).requires_grad_()
    covariance = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    y = propagate(model, cp.Gaussian(mean, covariance), method)
    slope = jacobian(model, mean.detach())
    weights = numbers(2, 2, seed=5)
    (by_mean,) = torch.autograd.grad(y.mean @ weights[0], mean, retain_graph=True)
    assert_close(by_mean, weights[0] @ slope, rtol=1e-12)
    (by_covariance,) = torch.autograd.grad((y.covariance_matrix * weights).sum(), covariance)
    symmetric = (by_covariance + by_covariance.mT) / 2
    expected = slope.mT @ weights @ slope
    assert_close(symmetric, (expected + expected.mT) / 2, atol=1e-12)


CURVED = ["tanh", "gelu", "exp", "sin", "square", "pow(3)", "softplus", "erf", "silu"]


@pytest.mark.parametrize("name", CURVED)
def test_without_variance_the_mean_bends_with_half_the_second_derivative(name: str) -> None:
    function = CASES[name].function
    mean = numbers(4)
    variance = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    y = propagate(function, cp.Gaussian(mean, torch.diag_embed(variance)))
    (gradient,) = torch.autograd.grad(y.mean.sum(), variance)
    bend = torch.stack([jacobian(lambda t: jacobian(function, t, create_graph=True), m)
                        for m in mean])  # fmt: skip
    assert_close(gradient, bend / 2, atol=1e-8)


SINGULAR = {
    "no variance at all": [[0.0, 0.0, 0.0, 0.0]],
    # some without variance; duplicates and opposites; one direction
    "some variance": [[0.0, 1.0, 0.0, 0.5], [0.7, 0.7, -0.7, 0.7], [0.7, 0.2, -0.4, 1.0]],
}
"""Batches of the one direction in which four elements vary."""


@pytest.mark.parametrize("method", [EXACT, SERIES], ids=repr)
@pytest.mark.parametrize("where", SINGULAR)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_gradients_at_singular_points_are_finite(name: str, where: str, method: Any) -> None:
    """On a kink (the first two means) as well as off it."""
    kinked = torch.tensor([0.0, 0.0, 1.0, -0.3], dtype=torch.float64)
    factor = torch.tensor(SINGULAR[where], dtype=torch.float64)[..., None].repeat(2, 1, 1)
    values = torch.stack([kinked, torch.full_like(kinked, 0.4)])
    values = values.repeat_interleave(len(SINGULAR[where]), 0).requires_grad_()
    covariance = (factor @ factor.mT).requires_grad_()
    y = propagate(CASES[name].function, cp.Gaussian(values, covariance), method)
    total = y.mean.sum() + (y.covariance_matrix * numbers(4, 4)).sum()
    if not total.requires_grad:  # a power of zero is a constant
        assert name == "pow(0)"
        return
    gradients = torch.autograd.grad(total, (values, covariance), allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in gradients)


def test_float32_has_float32_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    mean = numbers(3).float().requires_grad_()
    covariance = torch.eye(3).requires_grad_()
    y = propagate(model, cp.Gaussian(mean, covariance))
    y.covariance_matrix.sum().backward()
    for tensor in (mean, covariance, *model[0].parameters()):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert torch.isfinite(tensor.grad).all()


def test_nothing_is_recorded_without_grad() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).double()
    with torch.no_grad():
        y = propagate(model, cp.Gaussian(numbers(3), torch.eye(3, dtype=torch.float64)))
    assert not y.mean.requires_grad
    assert not y.covariance_matrix.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_gradients_after_a_unit_far_from_its_kink_are_finite(name: str) -> None:
    """Its variance after a ReLU is 1e-210 to 1e-320, whose powers are beyond float64."""
    distances = [-45.0, -38.0, -34.0, 38.0]
    if name.startswith(("exp", "pow(3", "pow(4")):
        distances.pop()  # of 31 standard deviations, beyond float64 themselves
    means = [[distance, 0.3] for distance in distances]
    mean = torch.tensor(means, dtype=torch.float64, requires_grad=True)
    root = torch.tensor([[1.0, 0.0], [0.2, 1.0]], dtype=torch.float64, requires_grad=True)
    x = cp.Gaussian(mean, (root @ root.mT).expand(len(mean), 2, 2))
    result = propagate(lambda y: CASES[name].function(torch.relu(y)), x)
    total = result.mean.sum() + result.covariance_matrix.sum() + 0 * (mean.sum() + root.sum())
    for gradient in torch.autograd.grad(total, (mean, root), retain_graph=True):
        assert bool(torch.isfinite(gradient).all())
    below = result.covariance_matrix[:3, 0, 0].sum()  # nothing comes of the unit
    (by_mean,) = torch.autograd.grad(below + 0 * mean.sum(), mean)
    assert float(by_mean.abs().max()) <= 1e-100


def test_gradients_of_batch_norm_between_two_relus_are_finite() -> None:
    layers = nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU()
    network = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        network[0].weight.copy_(numbers(8, 4))
        network[0].bias[:4] = (
            -0.3 * network[0].weight[:4].norm(dim=1) * torch.tensor([31.0, 34.0, 37.0, 38.4])
        )
        network[2].running_mean.copy_(0.2 * numbers(8, seed=1))
    x = cp.Gaussian(0.01 * numbers(2, 4, seed=2), 0.09 * torch.eye(4).double().expand(2, 4, 4))
    result = propagate(network, x)
    (result.mean.sum() + result.covariance_matrix.sum()).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert bool(torch.isfinite(parameter.grad).all())


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=4)], ids=repr)
def test_coefficients_that_are_zero_have_gradients(method: Any) -> None:
    """The first of a square at mean zero, between two functions of one tensor."""
    matrix = torch.tensor([[1.0, 0.4], [0.4, 0.8]], dtype=torch.float64)

    def covariance(mean: Tensor) -> Tensor:
        def model(x: Any) -> Any:
            square = x.square()
            return torch.cat([square + 0.5 * square, square])

        return propagate(model, cp.Gaussian(mean, matrix), method).covariance_matrix

    mean = torch.tensor([0.0, 0.7], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(covariance(mean)[0, 3], mean)
    # Cov(1.5 x_0^2, x_1^2) = 1.5 (4 m_0 m_1 c + 2 c^2).
    assert float(gradient[0]) == pytest.approx(1.5 * 4 * 0.7 * 0.4, rel=1e-12)
    assert float(gradient[1]) == pytest.approx(0.0, abs=1e-12)
