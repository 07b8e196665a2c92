"""Sketched: against the dense covariances of Exact where they fit, and its own standard errors."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop import demo
from covprop.carriers import Tangents
from covprop.covariance import Diagonal, LinearMap, LowRank
from covprop.flow.lineage import Lineage
from tests.architectures import ARCHITECTURES
from tests.largest import Largest
from tests.layers import joint, propagate
from tests.oracles import assert_close

D = torch.float64


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def gaussian(size: int = 20, batch: int = 2, scale: float = 0.05) -> cp.Gaussian:
    generator = seeded(5)
    root = torch.randn(size, size, dtype=D, generator=generator)
    covariance = scale * root @ root.mT / size + scale / 3 * torch.eye(size, dtype=D)
    mean = torch.randn(batch, size, dtype=D, generator=generator)
    return cp.Gaussian(mean, covariance.expand(batch, size, size))


class Residual(nn.Module):
    """Two branches of different depth, twice."""

    def __init__(self, size: int = 20) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.first(x))
        return self.last(x + torch.tanh(self.second(torch.relu(x))))


def seeded_network(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build().to(D).eval().requires_grad_(False)


def heads(x: Tensor) -> Tensor:
    return x.reshape(-1, 4, 5)


NETWORKS: dict[str, Callable[..., Any]] = {
    "residual": seeded_network(Residual),
    "chain": seeded_network(
        lambda: nn.Sequential(
            nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 3)
        )
    ),
    "convolution": seeded_network(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.AvgPool2d(2), nn.Conv2d(4, 2, (2, 1), stride=(1, 2)), nn.Flatten(),
        )
    ),
    "max pooling": lambda x: F.max_pool1d(x.reshape(-1, 2, 10), 2).flatten(1),
    "concatenation": lambda x: torch.cat([torch.relu(x[:, :10]), 2 * x[:, 5:]], 1)[:, ::5],
    "stack": lambda x: torch.stack([torch.relu(x), x - 1], 1).sum(1)[:, :6],
    "product": lambda x: (x[:, :10] * torch.relu(x[:, 10:])).unflatten(1, (2, 5)).sum(-1),
    "square": lambda x: (x * x).unflatten(1, (2, 10)).sum(-1),
    "matrix product": lambda x: (heads(x) @ heads(x).mT).flatten(1),
    "softmax": lambda x: torch.softmax(heads(x), -1).flatten(1),
    "layer norm": lambda x: F.layer_norm(x, (20,))[:, :5],
    "dropout": lambda x: F.dropout(x, 0.3, True)[:, :5],
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), 2 * heads(x), heads(x)).sum(-1),
}  # fmt: skip
every_network = pytest.mark.parametrize("name", NETWORKS)


def errors(y: cp.Gaussian, z: cp.Gaussian) -> tuple[float, float, float]:
    """Mean and worst relative error of the deviations, worst error of a mean in deviations."""
    ratio = (y.stddev / z.stddev - 1).abs()
    return (
        float(ratio.mean()),
        float(ratio.max()),
        float(((y.mean - z.mean) / z.stddev).abs().max()),
    )


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@every_network
def test_what_is_left_with_exact_directions_is_the_third_order(name: str) -> None:
    x = gaussian()
    y = propagate(NETWORKS[name], x, cp.Sketched(1024, generator=seeded(0)))
    z = propagate(NETWORKS[name], x)
    mean, worst, shift = errors(y, z)
    assert mean < 2e-3
    assert worst < 5e-3
    assert shift < 2e-3
    scale = z.stddev.flatten(1)
    apart = (y.covariance_matrix - z.covariance_matrix) / (scale[:, :, None] * scale[:, None, :])
    assert float(apart.abs().max()) < 0.02


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@every_network
def test_random_directions_agree_within_their_standard_errors(name: str) -> None:
    x = gaussian()
    y = propagate(NETWORKS[name], x, cp.Sketched(512, generator=seeded(1), exact=0, replicates=16))
    z = propagate(NETWORKS[name], x)
    spread = z.stddev
    slack = 5e-3  # of a deviation: the third order, and a bias of 1 / tangents
    assert bool(((y.mean - z.mean).abs() <= 5 * y.mean_stderr + slack * spread).all())
    scale = spread.flatten(1)
    room = 3 * slack * scale[:, :, None] * scale[:, None, :]
    away = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((away <= 5 * y.covariance_stderr + room).all())


@torch.no_grad()
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_networks_are_exact(order: int, dtype: torch.dtype) -> None:
    model = seeded_network(lambda: nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4))).to(dtype)
    x = gaussian().to(dtype)
    y = propagate(model, x, cp.Sketched(16, order, seeded(0), exact=0))
    z = propagate(model, x)
    assert y.dtype == dtype
    tolerance = 100 * torch.finfo(dtype).eps
    assert_close(y.mean, z.mean, rtol=tolerance, atol=tolerance)
    assert_close(y.covariance_matrix, z.covariance_matrix, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_what_few_tangents_bias_in_every_layer_is_taken_away() -> None:
    layers = [nn.Linear(20, 60), *(nn.Linear(60, 60) for _ in range(7)), nn.Linear(60, 5)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1].to(D)
    x = gaussian()
    z = propagate(model, x)
    many = cp.Gaussian(x.mean.repeat(100, 1), x.covariance_matrix.repeat(100, 1, 1))
    y = propagate(model, many, cp.Sketched(64, generator=seeded(0), exact=0))
    ratios = y.variance.unflatten(0, (100, 2)) / z.variance
    assert float(ratios.mean() - 1) < 0.011  # 0.015 where the bias is left, 0.004 +- 0.001 here


@torch.no_grad()
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.Hardtanh])
def test_what_saturates_keeps_its_variance_with_few_tangents(
    activation: type[nn.Module], order: int
) -> None:
    """The slope falls where the variance is overestimated, so that its square is too large."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(50, 80), *(nn.Linear(80, 80) for _ in range(5)), nn.Linear(80, 20)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=(1.6 / layer.in_features) ** 0.5)
    model = nn.Sequential(*(part for layer in layers for part in (layer, activation())))[:-1].to(D)
    x = cp.Gaussian.isotropic(torch.randn(50, dtype=D, generator=seeded(1)), stddev=1.0)
    z = propagate(model, x)
    method = cp.Sketched(96, order, seeded(0), exact=0, replicates=6)
    ratio = (propagate(model, x, method).variance / z.variance).mean()
    assert abs(float(ratio) - 1) < 0.05  # 0.07 to 0.15 where the square of the slope is left


