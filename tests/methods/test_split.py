"""Splitting: exact where quadrature is, the same by batch and one by one, better than one."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import covprop as cp
from covprop.covariance import Deflated, Diagonal
from tests.largest import Largest
from tests.layers import propagate
from tests.oracles import assert_close
from tests.test_propagate import assert_same, gaussian

D = torch.float64
BASES = {"exact": cp.Exact(), "linearized": cp.Linearized(), "series": cp.Series(order=4)}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(D).requires_grad_(requires_grad=False)


@every_base
def test_one_input_is_integrated_by_the_nodes_alone(base: Any) -> None:
    """With one element nothing is left beside the direction: Gauss-Hermite quadrature."""
    x = cp.Gaussian(torch.tensor([0.3], dtype=D), torch.tensor([[0.49]], dtype=D))
    y = propagate(lambda x: x**3, x, cp.Split(4, base=base))
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    values, weights = (0.3 + 0.7 * nodes) ** 3, weights / weights.sum()
    mean = weights @ values
    assert_close(y.mean, torch.tensor([mean], dtype=D))
    variance = weights @ (values - mean) ** 2
    assert_close(y.covariance_matrix, torch.tensor([[variance]], dtype=D))


@every_base
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_linear_network_is_exact(base: Any, batch: tuple[int, ...], directions: int) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3).to(D).requires_grad_(requires_grad=False)
    for x in (gaussian(*batch), gaussian(*batch, rank=1)):
        y = propagate(model, x, cp.Split(3, directions, base))
        assert_same(y, propagate(model, x), 1e-12)


def test_directions_are_those_of_an_independent_decomposition() -> None:
    """The mixture of the input itself has its moments, and lies along S J^T."""
    x = gaussian()
    weight = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=D)
    y = propagate(lambda x: torch.cat([x @ weight.mT, 0 * x], -1), x, cp.Split(5))
    along = y.mixture.components.mean[:, 0] - y.mean[0]
    deviation = float((weight @ x.covariance_matrix @ weight.mT) ** 0.5)
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    assert_close(along.sort().values, deviation * torch.as_tensor(nodes), atol=1e-9)
    assert_close(y.mixture.weights.sum(), torch.ones((), dtype=D))
    assert float(y.mixture.components.variance[:, 0].abs().max()) < 1e-12 * deviation**2
    assert weights.sum() > 0


def test_a_batch_is_the_same_one_by_one() -> None:
    model, x = network(4, 20, 3), gaussian(5)
    together = propagate(model, x, cp.Split(3, 2))
    for i in range(5):
        assert_same(together[i], propagate(model, x[i], cp.Split(3, 2)), 1e-9)


def test_a_network_that_takes_no_batch_has_its_components_one_by_one() -> None:
    model, x = network(4, 20, 3), gaussian()
    context = torch.randn(1, 4, dtype=D, generator=torch.Generator().manual_seed(0))

    def alone(x: Any, context: Any) -> Any:
        return {"y": model((x[None] + context)[0]), "n": 3, "context": context}

    found = propagate(alone, x, context, method=cp.Split(3))
    shifted = cp.Gaussian(x.mean + context[0], x.covariance_matrix)
    assert_same(found["y"], propagate(model, shifted, cp.Split(3)), 1e-9)
    assert found["n"] == 3
    assert found["context"] is context


def test_the_inputs_of_a_network_stay_independent() -> None:
    x, y = (
        gaussian(2),
        cp.Gaussian.diagonal(gaussian(2).mean, variance=gaussian(2).variance, batch_dims=1),
    )
    model = network(4, 20, 3)

    def both(a: Any, b: Any) -> Any:
        return model(a + 2 * b), a - b

    found = propagate(both, x, y, method=cp.Split(3, 2))
    plain = propagate(both, x, y, method=cp.MonteCarlo(200_000, _seeded(0)))
    for ours, sampled in zip(found, plain, strict=True):
        assert bool(((ours.mean - sampled.mean).abs() < 0.05 * sampled.stddev).all())
    exact = propagate(lambda a, b: a - b, x, y)
    assert_same(found[1], exact, 1e-12)


@pytest.mark.parametrize("alone", [True, False])
def test_an_input_of_low_rank_stays_one_and_is_the_same(alone: bool) -> None:
    factor = torch.randn(6, 2, dtype=D, generator=_seeded(0))
    variance = None if alone else torch.full((6,), 1e-12, dtype=D)
    mean = torch.randn(6, dtype=D, generator=_seeded(1))
    x = cp.Gaussian.low_rank(mean, factor, variance=variance)
    model = network(6, 20, 3)
    y = propagate(model, x, cp.Split(3, 2))
    full = propagate(model, cp.Gaussian(mean, factor @ factor.mT), cp.Split(3, 2))
    assert_close(y.mean, full.mean, rtol=1e-5, atol=1e-5)
    assert_close(y.covariance_matrix, full.covariance_matrix, rtol=1e-5, atol=1e-5)
    torch.manual_seed(2)
    linear = nn.Linear(6, 3).to(D).requires_grad_(requires_grad=False)
    assert_same(propagate(linear, x, cp.Split(3)), propagate(linear, x), 1e-9)


def test_a_sketch_is_split_along_the_directions_of_the_exact_method() -> None:
    model = network(30, 30, 30, 2, seed=3)
    x = cp.Gaussian.isotropic(torch.randn(30, dtype=D, generator=_seeded(0)), stddev=1.0)
    sketched = cp.Sketched(1024, generator=_seeded(1))
    y = propagate(model, x, cp.Split(3, base=sketched))
    exact = propagate(model, x, cp.Split(3))
    assert_close(y.mixture.components.mean, exact.mixture.components.mean, rtol=0.1, atol=0.1)
    assert_close(y.stddev / exact.stddev, torch.ones(2, dtype=D), atol=0.03)
    assert y.covariance_stderr is not None


@every_base
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("directions", [1, 2])
def test_independent_noise_is_split_as_its_matrix_is(
    base: Any, batch: tuple[int, ...], directions: int
) -> None:
    model, method = network(6, 20, 3), cp.Split(3, directions, base)
    mean = torch.randn((*batch, 6), dtype=D, generator=_seeded(0))
    variance = torch.rand((*batch, 6), dtype=D, generator=_seeded(1))
    variance[..., 2] = 0.0
    x = cp.Gaussian.diagonal(mean, variance=variance, batch_dims=len(batch))
    y = propagate(model, x, method)
    z = propagate(model, cp.Gaussian(mean, torch.diag_embed(variance)), method)
    assert_same(y, z, 1e-9)


def test_a_component_of_independent_noise_has_no_matrix() -> None:
    seen = []

    def model(x: Any) -> Any:
        seen.append(getattr(x, "covariance", None))
        return torch.relu(x @ torch.arange(12, dtype=D).reshape(6, 2))

    x = cp.Gaussian.isotropic(torch.zeros(6, dtype=D), stddev=0.5)
    y = propagate(model, x, cp.Split(3, 2))
    assert isinstance(seen[0], Diagonal)  # for the directions
    assert isinstance(seen[1], Deflated)
    assert seen[1].units.shape == (6, 2)
    assert y.mixture.components.batch_shape == (9,)


BASES_OF_IMAGES = {
    "linearized": cp.Linearized(),
    "sketched": cp.Sketched(16),
    "some outputs": cp.Sketched(16, outputs=[1]),
    "samples": cp.MonteCarlo(100),
    "split": cp.Split(base=cp.Sketched(16)),
}


@every_base
@pytest.mark.parametrize("shape", [(1, 3), (3,)])
def test_axes_may_be_counted_from_the_front(base: Any, shape: tuple[int, ...]) -> None:
    x = cp.Gaussian.isotropic(torch.tensor([0.3, 0.1, -0.2], dtype=D).reshape(shape), stddev=0.5)
    front = propagate(lambda x: x.softmax(len(shape) - 1), x, cp.Split(base=base))
    back = propagate(lambda x: x.softmax(-1), x, cp.Split(base=base))
    assert_same(front, back, 1e-12)
    assert float(back.stddev.min()) > 0.05
    assert_close(back.mean.sum(), torch.ones((), dtype=D))


def test_elements_of_a_batch_may_be_treated_by_their_place() -> None:
    x, model, places = gaussian(2), network(4, 20, 3), torch.arange(12, dtype=D)[:, None]

    def by_place(x: Any) -> Any:
        return model(x + places[: len(x)]), len(x)

    found, count = propagate(by_place, x, cp.Split(3))
    moved = cp.Gaussian(x.mean + places[:2], x.covariance_matrix)
    assert_same(found, propagate(model, moved, cp.Split(3)), 1e-9)
    assert count == 2


@torch.no_grad()
@every_base
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dense", [True, False])
def test_all_directions_leave_points_alone(base: Any, count: int, dense: bool) -> None:
    """Gauss-Hermite quadrature over all inputs, by numpy."""
    for seed in range(1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 3)).to(D)
        mean = torch.randn(3, dtype=D)
        x = cp.Gaussian.isotropic(mean, stddev=1.0)
        x = cp.Gaussian(mean, x.covariance_matrix) if dense else x
        y = propagate(model, x, cp.Split(count, 3, base=base))
        nodes, weights = np.polynomial.hermite_e.hermegauss(count)
        grid = np.stack(np.meshgrid(nodes, nodes, nodes), -1).reshape(-1, 3)
        chances = np.prod(np.stack(np.meshgrid(weights, weights, weights), -1), -1).reshape(-1)
        chances = torch.as_tensor(chances / chances.sum())
        # The rule is not the same in other axes: those that the method took.
        _, _, axes = torch.linalg.svd(_gain(model, x, base))
        values = model(mean + torch.as_tensor(grid) @ axes)
        centre = chances @ values
        matrix = (values - centre).mT @ (chances[:, None] * (values - centre))
        assert_close(y.mean, centre, atol=1e-9)
        assert_close(y.covariance_matrix, matrix, atol=1e-9)


def _gain(model: Any, x: cp.Gaussian, base: Any) -> torch.Tensor:
    """E[J] by samples of plain Jacobians for methods that average, at the mean for others."""
    if isinstance(base, cp.Linearized):
        return torch.func.jacrev(model)(x.mean)
    first, last = model[0], model[2]
    units = propagate(first, x)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    points = units.mean + units.stddev * torch.as_tensor(nodes)[:, None]
    slopes = torch.as_tensor(weights / weights.sum()) @ (1 - torch.tanh(points).square())
    return last.weight @ (slopes[:, None] * first.weight)


@torch.no_grad()
@pytest.mark.parametrize("method", [cp.Split(9), cp.Split(3, 2)], ids=["9", "3x3"])
@pytest.mark.parametrize("noise", [1e-6, 1e-5])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_noise_near_rounding_is_no_worse_for_being_split(
    method: Any, noise: float, offset: float
) -> None:
    """The covariance of a nearly linear network is that of `cp.Exact` in float64."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))

        def centred(x: Any, model: Any = model) -> Any:
            return model(x - offset)

        mean = torch.randn(4) + offset
        x = cp.Gaussian.isotropic(mean, stddev=noise * float(mean.norm()))
        found = propagate(centred, x, method).covariance_matrix.double()
        model.to(D)
        truth = propagate(centred, x.to(D), method)
        scale = truth.stddev[:, None] * truth.stddev
        # Noise s leaves out of the variance what is not linear: less than a share of s^2. Means in
        # float32 are off by eps, and nonlinearity is only seen where it is several times as much.
        missed = torch.finfo(torch.float32).eps * max(1.0, offset)
        allowed = 1e-5 + 100 * missed**2 + 100 * missed * float(x.stddev.max())
        assert float(((found - truth.covariance_matrix) / scale).abs().max()) < allowed


