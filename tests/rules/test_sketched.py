"""Nonlinearities of one depth in a sketch: they share their second order, as they do in `Exact`."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import covprop as cp
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close


def sketched(function: Callable[..., Any], *inputs: cp.Gaussian, tangents: int = 64) -> Any:
    generator = torch.Generator().manual_seed(0)
    return propagate(function, *inputs, method=cp.Sketched(tangents, generator=generator))


W = weight(4, 4) / 2
MEETING: dict[str, Callable[[Any], Any]] = {
    "square less product": lambda x: x.square() - x * x,
    "power and product": lambda x: x**2 + x * x,
    "square and another product": lambda x: x[:1].square() + x[:1] * x[1:2],
    "side by side": lambda x: torch.cat([x.square(), x * x, x * x.flip(0), x]),
    "two maps": lambda x: F.linear(x, W) * x - F.linear(x * x, W) + x.square(),
    "variance": lambda x: x.var()[None] - (x * x).mean()[None] * 4 / 3,
}


@pytest.mark.parametrize("name", MEETING)
def test_squares_and_products_of_exact_directions_are_exact(name: str) -> None:
    x = gaussian(4)
    y, expected = sketched(MEETING[name], x), propagate(MEETING[name], x)
    scale = max(1.0, float(expected.variance.max()))
    assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-12 * scale)


def test_tensors_of_several_inputs_share_what_they_have_in_common() -> None:
    x, w = gaussian(3), gaussian(3, seed=1)

    def forward(x: Any, w: Any) -> Any:
        return torch.cat([(x + w).square() - 2 * x * w, w * w + x.square(), w.square()])

    y, expected = sketched(forward, x, w), propagate(forward, x, w)
    assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-11)


def test_random_directions_agree_within_their_standard_errors() -> None:
    """Of a random direction of a layer: the noise of two that cancel is that of its own error."""
    size = 200
    x, outer = gaussian(size), weight(3, size) / size**0.5

    def forward(x: Any) -> Any:
        sum_, difference = x**2 + x * x.roll(1), torch.tanh(x) - x * x
        return F.linear(torch.cat([sum_, difference]), torch.cat([outer, outer.flip(0)], 1))

    method = cp.Sketched(256, exact=0, replicates=16, generator=torch.Generator().manual_seed(0))
    y, expected = propagate(forward, x, method=method), propagate(forward, x)
    bound = 5 * y.covariance_stderr.diagonal()
    assert bool(((y.variance - expected.variance).abs() <= bound).all())
    apart = propagate(forward, x, method=cp.Sketched(256, order=1))
    assert bool((bound < (apart.variance - expected.variance).abs()).any())


def test_variances_further_on_have_it_too() -> None:
    """exp sees the variance of its input, which is four times that of either square."""
    x = cp.Gaussian.isotropic(torch.zeros(50, dtype=torch.float64), stddev=0.5)

    def forward(x: Any) -> Any:
        return torch.exp(x.square() + x * x).mean(-1, keepdim=True)

    y, expected = sketched(forward, x, tangents=512), propagate(forward, x)
    assert abs(float(y.mean / expected.mean) - 1) < 0.02
    apart = torch.exp(torch.tensor(0.5 + 2 * 2 * 0.0625 / 2)).double()  # two of their own
    assert abs(float(apart / expected.mean) - 1) > 0.1


def test_a_matrix_product_beside_another_nonlinearity_is_not_silent() -> None:
    x = gaussian(4)
    for function in (lambda x: (x @ x) - (x * x).sum(), lambda x: (x @ x)[None] + torch.relu(x)):
        with pytest.warns(cp.ApproximationWarning, match=r"matrix product.*cp\.GaussianLayers"):
            sketched(function, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sketched(lambda x: (x @ x)[None] + x, x)
        sketched(lambda x: torch.relu((x @ x)[None] + x), x)
        twice = sketched(lambda x: (x @ x) - (x @ x), x)
    assert float(twice.variance.abs().max()) < 1e-10
