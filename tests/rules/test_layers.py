"""What layers with a weight know of their maps agrees with the layers themselves."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import covprop as cp
from covprop.covariance.congruence import TOGETHER
from covprop.rules.layers import Convolution, Convolver, Linear
from tests.layers import propagate

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "padding": {"padding": (2, 1)},
    "wide padding": {"padding": (4, 5)},
    "stride": {"stride": (2, 2)},
    "unequal strides": {"stride": (1, 3), "padding": (1, 0)},
    "strides, padded": {"stride": (3, 2), "padding": (1, 2)},
    "dilated": {"dilation": (2, 1), "padding": "same"},
    "groups": {"groups": 2},
}
IMAGE = torch.Size((4, 7, 6))


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def convolution(
    options: dict[str, Any], kernel: tuple[int, int], dtype: torch.dtype
) -> tuple[Convolution, dict[str, Any]]:
    whole = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    weight = numbers(6, 4 // whole["groups"], *kernel, dtype=dtype)
    return Convolution(weight, IMAGE, **whole), whole


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 3), (1, 1), (1, 4), (5, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("count", [1, TOGETHER, 2 * TOGETHER + 3])
def test_rows_of_a_convolution(
    options: dict[str, Any], kernel: tuple[int, int], dtype: torch.dtype, count: int
) -> None:
    layer, kinds = convolution(options, kernel, dtype)
    vectors = numbers(count, IMAGE.numel(), dtype=dtype)
    expected = F.conv2d(vectors.reshape(-1, *IMAGE), layer.weight, **kinds).flatten(1)
    tolerance = {"atol": 1e-12, "rtol": 0.0} if dtype == torch.float64 else {}
    for start in (0, 1, expected.shape[1] // 2, expected.shape[1] - 1):
        first, rows = layer.rows(vectors, start)
        assert first <= start
        assert_close(rows, expected[:, first:], **tolerance)
    assert layer.rows(vectors, expected.shape[1] - 1)[0] > 0 or kinds["groups"] > 1


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_any_dimensions_may_lead(lead: tuple[int, ...]) -> None:
    layer, kinds = convolution({"padding": "same"}, (3, 3), torch.float64)
    vectors = numbers(*lead, IMAGE.numel())
    expected = F.conv2d(vectors.reshape(-1, *IMAGE), layer.weight, **kinds)
    assert_close(layer.rows(vectors)[1], expected.reshape(*lead, -1), atol=1e-12, rtol=0.0)
    linear = Linear(numbers(5, IMAGE.numel()))
    assert_close(linear.rows(vectors)[1], vectors @ linear.weight.mT, atol=1e-12, rtol=0.0)


def test_an_event_of_several_images_is_whole() -> None:
    layer, kinds = convolution({}, (3, 3), torch.float64)
    vectors = numbers(5, 2 * IMAGE.numel())
    expected = F.conv2d(vectors.reshape(-1, *IMAGE), layer.weight, **kinds).reshape(5, -1)
    first, rows = layer.rows(vectors, expected.shape[1] - 1)
    assert first == 0
    assert_close(rows, expected, atol=1e-12, rtol=0.0)


def test_a_convolver_forgets_the_images_before() -> None:
    weight = numbers(3, 4, 3, 3)
    convolver = Convolver(weight, IMAGE, (1, 1), (1, 1, 1, 1))
    convolver(1e6 * numbers(TOGETHER, IMAGE.numel()))
    vectors = numbers(TOGETHER // 2, IMAGE.numel())
    fresh = Convolver(weight, IMAGE, (1, 1), (1, 1, 1, 1))(vectors)
    assert torch.equal(convolver(vectors), fresh)


def test_gradients_go_through_torchs_own_convolution() -> None:
    layer, _ = convolution({"padding": "same"}, (3, 3), torch.float64)
    vectors = numbers(2, IMAGE.numel()).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: layer.rows(v)[1][:, ::9], (vectors,))
    layer.weight.requires_grad_()
    assert layer.rows(vectors.detach())[1].requires_grad


def test_forward_derivatives_go_there_as_well() -> None:
    layer, kinds = convolution({"padding": "same"}, (3, 3), torch.float64)
    vectors, tangent = numbers(2, IMAGE.numel()), numbers(*layer.weight.shape) + 1

    def of_weight(weight: Tensor) -> Tensor:
        return Convolution(weight, IMAGE, **kinds).rows(vectors)[1]

    expected = Convolution(tangent, IMAGE, **kinds).rows(vectors)[1]  # it is linear
    assert_close(torch.func.jvp(of_weight, (layer.weight,), (tangent,))[1], expected)
    with fwAD.dual_level():
        dual = fwAD.make_dual(layer.weight, tangent)
        assert_close(fwAD.unpack_dual(of_weight(dual)).tangent, expected)
    along = torch.func.jvp(lambda v: layer.rows(v)[1], (vectors,), (vectors,))[1]
    assert_close(along, layer.rows(vectors)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("rows", [1, 500, 2**18])
def test_blocks_make_no_difference(
    rows: int, batch: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.congruence.ROWS", rows)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.Conv2d(3, 4, 2, stride=2),
        torch.nn.Flatten(-3), torch.nn.Linear(24, 9), torch.nn.AvgPool1d(3),
    ).to(dtype).requires_grad_(False)  # fmt: skip
    mean, root = numbers(*batch, 2, 4, 6, dtype=dtype), numbers(*batch, 48, 48, dtype=dtype)
    x = cp.Gaussian(mean if batch else mean[None], root @ root.mT, validate_args=False)
    image = mean.reshape(-1, 2, 4, 6)[:1]
    slope = torch.autograd.functional.jacobian(model, image).reshape(-1, 48)
    result = propagate(model, x).covariance_matrix
    assert_close(result, slope @ root @ root.mT @ slope.mT)
    assert torch.equal(result, result.mT)
