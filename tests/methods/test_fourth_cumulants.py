"""Fourth cumulants in `cp.Cumulants`: slices from trees, corrections, and the sign beside them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.kernels.edgeworth import Coefficients, Fourth, Marginal, Marginals, Slices
from tests.gaussians import numbers
from tests.layers import propagate
from tests.methods.test_cumulants import hermite_grid, in_flight
from tests.oracles import assert_close

D = torch.float64
FIRST, SECOND, LAST = (
    0.8 * numbers(5, 2, seed=3),
    0.7 * numbers(5, 5, seed=4),
    numbers(3, 5, seed=5),
)
BIAS = 0.5 * numbers(5, seed=6)


def smooth(x: Any) -> Any:
    """Two layers with curvature and third derivatives."""
    return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(x, FIRST, BIAS)), SECOND, BIAS)), LAST)


def fourth(network: Callable[[Any], Any], noise: float) -> Fourth:
    """Slices of the result, not in units."""
    x = cp.Gaussian(torch.zeros(2, dtype=D), noise**2 * torch.eye(2, dtype=D))
    y = network(in_flight(x))
    y.evaluate()
    one = torch.ones(y.shape[-1], dtype=D)
    found = y.carrier.fourth(one, y.carrier, one)
    assert found is not None
    return found


def once(x: Any) -> Any:
    """One layer."""
    return F.linear(torch.tanh(F.linear(x, FIRST, BIAS)), LAST)


def beside(x: Any) -> Any:
    """Two branches and a skip connection."""
    left, right = F.linear(x, FIRST, BIAS), F.linear(x, FIRST.flip(0), -BIAS)
    return F.linear(torch.tanh(left) + torch.sigmoid(right) * 2 + left, LAST)


@pytest.mark.parametrize("network", [once, beside])
def test_slices_are_those_of_quadrature_for_small_noise(network: Callable[[Any], Any]) -> None:
    """Trees of two vertices are of order noise^6, what they lack of noise^8."""
    nodes, weights = hermite_grid(2, 24)
    errors = []
    for noise in (0.02, 0.04):
        values = network(noise * nodes)
        u = values - weights @ values
        matrix = torch.einsum("p,pi,pj->ij", weights, u, u)
        products = 3 * matrix.diagonal()[:, None] * matrix
        truth = torch.einsum("p,pi,pj->ij", weights, u**3, u) - products
        found = fourth(network, noise).left
        errors.append(float((found - truth).norm() / truth.norm()))
    assert errors[0] <= 0.02
    assert 3 <= errors[1] / errors[0] <= 5


def test_paths_through_two_layers() -> None:
    """Of the gradient J and the Hessian B at the mean; squares make no stars."""

    def squares(x: Any) -> Any:
        inner = torch.square(F.linear(x, FIRST, BIAS))
        return F.linear(torch.square(F.linear(inner, SECOND, BIAS)), LAST)

    noise, zero = 1e-3, torch.zeros(2, dtype=D)
    gradient = torch.autograd.functional.jacobian(squares, zero)
    hessian = torch.stack([
        torch.autograd.functional.hessian(lambda x, i=i: squares(x)[i], zero) for i in range(3)
    ])  # fmt: skip
    met = torch.einsum("ikl,jl->kij", hessian, gradient)
    joined = noise**3 * (met + met.mT)  # the derivative of the covariance by each input
    own = joined.diagonal(dim1=-2, dim2=-1)
    found = fourth(squares, noise)
    # Expected derivatives differ from those at the mean by parts of the order of noise^2.
    assert_close(found.middle, own.mT @ own, rtol=1e-3)
    assert_close(found.left, 3 * torch.einsum("ki,kij->ij", own, joined), rtol=1e-3)


def derivatives(function: Callable[[Tensor], Tensor], nodes: Tensor, weights: Tensor) -> Tensor:
    """E[f He_k] of a standard normal argument, by quadrature."""
    rows = [torch.ones_like(nodes), nodes]
    for k in range(1, 9):
        rows.append(nodes * rows[-1] - k * rows[-2])
    return torch.stack([weights @ (function(nodes) * row) for row in rows])[:, None]


def test_moments_under_a_mixture_of_scales() -> None:
    """N(0, s^2 C) with s^2 = 1 +- d has K_ijkl = d^2 (C_ij C_kl + ...) and no sixth cumulant."""
    d, rho = 0.3, 0.6
    grid, weights = hermite_grid(2, 8)
    line, ones = hermite_grid(1, 8)
    f = lambda y: 0.4 * y + 0.5 * y**2 - 0.5  # noqa: E731  centred under the Gaussian
    g = lambda y: y - 0.3 * y**2 + 0.2 * y**3 + 0.3  # noqa: E731
    y = grid[:, :1]
    w = rho * y + math.sqrt(1 - rho**2) * grid[:, 1:]

    def expected(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        several = [math.sqrt(1 + sign * d) for sign in (-1, 1)]
        return sum(weights @ function(s * y, s * w) for s in several) / 2  # type: ignore[return-value]

    def gaussian(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return weights @ function(y, w)

    left, right = (derivatives(h, line[:, 0], ones) for h in (f, g))
    matrix = torch.tensor([[rho]], dtype=D)
    kurtosis = torch.tensor([3 * d**2], dtype=D)
    fourth = Fourth(kurtosis * matrix, d**2 * (1 + 2 * matrix**2), kurtosis * matrix)
    third, marginal = torch.zeros_like(matrix), Marginal(torch.zeros_like(kurtosis), kurtosis)
    slices = Slices(third, third, fourth, (marginal, marginal))
    found = slices.correction(matrix, Coefficients.of(left, matrix), Coefficients.of(right, matrix))
    product = lambda a, b: f(a) * g(b)  # noqa: E731
    mixed = expected(product) - expected(lambda a, _: f(a)) * expected(lambda _, b: g(b))
    # The shifts of two means are of second order in K, which the correction leaves out.
    shifts = expected(lambda a, _: f(a)) * (
        expected(lambda _, b: g(b)) - gaussian(lambda _, b: g(b))
    )  # fmt: skip
    plain = gaussian(product)
    assert_close(found[0], mixed + shifts - plain, atol=1e-14)
    powers = [derivatives(lambda t, p=p: f(t) ** p, line[:, 0], ones) for p in (1, 2, 3)]
    marginals = Marginals.of(*powers, torch.zeros(1, dtype=D), kurtosis)
    mean = expected(lambda a, _: f(a))
    central = [expected(lambda a, _, p=p: (f(a) - mean) ** p) for p in (2, 3)]
    for moment, truth in zip(marginals, (mean, *central), strict=True):
        assert_close(moment, truth, atol=1e-14)


def test_they_make_a_third_layer_better(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, weights = hermite_grid(2, 40)
    noise = 0.5

    def network(x: Any) -> Any:
        return F.linear(torch.tanh(smooth(x)), LAST.mT)

    values = network(noise * nodes)
    mean = weights @ values
    truth = torch.einsum("p,pi,pj->ij", weights, values - mean, values - mean)
    x = cp.Gaussian(torch.zeros(2, dtype=D), noise**2 * torch.eye(2, dtype=D))
    better = propagate(network, x, cp.Cumulants())
    monkeypatch.setattr("covprop.carriers.cumulants.LARGE_KURTOSIS", 0.0)
    third = propagate(network, x, cp.Cumulants())
    errors = [
        (float((y.covariance_matrix - truth).norm()), float((y.mean - mean).norm()))
        for y in (third, better)
    ]
    assert errors[1][0] <= 0.6 * errors[0][0]
    assert errors[1][1] <= 0.6 * errors[0][1]


def test_where_they_are_too_large_a_note_says_so() -> None:
    """Two inputs, and two layers with curvature before the last."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 30), nn.SELU(), nn.Linear(30, 30), nn.Hardtanh(), nn.Linear(30, 20)]
    net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(20, 4)).double()
    x = cp.Gaussian.isotropic(torch.zeros(2, dtype=D), stddev=1.0)
    y = propagate(net, x, cp.Cumulants())
    assert any(note.startswith("torch.relu lets fourth cumulants count little") for note in y.notes)


