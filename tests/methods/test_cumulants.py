"""Third cumulants: oracles that share no code, branches against one joint layer, fallbacks."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.carriers import Cumulants, cross_covariance
from covprop.flow.lineage import Lineage
from covprop.flow.tensor import GaussianTensor
from experiments import random_networks, randomness
from tests.gaussians import covariance_matrix, numbers, seeded
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients
from tests.test_networks import Peak

D = torch.float64


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=D)


def in_flight(x: cp.Gaussian) -> GaussianTensor:
    method = cp.Cumulants()
    return GaussianTensor(x.mean, method.carrier(x, Lineage(method)))


def whole(carrier: Any) -> Tensor:
    """T_ijk (n, n, n), written out from the factors."""
    assert isinstance(carrier, Cumulants)
    total = torch.zeros(carrier.size, carrier.size, carrier.size, dtype=D)
    assert carrier.blocks.tensor is not None
    e, w, q, r = carrier.blocks.tensor.unbind(-3)
    for one in ((e, w, q), (r, e, e)):
        for order in itertools.permutations(one):
            total += torch.einsum("ri,rj,rk->ijk", *order) / 2
    return total


def hermite_grid(dims: int, count: int = 64) -> tuple[Tensor, Tensor]:
    """Nodes (count^dims, dims) and weights of the standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    grid = np.stack(np.meshgrid(*[nodes] * dims, indexing="ij"), -1).reshape(-1, dims)
    product = np.prod(np.meshgrid(*[weights / weights.sum()] * dims, indexing="ij"), axis=0)
    return torch.from_numpy(grid), torch.from_numpy(product.reshape(-1))


def third_cumulant(values: Tensor, weights: Tensor) -> Tensor:
    """kappa(z_i, z_j, z_k) of values (points, n)."""
    centred = values - weights @ values
    return torch.einsum("p,pi,pj,pk->ijk", weights, centred, centred, centred)


# One layer of a Gaussian: slices are exact, triples to second order.


@pytest.mark.parametrize("function", [torch.tanh, F.gelu, torch.sigmoid, torch.square])
def test_slices_of_a_layer_are_those_of_quadrature(function: Callable[[Any], Any]) -> None:
    matrix, mean = 0.6 * numbers(4, 2, seed=3), 0.5 * numbers(4, seed=4)
    nodes, weights = hermite_grid(2)
    truth = third_cumulant(function(nodes @ matrix.mT + mean), weights)
    x = cp.Gaussian(torch.zeros(2, dtype=D), torch.eye(2, dtype=D))
    z = function(F.linear(in_flight(x), matrix, mean))
    z.evaluate()
    found = whole(z.carrier)
    scale = float(torch.einsum("iii->i", truth).abs().max())
    same = torch.einsum("iij->ij", torch.ones_like(truth)) > 0
    slices = torch.einsum("iij->ij", found)[same], torch.einsum("iij->ij", truth)[same]
    assert_close(*slices, atol=5e-4 * scale)  # what is beyond nine derivatives
    assert_close(found, truth, atol=0.1 * scale)
    assert_close(z.carrier.slices(z.carrier), torch.einsum("iij->ij", found), atol=1e-12)
    assert_close(z.carrier.third_moments(), torch.einsum("iii->i", found), atol=1e-12)


def test_triples_are_right_to_the_second_order_of_small_noise() -> None:
    matrix, mean = numbers(4, 2, seed=3), 0.5 * numbers(4, seed=4)
    nodes, weights = hermite_grid(2)
    errors = []
    for noise in (0.1, 0.2):
        truth = third_cumulant(torch.tanh(noise * nodes @ matrix.mT + mean), weights)
        x = cp.Gaussian(torch.zeros(2, dtype=D), noise**2 * torch.eye(2, dtype=D))
        z = torch.tanh(F.linear(in_flight(x), matrix, mean))
        z.evaluate()
        errors.append(float((whole(z.carrier) - truth).abs().max()))
        assert errors[-1] <= 0.02 * float(truth.abs().max())
    assert errors[1] / errors[0] >= 2**5  # the tree is of order noise^4, what it lacks of noise^6


def test_two_layers_beat_gaussian_layers_against_quadrature() -> None:
    first, second = 0.7 * numbers(6, 3, seed=3), 0.7 * numbers(5, 6, seed=5)
    nodes, weights = hermite_grid(3, 40)

    def network(x: Any) -> Any:
        return F.linear(torch.tanh(F.linear(torch.tanh(F.linear(x, first)), second)), second.mT)

    x = cp.Gaussian(torch.full((3,), 0.3, dtype=D), 0.2 * torch.eye(3, dtype=D))
    values = network(0.3 + math.sqrt(0.2) * nodes)
    mean = weights @ values
    truth = torch.einsum("p,pi,pj->ij", weights, values - mean, values - mean)
    exact, better = (propagate(network, x, method) for method in (cp.Exact(), cp.Cumulants()))
    error = [float((y.covariance_matrix - truth).norm()) for y in (exact, better)]
    assert error[1] <= 0.5 * error[0]
    shift = [float((y.mean - mean).norm()) for y in (exact, better)]
    assert shift[1] <= 0.7 * shift[0]


