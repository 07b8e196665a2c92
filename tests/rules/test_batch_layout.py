"""A batch that the model has moved: the numbers are those of the batch in front."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close
from tests.registry import WITHOUT_RULE, registry_kept

Function = Callable[[Any], Any]
BATCH, LENGTH, WIDTH = 2, 3, 4
W, ROW = weight(5, WIDTH), weight(WIDTH)


def assert_same(moved: Function, plain: Function, x: cp.Gaussian) -> None:
    """But for the order in which a matrix product sums, the very same numbers."""
    moved(x.mean.clone())  # torch has no objection
    y, expected = propagate(moved, x), propagate(plain, x)
    assert_close(y.mean, expected.mean, atol=1e-14)
    assert_close(y.covariance_matrix, expected.covariance_matrix, atol=1e-14)


def given(batch: int = BATCH, length: int = LENGTH, width: int = WIDTH) -> cp.Gaussian:
    return gaussian(length, width, batch=(batch,))


AWAY: dict[str, tuple[Function, Function]] = {  # there and back
    "transpose": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "permute": (lambda x: x.permute(1, 0, 2), lambda x: x.permute(1, 0, 2)),
    "swapaxes": (lambda x: x.swapaxes(1, 0), lambda x: torch.swapaxes(x, -2, -3)),
    "movedim": (lambda x: x.movedim(0, 1), lambda x: torch.movedim(x, 1, 0)),
    "in two steps": (
        lambda x: x.transpose(0, 2).permute(1, 2, 0),
        lambda x: x.movedim(1, -1).permute(2, 0, 1),
    ),
    "a new dimension": (lambda x: x[None].movedim(2, 0)[:, 0], lambda x: x.transpose(0, 1)),
    "unsqueeze": (
        lambda x: x.unsqueeze(0).transpose(1, 2).squeeze(0),
        lambda x: x.transpose(1, 0),
    ),
    "flatten of the rest": (
        lambda x: x.movedim(0, -1).flatten(0, 1).unflatten(0, (LENGTH, WIDTH)).movedim(-1, 1),
        lambda x: x.movedim(1, 0),
    ),
}


@pytest.mark.parametrize("name", AWAY)
@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (3, 3, 3), (3, 1, 3), (1, 1, 1)])
def test_there_and_back_is_where_it_was(name: str, sizes: tuple[int, int, int]) -> None:
    if name == "flatten of the rest" and sizes[1:] != (LENGTH, WIDTH):
        sizes = (LENGTH, LENGTH, WIDTH)
    there, back = AWAY[name]
    assert_same(lambda x: back(there(x) + 1), lambda x: x + 1, given(*sizes))


WITHIN: dict[str, Function] = {  # of (length, batch, width) or (batch, length, width) alike
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "a power": lambda x: x**2,
    "module": nn.ELU(),
    "neg": lambda x: -x,
    "abs": abs,
    "linear": lambda x: F.linear(x, W, weight(5)),
    "sum with a number": lambda x: 1 - x,
    "sum with a row": lambda x: x + ROW,
    "product with a row": lambda x: x * ROW,
    "quotient": lambda x: x / 3,
    "matmul": lambda x: x @ W.mT,
    "sum with itself": lambda x: x + torch.relu(x),
    "difference": lambda x: x - F.linear(x, weight(WIDTH, WIDTH)),
    "product with itself": lambda x: x * torch.tanh(x),
    "concatenation": lambda x: torch.cat([x, torch.relu(x)], -1),
    "stack behind": lambda x: torch.stack([x, x.flip(-1)], -1),
    "with a constant": lambda x: torch.cat([x, ROW.expand_as(x)], -1),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,), weight(WIDTH, seed=2), weight(WIDTH)),
    "layer norm module": nn.LayerNorm(WIDTH).double(),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, dim=2),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(2, keepdim=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "glu": lambda x: F.glu(x, -1),
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "split": lambda x: torch.cat(x.split(3, -1)[::-1], -1),
    "slice": lambda x: x[..., 1:3],
    "index": lambda x: x[..., [3, 1, 1]],
    "pad": lambda x: F.pad(x, (1, 2)),
    "flip": lambda x: x.flip(-1),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "repeat": lambda x: x.repeat(1, 1, 2),
    "max": lambda x: x.amax(-1, keepdim=True),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "double": lambda x: x.double(),
    "zeros_like": lambda x: x + torch.zeros_like(x),
    "prelu": nn.PReLU().double(),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_stays_within_each_row_does_not_see_where_the_batch_is(name: str) -> None:
    function = WITHIN[name]
    assert_same(lambda x: function(x.transpose(0, 1)).transpose(0, 1), function, given())


@pytest.mark.parametrize("name", ["relu", "linear", "sum with itself", "layer norm", "softmax"])
@pytest.mark.parametrize("sizes", [(1, 3), (3, 3), (4, 3), (3, 4), (4, 4), (4, 1)])
def test_sizes_give_nothing_away(name: str, sizes: tuple[int, int]) -> None:
    """A batch of one, as long as the sequence, as wide as a row."""
    function = WITHIN[name]
    moved = lambda x: function(x.transpose(0, 1)).transpose(0, 1)  # noqa: E731
    assert_same(moved, function, given(*sizes))


BEHIND: dict[str, Function] = {  # of a tensor whose batch is the last dimension, or moved there
    "relu": torch.relu,
    "sum with itself": lambda x: x + torch.relu(x),
    "product with itself": lambda x: x * x,
    "number": lambda x: 2 * x - 1,
    "dropout": lambda x: F.dropout(x, 0.2),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 3, 3), (1, 3, 4)])
def test_the_batch_may_come_last(name: str, sizes: tuple[int, int, int]) -> None:
    function = BEHIND[name]
    assert_same(lambda x: function(x.movedim(0, -1)).movedim(-1, 0), function, given(*sizes))


ALONG: dict[str, tuple[Function, Function]] = {  # the sequence is dimension 0; and canonical
    "mean": (lambda x: x.mean(0), lambda x: x.mean(1)),
    "sum": (lambda x: torch.sum(x, 0), lambda x: torch.sum(x, 1)),
    "softmax": (lambda x: x.softmax(0).transpose(0, 1), lambda x: x.softmax(1)),
    "step": (lambda x: x[0], lambda x: x[:, 0]),
    "last step": (lambda x: x[-1], lambda x: x[:, -1]),
    "select": (lambda x: x.select(0, 1), lambda x: x.select(1, 1)),
    "unbind": (lambda x: torch.cat(x.unbind(0), -1), lambda x: x.flatten(1)),
    "iteration": (lambda x: torch.cat(list(x), -1), lambda x: x.flatten(1)),
    "cat": (
        lambda x: torch.cat([x, x.relu()]).transpose(0, 1),
        lambda x: torch.cat([x, x.relu()], 1),
    ),
    "slice": (lambda x: x[1:].transpose(0, 1), lambda x: x[:, 1:]),
    "stack in front": (
        lambda x: torch.stack([x, x + 1]).permute(2, 0, 1, 3),
        lambda x: torch.stack([x, x + 1], 1),
    ),
    "amax": (lambda x: x.amax(0), lambda x: x.amax(1)),
    "positions": (
        lambda x: (x + weight(LENGTH, 1, WIDTH)).transpose(0, 1),
        lambda x: x + weight(LENGTH, WIDTH),
    ),
    "constants of each": (
        lambda x: (x * weight(BATCH, 1)).transpose(0, 1),
        lambda x: x * weight(BATCH, 1)[:, None],
    ),
    "all of the rest": (
        lambda x: x.permute(1, 0, 2).flatten(1),
        lambda x: x.flatten(1),
    ),
}


@pytest.mark.parametrize("name", ALONG)
def test_along_the_sequence(name: str) -> None:
    moved, plain = ALONG[name]
    assert_same(lambda x: moved(x.transpose(0, 1)), plain, given())


def test_stacking_in_front_of_the_batch_is_stacking_behind_it() -> None:
    assert_same(
        lambda x: torch.relu(torch.stack([x, 2 * x])).sum(0),
        lambda x: torch.relu(torch.stack([x, 2 * x], 1)).sum(1),
        given(),
    )
    assert_same(lambda x: torch.stack([x, 2 * x])[1], lambda x: 2 * x, given())


def test_the_shape_is_the_one_that_the_model_sees() -> None:
    seen = []

    def forward(x: Any) -> Any:
        y = x.transpose(0, 1)
        seen.extend([y.shape, y.size(1), len(y), y.mT.shape, y.movedim(1, 2).shape, y.ndim])
        return y

    plain = given()
    propagate(forward, plain)
    wanted = list(seen)
    seen.clear()
    forward(plain.mean)
    assert wanted == seen


def test_a_result_has_its_batch_in_front() -> None:
    """Wherever the model has left it: a Gaussian's batch leads."""
    x = given()
    for moved in (lambda x: x.transpose(0, 1), lambda x: x.movedim(0, -1), lambda x: x[None, None]):
        y = propagate(moved, x)
        assert y.batch_shape == (BATCH,)
        assert_close(y.mean.reshape(x.mean.shape), x.mean, rtol=0.0)
    assert propagate(lambda x: x[None], x).mean.shape == (BATCH, 1, LENGTH, WIDTH)