class Branched(nn.Module):
    """Two branches of different depth, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12).double() for _ in range(4))
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Any) -> Any:
        a, b, c, d = self.layers
        x = torch.relu(a(x))
        x = x + torch.relu(b(x)) + torch.tanh(c(torch.relu(d(x))))
        return c(torch.relu(a(x)))


def test_small_vertices_are_left_out_of_each_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without, where they are nothing; where they are some, a batch is a loop."""
    net, x = Branched(), cp.Gaussian.isotropic(numbers(3, 12), stddev=0.6, batch_dims=1)
    every = propagate(net, x, cp.Cumulants())
    monkeypatch.setattr("covprop.carriers.fourth_cumulant.MANY", 0)
    monkeypatch.setattr("covprop.carriers.fourth_cumulant.NEGLIGIBLE", 1e-40)
    same = propagate(net, x, cp.Cumulants())
    assert_close(same.covariance_matrix, every.covariance_matrix, rtol=1e-11)
    monkeypatch.setattr("covprop.carriers.fourth_cumulant.NEGLIGIBLE", 0.1)
    some = propagate(net, x, cp.Cumulants())
    for i in range(3):
        one = propagate(net, x[i], cp.Cumulants())
        assert_close(some.covariance_matrix[i], one.covariance_matrix, rtol=1e-10)
    monkeypatch.setattr("covprop.carriers.cumulants.LARGE_KURTOSIS", 0.0)
    third = propagate(net, x, cp.Cumulants())
    left_out = float((some.covariance_matrix - every.covariance_matrix).norm())
    added = float((every.covariance_matrix - third.covariance_matrix).norm())
    # Slices are a form of second degree: a tenth of the squares is at most 2 sqrt(0.1) of it.
    assert 0 < left_out <= 2 * math.sqrt(0.1) * added


