"""Element-wise operations on one tensor are one scalar function: against integrals of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64
Function = Callable[[Any], Any]
C = torch.tensor([0.7, -1.3], dtype=D)
B = torch.tensor([1.5, 0.4], dtype=D)
MEAN = torch.tensor([0.3, -0.5], dtype=D)
COVARIANCE = torch.tensor([[1.0, 0.5], [0.5, 0.8]], dtype=D)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)


R, T = 0.5**0.5, math.atanh(0.2)
"""Where x^2 = 1/2, and where tanh(x) = 0.2."""


def elu(x: Any) -> Any:
    return torch.where(x > 0, x, torch.exp(x) - 1)


FUNCTIONS: dict[str, tuple[Function, Sequence[float], Sequence[float]]] = {
    # name: function, kinks of the first element, kinks of the second
    "squared relu": (lambda x: torch.relu(x).square(), [0.0], [0.0]),
    "bell": (lambda x: torch.exp(-x.square()), [], []),
    "silu": (lambda x: x * torch.sigmoid(x), [], []),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), [], []),
    "softsign": (lambda x: x / (1 + x.abs()), [0.0], [0.0]),
    "clamped square": (lambda x: (x.clamp(-1, 1) + 1).pow(2), [-1.0, 1.0], [-1.0, 1.0]),
    "elu by where": (elu, [0.0], [0.0]),
    "filled": (lambda x: torch.tanh(x).masked_fill(x < 0, 0.0), [0.0], [0.0]),
    "jump": (lambda x: torch.where(x > 0.3, torch.tanh(x), x.sigmoid()), [0.3], [0.3]),
    "masked": (lambda x: x * (x > 0.3), [0.3], [0.3]),
    "masked by numbers": (lambda x: x * (x > 0.3).to(x.dtype), [0.3], [0.3]),
    "gated copies": (lambda x: x.clone() * torch.tanh(x).contiguous().type_as(x), [], []),
    "gated in one call": (lambda x: torch.addcmul(x, x, torch.tanh(x), value=0.5), [], []),
    "mixed by itself": (lambda x: torch.lerp(x, torch.tanh(x), torch.sigmoid(x)), [], []),
    "divided in one call": (lambda x: torch.addcdiv(x, x.tanh(), 1 + x * x), [], []),
    "exp of a sign": (lambda x: torch.exp(torch.sign(x)), [0.0], [0.0]),
    "sign of a parabola": (lambda x: torch.sign(x * x - 0.5), [-R, R], [-R, R]),
    "outside a band": (lambda x: torch.where(x * x > 0.5, x, 0.0), [-R, R], [-R, R]),
    "inside a band": (
        lambda x: torch.where((x > 0.2) & (x <= 1), x, 0.0),
        [0.2, 1.0],
        [0.2, 1.0],
    ),
    "beside a band": (
        lambda x: torch.where((x > 1) | torch.logical_not(x >= 0), x.square(), x),
        [0.0, 1.0],
        [0.0, 1.0],
    ),
    "one of two": (lambda x: x * ((x > 1) ^ (x > 0)), [0.0, 1.0], [0.0, 1.0]),
    "where a tanh is small": (
        lambda x: x.sigmoid().masked_fill((x * x > 0.5) & ~(x.tanh() > 0.2), -0.3),
        [-R, R, T],
        [-R, R, T],
    ),
    "a condition as a number": (lambda x: 1.0 * (True & (x > 0) & (x < 1)), [0, 1], [0, 1]),
    "masked by a tanh": (lambda x: x * (x.tanh() > 0.2), [T], [T]),
    "shrunk square": (lambda x: F.hardshrink(x.square()), [-R, R], [-R, R]),
    "signs of a wave": (
        lambda x: torch.tanh(x + torch.sign(torch.sin(0.5 * x))),
        [k * np.pi * 2 for k in range(-3, 4)],
        [k * np.pi * 2 for k in range(-3, 4)],
    ),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x)), [], []),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)), [], []),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), [], []),
    "hardswish": (lambda x: x * torch.clamp(x + 3, 0, 6) / 6, [-3.0, 3.0], [-3.0, 3.0]),
    "root": (lambda x: (x.square() + 0.1).sqrt(), [], []),
    "hardswish of a square": (
        lambda x: F.hardswish(x * x),
        [-(3**0.5), 3**0.5],
        [-(3**0.5), 3**0.5],
    ),
    "power": (lambda x: (1 + x.abs()).pow(-1.5), [0.0], [0.0]),
    "polynomial": (lambda x: x * x * (x - 1) + x.square(), [], []),
    "leaky relu": (lambda x: torch.maximum(x, 0.1 * x), [0.0], [0.0]),
    "ramp": (lambda x: torch.relu(x) - torch.relu(x - 1), [0.0, 1.0], [0.0, 1.0]),
    "nested": (lambda x: (x.abs() - 1).abs().square(), [-1, 0.0, 1.0], [-1.0, 0.0, 1.0]),
    "crossings": (
        lambda x: torch.relu(torch.sin(2 * x)),
        [k * np.pi / 2 for k in range(-8, 9)],
        [k * np.pi / 2 for k in range(-8, 9)],
    ),
    "snake": (lambda x: x + torch.sin(C * x).square() / C, [], []),
    "scaled gate": (lambda x: torch.tanh(C * x + B) * x, [], []),
    "shifted relu": (lambda x: torch.relu(x * C - B).square(), [1.5 / 0.7], [-0.4 / 1.3]),
    "relu of a square": (
        lambda x: torch.relu(x.square() - C.abs()).tanh(),
        [-(0.7**0.5), 0.7**0.5],
        [-(1.3**0.5), 1.3**0.5],
    ),
    "user": (lambda x: cp.activation(torch.tanh)(x).square(), [], []),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def panels(
    kinks: Sequence[float], mean: Any, stddev: float, count: int = 18
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (..., nodes) of normal densities of means (...), between kinks."""
    mean = np.asarray(mean)[..., None]
    cuts = (np.asarray(kinks) - mean) / stddev
    even = np.broadcast_to(np.linspace(-9, 9, count + 1), (*mean.shape[:-1], count + 1))
    edges = np.sort(np.concatenate([even, cuts.clip(-9, 9)], -1), -1)[..., None]
    half, middle = np.diff(edges, axis=-2) / 2, (edges[..., 1:, :] + edges[..., :-1, :]) / 2
    z = (middle + half * NODES).reshape(*mean.shape[:-1], -1)
    weights = (half * WEIGHTS).reshape(z.shape) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return mean + stddev * z, weights