@torch.no_grad()
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_float32_has_room_for_deviations_of_any_size(scale: float) -> None:
    model = seeded_network(lambda: nn.Sequential(nn.Linear(20, 40, bias=False), nn.ReLU())).float()
    found = []
    for unit in (1.0, scale):
        x = cp.Gaussian.isotropic(torch.zeros(20), stddev=unit)
        y = propagate(model, x, cp.Sketched(16, generator=seeded(0), exact=0))
        found.append(y.stddev / unit)
    assert_close(*found, rtol=1e-5)


@torch.no_grad()
def test_a_variance_that_could_be_too_large_is_not_taken_for_one() -> None:
    weight = F.normalize(torch.randn(30, 3, dtype=D, generator=seeded(0)), dim=0)
    x = cp.Gaussian.isotropic(torch.zeros(30, dtype=D), stddev=12.0)
    method = cp.Sketched(16, exact=0, generator=seeded(0))
    y = propagate(lambda x: torch.exp(x @ weight), x, method)
    assert bool(torch.isfinite(y.variance).all())  # e^(2 v) for v up to 300; v + s overflows


@torch.no_grad()
def test_the_spread_of_tangents_tells_how_well_variances_are_known() -> None:
    variance = torch.linspace(0.1, 2, 50, dtype=D)
    mixing = torch.randn(50, 50, generator=seeded(3), dtype=D)
    linear = LinearMap(lambda rows: rows @ mixing, torch.Size([50]))
    sketches = [
        cp.Sketched(32, generator=seeded(i), replicates=1)
        .carrier(
            cp.Gaussian.diagonal(torch.zeros_like(variance), variance=variance), Lineage(cp.Exact())
        )
        .sketch.push(linear)
        for i in range(400)
    ]
    spread = torch.stack([sketch.variances() for sketch in sketches]).std(0)
    told = torch.stack([sketch.uncertainty() for sketch in sketches]).square().mean(0).sqrt()
    assert_close(told, spread, rtol=0.2, atol=0)