def test_weights_are_of_elements_whatever_is_beside_them() -> None:
    """A layer with elements of large kurtosis, in two orders and in two parts."""
    x = cp.Gaussian(torch.zeros(2, dtype=D), torch.eye(2, dtype=D))

    def network(parts: int) -> Callable[[Any], Any]:
        def model(z: Any) -> Any:
            y = smooth(z).square()
            rows = SECOND[:, :3].chunk(parts)
            return torch.cat([torch.relu(F.linear(y, row)) for row in rows], -1)

        return model

    whole, halves = (propagate(network(parts), x, cp.Cumulants()) for parts in (1, 2))
    assert any(note.startswith("torch.relu lets fourth") for note in whole.notes)
    assert_close(halves.mean, whole.mean, rtol=1e-12)
    scale = float(whole.covariance_matrix.abs().max())
    assert_close(halves.covariance_matrix, whole.covariance_matrix, atol=1e-11 * scale)


@torch.no_grad()
def test_operations_that_only_others_refer_to_are_forgotten() -> None:
    """Their arguments have been released, which asked for a covariance that was not there."""

    def within(x: Any) -> Any:  # whose tensors are gone when the result is evaluated
        y = torch.cat([x, x], -1)[..., [5, 7, 3, 10, 11, 6, 2, 9, 1, 8, 0, 4]]
        largest = y.amax(-1, keepdim=True)
        below = y - largest
        back = torch.rsub(below, y)
        shares = F.log_softmax(y, -1)
        assert back.shape == y.shape
        return F.hardswish(shares)

    def function(x: Any) -> Any:
        return within(x).sum(-1)

    mean = torch.tensor([
        [0.28125, -0.53125, -0.96875, 1.625, -1.328125, 2.140625],
        [0.609375, -0.609375, -0.28125, -0.765625, 1.40625, -1.359375],
        [-1.359375, 0.0625, -1.046875, -0.75, 0.90625, 0.578125],
    ], dtype=D)  # fmt: skip
    factor = torch.tensor([
        [[8, 6], [-7, -2], [-11, -4], [0, -6], [-4, -7], [8, 6]],
        [[4, 8], [-5, 2], [-3, -7], [-4, -3], [7, -6], [4, 8]],
        [[8, 0], [-4, -6], [-1, -7], [10, -10], [-2, -4], [8, 0]],
    ], dtype=D) / 128  # fmt: skip
    x = cp.Gaussian(mean, factor @ factor.mT)
    y, plain = (propagate(function, x, method) for method in (cp.Cumulants(), cp.GaussianLayers()))
    assert_close(y.mean, plain.mean, atol=0.05 * float(plain.stddev.max()))