# Skewed inputs.


def test_linear_networks_of_skewed_inputs_are_exact() -> None:
    skewness, variance = numbers(5, seed=1), numbers(5, seed=2).square() + 0.1
    x = cp.Skewed(numbers(5), variance=variance, skewness=skewness)
    first, second = numbers(7, 5, seed=3), numbers(3, 7, seed=4)
    y = propagate(lambda z: F.linear(F.linear(z, first) * 2, second) + 1, x, cp.Cumulants())
    matrix = 2 * second @ first
    third = (matrix**3) @ (skewness * variance**1.5)
    expected = third / (matrix.square() @ variance) ** 1.5
    # 40 products of numbers of size one, before a division by a deviation of about ten.
    assert_close(y.skewness, expected, atol=1e-13)
    assert_close(y.covariance_matrix, matrix @ torch.diag(variance) @ matrix.mT, rtol=1e-13)


def test_a_batch_of_skewed_numbers_is_each_of_them() -> None:
    mean, variance = of(0.5, -1.0), of(0.1, 0.2)
    y = cp.propagate(
        torch.sin, cp.Skewed(mean, variance=variance, skewness=0.4, batch_dims=1), cp.Cumulants()
    )
    for i in range(2):
        alone = cp.Skewed(mean[i], variance=variance[i], skewness=0.4)
        expected = cp.propagate(torch.sin, alone, cp.Cumulants())
        assert_close(y[i].mean, expected.mean)
        assert_close(y[i].variance, expected.variance)


def test_a_square_of_a_skewed_input() -> None:
    """E[x^2] = mu^2 + v, Var(x^2) = 4 mu^2 v + 4 mu k3 + 2 v^2 (and k4, which is left out)."""
    mean, variance, skewness = 0.7, 0.4, 0.5
    x = cp.Skewed(of(mean), variance=of(variance), skewness=skewness)
    y = propagate(torch.square, x, cp.Cumulants())
    third = skewness * variance**1.5
    assert_close(y.mean, torch.tensor([mean**2 + variance], dtype=D), rtol=1e-12)
    expected = 4 * mean**2 * variance + 4 * mean * third + 2 * variance**2
    assert_close(y.variance, torch.tensor([expected], dtype=D), rtol=1e-10)


# Branches: a tensor that goes around an activation is one that goes through the identity.


def test_a_skip_connection_is_a_layer_with_an_identity() -> None:
    size = 5
    before, inner, after = (0.6 * numbers(size, size, seed=k) for k in (1, 2, 3))
    x = cp.Gaussian(numbers(1, size, seed=6), 0.3 * covariance_matrix(1, size=size, seed=7))

    def skipped(z: Any) -> Any:
        z = torch.tanh(F.linear(z, before))
        return F.linear(z + torch.relu(F.linear(z, inner)), after)

    def joint(z: Any) -> Any:
        z = torch.tanh(F.linear(z, before))
        both = F.linear(z, torch.cat([torch.eye(size, dtype=D), inner]))
        slopes = torch.cat([torch.ones(size, dtype=D), torch.zeros(size, dtype=D)])
        return F.linear(F.prelu(both, slopes), torch.cat([after, after], 1))

    one, other = (propagate(f, x, cp.Cumulants()) for f in (skipped, joint))
    assert_close(one.mean, other.mean, atol=1e-12)
    # Trees centred at the nonlinear elements agree; the share of the identity in the term
    # f_2(i) f_2(j) T_ijj is zero in both.
    assert_close(one.covariance_matrix, other.covariance_matrix, atol=1e-10)
    assert_close(one.skewness, other.skewness, atol=1e-8)


LEFT, RIGHT = (0.6 * numbers(4, 4, seed=k) for k in (2, 3))
BEFORE, AFTER = 0.6 * numbers(4, 4, seed=1), numbers(3, 4, seed=4)


def added(z: Any) -> Any:
    a, b = torch.relu(F.linear(z, LEFT)), torch.relu(F.linear(z, RIGHT))
    return F.linear(a, AFTER) + F.linear(b, AFTER)


def concatenated(z: Any) -> Any:
    b, a = torch.relu(F.linear(z, RIGHT)), torch.relu(F.linear(z, LEFT))
    return F.linear(torch.cat([a, b], -1), torch.cat([AFTER, AFTER], 1))


def one_layer(z: Any) -> Any:
    both = torch.relu(F.linear(z, torch.cat([LEFT, RIGHT])))
    return F.linear(both, torch.cat([AFTER, AFTER], 1))