@torch.no_grad()
def test_errors_fall_as_tangents_grow() -> None:
    x, z = gaussian(), propagate(NETWORKS["residual"], gaussian())
    found = []
    for tangents in (16, 64, 256):
        runs = [
            propagate(NETWORKS["residual"], x, cp.Sketched(tangents, generator=seeded(i), exact=0))
            for i in range(8)
        ]
        found.append(
            sum(float(((y.mean - z.mean) / z.stddev).square().mean()) for y in runs) ** 0.5
        )
    assert found[0] > 1.5 * found[1] > 2.25 * found[2]  # half each time, as a root of four


@torch.no_grad()
def test_the_second_order_is_what_order_one_lacks() -> None:
    x = gaussian(scale=0.5)
    z = propagate(NETWORKS["chain"], x)
    first, second = (
        errors(propagate(NETWORKS["chain"], x, cp.Sketched(1024, order, seeded(0))), z)
        for order in (1, 2)
    )
    assert second[0] < first[0] / 3


@torch.no_grad()
def test_one_generator_and_one_seed_give_one_result() -> None:
    x, method = gaussian(), cp.Sketched(16, generator=seeded(3))
    state = torch.random.get_rng_state()
    first = propagate(NETWORKS["residual"], x, method)
    assert torch.equal(state, torch.random.get_rng_state())
    again = propagate(NETWORKS["residual"], x, cp.Sketched(16, generator=seeded(3)))
    other = propagate(NETWORKS["residual"], x, method)  # the generator has moved on
    assert torch.equal(first.covariance_matrix, again.covariance_matrix)
    assert torch.equal(first.mean, again.mean)
    assert not torch.equal(first.mean, other.mean)


@torch.no_grad()
def test_standard_errors_are_those_of_repeated_seeds() -> None:
    x = gaussian()
    many = cp.Gaussian(x.mean.repeat(60, 1), x.covariance_matrix.repeat(60, 1, 1))
    y = propagate(NETWORKS["chain"], many, cp.Sketched(32, generator=seeded(0), exact=0))
    for values, errors_told in (
        (y.mean, y.mean_stderr),
        (y.covariance_matrix, y.covariance_stderr),
    ):
        runs, told = (t.unflatten(0, (60, 2)) for t in (values, errors_told))
        ratio = told.square().mean(0).sqrt() / runs.std(0)
        assert 0.8 < float(ratio.mean()) < 1.25
        assert values is not y.mean or bool(((ratio > 0.5) & (ratio < 2)).all())
    assert y.samples == 32
    alone = propagate(NETWORKS["chain"], x, cp.Sketched(32, generator=seeded(0), replicates=1))
    assert alone.covariance_stderr is None


@torch.no_grad()
def test_a_batch_is_its_elements_one_by_one() -> None:
    x = gaussian(batch=3)  # with exact directions and order one, what is random is little
    y = propagate(NETWORKS["convolution"], x, cp.Sketched(256, generator=seeded(0)))
    for i in range(3):
        alone = cp.Gaussian(x.mean[i : i + 1], x.covariance_matrix[i : i + 1])
        z = propagate(NETWORKS["convolution"], alone, cp.Sketched(256, generator=seeded(i)))
        assert max(errors(y[i], z[0])) < 0.01


@torch.no_grad()
def test_inputs_that_share_one_covariance_are_independent_all_the_same() -> None:
    shared = LowRank(torch.randn(6, 2, dtype=D, generator=seeded(0)))
    x, z = (cp.Gaussian(torch.zeros(6, dtype=D), shared) for _ in range(2))

    def network(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x - z), x * z

    truth = propagate(network, x, z)
    found = propagate(network, x, z, cp.Sketched(64, generator=seeded(0)))
    assert_close(found[0].variance, truth[0].variance)
    assert_close(found[1].mean, truth[1].mean)


