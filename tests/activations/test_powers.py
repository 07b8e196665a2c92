"""Expected derivatives of centred powers, against integrals that share no code with them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import integrate
from torch import Tensor

from covprop.activations.powers import expected_derivatives
from covprop.activations.rectifiers import prelu
from covprop.errors import QuadratureError
from covprop.rules.elementwise import find_activation
from tests.oracles import assert_close, assert_gradients

D = torch.float64
ORDER = 9
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[float], float], tuple[float, ...]]] = {
    "relu": (torch.relu, lambda y: max(y, 0.0), (0.0,)),
    "leaky_relu": (F.leaky_relu, lambda y: max(y, 0.01 * y), (0.0,)),
    "abs": (torch.abs, abs, (0.0,)),
    "tanh": (torch.tanh, math.tanh, ()),
    "gelu": (F.gelu, lambda y: y * (1 + math.erf(y / math.sqrt(2))) / 2, ()),
    "hardtanh": (F.hardtanh, lambda y: min(max(y, -1.0), 1.0), (-1.0, 1.0)),
    "sign": (torch.sign, lambda y: float(np.sign(y)), (0.0,)),
    "square": (torch.square, lambda y: y * y, ()),
    "elu": (F.elu, lambda y: y if y > 0 else math.expm1(y), (0.0,)),
}


def integral(
    function: Callable[[float], float],
    kinks: tuple[float, ...],
    mean: float,
    stddev: float,
    power: int,
    order: int,
) -> float:
    """E[(g - E g)^p He_k] by QUADPACK."""
    hermite = np.polynomial.hermite_e.HermiteE.basis(order)
    places = sorted((kink - mean) / stddev for kink in kinks)
    ends = [-12.0, *(p for p in (*places, -4.0, 0.0, 4.0) if -12 < p < 12), 12.0]
    ends.sort()

    def expect(values: Callable[[float], float]) -> float:
        total = 0.0
        for low, high in itertools.pairwise(ends):
            total += integrate.quad(
                lambda x: values(x) * math.exp(-x * x / 2) / math.sqrt(2 * math.pi),
                low, high, epsabs=1e-11, epsrel=1e-9, limit=200,
            )[0]  # fmt: skip
        return total

    centre = expect(lambda x: function(mean + stddev * x))
    return expect(lambda x: (function(mean + stddev * x) - centre) ** power * float(hermite(x)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_integrals_are_those_of_another_quadrature(name: str) -> None:
    function, plain, kinks = FUNCTIONS[name]
    points = [(0.3, 0.7), (-1.2, 0.5), (0.1, 2.0)]
    mean, stddev = (torch.tensor(column, dtype=D) for column in zip(*points, strict=True))
    found = expected_derivatives(find_activation(function), mean, stddev.square(), ORDER)
    for i, (mu, sigma) in enumerate(points):
        for power, rows in enumerate(found, start=1):
            # Relative to |f^p| and to the norm sqrt(k!) of He_k; both integrals are that good.
            size = max(1.0, integral(plain, kinks, mu, sigma, 2, 0)) ** (power / 2)
            for k in {0, 1, 3, len(rows) - 1}:
                expected = integral(plain, kinks, mu, sigma, power, k)
                bound = 1e-9 * size * 4**power * math.sqrt(math.factorial(k))
                assert abs(float(rows[k, i]) - expected) <= bound, (name, power, k, mu, sigma)


def test_those_of_a_rectifier_follow_from_its_own() -> None:
    """relu^2 has the derivative 2 relu: the centred square has 2 sigma c_{k-1} - 2 c_0 c_k."""
    mean, variance = torch.tensor([0.4, -1.0, 3.0], dtype=D), torch.tensor([1.0, 0.3, 2.0], dtype=D)
    relu = find_activation(torch.relu)
    first, second, _ = expected_derivatives(relu, mean, variance, ORDER)
    centre, stddev = relu.mean(mean, variance), variance.sqrt()
    for k in range(2, ORDER + 1):
        expected = 2 * stddev * first[k - 1] - 2 * centre * first[k]
        assert_close(second[k], expected, atol=1e-11 * math.sqrt(math.factorial(k)))


def test_coefficients_are_those_of_the_series() -> None:
    mean, variance = torch.tensor([0.4, -1.0], dtype=D), torch.tensor([1.0, 0.3], dtype=D)
    for function in (torch.tanh, torch.relu, F.gelu):
        activation = find_activation(function)
        first = expected_derivatives(activation, mean, variance, ORDER).first
        known = activation.coefficients(mean, variance, ORDER) * variance.sqrt()
        for k in range(1, ORDER + 1):
            factor = math.sqrt(math.factorial(k))
            assert_close(first[k] / factor, known[k - 1], atol=1e-11)


def test_what_does_not_vary_has_no_moments() -> None:
    zero = torch.zeros(2, dtype=D)
    for rows in expected_derivatives(find_activation(torch.relu), zero, zero, ORDER):
        assert not bool(rows.any())


@pytest.mark.parametrize("scale", [1e-8, 1e3, 1e8])
def test_narrow_and_wide_arguments(scale: float) -> None:
    """relu is homogeneous: f^p scales with the p-th power."""
    mean, variance = torch.tensor([0.4, -1.0], dtype=D), torch.tensor([1.0, 0.3], dtype=D)
    relu = find_activation(torch.relu)
    unit = expected_derivatives(relu, mean, variance, ORDER)
    scaled = expected_derivatives(relu, scale * mean, scale**2 * variance, ORDER)
    for power, (rows, expected) in enumerate(zip(scaled, unit, strict=True), start=1):
        assert_close(rows / scale**power, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "gelu", "hardtanh", "elu"])
def test_gradients(name: str) -> None:
    activation = find_activation(FUNCTIONS[name][0])
    mean, variance = torch.tensor([0.4, -1.0], dtype=D), torch.tensor([1.0, 0.3], dtype=D)

    def rows(mean: Tensor, variance: Tensor) -> Any:
        return [part[:6] for part in expected_derivatives(activation, mean, variance, 6)]

    assert_gradients(rows, [mean, variance], atol=2e-5)


def test_parameters_of_an_activation_have_no_gradient() -> None:
    slope = torch.tensor([0.1, 0.2], dtype=D, requires_grad=True)
    with pytest.raises(QuadratureError, match="no gradient by the parameters"):
        expected_derivatives(prelu(slope), slope.detach(), slope.detach(), ORDER)


def test_parts_and_batches_are_the_same_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 700, dtype=D, generator=generator)
    variance = torch.rand(3, 700, dtype=D, generator=generator) * 400
    activation = find_activation(torch.tanh)
    whole = expected_derivatives(activation, mean, variance, ORDER)
    one = expected_derivatives(activation, mean[1, 5:6], variance[1, 5:6], ORDER)
    for rows, expected in zip(whole, one, strict=True):
        scale = torch.tensor([math.sqrt(math.factorial(k)) for k in range(len(rows))], dtype=D)
        assert_close(rows[:, 1, 5] / scale, expected[:, 0] / scale, atol=1e-10)