def of_two_depths(z: Any) -> Any:
    a, b = torch.relu(F.linear(z, LEFT)), torch.relu(F.linear(z, RIGHT))
    return F.linear(a, AFTER) + F.linear(torch.relu(F.linear(b, BEFORE)), AFTER)


def with_identity(z: Any) -> Any:
    both = torch.relu(F.linear(z, torch.cat([LEFT, RIGHT])))
    zero = torch.zeros_like(BEFORE)
    second = torch.cat([torch.eye(8, dtype=D)[:4], torch.cat([zero, BEFORE], 1)])
    slopes = torch.cat([torch.ones(4, dtype=D), torch.zeros(4, dtype=D)])
    return F.linear(F.prelu(F.linear(both, second), slopes), torch.cat([AFTER, AFTER], 1))


@pytest.mark.parametrize(
    ("branches", "joint"),
    [(added, one_layer), (concatenated, one_layer), (of_two_depths, with_identity)],
)
def test_parallel_branches_are_one_layer(branches: Any, joint: Any) -> None:
    last = 0.5 * numbers(2, 3, seed=5)
    x = cp.Gaussian(numbers(1, 4, seed=6), 0.3 * covariance_matrix(1, size=4, seed=7))

    def network(middle: Any) -> Any:
        return lambda z: F.linear(torch.relu(middle(torch.tanh(F.linear(z, BEFORE)))), last)

    one, other = (propagate(network(f), x, cp.Cumulants()) for f in (branches, joint))
    gaussian = propagate(network(joint), x, cp.GaussianLayers())
    for name in ("mean", "covariance_matrix", "skewness"):
        a, b = (getattr(y, name) for y in (one, other))
        assert_close(a, b, atol=1e-11)
    assert float((other.covariance_matrix - gaussian.covariance_matrix).abs().max()) > 1e-4


def test_what_lives_longer_does_not_change_the_answer() -> None:
    """Variables that a forward pass keeps have no part in the result."""
    first = 0.6 * numbers(6, 4, seed=1)
    x = cp.Gaussian(numbers(4, seed=6), covariance_matrix(size=4, seed=7))

    def chain(z: Any) -> Any:
        return F.linear(torch.relu(F.linear(torch.relu(F.linear(z, first)), first.mT)), first)

    def keeping(z: Any) -> Any:
        a = F.linear(z, first)
        b = torch.relu(a)
        c = F.linear(b, first.mT)
        d = torch.relu(c)
        return F.linear(d, first)

    one, other = (propagate(f, x, cp.Cumulants()) for f in (chain, keeping))
    assert_close(one.covariance_matrix, other.covariance_matrix, rtol=1e-12)
    assert_close(one.skewness, other.skewness, rtol=1e-10)


# Products and dropout.


def test_third_cumulants_of_products_are_those_of_isserlis() -> None:
    """kappa(u_i v_i, u_i v_i, u_j v_j) by quadrature of a polynomial, which is exact."""
    root = numbers(6, 4, seed=1) / 2
    mean = 0.5 * numbers(6, seed=2)
    nodes, weights = hermite_grid(4, 8)  # exact up to degree 15; the cube has degree 6
    values = nodes @ root.mT + mean
    truth = third_cumulant(values[:, :3] * values[:, 3:], weights)
    x = in_flight(cp.Gaussian(torch.zeros(4, dtype=D), torch.eye(4, dtype=D)))
    y = F.linear(x, root, mean)
    z = y[:3] * y[3:]
    found = whole(z.carrier)
    scale = float(truth.abs().max())
    expected = torch.einsum("iij->ij", truth)
    assert_close(torch.einsum("iij->ij", found), expected, atol=1e-11 * scale)


def test_products_of_skewed_factors() -> None:
    """Cov(u_i v_i, u_j v_j) has m_u kappa(v, u, v) and its like, but no fourth cumulant."""
    third = torch.tensor([0.3, -0.2], dtype=D)
    x = cp.Skewed(
        torch.tensor([0.8, -0.5], dtype=D), variance=torch.ones(2, dtype=D), skewness=third
    )
    # u = x_0 + x_1, v = x_0 - x_1, both with mean: u v = x_0^2 - x_1^2.
    y = propagate(lambda z: (z[:1] + z[1:]) * (z[:1] - z[1:]), x, cp.Cumulants())
    mean = torch.tensor([0.8, -0.5], dtype=D)
    expected = (4 * mean.square() + 4 * mean * third + 2).sum()
    assert_close(y.variance[0], expected, rtol=1e-12)


