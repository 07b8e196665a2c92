"""Wu et al. (2019): exact variances, their covariances of ReLUs and of steps, nothing else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from tests.oracles import assert_close
from tests.test_propagate import gaussian

D = torch.float64
WU = cp.Wu2019()


def step(x: Any) -> Any:
    return torch.heaviside(x, torch.tensor(0.5, dtype=D))


def pairs(rho: float, steps: int = 41) -> cp.Gaussian:
    axis = torch.linspace(-5, 5, steps, dtype=D)
    mean = torch.cartesian_prod(axis, axis)
    matrix = torch.tensor([[1, rho], [rho, 1]], dtype=D)
    return cp.Gaussian(mean, matrix.expand(len(mean), 2, 2))


def error(function: Any, x: cp.Gaussian) -> Tensor:
    found, exact = cp.propagate(function, x, WU), cp.propagate(function, x)
    assert_close(found.mean, exact.mean, rtol=1e-15)
    assert_close(found.variance, exact.variance, rtol=1e-14)
    return (found.covariance_matrix - exact.covariance_matrix)[..., 0, 1].abs()


@pytest.mark.parametrize(
    ("function", "largest"), [(torch.relu, (1.32e-4, 3.65e-3)), (step, (8.93e-4, 1.87e-2))]
)
def test_the_largest_error_is_what_we_measured(function: Any, largest: tuple[float, ...]) -> None:
    for rho, measured in zip((0.5, 0.9), largest, strict=True):
        assert float(error(function, pairs(rho, 101)).max()) == pytest.approx(measured, rel=1e-2)


@pytest.mark.parametrize("function", [torch.relu, step])
def test_covariances_are_exact_at_zero_means_for_any_correlations_and_variances(
    function: Any,
) -> None:
    x = gaussian(3, size=5, rank=5)
    centred = cp.Gaussian(torch.zeros_like(x.mean), x.covariance_matrix)
    found, exact = (cp.propagate(function, centred, method) for method in (WU, cp.Exact()))
    assert_close(found.covariance_matrix, exact.covariance_matrix, rtol=1e-12, atol=1e-15)


def test_relu_scales_with_its_input() -> None:
    x = gaussian()
    scaled = cp.Gaussian(x.mean * 7, x.covariance_matrix * 49)
    found, expected = (cp.propagate(torch.relu, y, WU) for y in (scaled, x))
    assert_close(found.covariance_matrix, 49 * expected.covariance_matrix, rtol=1e-12)


@pytest.mark.parametrize("function", [torch.relu, step])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_degenerate_inputs_have_finite_moments_and_gradients(
    function: Any, dtype: torch.dtype
) -> None:
    matrix = torch.tensor(
        [[1, 1, -1, 0, 0], [1, 1, -1, 0, 0], [-1, -1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 2.0]]
    )
    matrix = matrix.to(dtype).requires_grad_()
    mean = torch.tensor([0.3, 0.3, -0.3, 1.0, 1e6], dtype=dtype, requires_grad=True)
    y = cp.propagate(
        lambda x: function(x.to(D)).to(dtype), cp.Gaussian(mean, matrix, validate_args=False), WU
    )
    covariance = y.covariance_matrix
    assert bool(torch.isfinite(covariance).all())
    assert float(covariance[3].detach().abs().max()) == 0.0  # a constant
    gradients = torch.autograd.grad(covariance.sum() + y.mean.sum(), (mean, matrix))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_a_network_is_near_the_exact_covariance_and_a_batch_is_its_elements() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3)
    ).to(D)  # fmt: skip
    x = gaussian(3)
    with torch.no_grad():
        found, exact = cp.propagate(model, x, WU), cp.propagate(model, x)
        for i, element in enumerate(x):
            alone = cp.propagate(model, element, WU)
            assert_close(found[i].covariance_matrix, alone.covariance_matrix, rtol=1e-12)
    scale = exact.stddev[..., :, None] * exact.stddev[..., None, :]
    difference = (found.covariance_matrix - exact.covariance_matrix).abs() / scale
    assert 1e-6 < float(difference.max()) < 0.02


def test_parallel_branches_meet_by_the_same_formula() -> None:
    x = gaussian()
    together = cp.propagate(lambda x: torch.relu(torch.cat([x, 2 * x])), x, WU)
    apart = cp.propagate(lambda x: torch.cat([torch.relu(x), torch.relu(2 * x)]), x, WU)
    assert_close(apart.covariance_matrix, together.covariance_matrix, rtol=1e-12)
    with pytest.raises(cp.UnsupportedOperation, match="a ReLU and a step"):
        cp.propagate(lambda x: torch.cat([torch.relu(x), step(x)]), x, WU)


def bend(x: Any) -> Any:
    return x.tanh()


@pytest.mark.parametrize(
    ("function", "name"),
    [(F.gelu, "torch.nn.functional.gelu"), (nn.GELU(), "torch.nn.functional.gelu"),
     (torch.tanh, "torch.tanh"), (F.leaky_relu, "torch.nn.functional.leaky_relu"),
     (torch.abs, "torch.abs"), (lambda x: x.exp(), "torch.Tensor.exp"),
     (lambda x: x.clamp(-1, 1), "torch.Tensor.clamp"), (cp.activation(bend), "bend"),
     (nn.PReLU().double(), "torch.prelu")],
)  # fmt: skip
def test_other_activations_are_refused(function: Any, name: str) -> None:
    with pytest.raises(cp.UnsupportedOperation, match="ReLU and Heaviside alone") as caught:
        cp.propagate(function, gaussian(), WU)
    assert f"{name}: Wu et al." in str(caught.value)
    assert "covprop." not in str(caught.value)


def test_clamping_from_below_at_zero_is_relu() -> None:
    x = gaussian()
    found, relu = (cp.propagate(f, x, WU) for f in (lambda x: x.clamp(min=0), torch.relu))
    assert_close(found.covariance_matrix, relu.covariance_matrix, rtol=1e-15)
