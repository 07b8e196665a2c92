"""The bumps of Wu et al. (2019): what they are matched to, and every limit of the correlation."""

import math

import mpmath as mp
import pytest
import torch
from torch import Tensor

from covprop.kernels.wu2019 import bump_first, bump_second
from tests.oracles import assert_close
from tests.paper import means, wu_relu_covariance

D = torch.float64
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