# In place, and views.


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (lambda y: y.relu_(), torch.relu),
        (lambda y: F.relu(y, inplace=True), torch.relu),
        (lambda y: nn.ELU(inplace=True)(y), F.elu),
        (lambda y: y.add_(1.0), lambda x: x + 1),
        (lambda y: y.mul_(ROW), lambda x: x * ROW),
        (lambda y: y.sub_(torch.relu(y)), lambda x: x - torch.relu(x)),
        (lambda y: F.dropout(y, 0.4, inplace=True), lambda x: F.dropout(x, 0.4)),
    ],
    ids=["relu_", "F.relu", "module", "add_", "mul_", "sub_", "dropout"],
)
def test_in_place_changes_a_moved_tensor(change: Function, plain: Function) -> None:
    def forward(x: Any) -> Any:
        y = x.transpose(0, 1)
        changed = change(y)
        assert changed.shape == y.shape
        return torch.cat([y.transpose(0, 1), changed.transpose(0, 1)], -1)

    assert_same(forward, lambda x: torch.cat([plain(x)] * 2, -1), given())


@pytest.mark.parametrize(
    "change", [lambda y: y.relu_(), lambda y: y.add_(1.0), lambda y: F.relu(y, inplace=True)]
)
def test_what_changed_through_a_moved_view_is_refused(change: Function) -> None:
    def original(x: Any) -> Any:
        y = x + 1
        change(y.transpose(0, 1))
        return y

    def view(x: Any) -> Any:
        y = x + 1
        moved = y.transpose(0, 1)
        change(y)
        return moved.transpose(0, 1)

    def other_view(x: Any) -> Any:
        y = (x + 1).transpose(0, 1)
        part = y[1:]
        change(y)
        return part.transpose(0, 1)

    for forward in (original, view, other_view):
        with pytest.raises(cp.UnsupportedOperation, match="changed in place"):
            propagate(forward, given())


