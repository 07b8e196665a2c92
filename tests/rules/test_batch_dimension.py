"""What would mix, move or drop the batch raises and says so; what keeps it apart works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

N = 3
"""Batch and event have the same size, so that shapes alone give nothing away."""


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


MIXING: dict[str, Callable[[Any], Any]] = {
    "sum over the batch": lambda x: x.sum(0),
    "sum over everything": lambda x: x.sum(),
    "sum over both": lambda x: torch.sum(x, (0, 1)),
    "sum that keeps the dimension": lambda x: x.sum(0, keepdim=True),
    "mean over the batch": lambda x: x.mean(0),
    "mean over everything": torch.mean,
    "flatten": lambda x: x.flatten(),
    "flatten from the batch": lambda x: torch.flatten(x, 0, 1),
    "reshape to one row": lambda x: x.reshape(1, -1),
    "view as a vector": lambda x: x.view(-1),
    "reshape that pairs elements": lambda x: x.view(N, N, N).reshape(N * N, N).view(N * N, N),
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
    "repeat of the batch": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split(1),
    "tensor_split": lambda x: x.tensor_split(2),
    "unbind": lambda x: x.unbind(),
    "iteration": lambda x: list(x),
    "unpacking": lambda x: (*x,),
    "squeeze of a batch of one": lambda x: x.squeeze(),
    "matrix from the left": lambda x: numbers(N, N) @ x[:, 0],
    "vector from the left": lambda x: numbers(N) @ x[:, 0],
    "mm from the left": lambda x: torch.mm(numbers(N, N), x[:, 0]),
    "dot": lambda x: torch.matmul(x[:, 0, 0], numbers(N)),
    "einsum over the batch": lambda x: torch.einsum("ab,bij->aij", numbers(N, N), x),
    "einsum that moves the batch": lambda x: torch.einsum("bij,jk->ikb", x, numbers(N, N)),
    "linear over the batch": lambda x: F.linear(x[:, 0, 0], numbers(N, N)),
    "pad of the batch": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "circular pad seen as channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1))[:N],
    "window over the batch": lambda x: x.unfold(0, 2, 1),
    "convolution with the batch as channels": nn.Conv1d(N, N, 3, padding=1).double(),
    "convolution of images without channels": nn.Conv2d(N, N, 3, padding=1).double(),
    "transposed convolution": nn.ConvTranspose2d(N, N, 3, padding=1).double(),
}
MOVING: dict[str, Callable[[Any], Any]] = {
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
    batch = (1,) if name == "squeeze of a batch of one" else (N,)
    x = gaussian(*EVENTS.get(name, (N, N)), batch=batch)
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
    model = nn.Sequential(nn.Flatten(0))
    with pytest.raises(
        cp.BatchDimensionError,
        match=r"in module 0 \(Flatten\): .*flatten mixes, moves or drops the batch of shape \(3,\) "
        r"in a tensor of shape \(3, 2\); the first dimension is the batch",
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