@torch.no_grad()
def test_outputs_that_the_direction_does_not_move_say_nothing_of_rounding_in_others() -> None:
    """What is rounding alone in them was taken for the share of rounding in every output."""
    weight = torch.randn(8, generator=_seeded(2), dtype=D)

    def beside(x: Any) -> Any:
        return torch.cat([2 * torch.relu(x[..., :1]), weight * torch.tanh(x[..., 1:])], -1)

    mean = torch.tensor([[0.1, 0.7], [-0.2, 0.3], [0.3, -1.1], [0.0, 0.9]], dtype=D)
    stddev = torch.tensor([1.0, 0.1], dtype=D).expand(4, 2)
    x = cp.Gaussian.diagonal(mean, stddev=stddev, batch_dims=1)
    y = propagate(beside, x, cp.Split(3))
    alone = propagate(lambda x: 2 * torch.relu(x), x.marginal(slice(0, 1)), cp.Split(3))
    assert_close(y.mean[:, :1], alone.mean)
    assert_close(y.covariance_matrix[:, :1, :1], alone.covariance_matrix)


def test_gradients_go_through_offsets_that_rounding_hides() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 2))
    start = torch.randn(4)
    found = []
    for dtype in (torch.float32, D):
        mean = start.detach().clone().to(dtype).requires_grad_()
        y = propagate(model.to(dtype), cp.Gaussian.isotropic(mean, stddev=1e-5), cp.Split(3))
        y.variance.log().sum().backward()
        found.append(mean.grad.to(D))
    assert_close(found[0], found[1], atol=0.05)  # eps over the noise, a few times


