"""Activations that never fall, exchanged with the maximum behind them: max g(y) = g(max y)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from tests.cases import CASES
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64
Function = Callable[[Any], Any]


def images(stddev: float = 0.5) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(2, 1, 6, 6, generator=generator, dtype=D)
    return cp.Gaussian.isotropic(mean, stddev=stddev, batch_dims=1)


def convolution() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Conv2d(1, 3, 3, padding=1).to(D).requires_grad_(False)


BEFORE = convolution()
UNSAID = ("prelu(0.2)", "pow(0)", "pow(3)")
"""Which rise, and for which nobody asked."""
EXTREMES: dict[str, Function] = {
    "pooling": lambda x: F.max_pool2d(x, 2),
    "padded pooling": lambda x: F.max_pool2d(x, 3, 2, 1),
    "adaptive pooling": lambda x: F.adaptive_max_pool2d(x, 2),
    "uneven adaptive pooling": lambda x: F.adaptive_max_pool2d(x, 4),
    "with indices": lambda x: F.max_pool2d_with_indices(x, 2)[0],
    "amax": lambda x: torch.amax(x, (2, 3)),
    "amin": lambda x: torch.amin(x, -1),
    "max": lambda x: torch.max(x, 1).values,
    "min": lambda x: x.min(-1).values,
}


def assert_equal_moments(y: cp.Gaussian, z: cp.Gaussian) -> None:
    assert_close(y.mean, z.mean, rtol=1e-12, atol=1e-12)
    assert_close(y.covariance_matrix, z.covariance_matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_to_rise_does_and_what_rises_is_said_to(name: str) -> None:
    case = CASES[name]
    points = torch.linspace(-9, 9, 2001, dtype=D)
    values = case.function(points)
    rises = bool((values.diff() >= 0).all())
    lazy: list[bool] = []

    def watched(x: Any) -> Any:
        y = case.function(x)
        pending = getattr(y, "pending", None)
        lazy.append(pending is not None and pending.expression.nondecreasing)
        return y

    propagate(watched, cp.Gaussian.isotropic(torch.zeros(2, dtype=D), stddev=0.1))
    assert lazy == [rises and name not in UNSAID]


@torch.no_grad()
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, F.elu, F.leaky_relu])
def test_a_maximum_comes_before_what_never_falls(extreme: str, activation: Function) -> None:
    largest = EXTREMES[extreme]
    y = propagate(lambda x: largest(activation(BEFORE(x))), images())
    z = propagate(lambda x: activation(largest(BEFORE(x))), images())
    assert_equal_moments(y, z)


@torch.no_grad()
@pytest.mark.parametrize("activation", [F.gelu, torch.abs, torch.sin])
def test_what_falls_somewhere_stays_where_it_is(activation: Function) -> None:
    y = propagate(lambda x: F.max_pool2d(activation(BEFORE(x)), 2), images())
    z = propagate(lambda x: F.max_pool2d(activation(BEFORE(x)).clone(), 2), images())
    assert_equal_moments(y, z)


@torch.no_grad()
def test_pooling_of_rectified_units_agrees_with_sampling() -> None:
    def function(x: Any) -> Any:
        return F.max_pool2d(torch.relu(BEFORE(x)), 2)

    y = propagate(function, images())
    z = propagate(function, images(), cp.MonteCarlo(100_000, seeded()))
    rectified_first = propagate(lambda x: F.max_pool2d(torch.relu(BEFORE(x))[...], 2), images())
    error, before = ((w.stddev - z.stddev).abs() / z.stddev.mean() for w in (y, rectified_first))
    assert float(error.mean()) < 0.03
    assert float(error.mean()) < 0.5 * float(before.mean())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(BEFORE, nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def changed_afterwards(x: Any) -> Any:
    y = BEFORE(x)
    z = torch.relu(y)
    y += 1
    assert z.shape == y.shape
    assert z.dtype == y.dtype
    return F.max_pool2d(z, 2)


def underscored(x: Any) -> Any:
    y = BEFORE(x)
    y.relu_()
    return F.max_pool2d(y, 2)


@torch.no_grad()
@pytest.mark.parametrize("model", [InPlace(), changed_afterwards, underscored])
def test_changes_in_place_are_followed(model: Any) -> None:
    y = propagate(model, images())
    assert_equal_moments(y, propagate(lambda x: F.max_pool2d(torch.relu(BEFORE(x)), 2), images()))


def used_twice(x: Any) -> Any:
    z = torch.relu(BEFORE(x))
    pooled = F.max_pool2d(z, 2)
    return torch.cat([pooled.flatten(1), z.flatten(1)], 1)


def used_before(x: Any) -> Any:
    z = torch.relu(BEFORE(x))
    return torch.cat([z.flatten(1), F.max_pool2d(z, 2).flatten(1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("function", [used_twice, used_before, changed_afterwards, underscored])
@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=4), cp.AssumedDensity()])
def test_a_trace_computes_what_propagate_does(function: Function, method: Any) -> None:
    traced = cp.trace(function, images(), method)
    assert_equal_moments(traced.output, propagate(function, images(), method))


@torch.no_grad()
def test_both_uses_of_one_activation_keep_their_dependence() -> None:
    y = propagate(used_twice, images())
    z = propagate(used_twice, images(), cp.MonteCarlo(100_000, seeded()))
    found, truth = (w.covariance_matrix[:, :27, 27:] for w in (y, z))  # of the one with the other
    assert float((found - truth).norm()) < 0.1 * float(truth.norm())


def test_an_activation_without_gradients_has_none_later() -> None:
    weight = torch.ones(3, 1, 1, dtype=D, requires_grad=True)

    def function(x: Any) -> Any:
        with torch.no_grad():
            z = torch.relu(BEFORE(x) * weight)
        return z * 2

    assert not propagate(function, images()).mean.requires_grad


def test_an_activation_looked_at_without_autograd_has_gradients_all_the_same() -> None:
    weight = torch.ones(3, 1, 1, dtype=D, requires_grad=True)

    def function(x: Any) -> Any:
        z = torch.relu(BEFORE(x) * weight)
        with torch.inference_mode():
            z.mean((2, 3))  # which carries the activation out
        return F.max_pool2d(z, 2) * weight

    y = propagate(function, images())
    (gradient,) = torch.autograd.grad(y.mean.sum() + y.variance.sum(), weight)
    plain = propagate(lambda x: F.max_pool2d(torch.relu(BEFORE(x) * weight)[...], 2) * weight,
                         images())  # fmt: skip
    assert_close(gradient, *torch.autograd.grad(plain.mean.sum() + plain.variance.sum(), weight))


class Scale(nn.Module):
    def forward(self, x: Any) -> Any:
        return 1e3 * x


@torch.no_grad()
@pytest.mark.parametrize("after", [(), (nn.Linear(2, 2),), (nn.Flatten(0), nn.MaxPool1d(2))])
def test_what_an_activation_refuses_late_is_told_of_its_own_module(
    after: tuple[nn.Module, ...],
) -> None:
    class Exponential(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.exp(x)

    x = cp.Gaussian.isotropic(torch.ones(1, 2), stddev=0.1)
    model = nn.Sequential(Scale(), nn.Sequential(Exponential()), *after)
    with pytest.raises(cp.MomentOverflow, match=r"^in module 1\.0 \(Exponential\): the moments"):
        propagate(model, x)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), *after)
    with pytest.raises(cp.UnsupportedOperation, match=r"^in module 1 \(Tanh\): torch\.tanh: Wu"):
        propagate(model, x, cp.Wu2019())