def moments(name: str, mean: Tensor, covariance: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """By integrals: one dimension for means and variances, two for the covariance."""
    function, *kinks = FUNCTIONS[name]
    (m1, m2), ((v1, c), (_, v2)) = mean.tolist(), covariance.tolist()

    def values(y: np.ndarray, element: int) -> np.ndarray:
        points = torch.as_tensor(y)
        return np.asarray(function(torch.stack([points, points], -1))[..., element])

    expected, variances = np.zeros(2), np.zeros(2)
    for i, (m, v) in enumerate([(m1, v1), (m2, v2)]):
        y, w = panels(kinks[i], m, v**0.5)
        g = values(y, i)
        expected[i] = (w * g).sum()
        variances[i] = (w * (g - expected[i]) ** 2).sum()
    y, w = panels(kinks[0], m1, v1**0.5, count=54)  # at rho = 0.999 a kink is as narrow as 0.05
    y, w = y[w > 1e-16], w[w > 1e-16]
    z, u = panels(kinks[1], m2 + c / v1 * (y - m1), (v2 - c**2 / v1) ** 0.5)
    spread = (w * (values(y, 0) - expected[0]) * (u * values(z, 1)).sum(-1)).sum()
    return expected, np.array([[variances[0], spread], [spread, variances[1]]])


@every_function
@torch.no_grad()
def test_moments_are_those_of_the_whole_function(name: str) -> None:
    y = propagate(FUNCTIONS[name][0], cp.Gaussian(MEAN, COVARIANCE))
    mean, covariance = moments(name, MEAN, COVARIANCE)
    scale = float(np.sqrt(covariance.diagonal().max()))
    assert_close(y.mean, torch.as_tensor(mean), atol=1e-8 * scale)
    assert_close(y.covariance_matrix, torch.as_tensor(covariance), atol=1e-8 * scale**2)


@every_function
@torch.no_grad()
def test_strong_correlations_and_wide_and_narrow_inputs(name: str) -> None:
    for stddev, rho in ((1.5, 0.999), (1e-3, -0.9)):
        unit = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=D)
        y = propagate(FUNCTIONS[name][0], cp.Gaussian(MEAN, stddev**2 * unit))
        mean, covariance = moments(name, MEAN, stddev**2 * unit)
        deviations = np.sqrt(covariance.diagonal())
        scale = torch.as_tensor(np.outer(deviations, deviations))
        assert_close(y.mean, torch.as_tensor(mean), atol=1e-8 * float(deviations.max()))
        error = (y.covariance_matrix - torch.as_tensor(covariance)).abs()
        assert bool((error <= 1e-8 * scale + 1e-300).all())