@torch.no_grad()
@pytest.mark.parametrize("base", BASES_OF_IMAGES.values(), ids=BASES_OF_IMAGES)
def test_an_image_is_split_without_a_matrix(base: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(400, 2)
    )
    x = cp.Gaussian.isotropic(
        torch.rand(1, 3, 80, 80, generator=_seeded(0)), stddev=0.5, batch_dims=1
    )
    with Largest() as largest:
        y = propagate(model, x, cp.Split(base=base))
    assert largest.nbytes < 19_200**2  # of which a matrix would have four times as many
    count = 1 if base == BASES_OF_IMAGES["some outputs"] else 2
    assert y.mixture.components.batch_shape == (3, 1)
    assert y.covariance_matrix.shape == (1, count, count)


@torch.no_grad()
def test_components_of_a_sketch_are_those_of_the_exact_method_on_images() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    x = cp.Gaussian.isotropic(
        torch.rand(2, 1, 8, 8, generator=_seeded(0)), stddev=1.0, batch_dims=1
    )
    sketched = cp.Sketched(512, generator=_seeded(2), exact=0)
    y, z = (propagate(model, x, cp.Split(3, base=base)) for base in (sketched, cp.Exact()))
    assert y.covariance_stderr is not None
    error = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((error < 5 * y.covariance_stderr + 0.02 * z.variance.amax()).all())


