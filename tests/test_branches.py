"""Branches with activations: exact for pairs that are jointly Gaussian before them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.lineage import Lineage
from tests.oracles import assert_close, moments, pair_covariance
from tests.test_lineage import gaussian, weight

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
    y = cp.propagate(function, x)
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
    y = cp.propagate(lambda x: PARALLEL[name](x, a, b, c), x)
    inner = torch.cat([a, b])
    mean, covariance = relu_moments(inner @ x.mean, inner @ x.covariance_matrix @ inner.mT)
    outer = OUTER.get(name, torch.cat([TWO, c], 1))
    assert_close(y.mean, outer @ mean, atol=1e-9)
    assert_close(y.covariance_matrix, outer @ covariance @ outer.mT, atol=1e-8)


def test_two_different_functions_of_one_element_are_close() -> None:
    x = gaussian(3, seed=3)

    def function(x: Any) -> Any:
        return torch.relu(x) - torch.tanh(x)

    y = cp.propagate(function, x)
    for i in range(3):
        pair = float(x.mean[i]), float(x.stddev[i])
        _, variance, _ = moments(function, *pair, kinks=(0.0,))
        # A series of 64 terms at rho = 1: what is left falls like order^-3/2 for a kink.
        assert abs(float(y.variance[i]) - variance) <= 1e-3 * variance


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


@pytest.mark.parametrize("seed", range(60))
def test_forgetting_never_changes_a_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cp.Gaussian(gaussian(4).mean, gaussian(4).covariance_matrix / 4)
    y = cp.propagate(random_graph(seed), x)
    monkeypatch.setattr(Lineage, "collect", lambda _: None)
    everything = cp.propagate(random_graph(seed), x)
    assert_close(y.mean, everything.mean, rtol=0.0)
    assert_close(y.covariance_matrix, everything.covariance_matrix, rtol=0.0)


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
        y = cp.propagate(Residual(), x)
        for i in range(2):
            for j in range(3):
                one = cp.propagate(Residual(), x[i, j])
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

        y = cp.propagate(call, cp.Gaussian(mean, factor @ factor.mT, validate_args=False))
        return y.mean, y.covariance_matrix

    inputs = (x.mean, factor, block.first.weight.detach(), block.second.weight.detach())
    inputs = tuple(t.clone().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(moments_of, inputs, fast_mode=True)


def test_a_residual_block_agrees_with_sampling_where_the_noise_is_small() -> None:
    x = gaussian(4)
    x = cp.Gaussian(x.mean, x.covariance_matrix / 400)
    with torch.no_grad():
        y = cp.propagate(Residual(), x)
        generator = torch.Generator().manual_seed(0)
        sample = Residual()(x.sample(200_000, generator))
    error = sample.std(0) * (2 / len(sample)) ** 0.5
    assert bool((5 * error < 0.02 * sample.std(0)).all())
    assert bool(((y.stddev - sample.std(0)).abs() <= 5 * error).all())