@torch.no_grad()
@pytest.mark.parametrize("turned", [False, True])
def test_each_element_of_a_pair_keeps_its_own_kink(turned: bool) -> None:
    """The pair that a series does not reach is integrated alone, the wider element first."""
    mean = torch.tensor([-1.8, 1.15], dtype=D)
    s = torch.tensor([0.046, 0.22], dtype=D)
    matrix = torch.tensor([[1.0, -0.966], [-0.966, 1.0]], dtype=D) * s[:, None] * s
    order = [1, 0] if turned else [0, 1]
    mean, matrix = mean[order], matrix[order][:, order]
    y = propagate(FUNCTIONS["hardswish of a square"][0], cp.Gaussian(mean, matrix))
    expected = moments("hardswish of a square", mean, matrix)[1]
    assert_close(y.covariance_matrix, torch.as_tensor(expected), atol=1e-8 * float(y.stddev.prod()))


@torch.no_grad()
@pytest.mark.parametrize("method", [cp.Series(order=64), cp.AssumedDensity(), cp.Exact()])
@every_function
def test_methods_agree_on_marginals_and_batches_on_each_element(name: str, method: Any) -> None:
    function = FUNCTIONS[name][0]
    means = torch.stack([MEAN + 0.4, -MEAN])
    x = cp.Gaussian(means, COVARIANCE.expand(2, 2, 2))
    y = propagate(function, x, method)
    whole = propagate(function, x)
    # Series of so many terms leave what kinks and jumps make slow; marginals have none.
    assert_close(y.mean, whole.mean, atol=1e-8)
    for i in range(2):
        one = propagate(function, cp.Gaussian(means[i], COVARIANCE), method)
        assert_close(y[i].mean, one.mean, atol=1e-10)
        assert_close(y[i].covariance_matrix, one.covariance_matrix, atol=1e-9)