def test_what_a_base_would_write_out_is_refused_where_it_does_not_fit() -> None:
    x = cp.Gaussian.isotropic(torch.zeros(3, 700, 700), stddev=0.1)
    with pytest.raises(cp.TooLarge, match="Sketched"):
        propagate(lambda x: x.flatten().cumsum(0)[0], x, cp.Split())


def test_a_matrix_is_not_copied_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.methods.split.free_bytes", lambda _: 100)
    with pytest.raises(cp.TooLarge, match="low_rank"):
        propagate(torch.relu, gaussian(), cp.Split(base=cp.Linearized()))


def test_nothing_that_varies_is_nothing_to_split() -> None:
    x = gaussian()
    assert_close(propagate(lambda _: torch.ones(2), x, cp.Split()), torch.ones(2))
    certain = cp.Gaussian.isotropic(torch.ones(4, dtype=D), stddev=0.0)
    model = network(4, 20, 3)
    y = propagate(model, certain, cp.Split())
    assert_close(y.mean, model(certain.mean))
    assert_close(y.covariance_matrix, torch.zeros(3, 3, dtype=D))
    scalar = propagate(lambda x: torch.relu(x).sum(), x, cp.Split())
    assert scalar.mean.shape == ()


@torch.no_grad()
@pytest.mark.parametrize("base", [cp.Exact(), cp.Linearized()])
def test_noise_along_no_direction_is_not_split(base: Any) -> None:
    mean = torch.ones(3, dtype=torch.float64)
    x = cp.Gaussian.low_rank(mean, mean.new_zeros(3, 0), variance=0.1 * mean)
    y = propagate(torch.relu, x, cp.Split(base=base))
    assert_close(y.covariance_matrix, propagate(torch.relu, x, base).covariance_matrix)


