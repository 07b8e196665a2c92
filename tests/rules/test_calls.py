"""How operations are called: by keyword, with numpy's numbers, with other dtypes, in any mode."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.layers import propagate
from tests.oracles import assert_close


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def gaussian() -> cp.Gaussian:
    factor = numbers(2, 12, 12)
    return cp.Gaussian(numbers(2, 3, 4), factor @ factor.mT)


def assert_same(actual: cp.Gaussian, expected: cp.Gaussian, rtol: float = 0.0) -> None:
    assert_close(actual.mean, expected.mean, rtol=rtol)
    assert_close(actual.covariance_matrix, expected.covariance_matrix, rtol=rtol)


WEIGHT, TERM, SLOPE = numbers(5, 4), numbers(3, 4), torch.full((1,), 0.2, dtype=torch.float64)
BY_KEYWORD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "flatten": (lambda x: torch.flatten(input=x, start_dim=1), lambda x: x.flatten(1)),
    "reshape": (lambda x: torch.reshape(input=x, shape=(2, 12)), lambda x: x.reshape(2, 12)),
    "permute": (lambda x: torch.permute(input=x, dims=(0, 2, 1)), lambda x: x.permute(0, 2, 1)),
    "sum": (lambda x: torch.sum(input=x, dim=-1), lambda x: x.sum(-1)),
    "linear": (lambda x: F.linear(input=x, weight=WEIGHT), lambda x: F.linear(x, WEIGHT)),
    "matmul": (lambda x: torch.matmul(input=x, other=WEIGHT.mT), lambda x: x @ WEIGHT.mT),
    "matmul, left": (lambda x: torch.matmul(input=WEIGHT, other=x.mT), lambda x: WEIGHT @ x.mT),
    "pad": (lambda x: F.pad(input=x, pad=(1, 1), value=2.0), lambda x: F.pad(x, (1, 1), value=2.0)),
    "add": (lambda x: torch.add(input=x, other=TERM, alpha=2), lambda x: x + 2 * TERM),
    "add, left": (lambda x: torch.add(input=TERM, other=x), lambda x: TERM + x),
    "sub, left": (lambda x: torch.sub(input=TERM, other=x), lambda x: TERM - x),
    "mul": (lambda x: torch.mul(input=x, other=2.0), lambda x: x * 2.0),
    "div": (lambda x: torch.div(input=x, other=2.0), lambda x: x / 2.0),
    "neg": (lambda x: torch.neg(input=x), lambda x: -x),
    "clone": (lambda x: torch.clone(input=x), lambda x: x.clone()),
    "dropout": (lambda x: F.dropout(input=x, training=False), lambda x: x),
    "relu": (lambda x: F.relu(input=x), torch.relu),
    "tanh": (lambda x: torch.tanh(input=x), torch.tanh),
    "clamp": (lambda x: torch.clamp(input=x, max=1.0, min=0.0), lambda x: x.clamp(0.0, 1.0)),
    "prelu": (lambda x: torch.prelu(input=x, weight=SLOPE), lambda x: F.prelu(x, SLOPE)),
    "sum over a list": (lambda x: x.sum([1, 2]), lambda x: x.sum((1, 2))),
    "mean over a list": (lambda x: x.mean([-2, -1]), lambda x: x.mean((1, 2))),
}


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_arguments_may_be_given_by_name(name: str) -> None:
    by_name, by_position = BY_KEYWORD[name]
    assert_same(propagate(by_name, gaussian()), propagate(by_position, gaussian()))


NUMPY: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "x * number": (lambda x: x * np.sqrt(2.0), lambda x: x * 2.0**0.5),
    "x / number": (lambda x: x / np.sqrt(2.0), lambda x: x / 2.0**0.5),
    "x + number": (lambda x: x + np.float64(3.0), lambda x: x + 3.0),
    "number * x": (lambda x: np.sqrt(2.0) * x, lambda x: 2.0**0.5 * x),
    "number + x": (lambda x: np.float64(3.0) + x, lambda x: 3.0 + x),
    "number - x": (lambda x: np.float64(3.0) - x, lambda x: 3.0 - x),
    "float32 * x": (lambda x: np.float32(0.5) * x, lambda x: 0.5 * x),
    "integer * x": (lambda x: np.int64(2) * x, lambda x: 2 * x),
}


@pytest.mark.parametrize("name", NUMPY)
def test_a_number_of_numpy_is_a_number(name: str) -> None:
    with_numpy, plain = NUMPY[name]
    x = gaussian()
    assert_close(with_numpy(x.mean), plain(x.mean), rtol=0.0)
    assert_same(propagate(with_numpy, x), propagate(plain, x))
    assert_same(propagate(with_numpy, x[0]), propagate(plain, x[0]))


def test_a_plus_sign_is_nothing() -> None:
    assert_same(propagate(lambda x: +x, gaussian()), gaussian())


OTHER_DTYPES: dict[str, Callable[[Any], Any]] = {
    "float64 factor": lambda x: x * TERM,
    "float64 divisor": lambda x: x / TERM,
    "float64 term": lambda x: x + TERM,
    "float64 minuend": lambda x: TERM - x,
    "float64 factor that widens": lambda x: x[..., None] * TERM[0],
    "float64 number": lambda x: x * torch.tensor(2.0, dtype=torch.float64) + 1,
    "integers": lambda x: torch.arange(4) * x + torch.arange(4),
    "truth values": lambda x: x * torch.tensor([True, False, True, True]),
    "sum in float64": lambda x: x.sum(-1, dtype=torch.float64),
    "mean in float64": lambda x: torch.mean(x, -1, dtype=torch.float64),
    "to float64": lambda x: x.to(torch.float64),
}


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_dtypes_are_promoted_as_torch_does(name: str) -> None:
    function, x = OTHER_DTYPES[name], gaussian().to(torch.float32)
    y = propagate(function, x)
    expected = function(x.mean)
    assert_close(y.mean, expected, rtol=1e-6, atol=1e-6)
    assert y.covariance_matrix.dtype == expected.dtype
    wide = propagate(function, x.to(torch.float64))
    scale = float(wide.covariance_matrix.abs().max())
    assert_close(y.covariance_matrix.double(), wide.covariance_matrix, atol=1e-6 * scale)


MODEL = nn.Sequential(
    nn.Linear(4, 5), nn.Tanh(), nn.Conv1d(3, 2, 3), nn.ReLU(), nn.GELU(), nn.ELU(), nn.Sigmoid()
).double()  # fmt: skip


@pytest.mark.parametrize("method", [cp.Exact(), cp.Series(order=3)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_mode_of_autograd_does_not_matter(mode: Any, method: Any) -> None:
    expected = propagate(MODEL, gaussian(), method)
    with mode():
        y = propagate(MODEL, gaussian(), method)
    assert_same(y, expected, rtol=1e-12)
    assert y.mean.requires_grad == (mode is torch.enable_grad)


def test_the_default_dtype_does_not_matter() -> None:
    x = gaussian().to(torch.float32)
    expected = propagate(MODEL.float(), x)
    torch.set_default_dtype(torch.float64)
    try:
        y = propagate(MODEL, x)
    finally:
        torch.set_default_dtype(torch.float32)
        MODEL.double()
    assert_same(y, expected, rtol=1e-6)


def test_the_global_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    propagate(MODEL, gaussian())
    assert torch.equal(torch.get_rng_state(), state)