@torch.no_grad()
def test_float32_is_near_float64() -> None:
    for name, (function, *_) in FUNCTIONS.items():
        if name in ("snake", "scaled gate", "shifted relu", "relu of a square"):
            continue  # constants in float64 make the result float64
        y = propagate(function, cp.Gaussian(MEAN.float(), COVARIANCE.float()))
        z = propagate(function, cp.Gaussian(MEAN, COVARIANCE))
        assert y.dtype == torch.float32
        # Moments are made in float64 of means and variances in float32: some ten roundings.
        atol = 64 * torch.finfo(torch.float32).eps * float(1 + z.variance.max())
        assert_close(y.mean.double(), z.mean, atol=atol)
        assert_close(y.covariance_matrix.double(), z.covariance_matrix, atol=atol)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_moments(name: str) -> None:
    function = FUNCTIONS[name][0]

    def total(mean: Tensor, spread: Tensor) -> Tensor:
        factor = torch.tensor([[1.0, 0.0], [0.5, 0.7]], dtype=D) * spread
        y = propagate(function, cp.Gaussian(mean, factor @ factor.mT))
        return (y.mean * C).sum() + (y.covariance_matrix * COVARIANCE).sum()

    mean, spread = MEAN.clone().requires_grad_(), torch.tensor(0.9, dtype=D, requires_grad=True)
    gradients = torch.autograd.grad(total(mean, spread), (mean, spread))
    step = 1e-4
    with torch.no_grad():
        by_mean = [
            (total(mean + step * e, spread) - total(mean - step * e, spread)) / (2 * step)
            for e in torch.eye(2, dtype=D)
        ]
        by_spread = (total(mean, spread + step) - total(mean, spread - step)) / (2 * step)
    # The third derivative of a moment is of the size of the moments, over 6 times step^2.
    assert_close(gradients[0], torch.stack(by_mean), rtol=1e-6, atol=1e-6)
    assert_close(gradients[1], by_spread, rtol=1e-6, atol=1e-6)


