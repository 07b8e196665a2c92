"""Layers wide enough for the series: it, its mixture with the direct formula, and that alone."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import covprop as cp
from covprop.activations import Activation
from covprop.activations.correlated import LADDER, Correlated
from covprop.covariance import Dense
from covprop.kernels import compiled as kernels
from covprop.kernels import polynomials
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.rules.elementwise import find_activation
from tests.oracles import assert_close, evaluate, normal_rule, pair_covariance

both_kernels = pytest.mark.usefixtures("both_kernels")

UNITS = 160
SIZES = torch.linspace(2, 0.2, UNITS, dtype=torch.float64)[:, None] / 120**0.5
ZERO = torch.zeros((), dtype=torch.float64)
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], dict[str, object], tuple[float, ...]]] = {
    "relu": (torch.relu, {}, (0.0,)),
    "leaky_relu": (F.leaky_relu, {"negative_slope": 0.2}, (0.0,)),
    "hardtanh": (F.hardtanh, {}, (-1.0, 1.0)),
    "heaviside": (torch.heaviside, {"values": ZERO}, (0.0,)),
    "erf": (torch.erf, {}, ()),
    "gelu": (F.gelu, {}, ()),
    "tanh": (torch.tanh, {}, ()),
    "silu": (F.silu, {}, ()),
}
BY_QUADRATURE = ("tanh", "silu")
every_function = pytest.mark.parametrize("name", FUNCTIONS)
ROUNDING = 1e-14
"""Relative to the deviations of the inputs: a flat function has no others to speak of."""
FAR = (-40.0, -15.0, -6.0, 6.0, 15.0, 40.0)


def make(name: str) -> Activation:
    function, options, _ = FUNCTIONS[name]
    return find_activation(function, **options)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weak() -> Tensor:
    """Correlations to about 0.4."""
    return SIZES * numbers(UNITS, 120, seed=1)


def mixed() -> Tensor:
    """The same, but for copies, negatives, near copies and constants."""
    rows = weak()
    rows[10], rows[11], rows[12] = rows[0], -rows[1], 2 * rows[2]
    rows[13], rows[14] = rows[3] + 1e-4 * rows[4], rows[5] - 1e-9 * rows[6]
    rows[15], rows[16] = rows[7] + rows[8], rows[7] + 0.2 * rows[9]
    rows[17:19] = 0
    return rows


def strong() -> Tensor:
    """Correlations mostly above 0.8, with copies, negatives and constants."""
    rows = SIZES * (numbers(1, 120, seed=2) + 0.3 * numbers(UNITS, 120, seed=3))
    rows[10], rows[11], rows[17:19] = rows[0], -rows[1], 0
    return rows


LAYERS = {"weak": weak, "mixed": mixed, "strong": strong}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def inputs(layer: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Means from -40 to 40 sigma, most of them within 2, and a covariance of unequal sizes."""
    rows = LAYERS[layer]()
    matrix = (rows @ rows.mT).to(dtype)
    mean = numbers(UNITS, seed=4) * matrix.diagonal().double().sqrt()
    mean[20 : 20 + len(FAR)] = torch.tensor(FAR).double() * rows.norm(dim=-1)[20 : 20 + len(FAR)]
    mean[10], mean[11] = mean[0], -mean[1]
    return mean.to(dtype), (matrix + matrix.mT) / 2


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """The dimensions of what `direct` was called with: 2 for whole blocks, 1 for picked pairs."""
    request.getfixturevalue("torch_kernels")
    seen: list[int] = []

    def watched(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def direct(self: Correlated, left: object, right: object, covariance: Tensor) -> Tensor:
            if covariance.numel() > UNITS:  # variances of vectors go there, too
                seen.append(covariance.dim())
            elif covariance.dim() == 1 and covariance.numel() < UNITS:
                seen.append(1)
            return plain(self, left, right, covariance)

        return direct

    for kind in {type(make(name)) for name in FUNCTIONS}:
        monkeypatch.setattr(kind, "direct", watched(kind.direct))
    return seen


def directly(activation: Activation, mean: Tensor, matrix: Tensor) -> Tensor:
    """The direct formula for every pair, in float64."""
    assert isinstance(activation, Correlated)
    variance = matrix.diagonal()
    elements = activation.elements(mean, variance)
    off = matrix - torch.diag(variance)
    rows = tuple(element[..., :, None] for element in elements)
    result = activation.direct(rows, tuple(element[..., None, :] for element in elements), off)
    return result.diagonal_scatter(activation.variance(mean, variance))


@cache
def directly_compared(name: str, layer: str, compiled: bool) -> tuple[Tensor, ...]:
    """Mean and covariance of the units that are compared, and the direct formula for them."""
    assert compiled == (kernels.library() is not None)
    part = compared(name)
    mean, matrix = inputs(layer)
    mean, matrix = mean[part], matrix[part][:, part]
    return mean, matrix, directly(make(name), mean, matrix)


def compared(name: str) -> list[int]:
    """The units whose pairs are compared: integrals of all would take long."""
    some = [0, 1, 2, 3, *range(10, 19), *range(20, 20 + len(FAR)), 150]
    return some if name in BY_QUADRATURE else list(range(UNITS))


def allowed(name: str, mean: Tensor, matrix: Tensor, tolerance: float) -> Tensor:
    stddev = matrix.diagonal().double().sqrt()
    return tolerance * deviations(name, mean, matrix) + ROUNDING * stddev[:, None] * stddev


def activated(name: str, mean: Tensor, matrix: Tensor) -> Tensor:
    return cp.Exact().activate(make(name), mean, Dense(matrix))[1].matrix()


def deviations(name: str, mean: Tensor, matrix: Tensor) -> Tensor:
    """sd_i sd_j of the outputs."""
    stddev = make(name).variance(mean.double(), matrix.diagonal().double()).sqrt()
    return stddev[:, None] * stddev[None, :]


SUFFICIENT = {*BY_QUADRATURE, "erf", "gelu"}
"""Functions whose longest series suffices for the mixed layer."""
PATHS: dict[str | tuple[str, str], set[int]] = {
    "weak": set(), "mixed": {1}, "strong": {2},
    # Series of any order, which suffice here.
    ("tanh", "strong"): set(), ("silu", "strong"): set(),
}  # fmt: skip


@every_layer
@every_function
def test_every_path_agrees_with_the_direct_formula(
    name: str, layer: str, shapes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in SUFFICIENT and layer == "mixed":
        monkeypatch.setattr(type(make(name)), "max_order", 16)  # so that it does not suffice
    mean, matrix = inputs(layer)
    result = activated(name, mean, matrix)
    assert set(shapes) == PATHS.get((name, layer), PATHS[layer])
    tolerance = 1e-9 if name in BY_QUADRATURE else 1e-12
    part = compared(name)
    mean, matrix, expected = directly_compared(name, layer, compiled=False)
    difference = (result[part][:, part] - expected).abs()
    assert bool((difference <= allowed(name, mean, matrix, tolerance)).all())


@both_kernels
@every_layer
@every_function
def test_float32_agrees_with_float64(name: str, layer: str) -> None:
    mean, matrix = inputs(layer, torch.float32)
    result = activated(name, mean, matrix)
    assert result.dtype == torch.float32
    expected = activated(name, mean.double(), matrix.double())
    scale = matrix.double().diagonal().sqrt()
    size = scale[:, None] * scale[None, :] if name != "heaviside" else torch.ones(())
    # Rounding of rho near one moves a step's covariance by its root.
    tolerance = 2e-4 if name == "heaviside" else 2e-5
    assert bool(((result - expected).abs() <= tolerance * size).all())


@both_kernels
@every_layer
@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_symmetric_and_positive_semi_definite(
    name: str, layer: str, dtype: torch.dtype
) -> None:
    mean, matrix = inputs(layer, dtype)
    result = activated(name, mean, matrix)
    assert torch.equal(result, result.mT)
    assert bool(torch.isfinite(result).all())
    least = float(torch.linalg.eigvalsh(result.double())[0])
    largest = float(result.diagonal().max())
    # What float32 has rounded is the input, which then is no longer semi-definite either.
    slack = {torch.float32: 2e-5, torch.float64: 1e-9 if name in BY_QUADRATURE else 1e-12}[dtype]
    if name == "heaviside":
        slack = slack**0.5 if dtype is torch.float32 else 1e-7
    assert least >= -slack * UNITS * largest
    assert torch.equal(result[17], result.new_zeros(UNITS)) or layer == "weak"


PAIRS = {"weak": [(30, 40), (50, 60)], "mixed": [(15, 16), (30, 40)], "strong": [(30, 40), (0, 50)]}


@cache
def by_brute_force(name: str, layer: str, i: int, j: int) -> float:
    function, options, kinks = FUNCTIONS[name]
    mean, matrix = inputs(layer)
    stddev = matrix.diagonal().sqrt()
    rho = float(matrix[i, j] / (stddev[i] * stddev[j]))
    means, scales = mean[[i, j]].tolist(), stddev[[i, j]].tolist()
    return pair_covariance(lambda y: function(y, **options), means, scales, rho, kinks)


@both_kernels
@every_layer
@every_function
def test_pairs_agree_with_brute_force(name: str, layer: str) -> None:
    mean, matrix = inputs(layer)
    result, size = activated(name, mean, matrix), deviations(name, mean, matrix)
    for i, j in PAIRS[layer]:
        tolerance = 1e-7 if name == "heaviside" else 1e-9
        expected = by_brute_force(name, layer, i, j)
        assert abs(float(result[i, j]) - expected) <= tolerance * float(size[i, j])


@both_kernels
@pytest.mark.parametrize("layer", ["mixed", "strong"])
@every_function
def test_copies_and_negatives_agree_with_an_integral_over_one_variable(
    name: str, layer: str
) -> None:
    function, options, kinks = FUNCTIONS[name]
    mean, matrix = inputs(layer)
    result, size = activated(name, mean, matrix), deviations(name, mean, matrix)
    for i, j, sign in ((0, 10, 1.0), (1, 11, -1.0)):
        centre, stddev = float(mean[i]), float(matrix[i, i].sqrt())
        cuts = (*kinks, *(-kink for kink in kinks))
        x, weight = normal_rule(centre, stddev, cuts)
        first = evaluate(lambda y: function(y, **options), centre + stddev * x)
        second = evaluate(lambda y: function(y, **options), sign * (centre + stddev * x))
        expected = float((weight * first * second).sum())
        expected -= float((weight * first).sum()) * float((weight * second).sum())
        # Rounding may leave rho at 1 - 1e-16, whose root shows in a step.
        tolerance = 1e-7 if name == "heaviside" else 1e-9
        assert abs(float(result[i, j]) - expected) <= tolerance * float(size[i, j])


@both_kernels
@every_layer
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "silu"])
def test_the_bound_holds_that_the_order_is_chosen_by(name: str, layer: str) -> None:
    """|series - exact| <= |rho|^(K+1) r_i r_j sd_i sd_j at every order of the ladder.

    The last coefficients stand for those beyond them, which may be somewhat larger.
    """
    activation = make(name)
    assert isinstance(activation, Correlated)
    mean, matrix, exact = directly_compared(name, layer, compiled=kernels.library() is not None)
    variance = matrix.diagonal()
    prepared = activation.prepare(mean, variance, 48, torch.float64)
    inverse, tails, coefficients, units = prepared.elements[:4]
    coefficients = coefficients * units
    size = deviations(name, mean, matrix)
    rounding = allowed(name, mean, matrix, 1e-9 if name in BY_QUADRATURE else 1e-12)
    rho = correlation(matrix, inverse[:, None], inverse[None, :])
    off = ~torch.eye(len(mean), dtype=torch.bool)
    for order, tail in zip([k for k in LADDER if k <= 48], tails, strict=True):
        kept = coefficients[:order]
        series = matrix * polynomials.power_series(rho, kept[:, :, None], kept[:, None, :])
        bound = rho.abs() ** (order + 1) * tail[:, None] * tail[None, :]
        excess = (series - exact).abs() - (2 * bound * size + rounding)
        assert bool((excess[off] <= 0).all()), order
        assert bool((tail <= 1 + 1e-12).all())


