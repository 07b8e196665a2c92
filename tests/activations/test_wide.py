"""Quadrature of wide inputs: as accurate as of narrow ones, in memory that does not grow."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import covprop as cp
from covprop.activations import nested
from covprop.activations.moments import Scalar
from covprop.kernels.polynomials import graded
from tests.layers import propagate

pytestmark = pytest.mark.usefixtures("both_kernels")

Function = Callable[[Tensor], Tensor]
NODES, WEIGHTS = np.polynomial.legendre.leggauss(24)


def bent(y: Tensor) -> Tensor:
    return (y - 2).abs() - (y + 1).abs() / 2 + torch.tanh(y)


FUNCTIONS: dict[str, tuple[Function, tuple[float, ...]]] = {
    "softsign": (F.softsign, (0.0,)),
    "tanh": (torch.tanh, ()),
    "softplus": (lambda y: torch.logaddexp(y, torch.zeros_like(y)), ()),
    "bent": (bent, (-1.0, 2.0)),
}


def panels(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    points = np.unique(points)
    half, middle = np.diff(points) / 2, (points[1:] + points[:-1]) / 2
    places = middle[:, None] + half[:, None] * NODES
    return places.ravel(), (half[:, None] * WEIGHTS).ravel()


def bell(z: np.ndarray) -> np.ndarray:
    return np.exp(-z * z / 2) / np.sqrt(2 * np.pi)


def around(centres: tuple[float, ...], reach: float) -> np.ndarray:
    distances = np.append(0, np.geomspace(0.05, reach, int(np.log(reach / 0.05) / 0.6) + 2))
    return np.concatenate([c + s * distances for c in (0.0, *centres) for s in (-1, 1)])


def oracle(function: Function, kinks: tuple[float, ...], means, stddevs, rho: float) -> float:
    """The double integral, place by place, on panels that shrink towards zero and the kinks."""
    (m1, m2), (s1, s2), rest = means, stddevs, stddevs[1] * np.sqrt((1 - rho) * (1 + rho))

    def g(y: np.ndarray) -> np.ndarray:
        return function(torch.from_numpy(np.ascontiguousarray(y))).numpy()

    def seen(y2: np.ndarray) -> np.ndarray:
        return m1 + s1 * (y2 - m2) / (s2 * rho)

    blurred = np.concatenate([c + rest * np.linspace(-10, 10, 21) for c in (0.0, *kinks)])
    outer = [m1 + s1 * np.linspace(-12, 12, 25), around(kinks, 12 * s1), seen(blurred)]
    points = np.concatenate(outer).clip(m1 - 12 * s1, m1 + 12 * s1)
    y, weight = panels(points)
    z = (y - m1) / s1
    weight = weight * bell(z) / s1
    second = []
    for centre in m2 + s2 * rho * z:
        inner = np.concatenate([centre + rest * np.linspace(-10, 10, 11), around(kinks, 20 * rest)])
        places, shares = panels(inner.clip(centre - 10 * rest, centre + 10 * rest))
        second.append((shares * bell((places - centre) / rest) / rest * g(places)).sum())
    first, given = g(y), np.array(second)
    first, given = first - (weight * first).sum(), given - (weight * given).sum()
    return float((weight * first * given).sum())


@pytest.mark.parametrize(
    ("name", "rho", "stddevs"),
    [
        ("softsign", 0.97, (30.0, 12.0)),
        ("tanh", -0.999, (1e6, 1e6)),
        ("softplus", 0.999, (300.0, 30.0)),
        ("bent", -0.97, (300.0, 40.0)),
    ],
)
def test_wide_pairs_are_as_accurate_as_narrow_ones(
    name: str, rho: float, stddevs: tuple[float, float]
) -> None:
    function, kinks = FUNCTIONS[name]
    means = 0.3 * stddevs[0], -0.2 * stddevs[1]
    numbers = means[0], stddevs[0], means[1], stddevs[1], rho
    scalar = Scalar(function, kinks, fineness=2)
    columns = [torch.tensor([number], dtype=torch.float64) for number in numbers]
    found = float(nested.nested_covariance(scalar, (), (), *columns))
    x = cp.Gaussian.diagonal(torch.cat(columns[0:3:2]), variance=torch.cat(columns[1:4:2]).square())
    scale = float(propagate(cp.activation(function, kinks=kinks), x).stddev.prod())
    assert found == pytest.approx(oracle(function, kinks, means, stddevs, rho), abs=1e-10 * scale)


class Largest(TorchDispatchMode):
    """The most bytes that tensors had at a time while it watched, of one operation's result."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, Tensor):
                self.nbytes = max(self.nbytes, leaf.nbytes)
        return result


@pytest.mark.parametrize("stddev", [300.0, 1e6])
@pytest.mark.parametrize("rho", [0.97])
@pytest.mark.parametrize("function", [F.softsign, torch.tanh])
def test_no_tensor_grows_with_the_width(function: Function, rho: float, stddev: float) -> None:
    """About a dozen live at a time: 8 MB each are some 100 MB."""
    matrix = stddev**2 * torch.tensor([[1, rho], [rho, 1]], dtype=torch.float64)
    x = cp.Gaussian(torch.zeros(2, dtype=torch.float64), matrix)
    with torch.no_grad(), Largest() as largest:
        propagate(function, x)
    assert largest.nbytes <= 2**23


def test_many_wide_elements_are_treated_in_blocks() -> None:
    x = cp.Gaussian.isotropic(torch.linspace(-1e3, 1e3, 1000, dtype=torch.float64), stddev=300.0)
    with torch.no_grad(), Largest() as largest:
        y = propagate(F.softsign, x)
    assert largest.nbytes <= 2**23
    alone = propagate(F.softsign, cp.Gaussian.isotropic(x.mean[:1], stddev=300.0))
    torch.testing.assert_close(y.mean[:1], alone.mean, rtol=1e-12, atol=0)


def test_gradients_of_a_wide_pair_agree_with_differences() -> None:
    scalar = Scalar(F.softsign, (0.0,), fineness=2)

    def pair(mean: Tensor, spread: Tensor, rho: Tensor) -> Tensor:
        columns = mean[:1], spread[:1], mean[1:], spread[1:], rho
        return nested.nested_covariance(scalar, (), (), *columns)

    mean = torch.tensor([4.0, -3.0], dtype=torch.float64, requires_grad=True)
    spread = torch.tensor([30.0, 12.0], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([-0.97], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pair, (mean, spread, rho), atol=1e-8, rtol=1e-6)


def test_graded_points_stay_closest_to_their_centre_and_end_where_even_panels_suffice() -> None:
    points = graded((5.0,), 1.0, 1.0, 100.0)
    assert {0.0, 5.0} <= set(points)
    assert points == sorted(set(points))
    assert max(points) < 5 + 2 * 100 / 0.25
    between = [point for point in points if 0 < point < 5]
    assert between == [2.0, 3.0]