ORIGINALS: dict[str, tuple[Function, Function]] = {
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "gelu": (F.gelu, lambda x: x * 0.5 * (1 + torch.erf(x * 0.7071067811865476))),
    "softsign": (F.softsign, lambda x: x / (x.abs() + 1)),
    "hardswish": (F.hardswish, lambda x: x * F.relu6(x + 3) * (1 / 6)),
    "sigmoid": (torch.sigmoid, lambda x: (1 + (-x).exp()).reciprocal()),
    "tanh": (torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1),
    "relu6": (F.relu6, lambda x: torch.minimum(torch.relu(x), torch.tensor(6.0))),
    "leaky relu": (F.leaky_relu, lambda x: torch.where(x > 0, x, 0.01 * x)),
    "mish": (F.mish, lambda x: x * torch.tanh(F.softplus(x))),
    "cube": (lambda x: x**3, lambda x: x * x * x),
    "nothing": (lambda x: 0 * x, lambda x: x**4 - (x * x) * (x * x)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_decomposed_function_is_the_original(name: str) -> None:
    torch.manual_seed(0)
    original, decomposed = ORIGINALS[name]
    first, last = nn.Linear(3, 5).to(D), nn.Linear(5, 2).to(D)
    x = cp.Gaussian.isotropic(torch.randn(4, 3, dtype=D), stddev=0.7, batch_dims=1)
    y = propagate(lambda x: last(decomposed(first(x))), x)
    z = propagate(lambda x: last(original(first(x))), x)
    assert_close(y.mean, z.mean, atol=1e-8)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ramp_of_wide_inputs_does_not_cancel(dtype: torch.dtype) -> None:
    """relu(y) - relu(y - 1) is between 0 and 1 for any deviation."""
    for stddev in (1e3, 1e7, 1e10):
        x = cp.Gaussian(torch.zeros(2, dtype=dtype),
                        stddev**2 * torch.tensor([[1, 0.6], [0.6, 1]], dtype=dtype))  # fmt: skip
        y = propagate(lambda x: torch.relu(x) - torch.relu(x - 1), x)
        limit = np.arcsin(0.6) / (2 * np.pi)  # of two steps
        assert_close(y.variance, torch.full((2,), 0.25, dtype=dtype), atol=2 / stddev)
        assert float(y.covariance_matrix[0, 1]) == pytest.approx(limit, abs=2 / stddev + 1e-6)


def test_reading_what_a_tensor_is_evaluates_nothing() -> None:
    seen: list[Any] = []

    def model(x: Any) -> Any:
        y = torch.tanh(x) * x
        seen.append((y.shape, y.dtype, y.device, y.dim(), y.requires_grad, repr(y), len(y)))
        seen.append((y.is_pending, y.batch_shape, y.event_shape))
        return y

    propagate(model, cp.Gaussian(MEAN, COVARIANCE))
    assert seen[1] == (True, torch.Size(()), torch.Size((2,)))
    assert "pending" in seen[0][5]


def test_what_is_written_in_place_changes_no_pending_function() -> None:
    def model(x: Any) -> Any:
        h = torch.tanh(x)
        product = x * h
        h.mul_(3.0)
        x.add_(1.0)
        return product + 0 * h

    y = propagate(model, cp.Gaussian(MEAN, COVARIANCE))
    z = propagate(lambda x: x * torch.tanh(x), cp.Gaussian(MEAN, COVARIANCE))
    assert_close(y.mean, z.mean, atol=1e-10)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-10)


def test_copies_of_pending_functions_change_with_the_original_where_they_do_in_torch() -> None:
    x = cp.Gaussian(MEAN, COVARIANCE)

    def changed(copied: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            hidden = torch.tanh(x)
            copy = copied(hidden)
            copy.mul_(2.0)
            return hidden

        return function

    for copied in (torch.clone, lambda x: x.to(x.dtype), lambda x: x.contiguous()):
        function = changed(copied)
        assert torch.equal(propagate(function, x.isotropic(MEAN, stddev=0.0)).mean, function(MEAN))


def test_a_value_at_one_place_counts_only_where_nothing_varies() -> None:
    x = cp.Gaussian(torch.zeros(2, dtype=D), torch.diag(torch.tensor([0.0, 1.0], dtype=D)))
    y = propagate(lambda x: torch.sign(x).abs(), x)
    assert_close(y.mean, torch.tensor([0.0, 1.0], dtype=D))
    assert_close(y.variance, torch.zeros(2, dtype=D))


def test_a_function_in_a_wider_dtype_composes_with_its_argument() -> None:
    """Cast back, its argument is the tensor that was cast, but for what changed in place since."""
    x = cp.Gaussian(MEAN.float(), COVARIANCE.float())
    y = propagate(lambda x: torch.tanh(x.double()).type_as(x) * x, x)
    z = propagate(lambda x: torch.tanh(x) * x, x)
    assert_close(y.mean, z.mean)
    assert_close(y.covariance_matrix, z.covariance_matrix)

    def changed(x: Any) -> Any:
        first, wide = x + 0.0, x.double()
        first_wide = first.double()
        first.add_(1.0)
        wide.mul_(2.0)
        return first_wide.float() + wide.float()

    assert_close(propagate(changed, x).mean, changed(x.mean))
    assert_close(propagate(changed, x).stddev, 3 * x.stddev)


def test_a_function_in_another_dtype_composes_with_what_follows() -> None:
    x = cp.Gaussian(MEAN.float(), COVARIANCE.float())
    y = propagate(lambda x: torch.relu(x.double()).to(x).square(), x)
    z = propagate(lambda x: torch.relu(x).square(), x)
    assert_close(y.mean, z.mean)
    assert_close(y.covariance_matrix, z.covariance_matrix)


@pytest.mark.parametrize(
    "cast",
    [
        lambda y: torch.tanh((y * C.float()).double()).type_as(y) * y,
        lambda y: torch.tanh(y.double() * C).float() * y,
        lambda y: torch.tanh(y * C).to(y) * y.double(),
        lambda y: torch.tanh(y * C.float()).type(torch.float64) * y,
    ],
)
def test_a_cast_of_a_function_with_numbers_of_each_element_composes(cast: Any) -> None:
    """Also where a number of each element, or another tensor, is of a wider dtype."""
    x = cp.Gaussian(MEAN.float(), COVARIANCE.float())
    y = propagate(lambda x: cast(torch.sigmoid(x)), x)
    z = propagate(lambda x: torch.tanh(torch.sigmoid(x) * C.float()) * torch.sigmoid(x), x)
    size = z.covariance_matrix.abs().max().item()  # rounding of the input's covariance, doubled
    assert_close(y.mean.float(), z.mean)
    assert_close(y.covariance_matrix.float(), z.covariance_matrix, atol=2 * 2.0**-23 * size)


@torch.no_grad()
def test_a_detached_function_composes_with_what_follows() -> None:
    x = cp.Gaussian(MEAN, COVARIANCE)
    y = propagate(lambda x: x.detach() * x.tanh().detach(), x)
    z = propagate(lambda x: x * x.tanh(), x)
    assert_close(y.mean, z.mean)
    assert_close(y.covariance_matrix, z.covariance_matrix)


def test_the_batch_may_be_anywhere() -> None:
    x = cp.Gaussian.isotropic(torch.randn(4, 3, 2, dtype=D), stddev=0.5, batch_dims=1)
    constants = torch.randn(3, 1, 2, dtype=D)  # for (3, batch, 2)
    y = propagate(lambda x: torch.sigmoid(x.movedim(0, 1) * constants) * x.movedim(0, 1), x)
    z = propagate(lambda x: torch.sigmoid(x * constants[:, 0]) * x, x)
    assert_close(y.mean, z.mean, atol=1e-10)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-10)


def test_constants_that_are_trained_are_taken_one_by_one() -> None:
    rate = torch.tensor(1.3, dtype=D, requires_grad=True)
    y = propagate(lambda x: x * torch.sigmoid(rate * x), cp.Gaussian(MEAN, 0.01 * COVARIANCE))
    (gradient,) = torch.autograd.grad(y.mean.sum(), rate)
    slope = torch.sigmoid(1.3 * MEAN) * (1 - torch.sigmoid(1.3 * MEAN)) * MEAN**2
    assert float(gradient) == pytest.approx(float(slope.sum()), rel=0.1)


def test_what_has_no_moments_as_a_whole_says_so() -> None:
    x = cp.Gaussian(torch.tensor([5.0], dtype=D), torch.tensor([[0.25]], dtype=D))
    with pytest.warns(cp.ApproximationWarning, match="one by one, as if Gaussian in between"):
        propagate(lambda x: 1 / x.square(), x)


@torch.no_grad()
def test_what_is_flat_at_a_jump_has_torchs_value_there() -> None:
    """sign(relu(y)) is 0 below zero, and relu(y) >= 0 everywhere."""
    x = cp.Gaussian(MEAN, COVARIANCE)
    above = 0.5 * (1 + torch.erf(MEAN / (2 * COVARIANCE.diagonal()).sqrt()))
    y = propagate(lambda x: torch.sign(torch.relu(x)), x)
    assert_close(y.mean, above, atol=1e-14)
    assert_close(y.variance, above * (1 - above), atol=1e-14)
    always = propagate(lambda x: torch.where(torch.relu(x) >= 0, x, 5.0), x)
    assert_close(always.mean, MEAN, atol=1e-13)
    seldom = propagate(lambda x: torch.where(torch.relu(x) > 0, x, 5.0), x)
    assert bool((seldom.mean > 1.0).all())


@torch.no_grad()
@pytest.mark.parametrize("slope", [0.3, 1 / 49])
@pytest.mark.parametrize("gradients", [False, True], ids=["compiled", "torch"])
def test_small_values_between_distant_knots_keep_their_digits(
    slope: float, gradients: bool
) -> None:
    """Added up from the knot at -1 / slope, they were off by the rounding of one."""

    def clamped(x: Any) -> Any:
        return F.hardtanh(F.leaky_relu(x, slope))

    mean = torch.tensor([0.0, -1e-30, 1e-30, -1e-18, -1.0], dtype=D)
    for stddev in (0.0, 1e-32):
        x = cp.Gaussian.isotropic(mean.clone().requires_grad_(gradients), stddev=stddev)
        y = propagate(clamped, x, cp.GaussianLayers())
        noise = torch.zeros_like(mean)
        noise[0] = (1 - slope) * stddev / math.sqrt(2 * math.pi)
        assert_close(y.mean.detach(), clamped(mean) + noise, rtol=1e-12, atol=0.0)
    assert torch.equal(propagate(clamped, cp.Gaussian.isotropic(mean, stddev=0.0)).mean,
                       clamped(mean))  # fmt: skip


def test_a_product_far_from_zero_does_not_cancel() -> None:
    x = cp.Gaussian(torch.tensor([1e3], dtype=D), torch.tensor([[1e-6]], dtype=D))
    y = propagate(lambda x: (x - 1e3) * (x - 1e3), x)
    assert float(y.mean) == pytest.approx(1e-6, rel=1e-12)
    assert float(y.variance) == pytest.approx(2e-12, rel=1e-12)


def test_control_flow_cannot_depend_on_a_comparison() -> None:
    x = cp.Gaussian(MEAN, COVARIANCE)
    with pytest.raises(cp.UnsupportedOperation, match="random"):
        propagate(lambda x: x if (x > 0) else -x, x)
    with pytest.raises(cp.UnsupportedOperation, match="random"):
        propagate(lambda x: torch.where(x > x.flip(0), x, -x), x)


@torch.no_grad()
def test_elements_chosen_by_two_comparisons_may_be_written() -> None:
    def written(x: Any) -> Any:
        x = x.clone()
        x[(x > 0) & (x < 1)] = 2.0
        return x

    x = cp.Gaussian(MEAN, COVARIANCE)
    y = propagate(written, x)
    z = propagate(lambda x: torch.where((x > 0) & (x < 1), 2.0, x), x)
    assert_close(y.mean, z.mean, atol=0.0)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=0.0)


