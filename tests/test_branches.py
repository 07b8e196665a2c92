"""Branches with activations: exact for pairs that are jointly Gaussian before them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from torch import Tensor, nn

import covprop as cp
from covprop.flow.lineage import Lineage
from tests.gaussians import gaussian, weight
from tests.layers import propagate
from tests.oracles import assert_close, moments, pair_covariance

SCALAR: dict[str, tuple[Callable[[Any], Any], tuple[float, ...], float]] = {
    "skip": (lambda x: x + torch.relu(x), (0.0,), 1e-9),
    "skip, other order": (lambda x: torch.relu(x) - 0.5 * x, (0.0,), 1e-9),
    "skip of a smooth one": (lambda x: x - torch.tanh(x), (), 1e-7),
    "same function, two scales": (lambda x: torch.relu(x) + torch.relu(-0.5 * x), (0.0,), 1e-9),
    "same smooth function": (lambda x: torch.erf(x) + torch.erf(2 * x - 1), (), 1e-7),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALAR)
def test_an_element_wise_block_is_the_function_that_it_is(name: str) -> None:
    """Two branches of one element are one scalar function of it, whose moments are integrals."""
    function, kinks, rounding = SCALAR[name]
    x = gaussian(3, seed=3)
    y = propagate(function, x)
    means, stddevs = x.mean.tolist(), x.stddev.tolist()
    expected = [moments(function, *p, kinks=kinks)[:2] for p in zip(means, stddevs, strict=True)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_close(y.mean, expected[:, 0], atol=rounding)
    assert_close(y.variance, expected[:, 1], atol=rounding)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        rho = float(x.correlation_matrix[i, j])
        pairs = [means[i], means[j]], [stddevs[i], stddevs[j]]
        covariance = pair_covariance(function, *pairs, rho, kinks=kinks)
        assert abs(float(y.covariance_matrix[i, j]) - covariance) <= rounding


def relu_moments(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of relu of a Gaussian vector by quadrature of every pair."""
    size = len(mean)
    stddev = covariance.diagonal().sqrt()
    matrix = torch.zeros(size, size, dtype=torch.float64)
    centre = torch.zeros(size, dtype=torch.float64)
    for i in range(size):
        m, v, _ = moments(torch.relu, float(mean[i]), float(stddev[i]), kinks=(0.0,))
        centre[i], matrix[i, i] = m, v
        for j in range(i):
            rho = float(covariance[i, j] / (stddev[i] * stddev[j]))
            pair = mean[[i, j]].tolist(), stddev[[i, j]].tolist()
            matrix[i, j] = matrix[j, i] = pair_covariance(torch.relu, *pair, rho, kinks=(0.0,))
    return centre, matrix


PARALLEL: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
    "sum": lambda x, a, b, _: torch.relu(F.linear(x, a)) + torch.relu(F.linear(x, b)),
    "cat": lambda x, a, b, _: torch.cat([F.relu(F.linear(x, a)), F.relu(F.linear(x, b))]),
    "linear after the newer": lambda x, a, b, c: (
        torch.relu(F.linear(x, a)) + F.linear(torch.relu(F.linear(x, b)), c)
    ),
    "linear after the older": lambda x, a, b, c: (
        F.linear(torch.relu(F.linear(x, b)), c) + torch.relu(F.linear(x, a))
    ),
}


def interleaved(x: Any, a: Tensor, b: Tensor, c: Tensor) -> Any:
    """Both inner maps first, then both activations, then the outer maps."""
    first, second = F.linear(x, a), F.linear(x, b)
    first, second = torch.relu(first), torch.relu(second)
    return F.linear(second, c) + first


PARALLEL["activations first"] = interleaved
TWO = torch.eye(2, dtype=torch.float64)
OUTER = {"sum": torch.cat([TWO, TWO], 1), "cat": torch.eye(4, dtype=torch.float64)}


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_activations_are_exact(name: str) -> None:
    """The outer map of relu of the stacked inner maps, whose pairs are integrals."""
    x, a, b, c = gaussian(3, seed=3), weight(2, 3), weight(2, 3, seed=4), weight(2, 2, seed=5)
    y = propagate(lambda x: PARALLEL[name](x, a, b, c), x)
    inner = torch.cat([a, b])
    mean, covariance = relu_moments(inner @ x.mean, inner @ x.covariance_matrix @ inner.mT)
    outer = OUTER.get(name, torch.cat([TWO, c], 1))
    assert_close(y.mean, outer @ mean, atol=1e-9)
    assert_close(y.covariance_matrix, outer @ covariance @ outer.mT, atol=1e-8)