def test_dropout_has_the_third_cumulants_of_its_masks() -> None:
    mean, matrix, p = torch.tensor([0.7, -0.4], dtype=D), covariance_matrix(size=2, seed=3), 0.3
    x = cp.Gaussian(mean, matrix)
    layer = nn.Dropout(p)
    with cp.dropout_active(layer):
        z = layer(in_flight(x))
    found = torch.einsum("iij->ij", whole(z.carrier))
    nodes, weights = hermite_grid(2, 8)
    values = nodes @ torch.linalg.cholesky(matrix).mT + mean
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=2)), dtype=D)
    chance = (p + (1 - 2 * p) * masks).prod(-1)
    every = (values[:, None] * masks / (1 - p)).reshape(-1, 2)
    truth = third_cumulant(every, (weights[:, None] * chance).reshape(-1))
    assert_close(found, torch.einsum("iij->ij", truth), atol=1e-12)


def test_a_tensor_around_dropout_has_its_share() -> None:
    mean, matrix, p = torch.tensor([0.7, -0.4], dtype=D), covariance_matrix(size=2, seed=3), 0.3
    layer = nn.Dropout(p)
    with cp.dropout_active(layer):
        x = in_flight(cp.Gaussian(mean, matrix))
        z = layer(x) + x
    found = torch.einsum("iij->ij", whole(z.carrier))
    nodes, weights = hermite_grid(2, 8)
    values = nodes @ torch.linalg.cholesky(matrix).mT + mean
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=2)), dtype=D)
    chance = (p + (1 - 2 * p) * masks).prod(-1)
    every = (values[:, None] * (1 + masks / (1 - p))).reshape(-1, 2)
    truth = third_cumulant(every, (weights[:, None] * chance).reshape(-1))
    assert_close(found, torch.einsum("iij->ij", truth), atol=1e-12)


# Networks.


def mlp(*sizes: int, activation: Any = nn.ReLU, seed: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(a, b, dtype=D)
        layer.weight.data = numbers(b, a, seed=seed + 2 * k) * math.sqrt(2 / a)
        layer.bias.data = 0.1 * numbers(b, seed=seed + 2 * k + 1)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1]).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU])
def test_networks_come_closer_to_samples(activation: Any) -> None:
    net = mlp(20, 40, 40, 40, 5, activation=activation)
    x = cp.Gaussian.isotropic(numbers(20, seed=9), stddev=0.7)
    exact, better = (propagate(net, x, method) for method in (cp.Exact(), cp.Cumulants()))
    truth = propagate(net, x, cp.MonteCarlo(100_000, generator=seeded(1)))
    assert truth.covariance_stderr is not None
    noise = float(truth.covariance_stderr.square().sum().sqrt())
    error = [float((y.covariance_matrix - truth.covariance_matrix).norm()) for y in (exact, better)]
    assert error[1] - 3 * noise <= 0.5 * error[0]


def test_skewness_of_outputs_is_that_of_samples() -> None:
    net = mlp(20, 40, 40, 3)
    x = cp.Gaussian.isotropic(numbers(20, seed=9), stddev=0.7)
    y = propagate(net, x, cp.Cumulants())
    samples = net(x.sample(200_000, seeded(1)))
    centred = (samples - samples.mean(0)) / samples.std(0)
    expected, spread = (centred**3).mean(0), (centred**3).std(0) / math.sqrt(len(samples))
    # Third cumulants are known to first order: a fifth of a skewness of about one half.
    assert bool(((y.skewness - expected).abs() <= 4 * spread + 0.2 * expected.abs()).all())
    low, high = y.interval(0.9)
    inside = ((samples > low) & (samples < high)).double().mean(0)
    assert_close(inside, torch.full_like(inside, 0.9), atol=0.01)


def test_a_batch_is_a_loop() -> None:
    net = mlp(6, 12, 12, 3)
    x = cp.Gaussian(numbers(3, 6), covariance_matrix(3, size=6, seed=2))
    batch = propagate(net, x, cp.Cumulants())
    for i in range(3):
        one = propagate(net, x[i], cp.Cumulants())
        assert_close(batch.mean[i], one.mean, rtol=1e-12)
        assert_close(batch.covariance_matrix[i], one.covariance_matrix, rtol=1e-10)
        assert_close(batch.skewness[i], one.skewness, rtol=1e-9)


