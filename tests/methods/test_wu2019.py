"""Wu et al. (2019): exact variances, their covariances of ReLUs and of steps, nothing else."""

import math
from typing import Any

import mpmath as mp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.methods.comparison.published import bump_first, bump_second
from tests.layers import propagate
from tests.oracles import assert_close
from tests.paper import means, wu_relu_covariance
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
    found, exact = propagate(function, x, WU), propagate(function, x)
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
    found, exact = (propagate(function, centred, method) for method in (WU, cp.Exact()))
    assert_close(found.covariance_matrix, exact.covariance_matrix, rtol=1e-12, atol=1e-15)


def test_relu_scales_with_its_input() -> None:
    x = gaussian()
    scaled = cp.Gaussian(x.mean * 7, x.covariance_matrix * 49)
    found, expected = (propagate(torch.relu, y, WU) for y in (scaled, x))
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
    y = propagate(
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
        found, exact = propagate(model, x, WU), propagate(model, x)
        for i, element in enumerate(x):
            alone = propagate(model, element, WU)
            assert_close(found[i].covariance_matrix, alone.covariance_matrix, rtol=1e-12)
    scale = exact.stddev[..., :, None] * exact.stddev[..., None, :]
    difference = (found.covariance_matrix - exact.covariance_matrix).abs() / scale
    assert 1e-6 < float(difference.max()) < 0.02


def test_parallel_branches_meet_by_the_same_formula() -> None:
    x = gaussian()
    together = propagate(lambda x: torch.relu(torch.cat([x, 2 * x])), x, WU)
    apart = propagate(lambda x: torch.cat([torch.relu(x), torch.relu(2 * x)]), x, WU)
    assert_close(apart.covariance_matrix, together.covariance_matrix, rtol=1e-12)
    with pytest.raises(cp.UnsupportedOperation, match="a ReLU and a step"):
        propagate(lambda x: torch.cat([torch.relu(x), step(x)]), x, WU)


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
        propagate(function, gaussian(), WU)
    assert f"{name}: Wu et al." in str(caught.value)
    assert "covprop." not in str(caught.value)


def test_clamping_from_below_at_zero_is_relu() -> None:
    x = gaussian()
    found, relu = (propagate(f, x, WU) for f in (lambda x: x.clamp(min=0), torch.relu))
    assert_close(found.covariance_matrix, relu.covariance_matrix, rtol=1e-15)


# The bumps of Wu et al. (2019): what they are matched to, and every limit of the correlation.

CORRELATIONS = [-1.0, -0.999, -0.5, -0.249, -1e-3, 1e-8, 0.1, 0.251, 0.9, 0.999999, 1.0]


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=D) for value in values]


@pytest.mark.parametrize("rho", CORRELATIONS)
def test_the_heights_are_those_of_the_integrals(rho: float) -> None:
    with mp.workdps(40):
        r = mp.mpf(rho)
        first = mp.asin(r) / (2 * mp.pi)
        second = (r * mp.asin(r) + mp.sqrt(1 - r * r) - 1) / (2 * mp.pi)  # the arc-cosine kernel
    assert float(bump_first(*numbers(0, 0, rho))) == pytest.approx(float(first), rel=1e-14)
    assert float(bump_second(*numbers(0, 0, rho))) == pytest.approx(float(second), rel=1e-13)


def curvature(bump: object, rho: float) -> Tensor:
    at_zero = torch.zeros(2, dtype=D)
    return torch.autograd.functional.hessian(
        lambda m: bump(m[0], m[1], torch.tensor(rho, dtype=D)), at_zero
    )


@pytest.mark.parametrize("rho", [-0.9, -0.1, 1e-3, 0.5, 0.99])
def test_the_curvatures_are_those_of_the_integrals(rho: float) -> None:
    q = math.sqrt(1 - rho * rho)
    # d^2 phi2 / da^2 = -phi2 / (1 - r^2) and d^2 phi2 / da db = r phi2 / (1 - r^2) at a = b = 0,
    # integrated over r from 0 to rho by hand.
    first = torch.tensor([[-rho / q, 1 / q - 1], [1 / q - 1, -rho / q]], dtype=D)
    mixed = math.asin(rho) - rho
    second = torch.tensor([[q - 1, mixed], [mixed, q - 1]], dtype=D)
    assert_close(curvature(bump_first, rho), first / (2 * math.pi), rtol=1e-9, atol=1e-12)
    assert_close(curvature(bump_second, rho), second / (2 * math.pi), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rho", [-0.9, 0.1, 0.5, 0.9])
def test_the_bump_of_relu_is_the_published_formula(rho: float) -> None:
    a, b = torch.from_numpy(means(21)).T
    found = bump_second(a, b, torch.full_like(a, rho))
    both = torch.special.ndtr(a) * torch.special.ndtr(b)
    published = torch.from_numpy(wu_relu_covariance(a.numpy(), b.numpy(), rho))
    assert_close(found + rho * both, published, atol=1e-15)


@pytest.mark.parametrize("bump", [bump_first, bump_second])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_values_and_gradients_are_finite_everywhere(bump: object, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    edges = [0.0, 1e-30, 1e-12, 1e-3, 0.25, 0.5, 1 - 1e-3, 1 - eps, 1.0, 1 + 2 * eps]
    rho = torch.tensor([sign * edge for sign in (-1, 1) for edge in edges], dtype=dtype)
    mean = torch.tensor([-100.0, -6, -1, 0, 0.5, 5, 100], dtype=dtype)
    grid = [t.clone().requires_grad_() for t in torch.meshgrid(mean, mean, rho, indexing="ij")]
    value = bump(*grid)
    assert bool(torch.isfinite(value).all())
    assert (
        float(value.detach().abs().max()) <= 0.2501
    )  # no more than Var 1(x > 0), of which it is a part
    for gradient in torch.autograd.grad(value.sum(), grid):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("bump", [bump_first, bump_second])
def test_gradients_are_those_of_the_values(bump: object) -> None:
    a, b, rho = torch.meshgrid(*numbers(-1.2, 0.3), torch.tensor([-0.7, -0.2, 0.24, 0.6]).to(D),
                               indexing="ij")  # fmt: skip
    inputs = [t.clone().requires_grad_() for t in (a, b, rho)]
    assert torch.autograd.gradcheck(bump, inputs)


@pytest.mark.parametrize("bump", [bump_first, bump_second])
def test_single_precision_is_near_double(bump: object) -> None:
    rho = torch.tensor([-1, -0.99, -0.3, -1e-4, 1e-6, 0.2, 0.7, 0.999, 1.0])
    mean = torch.tensor([-3.0, -0.5, 0, 1.25, 4])
    a, b, rho = torch.meshgrid(mean, mean, rho, indexing="ij")
    assert_close(bump(a, b, rho).double(), bump(a.double(), b.double(), rho.double()), atol=2e-7)


def test_the_sides_of_the_switch_between_series_and_formula_agree() -> None:
    below, above = (torch.tensor(0.25 + step, dtype=D) for step in (-1e-12, 1e-12))
    for bump in (bump_first, bump_second):
        at = [bump(*numbers(0.7, -1.1), rho) for rho in (below, above)]
        assert_close(at[0], at[1], rtol=1e-10)


def test_one_variable_and_one_threshold_have_a_finite_bump_of_a_step() -> None:
    a = torch.linspace(-3, 3, 13, dtype=D)
    for rho, other in ((1.0, a), (-1.0, -a)):
        found = bump_first(a, other, torch.full_like(a, rho))
        assert_close(found, rho * torch.exp(-2 * a.square() / math.pi) / 4, rtol=1e-12)
