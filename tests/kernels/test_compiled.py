"""The compiled kernels against the torch code, for every instruction set that this machine has."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import covprop as cp
from covprop.kernels import compiled, compiled_pairs
from covprop.kernels.gradients import jvp
from covprop.native import build
from tests.oracles import assert_close

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no compiler was found")
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "erf": torch.erf,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "heaviside": lambda x: torch.heaviside(x, torch.zeros(())),
}
ROUNDING = 64.0
"""Roundings by which the two may differ, relative to the standard deviations: sums of up to 48
terms of either sign, each of which both round."""


def both(
    function: Callable[[Tensor], Tensor], x: cp.Gaussian, method: Any
) -> tuple[cp.Gaussian, cp.Gaussian]:
    found = cp.propagate(function, x, method)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        expected = cp.propagate(function, x, method)
    return found, expected


def gaussian(
    size: int, rank: int, dtype: torch.dtype, batch: tuple[int, ...] = (), noise: float = 0.3
) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(size + rank)
    factor = torch.randn(*batch, size, rank, generator=generator, dtype=torch.float64)
    mean = 2 * torch.randn(*batch, size, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.mT / rank + noise * torch.eye(size, dtype=torch.float64)
    return cp.Gaussian(mean.to(dtype), matrix.to(dtype))


@pytest.mark.parametrize(
    "method", [cp.GaussianLayers(), cp.Series(order=5)], ids=["exact", "series"]
)
@pytest.mark.parametrize("rank", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("instructions")
def test_a_matrix_is_that_of_the_torch_code(
    name: str, dtype: torch.dtype, rank: int, method: Any
) -> None:
    x = gaussian(150, rank, dtype)  # three tiles, the last of which is not full
    found, expected = both(FUNCTIONS[name], x, method)
    scale = float(expected.variance.max())
    accuracy = torch.finfo(dtype).eps if name != "tanh" else max(torch.finfo(dtype).eps, 1e-13)
    matrix = found.covariance_matrix
    assert torch.equal(matrix, matrix.mT)
    assert_close(matrix, expected.covariance_matrix, atol=ROUNDING * accuracy * scale)


QUADRATURES = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus,
    "softplus, beta -1": partial(F.softplus, beta=-1.0), "logsigmoid": F.logsigmoid,
    "mish": F.mish, "gelu, tanh": partial(F.gelu, approximate="tanh"), "elu": F.elu,
    "elu, alpha 2": partial(F.elu, alpha=2.0), "selu": F.selu, "celu": partial(F.celu, alpha=1.5),
    "relu": torch.relu, "hardtanh": F.hardtanh, "sign": torch.sign, "hardshrink": F.hardshrink,
}  # fmt: skip


@pytest.mark.parametrize("name", QUADRATURES)
@pytest.mark.usefixtures("instructions")
def test_moments_of_single_elements(name: str) -> None:
    """Means and variances, from none to wide, far out in both tails: to rounding of their scale."""
    stddev = torch.tensor([0.0, 1e-150, 1e-6, 0.1, 1.0, 3.0, 7.9], dtype=torch.float64)
    mean = torch.tensor([-40.0, -3.0, -1e-9, 0.0, 0.5, 2.0, 30.0], dtype=torch.float64)
    mean, variance = (t.flatten() for t in torch.meshgrid(mean, stddev.square(), indexing="ij"))
    found, expected = both(
        QUADRATURES[name], cp.Gaussian.diagonal(mean, variance=variance), cp.GaussianLayers()
    )
    size = 1 + mean.abs() + variance.sqrt()
    # Sums of up to 1,000 terms of either sign: errors grow as their root.
    rounding = 64 * torch.finfo(torch.float64).eps
    assert bool(((found.mean - expected.mean).abs() <= rounding * size).all())
    assert bool(
        (
            (found.variance - expected.variance).abs()
            <= rounding * size * expected.stddev + rounding**2
        ).all()
    )


SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: torch.relu(x).square(),
    "power": lambda x: F.relu(x) ** 2,
    "product": lambda x: torch.relu(x) * torch.relu(x),
}


@pytest.mark.parametrize("name", SQUARES)
@pytest.mark.usefixtures("instructions")
def test_squared_ramps_have_closed_moments(name: str) -> None:
    """By the moments of a Gaussian above zero: M_n = m M_{n-1} + (n - 1) v M_{n-2}."""
    grid = [torch.linspace(-3, 3, 13).double(), torch.tensor([0.01, 0.3, 1.0, 7.0]).double()]
    mean, stddev = (t.flatten() for t in torch.meshgrid(*grid, indexing="ij"))
    variance = stddev.square()
    phi = torch.exp(-((mean / stddev) ** 2) / 2) / (2 * torch.pi) ** 0.5
    above = [torch.special.ndtr(mean / stddev)]
    above.append(mean * above[0] + stddev * phi)
    above += [mean * above[1] + variance * above[0]]
    above += [mean * above[2] + 2 * variance * above[1]]
    above += [mean * above[3] + 3 * variance * above[2]]
    x = cp.Gaussian.diagonal(mean, variance=variance)
    found, expected = both(SQUARES[name], x, cp.GaussianLayers())
    size = mean.square() + variance
    for y in (found, expected):
        assert bool(((y.mean - above[2]).abs() <= 1e-13 * size).all())
        spread = above[4] - above[2].square()
        assert bool(((y.variance - spread).abs() <= 1e-13 * size.square()).all())
    assert_close(found.variance, expected.variance, atol=0.0, rtol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_units_that_are_nearly_the_same(name: str, noise: float) -> None:
    x = gaussian(70, 2, torch.float64, noise=noise)
    mean, matrix = x.mean.repeat(2), x.covariance_matrix.repeat(2, 2)  # each twice
    found, expected = both(FUNCTIONS[name], cp.Gaussian(mean, matrix), cp.GaussianLayers())
    scale = float(expected.variance.max())
    assert_close(found.covariance_matrix, expected.covariance_matrix, atol=1e-11 * scale)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 130])
def test_a_batch_is_its_elements(size: int) -> None:
    x = gaussian(size, 2, torch.float64, batch=(3, 2))
    found = cp.propagate(torch.relu, x, cp.GaussianLayers()).covariance_matrix
    for i in range(3):
        for j in range(2):
            one = cp.propagate(torch.relu, x[i, j], cp.GaussianLayers()).covariance_matrix
            assert_close(found[i, j], one, atol=1e-14)


def test_a_series_may_be_long() -> None:
    x = gaussian(70, 3, torch.float64)
    found, expected = both(torch.relu, x, cp.Series(order=700))
    assert_close(found.covariance_matrix, expected.covariance_matrix, atol=1e-13)


def test_threads_change_nothing() -> None:
    x = gaussian(300, 4, torch.float64)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(cp.propagate(F.gelu, x, cp.GaussianLayers()).covariance_matrix)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_correlation_is_that_of_the_matrix(dtype: torch.dtype) -> None:
    x = gaussian(150, 2, dtype, batch=(2,))
    inverse = x.variance.rsqrt()
    rho = (x.covariance_matrix * inverse[..., None] * inverse[..., None, :]).abs()
    rho.diagonal(dim1=-2, dim2=-1).zero_()
    found = compiled_pairs.largest_correlation(x.covariance_matrix)
    assert found == pytest.approx(float(rho.max()), rel=4 * torch.finfo(dtype).eps)


def test_a_matrix_need_not_be_contiguous() -> None:
    x = gaussian(80, 3, torch.float64)
    wide = torch.zeros(80, 200, dtype=torch.float64)
    wide[:, ::2][:, :80] = x.covariance_matrix
    strided = cp.Gaussian(x.mean, wide[:, ::2][:, :80], validate_args=False)
    one, other = (cp.propagate(torch.relu, g, cp.GaussianLayers()) for g in (x, strided))
    assert torch.equal(one.covariance_matrix, other.covariance_matrix)


def test_libraries_of_other_sources_are_not_loaded(tmp_path: Path) -> None:
    assert build.digest() in build.library_path("portable").name
    (tmp_path / "kernels_portable_0123456789ab.so").write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"file too short|invalid ELF"):
        compiled.load(tmp_path / "kernels_portable_0123456789ab.so")


def test_an_environment_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = compiled.library.__wrapped__  # which remembers nothing
    assert isinstance(fresh(), ctypes.CDLL)
    monkeypatch.setenv("COVPROP_COMPILED", "0")
    assert fresh() is None


def test_what_is_not_plain_numbers_is_left_to_torch() -> None:
    plain = torch.randn(3, dtype=torch.float64)
    assert compiled.usable(plain)
    assert not compiled.usable(plain.half())
    assert not compiled.usable(plain.to("meta"))
    assert not compiled.usable(plain.clone().requires_grad_())
    assert not compiled.usable(plain, plain.float())
    seen = []
    torch.func.vmap(lambda x: seen.append(compiled.usable(x)) or x)(plain[:, None])
    jvp(lambda x: seen.append(compiled.usable(x)) or x, plain, plain)
    assert seen == [False, False]
    with forward_ad.dual_level():
        assert not compiled.usable(forward_ad.make_dual(plain, plain))


def test_numbers_of_elements_are_broadcast_over_a_batch_and_checked() -> None:
    x = gaussian(5, 2, torch.float64, batch=(3,))
    inverse, rows = x.variance[0].rsqrt(), torch.randn(2, 5, dtype=torch.float64)
    one = compiled_pairs.Series(inverse, None, rows[:, None], torch.ones_like(inverse))
    found, _ = compiled_pairs.pairs(one, one, x.covariance_matrix)
    for i in range(3):
        alone = compiled_pairs.Series(inverse, None, rows, torch.ones_like(inverse))
        assert torch.equal(found[i], compiled_pairs.pairs(alone, alone, x.covariance_matrix[i])[0])
    short = one._replace(inverse=inverse[:4])
    with pytest.raises(RuntimeError, match="expanded size"):
        compiled_pairs.pairs(short, one, x.covariance_matrix)


def gradients(
    function: Callable[[Tensor], Tensor], x: cp.Gaussian, weights: tuple[Tensor, Tensor],
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of weighted sums of the result, by the mean and the covariance of the input."""
    inputs = [t.clone().requires_grad_() for t in (x.mean, x.covariance_matrix)]
    given = cp.Gaussian(inputs[0], cp.covariance.Dense(inputs[1]), validate_args=False)
    y = cp.propagate(function, given, cp.GaussianLayers())
    return torch.autograd.grad((y.mean, y.covariance_matrix), inputs, weights, **options)