@torch.no_grad()
def test_products_of_two_inputs_of_unequal_sizes_agree_with_dense() -> None:
    first = cp.Gaussian.isotropic(
        torch.randn(2, 3, 3, dtype=D, generator=seeded(1)), stddev=0.1, batch_dims=1
    )
    second = cp.Gaussian.isotropic(
        torch.randn(2, 3, 2, dtype=D, generator=seeded(2)), stddev=0.2, batch_dims=1
    )
    y = propagate(torch.matmul, first, second, cp.Sketched(64, generator=seeded(3)))
    dense = propagate(torch.matmul, first, second)
    assert_close(y.mean, dense.mean, atol=1e-12)
    s = dense.covariance.diagonal().sqrt()
    unit = s[..., :, None] * s[..., None, :]
    errors = y.covariance_stderr / unit
    assert_close(y.covariance_matrix / unit, dense.covariance_matrix / unit,
                 atol=6 * float(errors.max()) + 1e-12)  # fmt: skip


@torch.no_grad()
def test_a_seed_gives_the_same_wherever_the_inputs_are_in_memory() -> None:
    weights = [torch.randn(30, 6, dtype=D, generator=seeded(i)) for i in range(2)]
    factor = torch.randn(6, 2, dtype=D, generator=seeded(2))
    apart = [LowRank(factor), LowRank(factor)]

    def network(x: Tensor, z: Tensor) -> Tensor:
        product = torch.relu(x @ weights[0].mT) * torch.relu(z @ weights[1].mT)
        return torch.relu(product @ weights[0])

    found = []
    for order in (apart, apart[::-1]):
        x, z = (cp.Gaussian(torch.ones(6, dtype=D), covariance) for covariance in order)
        y = propagate(network, x, z, cp.Sketched(64, generator=seeded(0)))
        found.append(y.covariance_matrix)
    assert torch.equal(*found)