@pytest.mark.parametrize(
    "masked",
    [
        lambda x: torch.where((x > 0) & (x.flip(0) < 1), x, 0.0),
        lambda x: torch.where((x > 0) & torch.relu(x), x, 0.0),
        lambda x: torch.where((x > 0.5) | (B > 1), x, 0.0),
        lambda x: x * ~(x == 0),
        lambda x: x & 1,
    ],
    ids=["two tensors", "no condition", "a jump of one element", "equality", "bits"],
)
def test_other_logic_is_refused(masked: Callable[[Any], Any]) -> None:
    """An error of covprop, not of Python's operators, which no method would take for an answer."""
    x = cp.Gaussian(MEAN, COVARIANCE)
    with pytest.raises(cp.UnsupportedOperation):
        propagate(masked, x)


def test_other_logic_is_left_to_points() -> None:
    x = cp.Gaussian(MEAN, COVARIANCE)
    y = cp.propagate(lambda x: torch.where((x > 0) & (x.flip(0) < 1), x, 0.0), x)
    assert isinstance(y.method, cp.QuasiMonteCarlo)


@pytest.mark.parametrize("exponent", [math.inf, -math.inf, math.nan])
def test_exponents_that_are_no_numbers_are_refused(exponent: float) -> None:
    x = cp.Gaussian.isotropic(torch.ones(2), stddev=0.1)
    with pytest.raises(cp.UnsupportedOperation, match="pow has a rule for one whole exponent"):
        propagate(lambda z: z**exponent, x)


def test_gradients_of_a_jump_do_not_fail_where_nothing_varies() -> None:
    """Forward it is a number; a wider Gaussian, for second derivatives, would meet the jump."""
    mean = torch.tensor([0.0, 0.3], dtype=D, requires_grad=True)
    variance = torch.zeros(2, dtype=D, requires_grad=True)

    def function(x: Any) -> Any:
        return torch.cos(torch.heaviside(x, torch.ones((), dtype=D)) + x).square()

    y = propagate(function, cp.Gaussian.diagonal(mean, variance=variance))
    assert_close(y.mean, function(mean))
    of_mean, of_variance = torch.autograd.grad(y.mean.sum(), [mean, variance])
    # f = cos(1 + x)^2 beside the jump: f' = -sin(2 + 2x), and dE/dv = f'' / 2 = -cos(2 + 2x).
    assert_close(of_mean, -torch.sin(2 + 2 * mean))
    assert_close(of_variance[1], -torch.cos(2 + 2 * mean[1]), rtol=1e-6)
    assert bool(torch.isfinite(of_variance).all())