def test_float32_is_near_float64() -> None:
    model, x = network(4, 20, 3), gaussian(2)
    y = propagate(model, x, cp.Split())
    z = propagate(model.float(), x.to(torch.float32), cp.Split())
    assert z.dtype == torch.float32
    assert_close(z.covariance_matrix.double(), y.covariance_matrix, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_direction_that_cannot_turn() -> None:
    def variance(mean: Any, spread: Any) -> Any:
        y = propagate(torch.sin, cp.Gaussian(mean, spread, validate_args=False), cp.Split(3))
        return y.covariance_matrix

    mean = torch.tensor([0.4], dtype=D, requires_grad=True)
    spread = torch.tensor([[0.3]], dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(variance, (mean, spread))


def test_components_halve_what_one_gaussian_is_off_by() -> None:
    """Kaiming's weights and unit noise, where one Gaussian is off by several percent."""
    errors: dict[int, list[float]] = {1: [], 3: []}
    for seed in range(8):
        model = network(30, 30, 30, 30, 1, seed=seed)
        x = cp.Gaussian.isotropic(torch.randn(30, dtype=D, generator=_seeded(seed)), stddev=1.0)
        truth = propagate(model, x, cp.MonteCarlo(40_000, _seeded(seed))).variance
        for count, method in ((1, cp.Exact()), (3, cp.Split(3))):
            errors[count].append(float(propagate(model, x, method).variance / truth - 1))
    one, three = (np.sqrt(np.mean(np.square(errors[count]))) for count in (1, 3))
    assert three < 0.6 * one


def test_a_mixture_samples_and_becomes_a_torch_distribution() -> None:
    model, x = network(4, 20, 2), gaussian(3)
    y = propagate(model, x, cp.Split(3))
    assert y.mixture.components.batch_shape == (3, 3)
    draws = y.mixture.sample(100_000, _seeded(0))
    assert draws.shape == (100_000, 3, 2)
    assert bool(((draws.mean(0) - y.mean).abs() < 5 * y.stddev / 100_000**0.5).all())
    assert_close(draws.var(0), y.variance, rtol=0.05)
    torch_s = y.mixture.to_torch()
    assert_close(torch_s.mean, y.mean)
    assert_close(torch_s.variance, y.variance)


def test_copies_and_parts_of_a_result_keep_their_mixture() -> None:
    model, x = network(4, 20, 3), gaussian(2, 3)
    y = propagate(model, x, cp.Split(3))
    means, matrices = y.mixture.components.mean, y.mixture.components.covariance_matrix
    rows = torch.tensor([1, 0])
    for index in (1, slice(0, 1), (0, 2), rows, (rows, rows), (slice(None), 1), y.mean[..., 0] > 0):
        part = y[index]
        assert_close(part.mixture.components.mean, torch.stack([mean[index] for mean in means]))
        again = part.mixture.moments()
        assert_same(again, part, 1e-12)
    assert_close(y.to(torch.float32).mixture.components.mean, means.float())
    assert y.to(torch.float32).mixture.weights.dtype == torch.float32
    assert_close(y.reshape_batch((6,)).mixture.components.mean, means.reshape(3, 6, 3))
    some = y.marginal([2, 0])
    assert_close(some.mixture.components.mean, means[..., [2, 0]])
    assert_close(some.mixture.components.covariance_matrix, matrices[..., [2, 0], :][..., [2, 0]])
    assert_same(some.mixture.moments(), some, 1e-12)
    assert [one.mixture.components.batch_shape for one in y] == [(3, 3)] * 2
    assert y.condition([0], torch.zeros(2, 3, 1, dtype=D)).mixture is None


def test_a_detached_result_has_a_detached_mixture() -> None:
    mean = torch.zeros(4, dtype=D, requires_grad=True)
    y = propagate(torch.sin, cp.Gaussian.isotropic(mean, stddev=0.5), cp.Split(3))
    assert y.mixture.components.mean.requires_grad
    assert not y.detach().mixture.components.mean.requires_grad


def test_errors_of_sampled_components_are_put_together() -> None:
    model, x = network(4, 20, 2), gaussian()
    found = [
        propagate(model, x, cp.Split(3, base=cp.MonteCarlo(500, _seeded(seed))))
        for seed in range(60)
    ]
    assert found[0].samples == 1500
    for pick in ("mean", "covariance_matrix"):
        error = {"mean": "mean_stderr", "covariance_matrix": "covariance_stderr"}[pick]
        spread = torch.stack([getattr(y, pick) for y in found]).std(0)
        told = torch.stack([getattr(y, error) for y in found]).mean(0)
        assert_close(told / spread, torch.ones_like(told), atol=0.4)


def test_errors_of_the_means_of_components_are_in_those_of_variances() -> None:
    matrix = torch.tensor([[3.0, 3.0], [1.0, -1.0]], dtype=D)  # the first is split, not the second
    x = cp.Gaussian.isotropic(torch.zeros(2, dtype=D), stddev=1.0)
    found = [
        propagate(lambda x: x @ matrix, x, cp.Split(base=cp.MonteCarlo(200, _seeded(seed))))
        for seed in range(200)
    ]
    spread = torch.stack([y.covariance_matrix for y in found]).std(0)
    told = torch.stack([y.covariance_stderr for y in found]).mean(0)
    assert_close(told / spread, torch.ones_like(told), atol=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 1}, "components"),
        ({"components": 400}, "components"),
        ({"directions": 0}, "directions"),
        ({"base": 3}, "base"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cp.Split(**options)


def test_an_operation_without_a_rule_says_so() -> None:
    with pytest.raises(cp.UnsupportedOperation, match="no rule"):
        propagate(lambda x: torch.linalg.inv(x.reshape(2, 2)), gaussian(), cp.Split())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("directions", [1, 2, 3])
def test_what_is_left_of_a_matrix_has_no_negative_variance(
    directions: int, dtype: torch.dtype
) -> None:
    """S less its directions is rounding along them, of either sign if it is a difference."""
    for seed in range(12):
        torch.manual_seed(seed)
        factor = 0.4 * torch.randn(3, 3, dtype=dtype)
        x = cp.Gaussian(torch.randn(3, dtype=dtype), factor @ factor.mT + 0.2 * torch.eye(3))
        model = nn.Linear(3, directions).to(dtype)
        y = propagate(model, x, cp.Split(3, directions))
        exact = model.weight @ x.covariance_matrix @ model.weight.mT
        # 27 components, sums of 3 and of 27 terms, at most.
        atol = 100 * torch.finfo(dtype).eps * float(exact.diagonal().max())
        assert_close(y.covariance_matrix, exact, atol=atol)
