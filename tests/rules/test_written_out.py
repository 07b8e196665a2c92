"""Functions in terms of exponentials and logarithms, and angles: against Gauss-Hermite."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import covprop as cp
from covprop.errors import OutsideDomain
from tests.layers import propagate

POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
EXACT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "expm1": (torch.expm1, np.expm1),
    "expm1, special": (torch.special.expm1, np.expm1),
    "expm1, in place": (lambda x: x.clone().expm1_(), np.expm1),
    "exp2": (torch.exp2, np.exp2),
    "sinh": (torch.sinh, np.sinh),
    "cosh": (lambda x: x.cosh(), np.cosh),
}
APPROXIMATE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], float]] = {
    "log1p": (torch.log1p, np.log1p, 2.0),
    "log1p near zero": (torch.log1p, np.log1p, 0.1),
    "log2": (torch.log2, np.log2, 3.0),
    "log10": (lambda x: x.log10(), np.log10, 3.0),
    "asin": (torch.asin, np.arcsin, 0.4),
    "arcsin": (torch.arcsin, np.arcsin, -0.4),
    "acos": (lambda x: x.acos(), np.arccos, 0.2),
}


def moments(function: Callable[[Any], Any], mean: float, stddev: float) -> tuple[float, float]:
    values = function(mean + stddev * POINTS)
    centre = float(WEIGHTS @ values)
    return centre, float(WEIGHTS @ (values - centre) ** 2) ** 0.5


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("mean", "stddev"), [(0.0, 0.7), (1.5, 0.4), (-1.0, 1e-3)])
def test_exponentials_are_exact(name: str, mean: float, stddev: float) -> None:
    function, plain = EXACT[name]
    y = propagate(function, cp.Gaussian.isotropic(torch.tensor([mean]).double(), stddev=stddev))
    wanted = moments(plain, mean, stddev)
    # 60 points integrate exp(0.7 xi)^2 to rounding; variances near 1e-6 lose it to cancellation.
    assert float(y.mean) == pytest.approx(wanted[0], abs=1e-13)
    assert float(y.stddev) == pytest.approx(wanted[1], rel=1e-9)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_the_others_are_right_for_small_noise(name: str) -> None:
    function, plain, mean = APPROXIMATE[name]
    y = propagate(function, cp.Gaussian.isotropic(torch.tensor([mean]).double(), stddev=0.02))
    wanted = moments(plain, mean, 0.02)
    assert float(y.mean) == pytest.approx(wanted[0], abs=1e-5)
    assert float(y.stddev) == pytest.approx(wanted[1], rel=2e-3)


@pytest.mark.parametrize("mean", [0.95, -0.95, 2.0])
def test_angles_are_refused_outside_of_their_domain(mean: float) -> None:
    x = cp.Gaussian.isotropic(torch.tensor([mean]).double(), stddev=0.02)
    for function in (torch.asin, torch.acos):
        with pytest.raises(OutsideDomain, match=r"from -1 to 1"):
            propagate(function, x)


def test_a_plain_tensor_of_the_caller_cannot_hold_a_gaussian() -> None:
    y = torch.zeros(3)

    def forward(x: Any) -> Any:
        y[1:] = x
        return y

    with pytest.raises(cp.UnsupportedOperation, match="into a plain tensor"):
        propagate(forward, cp.Gaussian.isotropic(torch.zeros(2), stddev=1.0))


def test_a_random_index_is_refused() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(3), stddev=1.0)
    with pytest.raises(cp.UnsupportedOperation, match="cannot be an index"):
        propagate(lambda x: torch.scatter_add(torch.zeros(3), 0, x, torch.ones(3)), x)


def test_the_name_of_a_type_and_another_type() -> None:
    def forward(x: Any) -> Any:
        assert x.type() == "torch.FloatTensor"
        return x.type(torch.float64)

    y = propagate(forward, cp.Gaussian.isotropic(torch.zeros(3), stddev=1.0))
    assert y.dtype == torch.float64