class Subtracted(nn.Module):
    """Branches that are subtracted, with weights large enough for variances below zero."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = (3, 16), (16, 3), (3, 16), (16, 3)
        self.a, self.b, self.c, self.d = (nn.Linear(*size, dtype=D) for size in sizes)
        for parameter in self.parameters():
            parameter.data *= 3
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Any) -> Any:
        h = x - self.b(torch.relu(self.a(x)))
        return h - self.d(torch.relu(self.c(torch.tanh(h) * h)))


def test_a_batch_falls_back_element_by_element() -> None:
    """Where one of a batch has a negative variance, the others are what they are alone."""
    net = Subtracted(101)
    torch.manual_seed(201)
    variance = torch.tensor([0.01, 0.3, 1.0, 4.0], dtype=D)
    x = cp.Gaussian(torch.randn(4, 3, dtype=D), variance[:, None, None] * torch.eye(3, dtype=D))
    with pytest.warns(cp.ApproximationWarning, match="negative variance in 1 of 4 elements"):
        batch = propagate(net, x, cp.Cumulants())
    assert batch.notes[-1].startswith("third cumulants give a negative variance in 1 of 4")
    fell = []
    for i in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cp.ApproximationWarning)
            one = propagate(net, x[i], cp.Cumulants())
        fell.append(any("negative variance" in note for note in one.notes))
        assert_close(batch.mean[i], one.mean, rtol=1e-10)
        scale = float(one.covariance_matrix.abs().max())
        assert_close(batch.covariance_matrix[i], one.covariance_matrix, atol=1e-10 * scale)
    assert fell == [False, False, True, False]
    exact = propagate(net, x[2], cp.Exact())
    assert_close(batch.covariance_matrix[2], exact.covariance_matrix, rtol=1e-10)


def test_a_result_far_from_a_covariance_is_that_of_gaussian_layers() -> None:
    """Two inputs of large noise through four layers of kinks; small noise has no part in it."""
    with randomness.seeded(0, "cumulants", "random/98"):
        drawn = random_networks.draw()
        net = random_networks.build(drawn)
        mean = torch.randn(2, dtype=D)
    variance = torch.tensor([drawn.noise**2, 1e-4], dtype=D)[:, None, None]
    x = cp.Gaussian(torch.stack([mean, mean]), variance * torch.eye(2, dtype=D))
    with pytest.warns(cp.ApproximationWarning, match="large negative eigenvalue"):
        y = propagate(net, x, cp.Cumulants())
    exact, small = propagate(net, x[0], cp.GaussianLayers()), propagate(net, x[1], cp.Cumulants())
    assert "in 1 of 2 elements" in y.notes[-1]
    assert_close(y.covariance_matrix[0], exact.covariance_matrix, rtol=1e-10)
    assert_close(y.covariance_matrix[1], small.covariance_matrix, rtol=1e-9)


def test_no_covariance_of_a_recurrent_network_is_found_twice(monkeypatch) -> None:
    """Each pair of tensors once: without it, time grows with the fourth power of the steps."""
    seen: list[tuple[int, int]] = []
    expand = cross_covariance._expand

    def counted(u: Any, v: Any, known: Any, gaussian: bool) -> Any:
        seen.append((u.serial, v.serial))
        return expand(u, v, known, gaussian)

    monkeypatch.setattr(cross_covariance, "_expand", counted)
    torch.manual_seed(0)
    net = nn.LSTM(2, 3, batch_first=True).to(D).requires_grad_(requires_grad=False)
    propagate(
        net, cp.Gaussian.isotropic(numbers(1, 4, 2), stddev=0.5, batch_dims=1), cp.Cumulants()
    )
    assert seen
    assert len(set(seen)) == len(seen)


class Skipping(nn.Module):
    """Two skip connections, a product and parts of a tensor put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (mlp(8, 8, seed=k)[0] for k in (1, 3, 5))

    def forward(self, x: Any) -> Any:
        h = x + self.b(torch.relu(self.a(torch.tanh(x))))
        h = h + self.c(torch.relu(self.b(torch.relu(self.a(h)))))
        return torch.cat([h[..., :4] * x[..., 4:], torch.tanh(h[..., 4:])], -1) + x


def test_released_blocks_are_moved_again(monkeypatch) -> None:
    """Where memory counts, blocks that a tensor beside them asks for are made again: the same."""
    x = cp.Gaussian.isotropic(0.5 * numbers(2, 8, seed=9), stddev=0.6, batch_dims=1)
    kept = propagate(Skipping(), x, cp.Cumulants())
    released = []
    release = Cumulants.release_blocks

    def counted(self: Any) -> None:
        release(self)
        released.append(self._released is not None)

    monkeypatch.setattr(Cumulants, "release_blocks", counted)
    monkeypatch.setattr("covprop.carriers.third_cumulant.KEPT", 0)
    again = propagate(Skipping(), x, cp.Cumulants())
    assert any(released)
    # The same numbers, added up in the same order.
    assert_close(again.mean, kept.mean, rtol=1e-13)
    assert_close(again.covariance_matrix, kept.covariance_matrix, rtol=1e-12)
    assert_close(again.skewness, kept.skewness, rtol=1e-11)


def test_memory_grows_with_the_depth(monkeypatch) -> None:
    """Each layer adds a block of four matrices, which the last two vectors and itself hold.

    Fourth cumulants take six matrices of a block at a time, and keep half a matrix for each pair of
    layers.
    """
    for constant in ("kernels.products.FORMED", "covariance.base.CHUNK"):
        monkeypatch.setattr(f"covprop.{constant}", 2**14)  # a small part, as of large networks
    monkeypatch.setattr("covprop.carriers.third_cumulant.KEPT", 0)
    width, peaks = 120, []
    x = cp.Gaussian.isotropic(numbers(width), stddev=1.0)
    for depth in (4, 8):
        net = mlp(*[width] * (depth + 1))
        with torch.no_grad(), Peak(net.parameters()) as measured:
            propagate(net, x, cp.Cumulants())
        peaks.append(measured.most)
    blocks, fourth, pairs = 4 * (3 * 4 + 2), 4 * 6, (8**2 - 4**2) // 2
    assert peaks[1] - peaks[0] <= (blocks + fourth + pairs) * 8 * width**2