@torch.no_grad()
def test_the_order_of_inputs_and_their_directions_do_not_matter() -> None:
    a, b = gaussian(6, scale=0.2), gaussian(4, scale=0.3)

    def model(u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([u[:, :4] * v, torch.relu(u[:, 2:] - v)], 1)

    y = propagate(model, a, b, cp.Sketched(512, generator=seeded(0)))
    z = propagate(model, a, b)
    assert max(errors(y, z)) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("scale", [0.0, 1e-30])
def test_no_noise_gives_the_output_at_the_mean(scale: float) -> None:
    mean = gaussian().mean
    x = cp.Gaussian.isotropic(mean, stddev=scale, batch_dims=1)
    for name in ("residual", "convolution", "max pooling", "product"):
        y = propagate(NETWORKS[name], x, cp.Sketched(16, generator=seeded(0), exact=0))
        assert_close(y.mean, NETWORKS[name](mean))
        assert float(y.variance.max()) <= 100 * scale**2


@torch.no_grad()
def test_a_constant_has_no_variance_and_a_low_rank_input_keeps_its_factor() -> None:
    x = gaussian()
    y = propagate(NETWORKS["chain"], cp.Gaussian.constant(x.mean, 1), cp.Sketched(16))
    assert_close(y.mean, NETWORKS["chain"](x.mean))
    assert float(y.variance.abs().max()) == 0
    factor = torch.randn(2, 20, 3, dtype=D, generator=seeded(2)) / 5
    for variance in (None, torch.full((2, 20), 0.01, dtype=D)):
        low = cp.Gaussian.low_rank(x.mean, factor, variance=variance, batch_dims=1)
        y = propagate(NETWORKS["chain"], low, cp.Sketched(64, generator=seeded(0)))
        z = propagate(NETWORKS["chain"], low)
        assert max(errors(y, z)) < (0.02 if variance is None else 0.03)


@torch.no_grad()
def test_some_outputs_alone_are_flat_and_the_same() -> None:
    x = gaussian()
    every = propagate(NETWORKS["chain"], x, cp.Sketched(16, generator=seeded(0)))
    some = propagate(NETWORKS["chain"], x, cp.Sketched(16, generator=seeded(0), outputs=[2, 0]))
    assert_close(some.mean, every.mean[:, [2, 0]])
    assert_close(some.covariance_matrix, every.covariance_matrix[:, [2, 0]][:, :, [2, 0]])


@torch.no_grad()
def test_a_limit_of_memory_counts_for_the_first_order_too() -> None:
    x = gaussian()
    first, second = (
        cp.plan(NETWORKS["chain"], x, method=cp.Sketched(64, order)).peak_bytes for order in (1, 2)
    )
    assert first < second
    enough = cp.Sketched(64, 1, seeded(0), memory=2 * first)
    free = cp.Sketched(64, 1, seeded(0))
    assert_close(*(propagate(NETWORKS["chain"], x, m).mean for m in (enough, free)))
    with pytest.raises(cp.TooLarge, match="more replicates"):
        propagate(NETWORKS["chain"], x, cp.Sketched(64, 1, memory=first // 8))


@torch.no_grad()
@pytest.mark.parametrize("memory", [60_000, 16_000])
def test_a_limit_of_memory_changes_groups_and_not_the_answer(memory: int) -> None:
    x = gaussian(batch=1)
    z = propagate(NETWORKS["residual"], x)
    limited = cp.Sketched(64, generator=seeded(0), memory=memory)
    assert max(errors(propagate(NETWORKS["residual"], x, limited), z)) < 0.02
    with pytest.raises(cp.TooLarge, match=r"need [\d.]+ kB, and .* fewer tangents"):
        propagate(NETWORKS["residual"], x, cp.Sketched(64, memory=1))


@torch.no_grad()
@pytest.mark.parametrize("method", [cp.Sketched(16), cp.Auto()])
def test_a_covariance_of_outputs_that_does_not_fit_is_refused(method: Any) -> None:
    layer = nn.Linear(3, 1_000_000).requires_grad_(requires_grad=False)
    x = cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
    with pytest.raises(cp.TooLarge, match=r"1,000,000 outputs would need 4 TB"):
        propagate(layer, x, method)


@torch.no_grad()
def test_copies_of_the_output_covariance_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(3, 4000), cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1)
    monkeypatch.setattr("covprop.methods.call.free_bytes", lambda _: 2 * 4 * 4000**2)
    with pytest.raises(cp.TooLarge, match="4,000 outputs would need 576 MB, and 128 MB are free"):
        propagate(layer, x, cp.Sketched(16))


@torch.no_grad()
def test_a_layer_of_fifty_thousand_units_has_no_matrix() -> None:
    torch.manual_seed(0)
    side, channels = 80, 8
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(channels * side**2 // 4, 3),
    ).requires_grad_(False)  # fmt: skip
    x = cp.Gaussian.isotropic(torch.rand(1, 1, side, side), stddev=0.1, batch_dims=1)
    with Largest() as largest:
        y = propagate(model, x, cp.Sketched(32, generator=seeded(0)))
    units = channels * side**2
    assert units > 50_000
    assert largest.nbytes <= 20 * units * x.mean.itemsize  # a matrix has 51,200 of them
    truth = propagate(model, x, cp.MonteCarlo(4_000, seeded(1)))
    assert errors(y, truth)[0] < 0.05


@torch.enable_grad()
def trained() -> tuple[nn.Module, Tensor]:
    """A convolutional network that tells digits, and digits it has not seen."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, labels, others, truth = demo.digits()
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(6):
            for rows in torch.randperm(len(images)).split(64):
                optimiser.zero_grad()
                F.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimiser.step()
        model.eval().requires_grad_(False)
        assert float((model(others).argmax(1) == truth).float().mean()) > 0.95
        return model, others


@torch.no_grad()
def test_a_trained_network_is_within_one_percent_of_dense() -> None:
    model, images = trained()
    x = cp.Gaussian.isotropic(images[:6], stddev=0.1, batch_dims=1)
    dense = propagate(model, x)
    method = cp.Sketched(64, generator=seeded(0), exact=0)
    y = propagate(model, x, method)
    mean, worst, _ = errors(y, dense)
    assert mean < 0.01
    assert worst < 0.03
    assert float(((y.mean - dense.mean) / dense.stddev).square().mean().sqrt()) < 0.05
    more = cp.Sketched(128, generator=seeded(0), exact=0)
    assert errors(propagate(model, x, more), dense)[2] < 0.1  # the worst of sixty means
    alone = propagate(model, x, cp.AssumedDensity())
    share = (alone.stddev / dense.stddev).mean()
    assert float(share) < 0.4  # variances alone are no answer


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_goes_through(name: str) -> None:
    model = ARCHITECTURES[name].build()
    generator = seeded(4)
    mean = torch.randn(2, *ARCHITECTURES[name].shape, dtype=D, generator=generator)
    x = cp.Gaussian.isotropic(mean, stddev=0.01, batch_dims=1)
    y = propagate(model, x, cp.Sketched(16, generator=generator, exact=0))
    z = propagate(model, x, cp.Linearized())
    assert_close(y.mean, z.mean, atol=0.05)
    assert 0.9 < float((y.stddev / z.stddev).median()) < 1.1


def test_parameters_get_no_gradients_and_autograd_may_be_off() -> None:
    model = seeded_network(Residual).requires_grad_()
    x = gaussian()
    y = propagate(model, x, cp.Sketched(16, generator=seeded(0)))
    assert not y.mean.requires_grad
    assert not y.covariance_matrix.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.inference_mode():
        z = propagate(model, x, cp.Sketched(16, generator=seeded(0)))
    assert_close(z.covariance_matrix, y.covariance_matrix)


def test_a_trace_tells_the_variances_of_every_layer() -> None:
    x = gaussian()
    found = cp.trace(NETWORKS["chain"], x, cp.Sketched(1024, generator=seeded(0)))
    expected = cp.trace(NETWORKS["chain"], x)
    assert len(found.steps) == len(expected.steps)
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert_close(step.variance.sum(), other.variance.sum(), rtol=0.03)
        assert_close(step.variance, other.variance, rtol=0.4)  # 5 sqrt(8 / tangents)
    assert "relu" in str(found)


def test_a_plan_counts_tangents() -> None:
    x = gaussian(batch=1)
    planned = cp.plan(NETWORKS["chain"], x, method=cp.Sketched(64, exact=0))
    assert [step.covariance_bytes for step in planned.steps] == [
        8 * 64 * features for features in (40, 40, 30, 30, 3, 3)
    ]
    assert planned.steps[-1].operation == "result"  # the backward pass
    before = sum(step.counts.products for step in planned.steps[:-1])
    assert planned.steps[-1].counts.products == pytest.approx(4 * 3 / 64 * before)


@torch.no_grad()
def test_joint_and_progress_work(capsys: pytest.CaptureFixture[str]) -> None:
    x = gaussian(batch=1)
    method = cp.Sketched(64, generator=seeded(0))
    y, z = joint(NETWORKS["chain"], x, method), joint(NETWORKS["chain"], x)
    assert_close(y.covariance_matrix, z.covariance_matrix, atol=0.01)
    propagate(NETWORKS["chain"], x, method, progress=True)
    assert "100%" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("low", [False, True])
def test_it_is_a_base_of_methods_that_wrap_another(low: bool) -> None:
    x = gaussian(scale=0.3)
    if low:
        factor = torch.randn(2, 20, 3, dtype=D, generator=seeded(2)) / 3
        x = cp.Gaussian.low_rank(
            x.mean, factor, variance=torch.full_like(x.mean, 0.01), batch_dims=1
        )
    y = propagate(NETWORKS["chain"], x, cp.Split(3, base=cp.Sketched(256, generator=seeded(0))))
    z = propagate(NETWORKS["chain"], x, cp.Split(3))
    assert max(errors(y, z)) < 0.02


def test_numbers_that_cannot_be_are_refused() -> None:
    for tangents in (0, 10, 3.0):
        with pytest.raises(ValueError, match="tangents is a multiple of 16"):
            cp.Sketched(tangents)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order"):
        cp.Sketched(order=3)
    with pytest.raises(ValueError, match="replicates"):
        cp.Sketched(replicates=0)
    with pytest.raises(TypeError, match="generator"):
        cp.Sketched(generator=3)  # type: ignore[arg-type]
    for number in (-1, 1.5):
        with pytest.raises(ValueError, match="exact is a whole number"):
            cp.Sketched(exact=number)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="memory is a whole number"):
            cp.Sketched(memory=number)  # type: ignore[arg-type]


@torch.no_grad()
def test_outputs_are_named_in_any_way() -> None:
    x, model = gaussian(), NETWORKS["residual"]

    def found(outputs: Any) -> cp.Gaussian:
        method = cp.Sketched(16, generator=seeded(0), outputs=outputs)
        assert method == cp.Sketched(16, outputs=outputs)
        return propagate(model, x, method)

    wanted = found([0, 2])
    mask = torch.tensor([True, False, True, False])
    for outputs in ((0, 2), slice(0, 3, 2), torch.tensor([0, 2]), np.array([0, 2]), mask):
        assert_close(found(outputs).covariance_matrix, wanted.covariance_matrix)
    with pytest.raises(ValueError, match="names no element"):
        found([])
    for outputs in ([4], 4, "first"):
        with pytest.raises(ValueError, match="is no index of the 4 elements of the flat output"):
            found(outputs)


@torch.no_grad()
def test_what_it_cannot_do_it_refuses() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(1, 2, 3, 3), stddev=0.1, batch_dims=1)
    with pytest.raises(cp.UnsupportedOperation, match="whole channels"):
        propagate(lambda t: F.dropout2d(t, 0.2, True), x, cp.Sketched(16))
    with pytest.raises(cp.UnsupportedOperation, match="every pair"):
        propagate(lambda t: t.covariance.matrix(), x, cp.Sketched(16))
    with pytest.raises(cp.UnsupportedOperation, match=r"gives a covariance.*through"):
        propagate(lambda t: t.replace(t.loc, Diagonal(t.variances)), x, cp.Sketched(16))

    def inner(t: Any) -> Any:
        with torch.inference_mode():
            return torch.einsum("...j,jk->...k", t, torch.ones(3, 2))

    with pytest.raises(cp.UnsupportedOperation, match="inference mode"):
        propagate(inner, x, cp.Sketched(16))


@torch.no_grad()
def test_time_is_linear_in_the_number_of_units() -> None:
    seconds = []
    for side in (32, 64):
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
        ).requires_grad_(False)  # fmt: skip
        x = cp.Gaussian.isotropic(torch.rand(1, 1, side, side), stddev=0.1, batch_dims=1)
        best = 1e9
        for _ in range(3):
            started = time.perf_counter()
            propagate(model, x, cp.Sketched(32, generator=seeded(0)))
            best = min(best, time.perf_counter() - started)
        seconds.append(best)
    assert seconds[1] < 10 * seconds[0]  # four times the units; sixteen if it were quadratic


def few_inputs(
    inputs: int, activation: nn.Module, depth: int, batch: int, dtype: torch.dtype = D
) -> tuple[nn.Sequential, cp.Gaussian]:
    """A few inputs, whose directions a sketch carries exactly, and weights that make it bend."""
    with torch.random.fork_rng():
        torch.manual_seed(inputs)
        layers = [
            m for n, k in pairwise([inputs, *[12] * depth]) for m in (nn.Linear(n, k), activation)
        ]
        model = (
            nn.Sequential(*layers, nn.Linear(12, 3)).to(dtype).requires_grad_(requires_grad=False)
        )
        mean = torch.randn(batch, inputs, dtype=dtype)
    return model, cp.Gaussian.isotropic(mean, stddev=0.5, batch_dims=1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("activation", "truth"), [(nn.Tanh(), cp.Series(order=32)), (nn.ReLU(), cp.Exact())]
)
@pytest.mark.parametrize("inputs", [1, 4])
def test_few_inputs_have_honest_standard_errors(
    inputs: int, activation: nn.Module, truth: cp.Series | cp.Exact, dtype: torch.dtype
) -> None:
    """Of 4 replicates: |error| / stderr has Student's t with 3 degrees, above 4 in 2.8 of 100."""
    model, x = few_inputs(inputs, activation, 2, 90, dtype)
    y = propagate(model, x, cp.Sketched(64, generator=seeded(inputs)))
    z = propagate(model, x, truth).covariance_matrix
    scale = z.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = scale[..., :, None] * scale[..., None, :]
    error = (y.covariance_matrix - z) / scale
    assert y.covariance_stderr is not None
    told = y.covariance_stderr / scale
    rounding = 100 * torch.finfo(dtype).eps
    assert float((error.abs() > 4 * told + rounding).double().mean()) < 0.05
    assert float((error.abs() > 10 * told + rounding).double().mean()) < 0.01
    noise = error.mean((-2, -1)).std() / len(error) ** 0.5
    assert abs(float(error.mean())) < 4 * float(noise)  # what all runs have is no bias
    assert float(error.square().mean().sqrt()) < 0.02


@torch.no_grad()
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU()])
def test_few_inputs_are_exact_but_for_chance(activation: nn.Module) -> None:
    """One layer has all orders: nothing is left but chance."""
    model, x = few_inputs(4, activation, 1, 1)
    method = cp.Sketched(512, generator=seeded(0), replicates=16)
    y, exact = propagate(model, x, method), propagate(model, x)
    error = (y.covariance_matrix - exact.covariance_matrix).abs()
    assert y.covariance_stderr is not None
    assert bool((error < 5 * y.covariance_stderr).all())
    scale = exact.stddev[..., :, None] * exact.stddev[..., None, :]
    assert float((y.covariance_stderr / scale).max()) < 0.005


