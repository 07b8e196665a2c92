"""Functions with narrow features: softplus with a large beta, CELU with a small alpha."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate, stats
from torch import Tensor

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64
MEANS, MATRIX = [0.5, 0.0, -1.0], [[1.0, 0.6, 1.0], [0.6, 1.5, 0.6], [1.0, 0.6, 1.0]]
RATES = [3.0, 100.0, 1e3, 1e4, 1e6, 1e9, 1e12, 1e30, -1e3, -1e9]
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    **{f"softplus {rate:g}": (partial(F.softplus, beta=rate), abs(rate)) for rate in RATES},
    **{f"celu {rate:g}": (partial(F.celu, alpha=1 / rate), rate) for rate in (3.0, 1e3, 1e9)},
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, D])


def gaussian(dtype: torch.dtype = D, scale: float = 1.0) -> cp.Gaussian:
    mean, matrix = torch.tensor(MEANS, dtype=dtype), torch.tensor(MATRIX, dtype=dtype)
    return cp.Gaussian(scale * mean, scale**2 * matrix)


def moments(function: Callable[[Any], Any], rate: float, mean: float, deviation: float) -> Any:
    """Mean and variance by scipy, piece by piece around what the function has at 1 / rate."""

    def integral(value: Callable[[float], float]) -> float:
        ends = mean - 14 * deviation, mean + 14 * deviation
        places = [k / rate for k in (-40, -10, -3, 0, 3, 10, 40)] + [mean]
        points = sorted({*ends, *(p for p in places if ends[0] < p < ends[1])})
        return sum(
            integrate.quad(
                lambda y: value(y) * stats.norm.pdf(y, mean, deviation), *part, epsabs=1e-15,
                epsrel=1e-13, limit=300,
            )[0]
            for part in pairwise(points)
        )  # fmt: skip

    def at(y: float) -> float:
        return float(function(torch.tensor(y, dtype=D)))

    centre = integral(at)
    return centre, integral(lambda y: (at(y) - centre) ** 2)


@every_dtype
@pytest.mark.parametrize(
    "name", ["softplus 3", "softplus 1000", "softplus 1e+06", "softplus -1000", "celu 1000"]
)
def test_moments_are_those_of_an_independent_integral(name: str, dtype: torch.dtype) -> None:
    function, rate = FUNCTIONS[name]
    y = propagate(function, gaussian(dtype))
    expected = [moments(function, rate, m, math.sqrt(MATRIX[i][i])) for i, m in enumerate(MEANS)]
    wanted = torch.tensor(expected, dtype=D)
    # torch switches to y at a threshold of 20, where exp(-20) / beta is left.
    left = math.exp(-20) / rate
    rounding = 8 * torch.finfo(dtype).eps
    assert bool(((y.mean.double() - wanted[:, 0]).abs() <= rounding + left).all())
    assert bool(((y.variance.double() - wanted[:, 1]).abs() <= rounding + 4 * left).all())


@every_dtype
@every_function
def test_it_is_the_limit_but_for_a_region_of_its_width(name: str, dtype: torch.dtype) -> None:
    """|g - relu| <= log 2 / beta or alpha, within some widths of zero: so are all moments."""
    function, rate = FUNCTIONS[name]
    y = propagate(function, gaussian(dtype))

    def limit(x: Any) -> Any:
        return -torch.relu(-x) if name.startswith("softplus -") else torch.relu(x)

    z = propagate(limit, gaussian(dtype))
    accuracy = {torch.float32: 2e-6, D: 1e-8}[dtype]  # the promise for quadrature
    assert bool(((y.mean - z.mean).abs() <= 1 / rate + accuracy).all())
    away = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((away <= 4 / rate + accuracy).all())


@every_dtype
@every_function
def test_units_do_not_matter(name: str, dtype: torch.dtype) -> None:
    """g_r(s y) = s g_rs(y): the same numbers in other units, also where hardly anything varies."""
    kind, _, number = name.partition(" ")
    scale = 2.0**-20
    if kind == "softplus":
        other: Callable[[Any], Any] = partial(F.softplus, beta=float(number) / scale)
    else:
        other = partial(F.celu, alpha=scale / float(number))
    y = propagate(FUNCTIONS[name][0], gaussian(dtype))
    z = propagate(other, gaussian(dtype, scale))
    rounding = 64 * torch.finfo(dtype).eps
    assert_close(z.mean / scale, y.mean, rtol=rounding, atol=rounding)
    assert_close(z.covariance_matrix / scale**2, y.covariance_matrix, rtol=rounding, atol=rounding)


def test_what_does_not_vary_is_the_value() -> None:
    mean = torch.tensor([0.0, 1e-3, -2.0, 5.0], dtype=D)
    x = cp.Gaussian.diagonal(mean, variance=torch.zeros(4, dtype=D))
    for rate in (1e3, 1e12):
        y = propagate(lambda t: F.softplus(t, rate), x)  # noqa: B023
        assert_close(y.mean, F.softplus(mean, rate), rtol=1e-15, atol=math.exp(-20) / rate)
        assert not bool(y.variance.any())


@pytest.mark.parametrize("rate", [3.0, 1e3, 1e12])
def test_gradients_are_those_of_differences(rate: float) -> None:
    def function(mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        x = cp.Gaussian(mean, root @ root.mT, validate_args=False)
        y = propagate(lambda t: F.softplus(t, rate), x)
        return y.mean, y.covariance_matrix

    mean = torch.tensor([0.3, -0.2], dtype=D, requires_grad=True)
    root = torch.tensor([[1.0, 0.2], [0.5, 0.7]], dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(function, (mean, root))


@every_dtype
def test_it_meets_other_activations_of_the_same_tensor(dtype: torch.dtype) -> None:
    """What relu leaves of it, d(y) = log(1 + exp(-beta |y|)) / beta, is narrow against the density.

    E[d] = 2 phi(0) (pi^2 / 12) / beta^2, E[d^2] = 2 phi(0) (zeta(3) / 4) / beta^3, but for a share
    of 1 / beta^2.
    """
    rate = 1e3
    x = cp.Gaussian.isotropic(torch.zeros(1, dtype=dtype), stddev=1.0)
    y = propagate(lambda t: F.softplus(t, rate) - torch.relu(t), x)
    density = 1 / math.sqrt(2 * math.pi)
    mean = math.pi**2 / 6 * density / rate**2
    second = 2 * 1.2020569031595942 / 4 * density / rate**3
    rounding = 8 * torch.finfo(dtype).eps
    assert float((y.mean - mean).abs()) <= 1e-4 * mean + rounding
    assert float((y.variance - (second - mean**2)).abs()) <= 1e-2 * second + rounding
    same = propagate(lambda t: F.softplus(t, rate) - F.softplus(t, rate), x)
    assert not bool(same.variance.any())


@torch.no_grad()
def test_a_trace_tells_the_order_of_its_series() -> None:
    trace = cp.trace(lambda t: F.softplus(t, 1e3), gaussian())
    assert trace.steps[-1].orders
