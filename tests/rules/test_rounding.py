"""Piecewise constant functions, against sums of probabilities and against samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "decimals": lambda x: torch.round(x / 4, decimals=1),
    "remainder": lambda x: x % 0.75,
    "fmod": lambda x: x.fmod(0.75),
    "floor_divide": lambda x: x // -0.5,
    "rounding_mode": lambda x: torch.div(x, 0.5, rounding_mode="trunc"),
    "in place": lambda x: (2 * x).round_() / 2,
    "fake quantisation": lambda x: (x / 0.5).round().clamp(-3, 2) * 0.5,
    "then a ReLU": lambda x: torch.relu(2 * torch.floor(x) + 1),
}


def one(mean: float, stddev: float) -> cp.Gaussian:
    return cp.Gaussian.isotropic(torch.tensor([mean]).double(), stddev=stddev)


def expected(function: Callable[[Any], Any], mean: float, stddev: float) -> tuple[float, float]:
    """Mean and variance by midpoints: all functions are linear between multiples of 0.05.

    With weights of exact probability, what is missed is the slope of the density within a step, of
    relative size (step / stddev)^2 / 12.
    """
    step = 0.05 / 64
    low, high = (round((mean + side * 9 * stddev) / step) for side in (-1, 1))
    ends = step * torch.arange(low, high, dtype=torch.float64)
    weights = torch.as_tensor(norm.cdf((ends + step - mean) / stddev)) - torch.as_tensor(
        norm.cdf((ends - mean) / stddev)
    )
    values = function(ends + step / 2)
    centre = float((weights * values).sum())
    return centre, float((weights * (values - centre).square()).sum())


@pytest.mark.parametrize(("mean", "stddev"), [(0.3, 0.4), (-1.1, 0.2), (2.5, 0.13)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_moments_of_one(name: str, mean: float, stddev: float) -> None:
    y = propagate(FUNCTIONS[name], one(mean, stddev))
    centre, variance = expected(FUNCTIONS[name], mean, stddev)
    assert float(y.mean) == pytest.approx(centre, abs=1e-6)
    assert float(y.variance) == pytest.approx(variance, abs=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pairs_agree_with_samples(name: str) -> None:
    x = gaussian(4)
    x = cp.Gaussian(2 * x.mean, x.covariance_matrix / 4)

    def function(x: Any) -> Any:
        return torch.cat([FUNCTIONS[name](x), x], -1)

    y = propagate(function, x)
    sample = function(x.sample(100_000, torch.Generator().manual_seed(0)))
    centred = sample - sample.mean(0)
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(0) / len(sample) ** 0.5
    # Events that no sample has seen are rarer than 1e-4.
    assert bool(((y.covariance_matrix - products.mean(0)).abs() <= 5 * error + 1e-3).all())
    assert bool(((y.mean - sample.mean(0)).abs() <= 5 * sample.std(0) / 316 + 1e-3).all())


def test_what_does_not_vary_is_rounded_as_torch_does() -> None:
    mean = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.0, 3.0, 0.0]).double()
    x = cp.Gaussian(mean, torch.zeros(7, 7).double())
    for name in ("floor", "ceil", "round", "trunc", "frac"):
        for far in (0.0, 1000.0):  # too far apart for one function
            shift = torch.tensor([far] + [0.0] * 6).double()
            y = propagate(lambda x, name=name, by=shift: getattr(torch, name)(x + by), x)
            assert_close(y.mean, getattr(torch, name)(mean + shift), rtol=0.0)
            assert not y.variance.any()


@pytest.mark.parametrize("name", ["floor", "round", "trunc", "remainder"])
def test_around_each_mean_it_is_the_same(name: str) -> None:
    x = gaussian(3, batch=(2,))
    x = cp.Gaussian(x.mean, x.covariance_matrix / 9)
    far = torch.tensor([1e4, 0.0, -1e4], dtype=torch.float64)
    x = cp.Gaussian(x.mean + far, x.covariance_matrix)
    y = propagate(FUNCTIONS[name], x)
    for i in range(3):
        alone = cp.Gaussian(x.mean[:, i : i + 1], x.covariance_matrix[:, i : i + 1, i : i + 1])
        z = propagate(FUNCTIONS[name], alone)
        assert_close(y.mean[:, i], z.mean[:, 0], atol=1e-10)
        assert_close(y.variance[:, i], z.variance[:, 0], atol=1e-10)


def test_gradients_are_those_of_the_probability() -> None:
    mean = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)

    def moments(mean: Tensor) -> tuple[Tensor, Tensor]:
        y = propagate(torch.round, cp.Gaussian.isotropic(mean, stddev=0.4))
        return y.mean, y.variance

    assert torch.autograd.gradcheck(moments, [mean])


def test_too_many_jumps_are_refused() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"round has more than 64 jumps"):
        propagate(torch.round, one(0.0, 5.0))
