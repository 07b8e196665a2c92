"""Independent noise without a few directions: exact, and without a matrix of all pairs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Deflated, Dense, Diagonal, LinearMap
from covprop.flow.lineage import Lineage
from tests.covariance.test_low_rank import METHODS
from tests.gaussians import seeded, written
from tests.largest import Largest
from tests.layers import propagate
from tests.oracles import assert_close, assert_gradients

D = torch.float64


def structure(
    *batch: int, size: int = 6, directions: int = 2, share: float = 1.0, dtype: Any = D
) -> Deflated:
    """Variances from 0.1 to 1.1, from which a share of random directions is taken."""
    values = 0.1 + torch.rand((*batch, size), dtype=D, generator=seeded(1))
    columns = torch.randn((*batch, size, directions), dtype=D, generator=seeded(2))
    units = torch.linalg.qr(columns)[0] * share**0.5
    return Deflated(values.to(dtype), units.to(dtype))


def gaussian(*batch: int, size: int = 6, share: float = 1.0, dtype: Any = D) -> cp.Gaussian:
    mean = torch.randn((*batch, size), dtype=D, generator=seeded(3)).to(dtype)
    return cp.Gaussian(mean, structure(*batch, size=size, share=share, dtype=dtype))


every_share = pytest.mark.parametrize("share", [1.0, 0.7])


@every_share
def test_the_matrix_is_that_of_independent_noise_less_the_directions(share: float) -> None:
    covariance = structure(3, share=share)
    values, units = covariance.values.numpy(), covariance.units.numpy()
    for at in range(3):
        left = np.diag(np.sqrt(values[at]))
        expected = left @ (np.eye(6) - units[at] @ units[at].T) @ left
        assert_close(covariance.matrix()[at], torch.as_tensor(expected), atol=1e-15)
        lowest = np.linalg.eigvalsh(covariance.matrix()[at].numpy())[:2]
        assert np.all(lowest < 1e-15) == (share == 1.0)


@every_share
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_the_root_is_one_behind_every_door(batch: tuple[int, ...], share: float, dtype: Any):
    covariance = structure(*batch, share=share, dtype=dtype)
    root, matrix = covariance.root(), covariance.matrix()
    columns = root.columns(0, root.width)
    close = {"rtol": 0.0, "atol": 20 * torch.finfo(dtype).eps}
    assert_close(columns @ columns.mT, matrix, **close)
    assert_close(root.columns(1, 4), columns[..., 1:4], **close)
    numbers = torch.randn((5, *batch, 6), dtype=dtype, generator=seeded(4))
    expected = torch.einsum("...ij,k...j->k...i", columns, numbers)
    assert_close(root.times(numbers), expected, **close)
    rows = torch.randn((*batch, 4, 6), dtype=dtype, generator=seeded(5))
    assert_close(root.after(rows), rows @ columns, **close)


def test_nothing_is_left_in_a_direction_that_was_taken_and_never_less() -> None:
    for dtype, bound in ((D, 1e-30), (torch.float32, 1e-12)):
        covariance = structure(200, size=40, dtype=dtype)
        rows = (covariance.units / covariance.values.sqrt()[..., None]).mT
        found = covariance.quadratic(rows)
        variance = found.diagonal(dim1=-2, dim2=-1)
        assert float(variance.min()) >= 0
        assert float(variance.max()) < bound * float(rows.square().sum(-1).max())
        assert float(covariance.diagonal().min()) >= 0


@every_share
def test_more_directions_may_be_taken(share: float) -> None:
    covariance = structure(2, share=share)
    units = torch.linalg.qr(torch.randn((2, 6, 2), dtype=D, generator=seeded(6)))[0].mT
    vectors = covariance.root().times(units.movedim(-2, 0)).movedim(0, -2)
    less = covariance.without(units, vectors)
    assert isinstance(less, Deflated)
    assert_close(less.matrix(), covariance.matrix() - vectors.mT @ vectors, atol=1e-14)
    plain = Diagonal(covariance.values)
    vectors = plain.root().times(units.movedim(-2, 0)).movedim(0, -2)
    first = plain.without(units, vectors)
    assert isinstance(first, Deflated)
    assert_close(first.matrix(), plain.matrix() - vectors.mT @ vectors, atol=1e-15)


def test_what_does_not_vary_stays_so() -> None:
    values = torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=D)
    units = torch.tensor([[0.6], [0.8], [0.0], [0.0]], dtype=D)
    x = cp.Gaussian(torch.zeros(4, dtype=D), Deflated(values, units))
    expected = torch.diag(torch.tensor([0.0, 0.36, 0.0, 2.0], dtype=D))
    assert_close(x.covariance_matrix, expected, atol=1e-15)
    noisy = x.covariance.plus(torch.ones(4, dtype=D))
    assert_close(noisy.matrix(), expected + torch.eye(4, dtype=D), atol=1e-15)
    y = propagate(torch.relu, x)
    assert_close(y.variance[[0, 2]], torch.zeros(2, dtype=D))


def test_what_cannot_be_is_refused() -> None:
    mean, ones = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    column = torch.tensor([[0.8], [0.8], [0.0]], dtype=D)
    with pytest.raises(cp.InvalidGaussian, match=r"take 1\.28 of the variance"):
        cp.Gaussian(mean, Deflated(ones, column))
    with pytest.raises(cp.InvalidGaussian, match="negative variance"):
        cp.Gaussian(mean, Deflated(-ones, column / 2))
    with pytest.raises(cp.InvalidGaussian, match="NaN"):
        cp.Gaussian(mean, Deflated(ones, column * torch.nan))


@every_share
def test_marginal_condition_and_the_rest_keep_the_structure(share: float) -> None:
    x = gaussian(2, share=share)
    value = torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=D)
    for noise in (None, 0.1):
        left, expected = (g.condition([0, 3], value, variance=noise) for g in (x, written(x)))
        assert isinstance(left.covariance, Deflated)
        assert_close(left.mean, expected.mean)
        assert_close(left.covariance_matrix, expected.covariance_matrix)
    some = x.marginal([4, 1])
    assert isinstance(some.covariance, Deflated)
    assert_close(some.covariance_matrix, x.covariance_matrix[:, [4, 1]][..., [4, 1]], atol=1e-15)
    for other in (x[1], x.detach(), x.to(torch.float32), x.reshape_batch((2, 1))):
        assert isinstance(other.covariance, Deflated)
    assert x.to(torch.float32).covariance.dtype == torch.float32
    assert "Deflated" in repr(x)
    if share == 1.0:
        with pytest.raises(cp.InvalidGaussian, match="singular"):
            x.to_torch()


@torch.no_grad()
@every_share
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_methods_give_what_they_give_for_the_matrix(
    method: Any, share: float, batch: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = gaussian(*batch, share=share)
    for hidden in (4, 9):
        model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3)).to(D)
        y, z = (propagate(model, g, method) for g in (x, written(x)))
        assert_close(y.mean, z.mean)
        assert_close(y.covariance_matrix, z.covariance_matrix)


@pytest.mark.parametrize("options", [{}, {"antithetic": True}, {"sobol": True}], ids=repr)
def test_monte_carlo_draws_from_it(options: dict[str, bool]) -> None:
    x = gaussian(size=4)
    y = propagate(torch.square, x, cp.MonteCarlo(40_000, seeded(7), **options))
    z = propagate(torch.square, x)
    assert bool(((y.mean - z.mean).abs() <= 5 * y.mean_stderr + 1e-12).all())
    error = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((error <= 5 * y.covariance_stderr).all())


def test_unscented_points_have_the_moments() -> None:
    x = gaussian(size=4)
    y = propagate(torch.square, x, cp.Unscented())
    assert_close(y.mean, propagate(torch.square, x).mean)  # exact for quadratic functions
    z = propagate(lambda t: 2 * t, x, cp.Unscented())
    assert_close(z.covariance_matrix, 4 * x.covariance_matrix)


@pytest.mark.parametrize("exact", [0, None])
def test_a_sketch_of_it_is_that_of_the_matrix(exact: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2)).to(D)
    x = gaussian(size=30)
    sketched = cp.Sketched(256, generator=seeded(1), exact=exact)
    y, z = propagate(model, x, sketched), propagate(model, x)
    assert y.covariance_stderr is not None
    error = (y.covariance_matrix - z.covariance_matrix).abs()
    assert bool((error <= 5 * y.covariance_stderr + 0.01 * z.variance.max()).all())


def test_the_tangents_of_a_sketch_have_its_covariance_on_average() -> None:
    covariance, count = structure(), 40_000
    method = cp.Sketched(count, generator=seeded(3), replicates=1, exact=0)
    x = cp.Gaussian(torch.zeros_like(covariance.diagonal()), covariance, validate_args=False)
    sketch = method.carrier(x, Lineage(method)).sketch
    found = sketch.tangents.mT @ sketch.tangents
    variance = covariance.diagonal()
    spread = (variance[:, None] * variance + covariance.matrix().square()).sqrt()
    assert bool(((found - covariance.matrix()).abs() < 5 * spread / count**0.5).all())


def test_a_control_variate_takes_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)).to(D)
    x = gaussian(2)
    y = propagate(model, x, cp.ControlVariate(4096, generator=seeded(1)))
    plain = propagate(model, x, cp.MonteCarlo(100_000, seeded(2)))
    for moment in ("mean", "covariance"):
        name = "mean" if moment == "mean" else "covariance_matrix"
        ours, other = (getattr(g, f"{moment}_stderr") for g in (y, plain))
        error = (getattr(y, name) - getattr(plain, name)).abs()
        assert bool((error <= 5 * (ours.square() + other.square()).sqrt()).all())


LARGE = [cp.Exact(), cp.Linearized(), cp.MonteCarlo(10), cp.Sketched(16)]


@torch.no_grad()
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("method", LARGE, ids=lambda method: type(method).__name__)
def test_no_matrix_of_all_pairs_is_made_where_none_is_needed(method: Any, taken: bool) -> None:
    torch.manual_seed(0)
    size = 6_000
    model = nn.Sequential(nn.Linear(size, 5), nn.ReLU(), nn.Linear(5, 3))
    x = gaussian(1, size=size, dtype=torch.float32)
    x = x if taken else cp.Gaussian.diagonal(x.mean, variance=x.variance, batch_dims=1)
    with Largest() as largest:
        y = propagate(model, x, method)
    assert largest.nbytes < size**2  # of which a matrix would have four times as many
    if isinstance(method, cp.Exact):
        assert cp.plan(model, x).peak_bytes < size**2
        first = model[0].weight.double()
        x, expected = x.to(D), propagate(model[0].double(), x.to(D)).covariance_matrix[0]
        rows = first * x.covariance.values[0].sqrt()
        matrix = rows @ rows.mT
        if taken:
            matrix = matrix - (rows @ x.covariance.units[0]) @ (rows @ x.covariance.units[0]).mT
        assert_close(expected, matrix)
    assert y.covariance_matrix.shape == (1, 3, 3)


@torch.no_grad()
@pytest.mark.parametrize("taken", [True, False])
def test_what_is_gathered_is_what_is_written(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn((4, 6), dtype=D, generator=seeded(8))
    linear = LinearMap(lambda t: t @ weight.mT, torch.Size((6,)), leading=True)
    covariance = structure(2) if taken else Diagonal(structure(2).values)
    expected = covariance.push(linear).matrix()
    for held in (1, 2**22):
        monkeypatch.setattr("covprop.covariance.congruence.WIDE", 1)
        monkeypatch.setattr("covprop.covariance.congruence.COLUMNS", held)
        found = covariance.push(linear)
        assert isinstance(found, Dense)
        assert_close(found.matrix(), expected)
        assert torch.equal(found.matrix(), found.matrix().mT)


@torch.no_grad()
def test_what_would_become_a_matrix_too_large_is_refused_before() -> None:
    size = 400_000
    units = torch.full((1, size, 1), size**-0.5)
    x = cp.Gaussian(torch.zeros(1, size), Deflated(torch.ones(1, size), units))
    for function in (torch.relu, lambda t: t.flip(-1).cumsum(-1)):
        with pytest.raises(cp.TooLarge):
            propagate(function, x)


@every_share
def test_gradients_reach_variances_and_units(share: float) -> None:
    covariance = structure(size=3, directions=1, share=share)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU()).to(D).requires_grad_(requires_grad=False)

    def moments(mean: Tensor, values: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        x = cp.Gaussian(mean, Deflated(values, units), validate_args=False)
        y = propagate(model, x)
        return y.mean, y.covariance_matrix

    inputs = torch.zeros(3, dtype=D), covariance.values, 0.9 * covariance.units
    assert_gradients(moments, inputs, atol=1e-5)