@torch.no_grad()
@pytest.mark.parametrize("noise", [0.0, 1e-20, 1e-6])
def test_few_inputs_that_hardly_vary_have_the_jacobian_alone(noise: float) -> None:
    model, x = few_inputs(2, nn.Tanh(), 2, 3)
    x = cp.Gaussian.isotropic(x.mean, stddev=noise, batch_dims=1)
    y = propagate(model, x, cp.Sketched(16, generator=seeded(0)))
    expected = propagate(model, x, cp.Linearized()).covariance_matrix
    assert_close(y.covariance_matrix, expected, rtol=1e-5, atol=1e-11 * noise**2)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("exact", [None, 0])
def test_what_cancels_has_no_negative_variance(
    dtype: torch.dtype, scale: float, exact: int | None
) -> None:
    """By rounding, where the directions of the input are carried exactly, or else by chance."""
    root = scale * torch.randn(5, 5, dtype=D, generator=seeded(0))
    mean = 3 * torch.randn(2, 5, dtype=D, generator=seeded(1))
    x = cp.Gaussian(mean, (root @ root.mT).expand(2, 5, 5)).to(dtype)
    for replicates in (1, 4):
        method = cp.Sketched(16, generator=seeded(2), replicates=replicates, exact=exact)
        for function in (lambda x: x**2 - x * x, lambda x: torch.cat([x**2 - x * x, x], -1)):
            y = propagate(function, x, method=method)
            assert bool((y.variance >= 0).all())
            assert bool(y.stddev.isfinite().all())
            propagate(torch.relu, y)
        if exact is None:
            y = propagate(lambda x: x**2 - x * x, x, method=method)
            # Two sums of 25 products of two rows, for each of two terms, and their difference.
            of_terms = 4 * propagate(torch.square, x).variance
            assert bool((y.variance <= 50 * torch.finfo(dtype).eps * of_terms).all())
            cp.Gaussian(y.mean, y.covariance_matrix)


