"""Different activations of one tensor, or of tensors of any correlation, against brute force."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.activations import Activated
from covprop.rules.elementwise import find_activation
from tests.layers import propagate
from tests.oracles import assert_close, evaluate, moments, panels

pytestmark = pytest.mark.usefixtures("both_kernels")

ZERO = torch.zeros((), dtype=torch.float64)
SLOPES = torch.tensor([0.25, -0.5], dtype=torch.float64)
Function = Callable[[Tensor], Tensor]


def heaviside(x: Tensor) -> Tensor:
    return torch.heaviside(x, ZERO.to(x))


SUMS: dict[str, tuple[Function, tuple[float, ...]]] = {
    "sign - 2 heaviside": (lambda x: torch.sign(x) - 2 * heaviside(x), (0.0,)),
    "relu - clamp": (lambda x: torch.relu(x) - x.clamp(-1, 1), (-1.0, 0.0, 1.0)),
    "hardshrink + leaky_relu": (lambda x: F.hardshrink(x) + F.leaky_relu(x), (-0.5, 0.0, 0.5)),
    "tanh + sigmoid": (lambda x: torch.tanh(x) + torch.sigmoid(x), ()),
    "relu - elu": (lambda x: torch.relu(x) - F.elu(x), (0.0,)),
    "gelu + tanh": (lambda x: F.gelu(x) + torch.tanh(x), ()),
    "sign + tanh": (lambda x: torch.sign(x) + torch.tanh(x), (0.0,)),
    "hardshrink - erf": (lambda x: F.hardshrink(x) - torch.erf(x), (-0.5, 0.5)),
    "exp - relu": (lambda x: torch.exp(0.3 * x) - torch.relu(x), (0.0,)),
    "sin + softsign": (lambda x: torch.sin(x) + F.softsign(x), (0.0,)),
    "cube + sign": (lambda x: x**3 + torch.sign(x), (0.0,)),
    "hardswish - relu6": (lambda x: F.hardswish(x) - F.relu6(x), (-3.0, 0.0, 3.0, 6.0)),
}
every_sum = pytest.mark.parametrize("name", SUMS)
POINTS = [(0.3, 1.0), (-0.4, 2.5), (1.0, 0.3), (0.2, 12.0)]


def gaussian(dtype: torch.dtype) -> cp.Gaussian:
    mean, stddev = torch.tensor(POINTS, dtype=torch.float64).T
    return cp.Gaussian(mean.to(dtype), torch.diag(stddev.square()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_sum
def test_variances_of_sums_agree_with_quadrature(name: str, dtype: torch.dtype) -> None:
    function, kinks = SUMS[name]
    found = propagate(function, gaussian(dtype)).variance
    expected = [moments(function, mean, stddev, kinks=kinks)[1] for mean, stddev in POINTS]
    # The variances of the terms are added; a covariance is that to 1e-11, or to rounding.
    size = [(1 + stddev**3 * 15**0.5) ** 2 if "cube" in name else (1 + stddev) ** 2
            for _, stddev in POINTS]  # fmt: skip
    bound = 1e-11 if dtype == torch.float64 else 4e-6
    for i, wanted in enumerate(expected):
        assert abs(float(found[i]) - wanted) <= bound * (size[i] + wanted)


def test_one_function_of_two_names_is_one_function() -> None:
    x = gaussian(torch.float64)
    for function in (
        lambda x: torch.sign(x) - 2 * heaviside(x),
        lambda x: torch.relu(x) + torch.relu(-x) - x.abs(),
        lambda x: F.hardtanh(x) - x.clamp(-1, 1),
        lambda x: F.relu6(x) - torch.relu(x) + torch.relu(x - 6),
        lambda x: F.softshrink(x) - x + x.clamp(-0.5, 0.5),
    ):
        covariance = propagate(function, x).covariance_matrix
        assert float(covariance.abs().max()) <= 64 * torch.finfo(torch.float64).eps * 12**2


@every_sum
def test_gradients_of_sums_agree_with_finite_differences(name: str) -> None:
    function, kinks = SUMS[name]
    mean, stddev, step = 0.3, 1.3, 1e-5
    point = torch.tensor([mean], dtype=torch.float64, requires_grad=True)
    matrix = torch.tensor([[stddev**2]], dtype=torch.float64, requires_grad=True)
    found = propagate(function, cp.Gaussian(point, matrix)).variance
    by_mean, by_matrix = torch.autograd.grad(
        found.sum(),
        (point, matrix),
        materialize_grads=True,  # of a constant, nothing
    )

    def variance(mean: float, stddev: float) -> float:
        return moments(function, mean, stddev, kinks=kinks)[1]

    slope = (variance(mean + step, stddev) - variance(mean - step, stddev)) / (2 * step)
    bend = (variance(mean, stddev + step) - variance(mean, stddev - step)) / (2 * step)
    scale = 1 + abs(slope) + abs(bend)
    assert abs(float(by_mean) - slope) <= 1e-7 * scale
    assert abs(float(by_matrix) * 2 * stddev - bend) <= 1e-7 * scale


def brute(one: Function, other: Function, rho: float, kinks: tuple[float, ...]) -> float:
    """E[(g(y1) - E g) h(y2)] of means 0.3, -0.2 and deviations 1.5, 0.8, on panels of both."""
    q = math.sqrt(1 - rho**2)
    edges = [np.linspace(-12, 12, 97), *((kink - 0.3) / 1.5 + np.zeros(1) for kink in kinks)]
    edges += [((k + 0.2) / 0.8 + q * np.arange(-8, 9)) / rho for k in kinks]
    x, outer = panels(np.sort(np.concatenate(edges).clip(-12, 12)))
    outer = outer * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    centre = -0.2 + 0.8 * rho * x
    inner = [np.broadcast_to(np.linspace(-9, 9, 19), (len(x), 19))]
    inner += [((k - centre) / (0.8 * q)).clip(-9, 9)[:, None] for k in kinks]
    z, weight = panels(np.sort(np.concatenate(inner, axis=-1), axis=-1))
    weight = weight * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    second = (weight * evaluate(other, centre[:, None] + 0.8 * q * z)).sum(-1)
    first = evaluate(one, 0.3 + 1.5 * x)
    return float(np.sum(outer * (first - np.sum(outer * first)) * second))


@pytest.mark.parametrize("rho", [0.5, -0.97, 0.9999])
@pytest.mark.parametrize(
    ("one", "other", "kinks"),
    [
        (torch.tanh, torch.sigmoid, ()), (torch.sign, torch.tanh, (0.0,)),
        (F.gelu, F.hardtanh, (-1.0, 1.0)), (F.elu, torch.relu, (0.0,)),
    ],
)  # fmt: skip
def test_pairs_agree_with_brute_force(
    one: Function, other: Function, kinks: tuple[float, ...], rho: float
) -> None:
    mean, spread = (torch.tensor(t, dtype=torch.float64) for t in ([0.3], [1.5**2]))
    left = Activated(find_activation(one), mean, spread)
    mean, spread = (torch.tensor(t, dtype=torch.float64) for t in ([-0.2], [0.8**2]))
    right = Activated(find_activation(other), mean, spread)
    covariance = torch.tensor([[rho * 1.5 * 0.8]], dtype=torch.float64)
    expected = torch.tensor([[brute(one, other, rho, kinks)]], dtype=torch.float64)
    assert_close(cp.Exact().cross(left, right, covariance), expected, atol=1e-10)
    assert_close(cp.Exact().cross(right, left, covariance), expected, atol=1e-10)


def test_slopes_of_single_elements_and_batches_go_through_it() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 2, 2, dtype=torch.float64, generator=generator)
    mean = torch.randn(3, 2, dtype=torch.float64, generator=generator)

    def function(x: Tensor) -> Tensor:
        return F.prelu(x, SLOPES) + F.silu(x)

    batch = propagate(function, cp.Gaussian(mean, root @ root.mT))
    for i in range(3):
        alone = propagate(function, cp.Gaussian(mean[i : i + 1], (root @ root.mT)[i : i + 1]))
        assert_close(batch.covariance_matrix[i], alone.covariance_matrix[0], atol=1e-13)
        for k in range(2):
            expected = moments(
                lambda y, k=k: torch.where(y >= 0, y, SLOPES[k] * y) + F.silu(y),
                float(mean[i, k]), float((root @ root.mT)[i, k, k]) ** 0.5, kinks=(0.0,),
            )[1]  # fmt: skip
            assert abs(float(alone.variance[0, k]) - expected) <= 1e-11 * (1 + expected)


def test_series_is_what_it_says() -> None:
    """`Series` keeps its order: four terms of two different functions, and not what is exact."""
    x = cp.Gaussian(torch.tensor([0.3], dtype=torch.float64), torch.ones(1, 1).double())
    step = torch.tensor(0.5, dtype=torch.float64)
    both = propagate(
        lambda x: torch.cat([torch.sign(x), 2 * torch.heaviside(x, step)]), x, method=cp.Series(4)
    )
    apart = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert float(apart @ both.covariance_matrix @ apart) > 0.1
