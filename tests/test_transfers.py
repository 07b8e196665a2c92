"""Transposes of the edges of the lineage, against autograd and against matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.covariance import LinearMap
from covprop.flow.carrier import DiagonalTransfer, IndexTransfer, LinearTransfer, ScalarTransfer
from covprop.methods.sketched_backward import transposed
from covprop.rules.layers import Convolution, Linear
from tests.gaussians import numbers
from tests.layers import propagate
from tests.oracles import assert_close

D = torch.float64


def matrix_of(
    transfer: LinearTransfer | DiagonalTransfer, size: int, batch: tuple[int, ...]
) -> Tensor:
    """Its columns: what it makes of unit vectors."""
    return transfer(torch.eye(size, dtype=D).expand(*batch, size, size))


CONVOLUTIONS = {  # inputs, outputs, kernel, stride, padding, dilation, groups, side
    "plain": (3, 4, 3, 1, 1, 1, 1, 7),
    "stride": (3, 4, 3, 2, 1, 1, 1, 8),
    "dilation": (4, 6, 3, 1, 0, 2, 1, 9),
    "one by one": (4, 6, 1, 1, 0, 1, 1, 5),
    "one by one, stride": (4, 6, 1, 2, 0, 1, 1, 6),
    "groups": (4, 6, 3, 2, 1, 1, 2, 7),
    "wide": (2, 3, 7, 2, 3, 1, 1, 11),
    "more padding than kernel": (2, 3, 3, 1, 3, 1, 1, 5),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_transpose_of_a_convolution_is_that_of_its_matrix(
    name: str, batch: tuple[int, ...]
) -> None:
    inputs, outputs, kernel, stride, padding, dilation, groups, side = CONVOLUTIONS[name]
    weight, image = numbers(outputs, inputs // groups, kernel, kernel), (inputs, side, side)
    layer = Convolution(
        weight, torch.Size(image), (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups
    )
    linear = LinearMap(
        lambda t: F.conv2d(t, weight, None, stride, padding, dilation, groups),
        torch.Size(image), layer=layer,
    )  # fmt: skip
    size = inputs * side**2
    matrix = matrix_of(LinearTransfer(linear), size, batch)
    rows = numbers(*batch, 3, matrix.shape[-2], seed=1)
    assert layer.transposed(rows) is not None
    assert_close(transposed(LinearTransfer(linear), rows, size), rows @ matrix, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 3])
def test_the_transpose_of_a_linear_layer_is_that_of_its_matrix(positions: int) -> None:
    weight = numbers(5, 4)
    linear = LinearMap(
        lambda t: F.linear(t, weight), torch.Size((positions, 4)), layer=Linear(weight)
    )
    matrix = matrix_of(LinearTransfer(linear), 4 * positions, ())
    rows = numbers(2, 5 * positions, seed=1)
    assert_close(transposed(LinearTransfer(linear), rows, 4 * positions), rows @ matrix, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding")
def test_one_sided_padding_is_left_to_autograd() -> None:
    weight = numbers(3, 2, 2, 2)
    layer = Convolution(weight, torch.Size((2, 4, 4)), (1, 1), "same", (1, 1), 1)
    linear = LinearMap(
        lambda t: F.conv2d(t, weight, padding="same"), torch.Size((2, 4, 4)), layer=layer
    )
    matrix = matrix_of(LinearTransfer(linear), 32, ())
    rows = numbers(2, 48, seed=1)
    assert layer.transposed(rows) is None
    assert_close(transposed(LinearTransfer(linear), rows, 32), rows @ matrix, atol=1e-12)


def test_what_autograd_makes_is_what_is_known() -> None:
    factor, rows = numbers(2, 6), numbers(2, 3, 6, seed=1)
    for known in (
        ScalarTransfer(1.0),
        ScalarTransfer(-2.5),
        IndexTransfer(torch.tensor([4, 0, 0, 2, 1, 4]), 7),
    ):
        size = 7 if isinstance(known, IndexTransfer) else 6
        other = transposed(lambda cross, known=known: known(cross), rows, size)
        assert_close(transposed(known, rows, size), other)
    assert_close(transposed(DiagonalTransfer(factor), rows, 6), rows * factor[:, None])
    other = transposed(lambda cross: factor[..., None] * cross, rows, 6)
    assert_close(other, rows * factor[:, None])


@torch.no_grad()
def test_outputs_in_groups_have_the_same_covariance() -> None:
    x = cp.Gaussian.isotropic(numbers(1, 20), stddev=0.3, batch_dims=1)
    weight = numbers(20, 20, seed=2)

    def model(t: Tensor) -> Tensor:
        return torch.tanh(t @ weight) @ weight

    whole, parts, single = (
        propagate(
            model, x,
            cp.Sketched(16, 1, torch.Generator().manual_seed(0), exact=0, memory=memory),
        )
        for memory in (10**9, 10_000, 4_000)  # all, three and one at a time
    )  # fmt: skip
    assert_close(parts.covariance_matrix, whole.covariance_matrix)
    assert_close(single.covariance_matrix, whole.covariance_matrix)