@torch.no_grad()
def test_what_has_been_released_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a run of n operations would take n^2 looks."""
    looked: list[int] = []
    plain = Tangents.collect.__func__

    def counted(cls: type, held: set[Any], others: Any) -> None:
        looked.append(len(others))
        plain(cls, held, others)

    monkeypatch.setattr(Tangents, "collect", classmethod(counted))

    def long(t: Any) -> Any:
        for _ in range(30):
            t = torch.tanh(t.flip(-1))
        return t

    propagate(long, cp.Gaussian.isotropic(torch.zeros(4), stddev=0.1), cp.Sketched(4, replicates=1))
    assert len(looked) >= 30
    assert max(looked) <= 4


def test_outputs_that_are_copies_have_a_semidefinite_covariance() -> None:
    """Without the repair, the lowest eigenvalue is -1e-3 of the largest, which a note tells."""
    torch.manual_seed(0)
    x = cp.Gaussian.isotropic(torch.randn(6, dtype=D), stddev=1.0)

    def copies(x: Any) -> Any:
        return F.elu(torch.cat([x, x * 1.01], -1))

    y = propagate(copies, x, cp.Sketched(64, generator=torch.Generator().manual_seed(1)))
    lowest, largest = torch.linalg.eigvalsh(y.covariance_matrix)[[0, -1]]
    assert lowest >= -12 * torch.finfo(D).eps * largest
    assert any("eigenvalues of the sketched covariance" in note for note in y.notes)
    within = (y.variance - propagate(copies, x).variance).abs()
    assert (within <= 5 * y.covariance_stderr.diagonal() + 1e-12).all()