CONTINUOUS = {
    "relu": torch.relu, "leaky_relu": F.leaky_relu, "abs": torch.abs, "hardtanh": F.hardtanh,
    "softshrink": F.softshrink, "relu6": F.relu6,
}  # fmt: skip


@pytest.mark.parametrize("size", [5, 40, 150])  # closed forms, a part of a tile, three tiles
@pytest.mark.parametrize("rank", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.usefixtures("instructions")
def test_gradients_are_those_of_the_torch_code(
    name: str, dtype: torch.dtype, rank: int, size: int
) -> None:
    x = gaussian(size, rank, dtype, batch=(2,))
    generator = torch.Generator().manual_seed(size)
    weights = tuple(torch.randn(t.shape, generator=generator).to(dtype)
                    for t in (x.mean, x.covariance_matrix))  # fmt: skip
    found = gradients(CONTINUOUS[name], x, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        expected = gradients(CONTINUOUS[name], x, weights)
    # Sums over pairs of the weights times slopes, and ratios of deviations.
    deviations = x.variance.sqrt()
    scale = float(weights[1].abs().sum(-1).max() * (deviations.max() / deviations.min()))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=ROUNDING * torch.finfo(dtype).eps * scale)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_do_not_see_what_another_call_has_left(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept in memory of each thread, where it was multiplied by zeros."""
    x = gaussian(130, 3, dtype)
    weights = torch.ones_like(x.mean), torch.ones_like(x.covariance_matrix)
    monkeypatch.setattr(compiled, "threads", lambda _: 1)
    layers = []
    whole = compiled.piecewise_layer

    def seen(layer: Any, mean: Tensor, covariance: Tensor) -> Any:
        layers.append(layer)
        return whole(layer, mean, covariance)

    monkeypatch.setattr(compiled, "piecewise_layer", seen)
    gradients(torch.relu, x, weights)
    matrix = torch.full_like(x.covariance_matrix, torch.nan)
    matrix.diagonal().fill_(1)
    made = compiled._backward(layers[0], (x.mean, matrix), weights)
    assert made is not None
    assert bool(made[0].isnan().all())
    found = gradients(torch.relu, gaussian(5, 1, dtype), (weights[0][:5], weights[1][:5, :5]))
    assert all(bool(one.isfinite().all()) for one in found)


def test_gradients_of_units_that_do_not_vary() -> None:
    """One of them at the kink, among others: as in the torch code, and finite."""
    x = gaussian(30, 3, torch.float64)
    mean, matrix = x.mean.clone(), x.covariance_matrix.clone()
    for unit, value in ((3, 0.0), (7, 2.0), (11, -2.0)):
        mean[unit], matrix[unit], matrix[:, unit] = value, 0, 0
    x = cp.Gaussian(mean, matrix)
    weights = torch.ones_like(mean), torch.ones_like(matrix)
    found = gradients(torch.relu, x, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        expected = gradients(torch.relu, x, weights)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=1e-13)


def test_gradients_of_single_elements() -> None:
    stddev = torch.tensor([0.0, 1e-6, 0.1, 1.0, 7.9], dtype=torch.float64)
    mean = torch.tensor([-40.0, -3.0, -1e-3, 0.5, 2.0, 30.0], dtype=torch.float64)
    mean, variance = (t.flatten() for t in torch.meshgrid(mean, stddev.square(), indexing="ij"))

    def found(name: str) -> tuple[Tensor, ...]:
        inputs = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        x = cp.Gaussian(inputs[0], cp.covariance.Diagonal(inputs[1]), validate_args=False)
        y = cp.propagate(CONTINUOUS[name], x, cp.GaussianLayers())
        return torch.autograd.grad(y.mean.sum() + y.variance.sum(), inputs)

    for name in CONTINUOUS:
        ours = found(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "library", lambda: None)
            theirs = found(name)
        for one, other in zip(ours, theirs, strict=True):
            # Differences of numbers as large as the mean over a deviation.
            size = 1 + mean.abs() + mean.abs() / variance.sqrt().clamp(min=1e-6)
            assert bool(((one - other).abs() <= ROUNDING * 2.3e-16 * size).all())


def test_gradients_have_gradients() -> None:
    x = gaussian(30, 3, torch.float64)
    weights = torch.ones_like(x.mean), torch.ones_like(x.covariance_matrix)

    def second() -> Tensor:
        mean = x.mean.clone().requires_grad_()
        given = cp.Gaussian(mean, cp.covariance.Dense(x.covariance_matrix))
        y = cp.propagate(torch.relu, given, cp.GaussianLayers())
        results = (y.mean, y.covariance_matrix)
        (first,) = torch.autograd.grad(results, mean, weights, create_graph=True)
        return torch.autograd.grad(first.square().sum(), mean)[0]

    found = second()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: None)
        expected = second()
    assert_close(found, expected, atol=1e-12 * float(expected.abs().max()))


def test_gradients_of_many_sums_at_once() -> None:
    x = gaussian(30, 3, torch.float64)
    many = torch.randn(4, 30, dtype=torch.float64), torch.randn(4, 30, 30, dtype=torch.float64)
    found = gradients(torch.relu, x, many, is_grads_batched=True)
    for i in range(4):
        alone = gradients(torch.relu, x, (many[0][i], many[1][i]))
        for one, other in zip(found, alone, strict=True):
            assert_close(one[i], other, atol=1e-12)
