"""The compiled A S A^T of small matrices against products in float64, for every instruction set."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.kernels import compiled
from covprop.kernels.gradients import jvp
from covprop.rules.layers import COMPILED, Linear

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no compiler was found")
SIZES = (1, 2, 3, 7, 8, 13, 16, 33, 100, COMPILED)


def matrices(m: int, n: int, dtype: torch.dtype, *batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + n)
    weight = torch.randn(m, n, generator=generator, dtype=torch.float64).to(dtype)
    root = torch.randn(*batch, n, n, generator=generator, dtype=torch.float64)
    covariance = (root @ root.mT).to(dtype)
    return (covariance + covariance.mT) / 2, weight


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_product_to_rounding_and_symmetric_to_the_last_bit(dtype: torch.dtype) -> None:
    for (m, n), batch in itertools.product(itertools.product(SIZES, SIZES), ((), (3,), (2, 1))):
        covariance, weight = matrices(m, n, dtype, *batch)
        found, least = compiled.congruence(covariance, weight)
        wide, sides = covariance.double(), weight.double()
        expected = sides @ wide @ sides.mT
        # Two sums of n terms each, relative to the sum of what is added up.
        size = sides.abs() @ wide.abs() @ sides.abs().mT
        assert found.shape == (*batch, m, m)
        assert bool(((found - expected).abs() <= 2 * n * torch.finfo(dtype).eps * size).all())
        assert torch.equal(found, found.mT)
        assert least == float(found.diagonal(dim1=-2, dim2=-1).min())


@pytest.mark.usefixtures("instructions")
def test_a_batch_is_a_loop_whatever_the_strides() -> None:
    covariance, weight = matrices(20, 30, torch.float64, 5)
    strided = torch.empty(30, 5, 30, dtype=torch.float64).movedim(1, 0)
    strided.copy_(covariance)
    found, _ = compiled.congruence(strided, weight.mT.contiguous().mT)
    for one, matrix in zip(found, covariance, strict=True):
        assert torch.equal(one, compiled.congruence(matrix, weight)[0])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_variance_that_is_nan_or_negative_is_seen(place: int) -> None:
    for value in (math.nan, -1.0):
        covariance = torch.eye(3, dtype=torch.float64)
        covariance[place, place] = value
        found, least = compiled.congruence(covariance, torch.eye(3, dtype=torch.float64))
        assert found[place, place] == value or math.isnan(value)
        assert not least >= 0


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_has_the_same_moments_without_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 21), nn.ReLU(), nn.Linear(21, 5), nn.Tanh(), nn.Linear(5, 2))
    covariance, _ = matrices(1, 9, dtype)
    x = cp.Gaussian(torch.ones(9, dtype=dtype), covariance)
    with torch.no_grad():
        found = cp.propagate(model.to(dtype), x, cp.GaussianLayers())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linear, "congruence", lambda *_: None)
            expected = cp.propagate(model, x, cp.GaussianLayers())
    allowed = 1000 * torch.finfo(dtype).eps
    assert bool(((found.mean - expected.mean).abs() <= allowed * expected.stddev).all())
    scale = expected.stddev[:, None] * expected.stddev
    apart = (found.covariance_matrix - expected.covariance_matrix).abs()
    assert bool((apart <= allowed * scale).all())


def test_what_is_followed_large_or_no_plain_matrix_is_left_to_torch() -> None:
    covariance, weight = matrices(3, 4, torch.float64)

    def done(weight: Tensor, covariance: Tensor = covariance) -> bool:
        made: list[bool] = []
        congruence = Linear.congruence

        def seen(layer: Linear, values: Tensor) -> object:
            made.append((found := congruence(layer, values)) is not None)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linear, "congruence", seen)
            x = cp.Gaussian(torch.zeros(len(covariance), dtype=covariance.dtype), covariance)
            cp.propagate(lambda y: nn.functional.linear(y, weight), x, cp.GaussianLayers())
        return made == [True]

    assert done(weight)
    assert done(nn.Parameter(weight, requires_grad=False))
    followed = nn.Parameter(weight)
    assert not done(followed)
    with torch.no_grad():
        assert done(followed)
    assert not done(weight[:0])
    wide, tall = matrices(COMPILED + 1, 4, torch.float64)
    assert not done(tall, wide)


def test_forward_derivatives_go_through() -> None:
    covariance, weight = matrices(3, 4, torch.float64)

    def variance(factor: Tensor) -> Tensor:
        x = cp.Gaussian(torch.zeros(4, dtype=torch.float64), covariance * factor)
        y = cp.propagate(lambda z: nn.functional.linear(z, weight), x, cp.GaussianLayers())
        result: Tensor = y.variance
        return result

    one = torch.ones((), dtype=torch.float64)
    found = jvp(variance, one, one)
    expected = (weight @ covariance @ weight.mT).diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
