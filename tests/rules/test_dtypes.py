"""Tensors that change their dtype on the way, and meet others that have not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from tests.layers import propagate

torch.manual_seed(0)
WIDE, NARROW = nn.Linear(3, 3).double(), nn.Linear(3, 3)
CHOSEN = torch.tensor([True, False, True])
METHODS = {
    "Exact": cp.Exact,
    "Series": lambda: cp.Series(order=8),
    "AssumedDensity": cp.AssumedDensity,
    "Sketched": lambda: cp.Sketched(64, generator=torch.Generator().manual_seed(0)),
}
PROGRAMS: dict[str, Any] = {
    "there and back": lambda x, f: WIDE(torch.tanh(f(x)).to(torch.float64)),
    "product": lambda x, f: torch.tanh(f(x)) * WIDE(x),
    "sum": lambda x, f: torch.tanh(f(x)) + WIDE(x),
    "difference of itself": lambda x, f: f(x) - 2 * x,
    "cat": lambda x, f: torch.cat([torch.tanh(f(x)), WIDE(x)], -1),
    "stack": lambda x, f: torch.stack([f(x), WIDE(x)], -1),
    "where": lambda x, f: torch.where(CHOSEN, f(x), WIDE(x)),
    "maximum": lambda x, f: torch.maximum(f(x), WIDE(x)),
    "two activations": lambda x, f: F.relu(f(x)) + F.relu(WIDE(x)),
    "softmax": lambda x, f: torch.softmax(f(x), -1) * x,
}


def gaussian() -> cp.Gaussian:
    factor = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64)
    return cp.Gaussian(mean, 0.2 * factor @ factor.mT)


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_detour_through_float32_costs_its_rounding_alone(name: str, method: str) -> None:
    program, x = PROGRAMS[name], gaussian()
    with torch.no_grad():
        found = propagate(lambda x: program(x, lambda y: y.float()), x, METHODS[method]())
        expected = propagate(lambda x: program(x, lambda y: y), x, METHODS[method]())
    assert found.dtype == torch.float64
    # A few hundred roundings of variances of about one.
    slack = 300 * torch.finfo(torch.float32).eps
    sampled = method == "Sketched" and found.covariance_stderr is not None
    spread = 4 * found.covariance_stderr if sampled else torch.zeros(())
    torch.testing.assert_close(found.mean, expected.mean, rtol=slack, atol=slack + 4 * _max(found))
    error = (found.covariance_matrix - expected.covariance_matrix).abs()
    assert bool((error <= slack + 2 * spread).all())


def _max(y: cp.Gaussian) -> float:
    return 0.0 if y.mean_stderr is None else float(y.mean_stderr.max())


def test_a_narrow_layer_and_a_wide_one_of_one_tensor_know_each_other() -> None:
    x = gaussian()
    with torch.no_grad():
        y = propagate(lambda x: NARROW(x.float()) + WIDE(x), x)
        matrix = NARROW.weight.double() + WIDE.weight
    expected = matrix @ x.covariance_matrix @ matrix.mT
    slack = 100 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(y.covariance_matrix, expected, rtol=slack, atol=slack)


def test_gradients_pass_through_both_dtypes() -> None:
    x = gaussian()
    mean = x.mean.clone().requires_grad_()
    y = propagate(lambda x: torch.tanh(x.float()) * WIDE(x), cp.Gaussian(mean, x.covariance_matrix))
    (y.mean.sum() + y.variance.sum()).backward()
    assert mean.grad is not None
    assert bool(torch.isfinite(mean.grad).all())


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize(
    "method", [cp.Linearized(), cp.Split(), cp.Unscented(), cp.Split(base=cp.Linearized())]
)
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("made", [torch.float32, torch.float64])
def test_outputs_may_have_another_dtype_than_inputs(
    method: Any, given: torch.dtype, made: torch.dtype
) -> None:
    x = gaussian().to(given)
    with torch.no_grad():
        found = propagate(lambda x: torch.tanh(x.to(made)), x, method)
        expected = propagate(torch.tanh, gaussian(), method)
    assert found.dtype == made
    slack = 300 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=0, atol=slack)
    torch.testing.assert_close(
        found.covariance_matrix.double(), expected.covariance_matrix, rtol=0, atol=slack
    )