@pytest.mark.parametrize("name", ["relu", "hardtanh", "gelu", "tanh"])
def test_gradients_through_the_mixture_agree_with_finite_differences(
    name: str, shapes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in SUFFICIENT:
        monkeypatch.setattr(type(make(name)), "max_order", 16)  # so that it does not suffice
    mean, matrix = inputs("mixed")
    # Directions that keep copies copies, and what is symmetric so.
    weight = numbers(UNITS, UNITS, seed=6)
    weight = (weight + weight.mT) / 2
    generator = mean * 0.3, matrix

    def total(shift: Tensor, scale: Tensor) -> Tensor:
        return (weight * activated(name, mean + shift * generator[0], matrix * scale)).sum()

    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    gradients = torch.autograd.grad(total(shift, scale), (shift, scale))
    assert set(shapes) == {1}
    step = 1e-4
    with torch.no_grad():
        for gradient, (a, b) in zip(gradients, ((step, 0.0), (0.0, step)), strict=True):
            ends = [total(shift + s * a, scale + s * b) for s in (1, -1)]
            difference = (ends[0] - ends[1]) / (2 * step)
            assert_close(gradient, difference, rtol=1e-6, atol=1e-6)


@both_kernels
@pytest.mark.parametrize("name", ["relu", "hardtanh", "tanh"])
def test_gradients_of_the_mixture_are_those_of_the_direct_formula(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, matrix = (tensor.requires_grad_() for tensor in inputs("mixed"))
    weight = numbers(UNITS, UNITS, seed=6)
    found = torch.autograd.grad((weight * activated(name, mean, matrix)).sum(), (mean, matrix))
    if name in BY_QUADRATURE:
        monkeypatch.setattr(type(make(name)), "max_order", 24)
    else:
        monkeypatch.setattr(type(make(name)), "direct_pairs", UNITS**2)
    again = torch.autograd.grad((weight * activated(name, mean, matrix)).sum(), (mean, matrix))
    for one, other in zip(found, again, strict=True):
        assert_close(one, other, atol=1e-8 * float(other.abs().max()))


@pytest.mark.parametrize("distance", [-15.0, -8.0, 8.0, 15.0])
@every_function
@pytest.mark.usefixtures("torch_kernels")
def test_hardly_any_number_in_the_series_is_denormal(
    name: str, distance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are slow, and below anything that counts."""
    tiny = torch.finfo(torch.float32).tiny
    steps: list[Tensor] = []
    plain = polynomials.power_series

    def watched(rho: Tensor, left: Tensor, right: Tensor) -> Tensor:
        total = left[-1] * right[-1]
        for k in reversed(range(len(left) - 1)):
            shrunk, term = total * rho, left[k] * right[k]
            total = shrunk + term
            steps.extend((shrunk, term, total))
        steps.append(plain(rho, left, right))
        return steps[-1]

    monkeypatch.setattr("covprop.activations.correlated.power_series", watched)
    _, matrix = inputs("weak", torch.float32)
    mean = distance * matrix.diagonal().sqrt()
    mean[::3] /= 15  # and units that vary beside those that do not
    for method in (cp.Exact(), cp.Series(order=8)):
        method.activate(make(name), mean, Dense(matrix))
    denormal = sum(int(((step != 0) & (step.abs() < tiny)).sum()) for step in steps)
    count = sum(step.numel() for step in steps)
    assert count > UNITS**2
    # Nearer, some coefficients are just above what is flushed; one in a hundred costs little.
    assert denormal <= (0 if abs(distance) == 15 else 0.005 * count)


def batched(mean: Tensor, matrix: Tensor, batch: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if not batch:
        return mean, matrix
    return torch.stack([mean, mean / 2]), torch.stack([matrix, matrix / 4])


@cache
def in_one_block(name: str, layer: str, batch: tuple[int, ...]) -> Tensor:
    return activated(name, *batched(*inputs(layer), batch))


def results_and_gradients(name: str, batch: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The covariances, the same with and without autograd, and gradients of their sum."""
    mean, matrix = (tensor.requires_grad_() for tensor in batched(*inputs("mixed"), batch))
    result = activated(name, mean, matrix)
    with torch.no_grad():
        assert_close(activated(name, mean, matrix), result, rtol=1e-9, atol=1e-13)
    weighed = (numbers(UNITS, UNITS, seed=6) * result).sum()
    return (result.detach(), *torch.autograd.grad(weighed, (mean, matrix)))


whole_results_and_gradients = cache(results_and_gradients)
"""In one block."""


@both_kernels
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("layer", ["mixed", "strong"])
@pytest.mark.parametrize("block", [1, 1000, 7919])
@pytest.mark.parametrize("name", ["relu", "heaviside", "tanh"])
def test_the_size_of_blocks_changes_rounding_alone(
    name: str, block: int, layer: str, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, matrix = inputs(layer)
    if block == 1:  # a row at a time is slow
        mean, matrix = mean[:40], matrix[:40, :40]
        monkeypatch.setattr(type(make(name)), "direct_pairs", 0)
    size = deviations(name, mean, matrix)
    mean, matrix = batched(mean, matrix, batch)
    expected = in_one_block(name, layer, batch) if block > 1 else activated(name, mean, matrix)
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    difference = (activated(name, mean, matrix) - expected).abs()
    tolerance = 1e-10 if name in BY_QUADRATURE else 1e-13
    assert bool((difference <= tolerance * size + 1e-15).all())


@both_kernels
@pytest.mark.parametrize(
    ("block", "kept", "batch"), [(1000, 0, (2,)), (7919, 0, ()), (7919, 2**30, (2,))]
)
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_the_size_of_blocks_changes_no_gradient(
    name: str, block: int, kept: int, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole_results_and_gradients(name, batch)
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    monkeypatch.setattr("covprop.covariance.dense.KEPT", kept)
    for one, other in zip(results_and_gradients(name, batch), expected, strict=True):
        assert_close(one, other, atol=1e-10 * float(other.abs().max()))


def test_few_units_take_the_direct_formula_alone(shapes: list[int]) -> None:
    mean, matrix = inputs("weak")
    count = math.isqrt(Correlated.direct_pairs)
    activated("relu", mean[:count], matrix[:count, :count])
    assert set(shapes) == {2}
    shapes.clear()
    activated("relu", mean[: count + 1], matrix[: count + 1, : count + 1])
    assert not shapes


@both_kernels
def test_units_of_equal_size_and_no_variance_do_not_disturb_the_others() -> None:
    mean, matrix = inputs("weak")
    wide = torch.zeros(UNITS + 5, UNITS + 5, dtype=torch.float64)
    wide[:UNITS, :UNITS] = matrix
    for name in FUNCTIONS:
        padded = activated(name, F.pad(mean, (0, 5), value=0.5), wide)
        assert_close(padded[:UNITS, :UNITS], activated(name, mean, matrix), atol=1e-13)
        assert not bool(padded[UNITS:].any())
        inverse = inverse_deviation(wide.diagonal())
        assert not bool(inverse[UNITS:].any())