def test_a_movement_in_place_moves_the_handle() -> None:
    def forward(x: Any) -> Any:
        y = x + 0
        y.transpose_(0, 1)
        assert y.shape == (LENGTH, BATCH, WIDTH)
        return F.linear(y, W).transpose(0, 1)

    assert_same(forward, lambda x: F.linear(x, W), given())


# What must be refused.

N = 3
MIXING: dict[str, Function] = {  # of (length, batch, width), all of size 3
    "sum over the batch": lambda x: x.sum(1),
    "mean over everything": lambda x: x.mean(),
    "softmax over the batch": lambda x: x.softmax(1),
    "layer norm over the batch": lambda x: F.layer_norm(x, (N, N)),
    "one element": lambda x: x[:, 0],
    "another order": lambda x: x[:, [1, 0, 2]],
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "linear of the batch": lambda x: F.linear(x.mT, weight(N, N)),
    "product that pairs": lambda x: x * x.mT,
    "sum that pairs": lambda x: x + x.transpose(0, 1),
    "two layouts": lambda x: torch.cat([x, x.transpose(0, 1)], -1),
    "two layouts stacked": lambda x: torch.stack([x, x.mT]),
    "two layouts added": lambda x: x + x.movedim(1, 2),
    "convolution": lambda x: F.conv1d(x, weight(N, N, 1)),
    "convolution along the batch": lambda x: F.conv1d(x.mT, weight(N, N, 3), padding=1),
    "pooling along the batch": lambda x: F.avg_pool1d(x.mT, 3, 1, 1),
    "channels dropped": lambda x: F.dropout1d(x, 0.5),
    "padding the batch": lambda x: F.pad(x, (0, 0, 1, 0)),
    "group norm": lambda x: F.group_norm(x, 1),
    "instance norm": lambda x: F.instance_norm(x.mT),
    "matmul of the batch": lambda x: weight(N, N) @ x,
}


