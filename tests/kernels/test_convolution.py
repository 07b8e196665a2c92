"""The compiled A S A^T of convolutions against matrices in float64, for every instruction set."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.kernels import compiled
from covprop.rules.layers import Convolution

pytestmark = [
    pytest.mark.skipif(compiled.library() is None, reason="no compiler was found"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


class Case(NamedTuple):
    """Channels, rows and columns of an image, outputs and kernel of a layer, and its options."""

    image: tuple[int, int, int]
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] | str = (0, 0)


CASES = (
    Case((1, 1, 1), 1, (1, 1)),
    Case((2, 3, 4), 1, (2, 2)),  # fewer places than a vector has lanes
    Case((1, 5, 5), 2, (3, 3), padding=(1, 1)),
    Case((3, 6, 7), 13, (3, 3), padding="same"),  # more outputs than registers
    Case((2, 5, 6), 3, (2, 4), padding="same"),  # more zeros on one side
    Case((2, 8, 9), 5, (2, 2), stride=(2, 2)),
    Case((3, 7, 6), 4, (5, 3), stride=(2, 1), padding=(2, 1)),
    Case((4, 5, 5), 7, (3, 3), stride=(3, 2), padding=(4, 3)),  # some places see only zeros
    Case((2, 1, 1), 30, (1, 1)),
    Case((5, 8, 8), 6, (3, 3), padding=(1, 1)),
)


def layer_of(case: Case, dtype: torch.dtype) -> tuple[Convolution, Tensor]:
    """A layer, and the matrix of its linear map in float64."""
    generator = torch.Generator().manual_seed(sum(case.image))
    shape = case.outputs, case.image[0], *case.kernel
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    layer = Convolution(weight, torch.Size(case.image), case.stride, case.padding, (1, 1), 1)
    unit = torch.eye(math.prod(case.image), dtype=torch.float64).reshape(-1, *case.image)
    images = F.conv2d(unit, weight.double(), None, case.stride, case.padding)
    return layer, images.flatten(1).mT


def covariance_of(case: Case, dtype: torch.dtype, *batch: int) -> Tensor:
    size = math.prod(case.image)
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64)
    covariance = (root @ root.mT).to(dtype)
    return (covariance + covariance.mT) / 2


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_product_to_rounding_and_symmetric_to_the_last_bit(
    case: Case, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    (layer, matrix), covariance = layer_of(case, dtype), covariance_of(case, dtype, *batch)
    made = layer.congruence(covariance)
    assert made is not None
    found, least = made
    wide = covariance.double()
    # Two sums of so many terms each, relative to the sum of what is added up.
    terms = case.image[0] * math.prod(case.kernel)
    size = matrix.abs() @ wide.abs() @ matrix.abs().mT
    assert found.shape == (*batch, len(matrix), len(matrix))
    apart = (found - matrix @ wide @ matrix.mT).abs()
    assert bool((apart <= 2 * terms * torch.finfo(dtype).eps * size).all())
    assert torch.equal(found, found.mT)
    assert least == float(found.diagonal(dim1=-2, dim2=-1).min())


@pytest.mark.usefixtures("instructions")
def test_a_batch_is_a_loop_whatever_strides_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, _), size = layer_of(CASES[-1], torch.float64), math.prod(CASES[-1].image)
    covariance = covariance_of(CASES[-1], torch.float64, 5)
    strided = torch.empty(size, 5, size, dtype=torch.float64).movedim(1, 0)
    strided.copy_(covariance)
    made = layer.congruence(strided)
    assert made is not None
    for one, matrix in zip(made[0], covariance, strict=True):
        alone = layer.congruence(matrix)
        assert alone is not None
        assert torch.equal(one, alone[0])
    monkeypatch.setattr(compiled, "threads", lambda _: 3)
    several = layer.congruence(covariance)
    assert several is not None
    assert torch.equal(several[0], made[0])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_variance_that_is_nan_or_negative_is_seen(value: float) -> None:
    layer, _ = layer_of(CASES[4], torch.float64)
    covariance = torch.eye(60, dtype=torch.float64)
    covariance[31, 31] = 1000 * value
    made = layer.congruence(covariance)
    assert made is not None
    assert not made[1] >= 0


def test_it_is_what_a_network_runs_and_its_moments_are_those_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding="same"), nn.ReLU(), nn.Conv2d(5, 3, 2, stride=2), nn.Tanh(),
        nn.Flatten(-3), nn.Linear(18, 3),
    ).double().requires_grad_(False)  # fmt: skip
    covariance = covariance_of(Case((2, 5, 6), 1, (1, 1)), torch.float64) / 60
    x = cp.Gaussian(torch.ones(2, 5, 6, dtype=torch.float64), covariance)
    made: list[bool] = []
    compute = Convolution.congruence

    def seen(layer: Convolution, values: Tensor) -> tuple[Tensor, float] | None:
        made.append((found := compute(layer, values)) is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Convolution, "congruence", seen)
        found = cp.propagate(model, x, cp.GaussianLayers())
        assert made == [True, True]
        patch.setattr(Convolution, "congruence", lambda *_: None)
        expected = cp.propagate(model, x, cp.GaussianLayers())
    allowed = 1000 * torch.finfo(torch.float64).eps
    assert bool(((found.mean - expected.mean).abs() <= allowed * expected.stddev).all())
    scale = expected.stddev[:, None] * expected.stddev
    assert bool(
        ((found.covariance_matrix - expected.covariance_matrix).abs() <= allowed * scale).all()
    )


def test_what_is_followed_grouped_dilated_or_several_images_is_left_to_torch() -> None:
    layer, _ = layer_of(CASES[3], torch.float64)
    covariance = covariance_of(CASES[3], torch.float64)
    assert layer.congruence(covariance) is not None
    several = torch.block_diag(covariance, covariance)
    assert layer.congruence(several) is None
    kinds = layer.image, layer.stride, (0, 0)
    assert Convolution(layer.weight, *kinds, (2, 2), 1).congruence(covariance) is None
    assert Convolution(layer.weight[:, :1], *kinds, (1, 1), 3).congruence(covariance) is None
    followed = Convolution(nn.Parameter(layer.weight), *kinds, (1, 1), 1)
    assert followed.congruence(covariance) is None
    with torch.no_grad():
        assert followed.congruence(covariance) is not None