def test_single_precision_is_close_to_double() -> None:
    net = mlp(10, 30, 30, 4)
    x = cp.Gaussian(numbers(10), covariance_matrix(size=10, seed=2))
    double = propagate(net, x, cp.Cumulants())
    single = propagate(net.float(), x.to(torch.float32), cp.Cumulants())
    # A few hundred additions of numbers of the size of the largest variance.
    scale = float(double.covariance_matrix.abs().max())
    found = single.covariance_matrix.double()
    assert_close(found, double.covariance_matrix, atol=300 * 1.2e-7 * scale)
    assert_close(single.skewness.double(), double.skewness, atol=1e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-6])
def test_without_noise_it_is_exact(scale: float) -> None:
    net = mlp(5, 8, 8, 3)
    x = cp.Gaussian(numbers(5), scale**2 * covariance_matrix(size=5, seed=2))
    exact, found = (propagate(net, x, method) for method in (cp.Exact(), cp.Cumulants()))
    assert_close(found.mean, exact.mean, rtol=1e-12)
    size = float(exact.covariance_matrix.abs().max())
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=1e-6 * size)
    assert bool(torch.isfinite(found.skewness).all())


def test_gradients_are_those_of_differences() -> None:
    net = mlp(3, 5, 5, 2, activation=nn.Tanh)
    root = numbers(3, 3, seed=4) / 2

    def moments(mean: Tensor, root: Tensor, weight: Tensor) -> Any:
        def model(z: Any) -> Any:
            z = net[1](F.linear(z, weight))
            return net[4](z + net[3](net[2](z)))

        y = propagate(model, cp.Gaussian(mean, root @ root.mT), cp.Cumulants())
        return [y.mean, y.covariance_matrix, y.skewness]

    weight = numbers(5, 3, seed=8)
    assert_gradients(moments, [numbers(3), root, weight], atol=2e-6)


def test_gradients_through_rectifiers() -> None:
    net = mlp(3, 6, 6, 2)
    root = numbers(3, 3, seed=4) / 2

    def moments(mean: Tensor, root: Tensor) -> Any:
        y = propagate(net, cp.Gaussian(mean, root @ root.mT), cp.Cumulants())
        return [y.mean, y.covariance_matrix, y.skewness]

    assert_gradients(moments, [numbers(3), root], atol=2e-6)


def test_units_that_do_not_bend_have_no_columns() -> None:
    x = cp.Gaussian(torch.tensor([20.0, 0.1, -20.0, 0.0], dtype=D), torch.eye(4, dtype=D))
    z = torch.relu(in_flight(x))
    z.evaluate()
    assert z.carrier.blocks.tensor.shape == (4, 2, 4)


# Where it is not to be trusted.


def test_what_is_too_skewed_is_taken_as_gaussian_and_says_so() -> None:
    skewness = torch.tensor([16.0, 0.2], dtype=D)
    x = cp.Skewed(
        torch.full((2,), 0.4, dtype=D), variance=torch.ones(2, dtype=D), skewness=skewness
    )
    net = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, dtype=D))
    net[1].weight.data, net[1].bias.data = torch.eye(2, dtype=D), torch.zeros(2, dtype=D)
    with pytest.warns(cp.ApproximationWarning, match=r"in module 1 \(Linear\): torch.relu takes"):
        y = propagate(net.requires_grad_(requires_grad=False), x, cp.Cumulants())
    assert len(y.notes) == 1
    assert y.notes[0].startswith("in module 1 (Linear): torch.relu takes")
    gaussian = propagate(net, cp.Gaussian(x.mean, x.covariance_matrix), cp.Exact())
    assert_close(y.mean[0], gaussian.mean[0], rtol=1e-12)
    assert_close(y.variance[0], gaussian.variance[0], rtol=1e-12)
    assert float((y.mean[1] - gaussian.mean[1]).abs()) > 1e-3  # the other is corrected