@pytest.mark.parametrize("name", MIXING)
def test_what_touches_a_moved_batch_is_refused(name: str) -> None:
    x = gaussian(N, N, batch=(N,))
    MIXING[name](x.mean.transpose(0, 1))  # torch has no objection
    with pytest.raises(cp.BatchDimensionError):
        propagate(lambda x: MIXING[name](x.transpose(0, 1)), x)


def test_the_error_says_where_the_batch_is() -> None:
    with pytest.raises(
        cp.BatchDimensionError,
        match=r"sum mixes, splits or drops the batch of shape \(2,\), which is in dimension 1 of a "
        r"tensor of shape \(3, 2, 4\)",
    ):
        propagate(lambda x: x.transpose(0, 1).sum(1), given())
    with pytest.raises(cp.BatchDimensionError, match=r"different dimensions; .*\.movedim"):
        propagate(lambda x: torch.cat([x[:, 0], x.mean(1, keepdim=True)[:, 0].t()]), given(4))


def test_a_rule_of_the_user_is_for_batches_in_front() -> None:
    with registry_kept():
        cp.rule(WITHOUT_RULE)(lambda _, x, dim: x)  # noqa: ARG005 (its signature)
        with pytest.raises(cp.BatchDimensionError, match=r"has a rule .* comes first"):
            propagate(lambda x: WITHOUT_RULE(x.transpose(0, 1), -1), given())
        assert_same(lambda x: WITHOUT_RULE(x, -1), lambda x: x, given())


def test_gradients_follow_through_a_moved_batch() -> None:
    x = given()

    def moments(mean: torch.Tensor, forward: Function) -> torch.Tensor:
        y = propagate(forward, cp.Gaussian(mean, x.covariance_matrix))
        return y.covariance_matrix.square().sum() + y.mean.square().sum()

    def plain(x: Any) -> Any:
        return torch.relu(F.linear(x, W))

    def moved(x: Any) -> Any:
        return torch.relu(F.linear(x.transpose(0, 1), W)).transpose(0, 1)

    mean = x.mean.clone().requires_grad_()
    (want,) = torch.autograd.grad(moments(mean, plain), mean)
    (got,) = torch.autograd.grad(moments(mean, moved), mean)
    assert_close(got, want, rtol=1e-12)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda t: t * t.mean(0, keepdim=True),
        lambda t: torch.cat([t[:1], t], 0),
        lambda t: t * torch.sigmoid(t[-1:]),
    ],
)
def test_a_batch_of_one_is_as_good_as_a_larger_one(batch: int, function: Function) -> None:
    x = given(batch)
    y = propagate(lambda x: function(x.transpose(0, 1)).transpose(0, 1), x)
    for i in range(batch):
        one = propagate(function, x[i])
        assert_close(y[i].mean, one.mean, atol=1e-13)
        assert_close(y[i].covariance_matrix, one.covariance_matrix, atol=1e-13)
