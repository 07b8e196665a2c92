"""Writing Gaussians into plain tensors that the model has made, and into others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close

ROWS = torch.tensor([2, 0, 1])


def items(x: Any) -> Any:
    buffer = torch.zeros(*x.shape[:-1], 5, dtype=x.dtype)
    buffer[..., 1:4] = x
    buffer[..., 0] = 2 * x[..., 1]
    return buffer


def added(x: Any) -> Any:
    total = torch.full_like(x, 3.0)
    total += x
    total.mul_(2)
    total.add_(x, alpha=-1)
    return total


def copied(x: Any) -> Any:
    empty = torch.empty(*x.shape[:-1], 2, 3, dtype=x.dtype)
    return empty.copy_(x.unsqueeze(-2)).sum(-2)


def cast(x: Any) -> Any:
    narrow = torch.zeros(x.shape).to(torch.float64)
    narrow.index_copy_(-1, ROWS, x)
    return narrow.index_add_(-1, ROWS, x)


def put(x: Any) -> Any:
    result = torch.ones(x.shape[-1], dtype=x.dtype).clone()
    result.index_put_((ROWS,), x)
    return result.index_put_((ROWS,), x, accumulate=True)


CASES: dict[str, Callable[[Any], Any]] = {
    "items": items, "added": added, "copied": copied, "cast": cast,
}  # fmt: skip


def jacobian(function: Callable[[Any], Any], mean: Tensor) -> Tensor:
    columns = [function(mean + unit) - function(mean) for unit in torch.eye(len(mean)).double()]
    return torch.stack(columns, -1)


@pytest.mark.parametrize("name", [*CASES, "put"])
def test_a_tensor_made_by_the_model_becomes_gaussian(name: str) -> None:
    function = {**CASES, "put": put}[name]
    x = gaussian(3)
    y = propagate(function, x)
    matrix = jacobian(function, x.mean)
    assert_close(y.mean, function(x.mean), atol=1e-13)
    assert_close(y.covariance_matrix, matrix @ x.covariance_matrix @ matrix.mT, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_with_a_batch(name: str) -> None:
    x = gaussian(3, batch=(2,))
    y = propagate(CASES[name], x)
    for i in range(2):
        alone = propagate(CASES[name], x[i])
        assert_close(y[i].mean, alone.mean, atol=1e-13)
        assert_close(y[i].covariance_matrix, alone.covariance_matrix, atol=1e-13)


def test_the_dtype_stays_that_of_the_tensor() -> None:
    y = propagate(lambda x: torch.zeros(3, dtype=torch.float32).copy_(x), gaussian(3))
    assert y.dtype == torch.float32


@pytest.mark.parametrize("index", [lambda t: t, lambda t: (t, ...), lambda t: (t, slice(None))])
def test_steps_are_collected_before_the_batch(index: Callable[[int], Any]) -> None:
    """As torchdiffeq does: the batch is first in each step, and second in the result."""

    def collected(x: Any) -> Any:
        steps = torch.empty(3, *x.shape, dtype=x.dtype)
        steps[0] = x
        for t in range(1, 3):
            x = torch.tanh(x @ (0.5 * torch.eye(3, dtype=x.dtype)))
            steps[index(t)] = x
        return steps.movedim(0, 1)

    def stacked(x: Any) -> Any:
        steps = [x]
        for _ in range(2):
            steps.append(torch.tanh(steps[-1] @ (0.5 * torch.eye(3, dtype=x.dtype))))
        return torch.stack(steps, 1)

    x = gaussian(3, batch=(2,))
    y, z = propagate(collected, x), propagate(stacked, x)
    assert_close(y.mean, z.mean, atol=1e-14)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=1e-13)


class Cache(nn.Module):
    """Keeps what it is given in a buffer, as caches of keys do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3).double())

    def forward(self, x: Any) -> Any:
        self.kept.copy_(x)
        return 2 * self.kept


OUTSIDE = torch.zeros(3, dtype=torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        Cache(),
        lambda x: OUTSIDE.add_(x),
        lambda x: torch.zeros(2, 3).double()[0].copy_(x),
        lambda x: torch.zeros(2, 3).double().view(-1)[:3].copy_(x),
    ],
)
def test_what_outlives_the_pass_and_views_are_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"into a plain tensor .* t = t \+ x"):
        propagate(function, gaussian(3))
    assert not OUTSIDE.any()


def test_whole_numbers_cannot_be_random() -> None:
    with pytest.raises(cp.UnsupportedOperation, match=r"gives torch\.int64"):
        propagate(lambda x: torch.zeros(3, dtype=torch.long).copy_(x), gaussian(3))


def test_views_made_before_show_that_they_are_overwritten() -> None:
    def function(x: Any) -> Any:
        buffer = torch.zeros(3, dtype=x.dtype)
        view = buffer[:2]
        buffer.copy_(x)
        return view + x[:2]

    with pytest.raises(cp.MomentOverflow, match="not finite"):
        propagate(function, gaussian(3))


def test_without_gradients_and_in_inference_mode() -> None:
    x = gaussian(3)
    expected = propagate(items, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = propagate(items, x)
        assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)


def test_gradients_flow_through_what_is_written() -> None:
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    propagate(items, cp.Gaussian.isotropic(mean, stddev=0.1)).mean.sum().backward()
    assert_close(mean.grad, torch.tensor([1.0, 3.0, 1.0]).double(), rtol=0.0)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_number_where_a_condition_on_the_tensor_holds(batch: tuple[int, ...]) -> None:
    """A choice, which composes with the function before and after it."""
    x = gaussian(3, batch=batch)

    def assigned(x: Any) -> Any:
        y = x.tanh()
        y[y.square() < 0.1] = torch.tensor(0.5, dtype=y.dtype)
        y[x > 1] = -2
        return y.exp()

    def chosen(x: Any) -> Any:
        y = x.tanh()
        return torch.where(x > 1, -2.0, torch.where(y.square() < 0.1, 0.5, y)).exp()

    y, expected = propagate(assigned, x), propagate(chosen, x)
    assert_close(y.mean, expected.mean, rtol=0.0)
    assert_close(y.covariance_matrix, expected.covariance_matrix, rtol=0.0)


@pytest.mark.parametrize("index", [lambda x: x[0] < 0, lambda x: (slice(None), x[0] < 0)])
def test_conditions_on_other_elements_are_no_index(index: Callable[[Any], Any]) -> None:
    def function(x: Any) -> Any:
        y = x.clone()
        y[index(x)] = 0.0
        return y

    with pytest.raises(cp.UnsupportedOperation, match=r"__setitem__ takes places.*same tensor"):
        propagate(function, gaussian(2, 3))