def test_no_variance_is_negative_without_a_word() -> None:
    """Few inputs, strong noise and cancellation, where the expansion breaks."""
    worst = 0
    for seed in range(30):
        net = mlp(2, 3, 16, 2, 8, seed=10 * seed)
        x = cp.Gaussian.isotropic(numbers(2, seed=seed), stddev=1.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = propagate(net, x, cp.Cumulants())
        assert bool((y.variance >= 0).all())
        assert bool(torch.isfinite(y.covariance_matrix).all())
        assert bool((torch.linalg.eigvalsh(y.covariance_matrix) >= -1e-12).all())
        warned = [w for w in caught if issubclass(w.category, cp.ApproximationWarning)]
        assert bool(y.notes) or not warned
        worst += bool(warned)
    assert worst > 0


def test_a_plan_counts_the_blocks() -> None:
    net, x = mlp(50, 300, 300, 10), cp.Gaussian.isotropic(numbers(50), stddev=0.1)
    exact, plan = (cp.plan(net, x, method) for method in (cp.Exact(), cp.Cumulants()))
    blocks = 8 * 300 * 300 * 4 * 2
    assert plan.peak_bytes >= exact.peak_bytes + blocks
    assert plan.work > exact.work


# Other operations and methods.


def sampled_error(model: Any, x: cp.Gaussian, method: Any, samples: int = 60_000) -> float:
    """Root mean square error of the deviations, relative, beyond that of the samples."""
    y = propagate(model, x, method)
    truth = propagate(model, x, cp.MonteCarlo(samples, generator=seeded(1)))
    return float((y.stddev / truth.stddev - 1).square().mean().sqrt())


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return net.to(D).eval().requires_grad_(requires_grad=False)


def test_convolutions_come_closer_to_samples() -> None:
    net, x = convolutional(), cp.Gaussian.isotropic(numbers(1, 1, 8, 8), stddev=0.8, batch_dims=1)
    exact, better = (sampled_error(net, x, method) for method in (cp.Exact(), cp.Cumulants()))
    assert better <= 0.5 * exact + 0.003  # sampling's own


class Gated(nn.Module):
    """A product of two branches, and a skip connection around it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = (mlp(8, 8, seed=k)[0] for k in (1, 3, 5))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(x)
        return self.out(torch.relu(x + torch.sigmoid(self.left(x)) * self.right(x)))


def test_products_and_branches_come_closer_to_samples() -> None:
    x = cp.Gaussian.isotropic(0.5 * numbers(8, seed=9), stddev=0.7)
    exact, better = (sampled_error(Gated(), x, m) for m in (cp.Exact(), cp.Cumulants()))
    assert better <= 0.6 * exact + 0.003


@pytest.mark.parametrize(
    "model",
    [
        lambda z: torch.amax(torch.tanh(z), -1),
        lambda z: torch.softmax(torch.tanh(z), -1),
        lambda z: F.layer_norm(torch.tanh(z), (6,)),
        lambda z: torch.tanh(z).norm(dim=-1),
        lambda z: torch.cat([torch.tanh(z), z.square()], -1),
        lambda z: F.scaled_dot_product_attention(torch.tanh(z)[:, None], z[:, None], z[:, None]),
        lambda z: torch.exp(-torch.tanh(z).square()),
        lambda z: torch.where(z > 0, z, torch.tanh(z)) * 2,
    ],
)
def test_every_kind_of_operation_has_an_answer(model: Any) -> None:
    x = cp.Gaussian(numbers(2, 6), 0.05 * covariance_matrix(2, size=6, seed=2))
    exact, found = (propagate(model, x, method) for method in (cp.Exact(), cp.Cumulants()))
    assert bool(torch.isfinite(found.covariance_matrix).all())
    assert found.skewness is None or bool(torch.isfinite(found.skewness).all())
    size = float(exact.variance.max())
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=0.2 * size)


def test_recurrent_networks_have_an_answer() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(2, 3, batch_first=True).to(D).requires_grad_(requires_grad=False)
    x = cp.Gaussian.isotropic(numbers(1, 3, 2), stddev=0.5, batch_dims=1)
    exact, found = (propagate(net, x, m)[0] for m in (cp.Exact(), cp.Cumulants()))
    assert bool((found.variance > 0).all())
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=0.05)


def test_it_composes_with_a_split() -> None:
    net, x = mlp(20, 40, 40, 5), cp.Gaussian.isotropic(numbers(20, seed=9), stddev=0.7)
    exact, split = (
        sampled_error(net, x, method) for method in (cp.Exact(), cp.Split(3, base=cp.Cumulants()))
    )
    assert split <= 0.5 * exact + 0.003


def test_a_trace_has_its_moments() -> None:
    net, x = mlp(6, 8, 8, 3), cp.Gaussian.isotropic(numbers(6, seed=9), stddev=0.7)
    trace = cp.trace(net, x, method=cp.Cumulants(), keep=True)
    y, last = propagate(net, x, cp.Cumulants()), trace.steps[-1].gaussian
    assert last is not None
    assert_close(last.covariance_matrix, y.covariance_matrix, rtol=1e-10)
    assert_close(trace.output.skewness, y.skewness, rtol=1e-8)


def test_a_comparison_includes_it() -> None:
    net, x = mlp(6, 8, 8, 3), cp.Gaussian.isotropic(numbers(6, seed=9), stddev=0.7)
    assert "Cumulants()" in [row.name for row in cp.compare(net, x, samples=2000).rows]


# What a fresh reviewer found.


@pytest.mark.parametrize("function", [torch.relu, torch.square, F.silu])
def test_an_activation_beside_a_product_counts_its_second_order_once(function: Any) -> None:
    """Both are of a Gaussian, so that nothing is to be corrected."""
    matrix = torch.tensor([[1.0, 0.5], [-0.4, 0.8]], dtype=D)
    x = cp.Gaussian.isotropic(torch.tensor([0.3, -0.2], dtype=D), stddev=0.7)

    def model(z: Any) -> Any:
        return torch.cat([(z @ matrix) * (z @ matrix.mT), function(z)])

    exact, found = (propagate(model, x, method) for method in (cp.Exact(), cp.Cumulants()))
    assert_close(found.covariance_matrix, exact.covariance_matrix, atol=1e-9)


def test_a_product_beside_its_factor_is_a_square_beside_it() -> None:
    x = cp.Skewed(of(0.7), variance=of(0.4), skewness=0.5)
    one = torch.ones(1, 1, dtype=D)
    square, product = (
        propagate(lambda z, f=f: F.linear(z, one) + f(F.linear(z, one), z), x, cp.Cumulants())
        for f in (lambda _, z: z.square(), lambda a, b: a * b)
    )
    # Var(x) + 2 Cov(x, x^2) + Var(x^2), without the fourth cumulant.
    third = 0.5 * 0.4**1.5
    expected = 0.4 + 2 * (2 * 0.7 * 0.4 + third) + 4 * 0.49 * 0.4 + 4 * 0.7 * third + 2 * 0.16
    for y in (square, product):
        assert_close(y.variance, torch.tensor([expected], dtype=D), rtol=1e-9)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-9), (torch.float64, 1e-90)])
def test_units_do_not_matter(dtype: torch.dtype, least: float) -> None:
    net = nn.Sequential(*(
        layer for layer in mlp(8, 12, 12, 3) if isinstance(layer, nn.Linear | nn.ReLU)
    )).to(dtype)  # fmt: skip
    for layer in net:
        if isinstance(layer, nn.Linear):
            layer.bias.data.zero_()
    mean = numbers(8, seed=3).to(dtype)
    one = propagate(net, cp.Gaussian.isotropic(mean, stddev=0.5), cp.Cumulants())
    small = propagate(net, cp.Gaussian.isotropic(least * mean, stddev=0.5 * least), cp.Cumulants())
    tolerance = 1e4 * torch.finfo(dtype).eps
    assert_close(small.stddev / least, one.stddev, rtol=tolerance)
    assert_close(small.skewness, one.skewness, atol=10 * tolerance)
    tiny = propagate(net, cp.Gaussian.isotropic(0 * mean, stddev=1e-3 * least), cp.Cumulants())
    assert bool(torch.isfinite(tiny.stddev).all())


def test_skewness_that_is_not_known_is_not_given() -> None:
    x = cp.Gaussian.isotropic(numbers(1, 4), stddev=0.5)
    for model in (
        lambda z: z.softmax(-1),
        lambda z: F.layer_norm(z, (4,)),
        lambda z: z.norm(dim=-1),
        lambda z: z @ z.mT,
        lambda z: z.replace(z.loc, z.covariance),
        lambda z: z.replace(z.loc, z.covariance, transfer=lambda cross: cross),
    ):
        assert propagate(model, x, cp.Cumulants()).skewness is None


def test_outputs_that_fall_back_say_so_however_small_they_are() -> None:
    skewness = torch.tensor([0.1, 60.0], dtype=D)
    x = cp.Skewed(
        torch.tensor([0.4, -3.0], dtype=D), variance=torch.ones(2, dtype=D), skewness=skewness
    )
    with pytest.warns(cp.ApproximationWarning, match="third cumulants are too large"):
        y = propagate(torch.relu, x, cp.Cumulants())
    assert y.notes


@pytest.mark.parametrize("mean", [60.0, 90.0])
def test_saturated_units_have_the_variance_of_a_gaussian_argument(mean: float) -> None:
    """1 - sigmoid(60) is far below the rounding of 1, so that integrals of its powers are zero."""

    def function(x: Any) -> Any:
        other = torch.tanh(x).flip(-1)
        return torch.sigmoid(torch.stack([x[0] + other[0] + mean, x[1] + other[1]]))

    x = cp.Gaussian(of(0.2, 0.3), torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=D))
    y = propagate(function, x, cp.Cumulants())
    plain = propagate(function, x, cp.GaussianLayers())
    assert_close(y.variance[0], plain.variance[0], rtol=1e-12)
    assert_close(y.covariance_matrix[0, 1], plain.covariance_matrix[0, 1], rtol=0.1)