def test_two_different_functions_of_one_element_are_exact() -> None:
    x = gaussian(3, seed=3)

    def function(x: Any) -> Any:
        return torch.relu(x) - torch.tanh(x)

    y = propagate(function, x)
    for i in range(3):
        pair = float(x.mean[i]), float(x.stddev[i])
        _, variance, _ = moments(function, *pair, kinks=(0.0,))
        assert abs(float(y.variance[i]) - variance) <= 1e-11 * variance


def random_graph(seed: int) -> Callable[[Any], Any]:
    """Ten operations on randomly chosen earlier results, of which three are kept at a time."""

    def run(x: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        pool = [x]
        for step in range(10):
            first, second, kind = torch.randint(0, 1000, (3,), generator=generator).tolist()
            operations: tuple[Callable[[Any, Any], Any], ...] = (
                lambda u, v: u + v,
                lambda u, v: u - 0.5 * v,
                lambda u, v, s=step: F.linear(u, weight(4, 4, seed=s) / 2),  # noqa: ARG005
                lambda u, v: torch.cat([u[:2], v.flip(0)[2:]]),
                lambda u, _: torch.relu(u),
                lambda _, v: torch.tanh(v),
                lambda u, v: 0.3 * u * v,
                lambda u, _: 0.3 * u.square(),
                lambda u, v: 0.2 * (u.reshape(2, 2) @ v.reshape(2, 2)).flatten(),
                lambda u, _: F.dropout(u, 0.1),
                torch.maximum,
            )
            u, v = pool[first % len(pool)], pool[second % len(pool)]
            pool.append(operations[kind % len(operations)](u, v))
            del u, v
            if len(pool) > 3:
                pool.pop(first % len(pool))
        return torch.cat(pool)

    return run


@pytest.mark.parametrize("seed", range(30))
def test_forgetting_never_changes_a_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cp.Gaussian(gaussian(4).mean, gaussian(4).covariance_matrix / 4)
    y = propagate(random_graph(seed), x)
    monkeypatch.setattr(Lineage, "collect", lambda _: None)
    everything = propagate(random_graph(seed), x)
    assert_close(y.mean, everything.mean, rtol=0.0)
    assert_close(y.covariance_matrix, everything.covariance_matrix, rtol=0.0)


def with_a_product(
    function: Callable[[Any], Any], kinks: tuple[float, ...], mean: Tensor, matrix: Tensor
) -> float:
    """Cov(g(p), a b) of jointly Gaussian (p, a, b), by one integral over p of g(p) E[a b | p]."""
    (m, a, b), v = mean.tolist(), float(matrix[0, 0])
    first, second = float(matrix[0, 1]) / v, float(matrix[0, 2]) / v

    def weighted(t: float) -> float:
        given = first * second * ((t - m) ** 2 - v) + (t - m) * (first * b + second * a)
        density = math.exp(-((t - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
        return float(function(torch.tensor(t, dtype=torch.float64))) * given * density

    far = 12 * math.sqrt(v)
    points = [k for k in (*kinks, m) if abs(k - m) < far]
    return float(quad(weighted, m - far, m + far, points=points, limit=200, epsabs=1e-12)[0])


MEETING: dict[str, tuple[Callable[[Any], Any], tuple[float, ...]]] = {
    "relu": (torch.relu, (0.0,)),
    "leaky relu": (F.leaky_relu, (0.0,)),
    "hardtanh": (F.hardtanh, (-1.0, 1.0)),
    "sign": (torch.sign, (0.0,)),
    "abs": (torch.abs, (0.0,)),
    "hardshrink": (F.hardshrink, (-0.5, 0.5)),
    "hardswish": (F.hardswish, (-3.0, 3.0)),
    "elu": (F.elu, (0.0,)),
    "tanh": (torch.tanh, ()),
    "sigmoid": (torch.sigmoid, ()),
    "gelu": (F.gelu, ()),
    "silu": (F.silu, ()),
    "softplus": (F.softplus, ()),
    "exp": (torch.exp, ()),
    "cos": (torch.cos, ()),
    "cube": (lambda x: x**3, ()),
    "fourth power": (lambda x: x.pow(4), ()),
}


@pytest.mark.parametrize("spelling", ["product", "sum of products", "later"])
@pytest.mark.parametrize("name", MEETING)
def test_an_activation_meets_a_product_exactly(name: str, spelling: str) -> None:
    """The expansion in Hermite polynomials ends with the second order, that of the product."""
    function, kinks = MEETING[name]
    x = cp.Gaussian(torch.tensor([0.4, -0.7, 1.2]).double(), gaussian(3).covariance_matrix / 2)

    def forward(x: Any) -> Any:
        if spelling == "product":
            return torch.stack([function(x[0]), x[1] * x[2]])
        if spelling == "sum of products":
            return torch.cat([(x[1:2] @ x[2:])[None], function(x[:1])]).flip(0)
        activated, product = function(x), torch.einsum("i,j->ij", x, x)
        return torch.stack([activated.sum() - activated[1:].sum(), product[1, 2] + 2])

    y = propagate(forward, x)
    expected = with_a_product(function, kinks, x.mean, x.covariance_matrix)
    assert abs(float(y.covariance_matrix[0, 1]) - expected) <= 2e-8 * max(1.0, float(y.variance[0]))


def test_an_activation_meets_a_product_of_its_own_input() -> None:
    """Two functions of one element are one function of it: relu(x) + x^2, tanh(x) - x^2."""
    x = gaussian(3, seed=3)
    for function, kinks in ((torch.relu, (0.0,)), (torch.tanh, ())):
        y = propagate(lambda x, f=function: f(x) - x * x, x)
        for i in range(3):
            pair = float(x.mean[i]), float(x.stddev[i])
            _, variance, _ = moments(lambda t, f=function: f(t) - t * t, *pair, kinks=kinks)
            assert abs(float(y.variance[i]) - variance) <= 1e-7 * variance


SAME: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "square": (lambda x: x * x, torch.square),
    "relu of a square": (lambda x: torch.relu(x * x), lambda x: torch.relu(x.square())),
    "cube": (lambda x: x * x * x, lambda x: x.square() * x),
    "gate": (lambda x: x * torch.sigmoid(x), lambda x: torch.sigmoid(x) * x),
    "two layers": (
        lambda x: torch.tanh(F.linear(torch.relu(x), weight(3, 3))),
        lambda x: torch.tanh(F.linear(torch.relu(x), weight(3, 3))),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_computed_twice_is_the_same_wherever_it_meets(name: str) -> None:
    """A difference is zero, and either has the same covariance with whatever came of the other."""
    first, second = SAME[name]
    x = gaussian(3, seed=3)
    difference = propagate(lambda x: first(x) - second(x), x)
    size = propagate(first, x).variance
    assert bool((difference.variance.abs() <= 1e-11 * size).all())

    def came_of_one(x: Any) -> Any:
        y = first(x)
        return torch.cat([torch.tanh(y), y * x, y])

    def came_of_both(x: Any) -> Any:
        y = first(x)
        return torch.cat([torch.tanh(y), y * x, second(x)])

    one, both = propagate(came_of_one, x), propagate(came_of_both, x)
    scale = float(one.variance.max())
    assert_close(both.covariance_matrix, one.covariance_matrix, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stddev", [0.0, 1e-22, 1e-18, 1e-10, 1e8])
def test_an_activation_beside_a_product_is_finite_whatever_varies(
    dtype: torch.dtype, stddev: float
) -> None:
    mean = torch.tensor([0.0, 0.5], dtype=dtype)
    for function in (torch.sign, torch.relu, torch.tanh, torch.square):
        x = cp.Gaussian.isotropic(mean, stddev=stddev)
        y = propagate(lambda x, f=function: torch.cat([f(x), x * x.flip(0), x * x]), x)
        assert bool(torch.isfinite(y.covariance_matrix).all())
        bound = y.stddev[:, None] * y.stddev
        slack = 8 * torch.finfo(dtype).eps * bound + torch.finfo(dtype).tiny
        assert bool((y.covariance_matrix.abs() <= bound + slack).all())


def test_gradients_of_an_activation_beside_a_product_are_right() -> None:
    factor = torch.linalg.cholesky(gaussian(3).covariance_matrix)

    def moments_of(mean: Tensor, factor: Tensor) -> Any:
        x = cp.Gaussian(mean, factor @ factor.mT, validate_args=False)
        y = propagate(lambda x: torch.tanh(x) + torch.relu(x) * x.flip(0) - x * x, x)
        return y.mean, y.covariance_matrix

    inputs = (gaussian(3).mean.requires_grad_(), factor.requires_grad_())
    assert torch.autograd.gradcheck(moments_of, inputs, fast_mode=True)


@pytest.mark.parametrize("seed", range(30))
def test_a_joint_covariance_is_positive_semi_definite(seed: int) -> None:
    """Every depth is a layer of one network, through which all before it is carried jointly."""
    y = propagate(random_graph(seed), gaussian(4))
    values = torch.linalg.eigvalsh(y.covariance_matrix)
    assert float(values[0]) >= -1e-12 * float(values[-1])


class Residual(nn.Module):
    """A block with a skip connection around two layers."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.double()

    def forward(self, x: Any) -> Any:
        return F.gelu(x + self.second(torch.tanh(self.first(x))))


def test_a_batch_of_residual_blocks_is_each_of_them() -> None:
    x = gaussian(4, batch=(2, 3))
    with torch.no_grad():
        y = propagate(Residual(), x)
        for i in range(2):
            for j in range(3):
                one = propagate(Residual(), x[i, j])
                assert_close(y.mean[i, j], one.mean, atol=1e-14)
                assert_close(y.covariance_matrix[i, j], one.covariance_matrix, atol=1e-13)


def test_gradients_flow_through_a_residual_block() -> None:
    block = Residual(3)
    x = gaussian(3)
    factor = torch.linalg.cholesky(x.covariance_matrix)

    def moments_of(mean: Tensor, factor: Tensor, first: Tensor, second: Tensor) -> Any:
        parameters = {"first.weight": first, "second.weight": second}

        def call(x: Any) -> Any:
            return torch.func.functional_call(block, parameters, (x,))

        y = propagate(call, cp.Gaussian(mean, factor @ factor.mT, validate_args=False))
        return y.mean, y.covariance_matrix

    inputs = (x.mean, factor, block.first.weight.detach(), block.second.weight.detach())
    inputs = tuple(t.clone().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(moments_of, inputs, fast_mode=True)


def test_a_residual_block_agrees_with_sampling_where_the_noise_is_small() -> None:
    x = gaussian(4)
    x = cp.Gaussian(x.mean, x.covariance_matrix / 400)
    with torch.no_grad():
        y = propagate(Residual(), x)
        generator = torch.Generator().manual_seed(0)
        sample = Residual()(x.sample(200_000, generator))
    error = sample.std(0) * (2 / len(sample)) ** 0.5
    assert bool((5 * error < 0.02 * sample.std(0)).all())
    assert bool(((y.stddev - sample.std(0)).abs() <= 5 * error).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 4.0, 5.0, 8.0, 10.0, 20.0])
def test_what_rounding_has_hidden_in_a_sum_is_hidden_from_others(
    offset: float, dtype: torch.dtype
) -> None:
    """relu(u) = (u + |u|) / 2, whose variance is lost in the rounding of that of u."""
    x = cp.Gaussian(torch.tensor([0.3], dtype=dtype), torch.tensor([[1.0]], dtype=dtype))

    def zero(x: Any) -> Any:
        u = x - offset
        return torch.relu(u) - (u + u.abs()) / 2

    y = propagate(zero, x)
    assert 0 <= float(y.variance) <= 8 * torch.finfo(dtype).eps


def test_what_rounding_has_hidden_in_a_sum_keeps_its_gradient() -> None:
    """x1 - x0 of equal factors does not vary, but would if one of them were scaled."""
    factor = torch.tensor([[-0.125], [-0.125], [1.25]], dtype=torch.float64)

    def total(scale: Tensor) -> Tensor:
        root = scale[:, None] * factor
        y = propagate(
            lambda x: torch.cat([x[1:2] - x[0:1], x]),
            cp.Gaussian(torch.zeros(3, dtype=torch.float64), root @ root.mT),
        )
        return (y.covariance_matrix * torch.arange(16, dtype=torch.float64).reshape(4, 4)).sum()

    ones = torch.ones(3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(total(scale := ones.clone().requires_grad_()), scale)
    line, step = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64), 1e-4
    with torch.no_grad():
        slope = (total(ones + step * line) - total(ones - step * line)) / (2 * step)
    assert_close(gradient @ line, slope, rtol=1e-6, atol=1e-9)
