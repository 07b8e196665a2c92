"""What would mix, move or drop the batch raises and says so; what keeps it apart works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.flow.batch_position import Position
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

N = 3
"""Batch and event have the same size, so that shapes alone give nothing away."""


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def nn_batch_norm(x: Any) -> Any:
    moments = numbers(N), numbers(N + 1)[:N].square()
    return F.batch_norm(x.view(-1, N), *moments, numbers(N), numbers(N))


MIXING: dict[str, Callable[[Any], Any]] = {
    "sum over the batch": lambda x: x.sum(0),
    "sum over everything": lambda x: x.sum(),
    "sum over both": lambda x: torch.sum(x, (0, 1)),
    "sum that keeps the dimension": lambda x: x.sum(0, keepdim=True),
    "mean over the batch": lambda x: x.mean(0),
    "mean over everything": torch.mean,
    "first element": lambda x: x[0],
    "slice of the batch": lambda x: x[:1],
    "batch in another order": lambda x: x[[1, 0, 2]],
    "one element for all": lambda x: x[torch.zeros(N, dtype=torch.long)],
    "mask over the batch": lambda x: x[torch.ones(N, dtype=torch.bool) & (torch.arange(N) > 0)],
    "diagonal of batch and event": lambda x: x[torch.arange(N), torch.arange(N)],
    "event index of the batch's": lambda x: x[torch.arange(N).flip(0), torch.arange(N)],
    "select": lambda x: x.select(0, 1),
    "narrow": lambda x: x.narrow(0, 0, 2),
    "index_select": lambda x: x.index_select(0, torch.tensor([2, 0, 1])),
    "roll over the batch": lambda x: x.roll(1, 0),
    "roll of everything": lambda x: x.roll(1),
    "flip": lambda x: x.flip(0),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split(1),
    "tensor_split": lambda x: x.tensor_split(2),
    "unbind": lambda x: x.unbind(),
    "iteration": lambda x: list(x),
    "unpacking": lambda x: (*x,),
    "matrix from the left": lambda x: numbers(N, N) @ x[:, 0],
    "vector from the left": lambda x: numbers(N) @ x[:, 0],
    "mm from the left": lambda x: torch.mm(numbers(N, N), x[:, 0]),
    "dot": lambda x: torch.matmul(x[:, 0, 0], numbers(N)),
    "einsum over the batch": lambda x: torch.einsum("ab,bij->aij", numbers(N, N), x),
    "linear over the batch": lambda x: F.linear(x[:, 0, 0], numbers(N, N)),
    "pad of the batch": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "circular pad seen as channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1))[:N],
    "window over the batch": lambda x: x.unfold(0, 2, 1),
    "convolution with the batch as channels": nn.Conv1d(N, N, 3, padding=1).double(),
    "convolution of images without channels": nn.Conv2d(N, N, 3, padding=1).double(),
    "transposed convolution": nn.ConvTranspose2d(N, N, 3, padding=1).double(),
}
MERGING: dict[str, tuple[Callable[[Any], Any], Position]] = {
    "flatten": (lambda x: x.flatten(), Position(0, after=N * N)),
    "flatten from the batch": (lambda x: torch.flatten(x, 0, 1), Position(0, after=N)),
    "reshape to one row": (lambda x: x.reshape(1, -1), Position(1, after=N * N)),
    "view as a vector": (lambda x: x.view(-1), Position(0, after=N * N)),
    "reshape that pairs elements": (
        lambda x: x.view(N, N, N).reshape(N * N, N).view(N * N, N),
        Position(0, after=N),
    ),
    "repeat of the batch": (lambda x: x.repeat(2, 1, 1), Position(0, before=2)),
    "tile": (lambda x: x.tile(2, 1, 1), Position(0, before=2)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), Position(0, after=2)),
    "both sides": (
        lambda x: x.mT.reshape(N * N, N).mT.reshape(1, -1),
        Position(1, N, N),
    ),
    "heads": (lambda x: x.transpose(0, 1).flatten(0, 1), Position(0, before=N)),
    "cat along the batch": (lambda x: torch.cat([x, 2 * x]), Position(0, before=2)),
    "linear": (lambda x: F.linear(x.view(-1, N), numbers(2, N)), Position(0, after=N)),
    "product with a constant": (lambda x: x.view(-1, N) * numbers(N * N, N), Position(0, after=N)),
    "sum with a constant": (lambda x: numbers(N * N, 1) - x.view(-1, N), Position(0, after=N)),
    "addmm": (
        lambda x: torch.addmm(numbers(2), x.view(-1, N), numbers(N, 2)),
        Position(0, after=N),
    ),
    "where": (
        lambda x: torch.where(numbers(N * N, N) > 0, x.view(-1, N), 1.0),
        Position(0, after=N),
    ),
    "masked_fill": (
        lambda x: x.view(-1, N).masked_fill(numbers(N * N, N) > 0, 2.0),
        Position(0, after=N),
    ),
    "batch norm": (nn_batch_norm, Position(0, after=N)),
    "convolution": (
        lambda x: F.conv1d(x.reshape(-1, 1, N), numbers(2, 1, 2)),
        Position(0, after=N),
    ),
    "interpolation": (lambda x: F.interpolate(x.reshape(-1, 1, N), 5), Position(0, after=N)),
    "einsum": (
        lambda x: torch.einsum("ai,ij->aj", x.view(-1, N), numbers(N, N)),
        Position(0, after=N),
    ),
    "constant from the left": (
        lambda x: numbers(N * N, 2, 1) @ x.view(-1, 1, N),
        Position(0, after=N),
    ),
}
MOVING: dict[str, Callable[[Any], Any]] = {
    "einsum that moves the batch": lambda x: torch.einsum("bij,jk->ikb", x, numbers(N, N)),
    "transpose": lambda x: x.transpose(0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "mT reaching the batch": lambda x: x[:, 0].mT,
    "permute": lambda x: x.permute(1, 0, 2),
    "movedim": lambda x: x.movedim(0, -1),
    "unsqueeze before the batch": lambda x: x.unsqueeze(0),
    "new axis before the batch": lambda x: x[None],
    "expand before the batch": lambda x: x.expand(N, N, N, N),
    "repeat before the batch": lambda x: x.repeat(N, 1, 1, 1),
    "constant that adds a dimension": lambda x: x + numbers(N, N, N, N),
    "constant that multiplies a dimension": lambda x: numbers(N, N, N, N) * x,
}
EVENTS = {"convolution with the batch as channels": (5,)}


@pytest.mark.parametrize("name", MIXING)
def test_what_touches_the_batch_raises(name: str) -> None:
    x = gaussian(*EVENTS.get(name, (N, N)), batch=(N,))
    MIXING[name](x.mean)  # torch has no objection
    with pytest.raises(cp.BatchDimensionError, match="batch"):
        propagate(MIXING[name], x)


@pytest.mark.parametrize("name", MOVING)
def test_a_batch_that_is_only_moved_comes_first_in_the_result(name: str) -> None:
    x, function = gaussian(N, N, batch=(N,)), MOVING[name]
    slopes = torch.autograd.functional.jacobian(function, x.mean)
    places = [
        at
        for at in range(slopes.dim() - 3)
        if all(
            not bool(slopes.movedim(at, 0)[i].movedim(-3, 0)[j].any())
            for i in range(N)
            for j in range(N)
            if i != j
        )
    ]
    assert len(places) == 1
    y = propagate(function, x)
    assert_close(y.mean, function(x.mean).movedim(places[0], 0), rtol=1e-14)
    for b in range(N):
        slope = slopes.movedim(places[0], 0)[b].movedim(-3, 0)[b].reshape(-1, N * N)
        expected = slope @ x[b].covariance_matrix @ slope.mT
        assert_close(y[b].covariance_matrix, expected, atol=1e-12)


@pytest.mark.parametrize("name", MERGING)
def test_a_batch_that_is_merged_comes_first_in_the_result(name: str) -> None:
    """The map is linear, so that the oracle is its Jacobian, of each Gaussian alone."""
    x, (function, at) = gaussian(N, N, batch=(N,)), MERGING[name]
    slopes = torch.autograd.functional.jacobian(function, x.mean).movedim((-3, -2, -1), (0, 1, 2))
    y = propagate(function, x)
    assert_close(y.mean, at.first(function(x.mean)), rtol=1e-14)
    for b in range(N):
        each = torch.stack([at.first(slope) for slope in slopes[b].flatten(0, 1)], -1)
        assert not bool(each[[other for other in range(N) if other != b]].any())
        slope = each[b].reshape(-1, N * N)
        expected = slope @ x[b].covariance_matrix @ slope.mT
        assert_close(y[b].covariance_matrix, expected, atol=1e-12)


APART: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "softmax": lambda x: torch.softmax(x, -1).mT @ x,
    "matrix product": lambda x: torch.bmm(x, x.mT),
    "baddbmm": lambda x: torch.baddbmm(numbers(1, 2), x, x.mT),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: torch.linalg.norm(x, dim=1),
    "std": lambda x: x.std(-1, keepdim=True),
    "gelu": F.gelu,
    "product": lambda x: x * torch.sigmoid(x) * x.mean(-1, keepdim=True),
    "root": lambda x: torch.rsqrt(x.square().mean(-1, keepdim=True) + 9),
    "quotient": lambda x: x / (9 + x.mean(1, keepdim=True)),
    "max pooling": lambda x: F.max_pool1d(x, 2, 1, 1),
    "prelu": nn.PReLU().double(),
    "dropout": lambda x: F.dropout(x, 0.2),
    "in place": lambda x: x.clone().relu_().add_(numbers(2, 4)),
}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", APART)
def test_heads_that_are_merged_with_the_batch_are_those_of_each_gaussian(
    name: str, count: int
) -> None:
    x = gaussian(3, 2, 4, batch=(count,))
    function = APART[name]
    there = propagate(lambda x: function(x.flatten(0, 1)).unflatten(0, (count, 3)), x)
    for b in range(count):
        alone = propagate(function, x[b])
        assert_close(there[b].mean, alone.mean, atol=1e-13)
        assert_close(there[b].covariance_matrix, alone.covariance_matrix, atol=1e-13)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(-1, N) @ numbers(N, N) + x.view(-1, N).mT.reshape(-1, N),
        lambda x: x.flatten(0, 1).sum(0),
        lambda x: x.flatten(0, 1).view(N, -1)[:, :2].flatten()[:4],
        lambda x: numbers(N * N, N * N) @ x.flatten(0, 1),
        lambda x: x.flatten(0, 1).flip(0),
        lambda x: x.flatten(0, 1) @ x.flatten(0, 1).mT,
        lambda x: x.flatten(0, 1) * x.transpose(0, 1).flatten(0, 1),
        lambda x: x.flatten(0, 1).softmax(0),
        lambda x: F.layer_norm(x.flatten(0, 1), (N * N, N)),
        lambda x: x.flatten(0, 1)[1:],
        lambda x: x.view(-1)[:-1].view(2, -1),
    ],
)
def test_a_merged_batch_is_not_mixed(function: Callable[[Any], Any]) -> None:
    x = gaussian(N, N, batch=(N,))
    function(x.mean)
    with pytest.raises(cp.BatchDimensionError, match="batch"):
        propagate(function, x)


@pytest.mark.parametrize("name", [name for name in MIXING if name not in EVENTS])
def test_the_same_is_allowed_where_there_is_no_batch(name: str) -> None:
    x = gaussian(N, N, N)
    expected = MIXING[name](x.mean)
    y = propagate(MIXING[name], x)
    many = isinstance(expected, list | tuple)
    for got, want in zip(y if many else [y], expected if many else [expected], strict=True):
        assert_close(got.mean, want, rtol=1e-14)


@pytest.mark.parametrize("dims", [(0, 1), (1, 2)])
def test_every_batch_dimension_is_guarded(dims: tuple[int, int]) -> None:
    x = gaussian(N, batch=(N, N))
    with pytest.raises(cp.BatchDimensionError, match="first 2 dimensions are the batch"):
        propagate(lambda x: x.transpose(*dims), x)


def test_the_error_names_the_operation_the_shapes_and_the_module() -> None:
    model = nn.Sequential(nn.LayerNorm((3, 2)).double())
    with pytest.raises(
        cp.BatchDimensionError,
        match=r"in module 0 \(LayerNorm\): .*layer_norm mixes, moves or drops the batch of shape "
        r"\(3,\) in a tensor of shape \(3, 2\); the first dimension is the batch",
    ):
        propagate(model, gaussian(2, batch=(3,)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [2, 40, 80])
def test_exchanging_two_elements_of_any_batch_is_noticed(count: int, dtype: torch.dtype) -> None:
    x = cp.Gaussian.isotropic(numbers(count, 2, dtype=dtype), stddev=1.0, batch_dims=1)
    for first, second in ((0, 1), (count - 2, count - 1), (0, count // 2), (0, min(31, count - 1))):
        order = torch.arange(count)
        order[first], order[second] = second, first
        exchange = torch.eye(count, dtype=dtype)[order]
        with pytest.raises(cp.BatchDimensionError):
            propagate(lambda x, exchange=exchange: exchange @ x, x)


@pytest.mark.parametrize("count", [2, 40])
def test_a_small_leak_between_elements_is_noticed(count: int) -> None:
    x = gaussian(2, batch=(count,))
    leak = torch.eye(count, dtype=torch.float64)
    leak[0, 1] = 1e-3
    with pytest.raises(cp.BatchDimensionError):
        propagate(lambda x: leak @ x, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * numbers(N, 1, 1),
        lambda x: x + numbers(N, N, N),
        lambda x: torch.bmm(x, numbers(N, N, 2)),
        lambda x: torch.einsum("bij,bj->bi", x, numbers(N, N)),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.interpolate(x, 5),
    ],
)
def test_constants_may_differ_along_the_batch(function: Callable[[Any], Any]) -> None:
    x = gaussian(N, N, batch=(N,))
    y = propagate(function, x)
    slopes = torch.autograd.functional.jacobian(function, x.mean)
    slopes = slopes.reshape(N, -1, N, N * N)
    for b in range(N):
        slope = slopes[b, :, b]
        assert_close(y.mean, function(x.mean), rtol=1e-14)
        expected = slope @ x[b].covariance_matrix @ slope.mT
        assert_close(y[b].covariance_matrix, expected, atol=1e-12)
