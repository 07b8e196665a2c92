"""Properties that hold for every activation, shape and covariance."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import covprop as cp
from covprop.covariance import Diagonal
from tests.cases import CASES, CONTINUOUS, EXACT
from tests.layers import propagate
from tests.oracles import assert_close

ACCURACY = {EXACT: 1e-9, "quadrature": 1e-8}
"""Promised error of a covariance, relative to the standard deviations."""

TINY = 1e-200
"""Below it, intermediate squares have no digits left."""

examples = settings(max_examples=40, derandomize=True, deadline=None)
activations = st.sampled_from(sorted(CASES))
continuous = st.sampled_from(sorted(CONTINUOUS))
methods = st.sampled_from([cp.Exact(), cp.Series(order=1), cp.Series(order=5)])


@dataclass(frozen=True)
class Input:
    """A recipe for a Gaussian, so that a failing example can be read."""

    batch: tuple[int, ...]
    event: tuple[int, ...]
    rank: int
    spread: float
    constants: int
    seed: int

    @property
    def size(self) -> int:
        return torch.Size(self.event).numel()

    def build(self) -> cp.Gaussian:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (*self.batch, self.size)
        factor = torch.randn((*shape, self.rank), dtype=torch.float64, generator=generator)
        factor[..., : self.constants, :] = 0.0  # elements that do not vary
        mean = 2 * torch.randn((*self.batch, *self.event), dtype=torch.float64, generator=generator)
        return cp.Gaussian(mean, self.spread**2 * (factor @ factor.mT) / self.rank)


inputs = st.builds(
    Input,
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    event=st.sampled_from([(1,), (4,), (2, 3), (1, 2, 2), ()]),
    rank=st.integers(1, 7),
    spread=st.sampled_from([1e-4, 0.1, 1.0, 2.0]),
    constants=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
vectors = st.builds(
    Input,
    batch=st.just(()),
    event=st.sampled_from([(2,), (4,), (6,)]),
    rank=st.integers(1, 7),
    spread=st.sampled_from([0.1, 1.0]),
    constants=st.just(0),
    seed=st.integers(0, 1000),
)


def scale_of(x: cp.Gaussian) -> Tensor:
    """Products of standard deviations (*batch, n, n), what a covariance is compared with."""
    stddev = x.covariance.diagonal().clamp(min=0).sqrt().double()
    return stddev[..., :, None] * stddev[..., None, :]


def assert_near(actual: Tensor, expected: Tensor, scale: Tensor, tolerance: float) -> None:
    unit = torch.where(scale > TINY, scale, 1)
    assert_close(actual.double() / unit, expected.double() / unit, atol=tolerance)


@examples
@given(activations, inputs, methods)
def test_covariances_are_symmetric_and_positive_semi_definite(
    name: str, recipe: Input, method: Any
) -> None:
    y = propagate(CASES[name].function, recipe.build(), method)
    matrix = y.covariance_matrix
    assert torch.equal(matrix, matrix.mT)
    assert bool((y.variance >= 0).all())
    scale = scale_of(y)
    unit = torch.where(scale > 0, scale, 1)
    lowest = torch.linalg.eigvalsh(matrix / unit)[..., 0]
    accuracy = ACCURACY[CASES[name].family] if isinstance(method, cp.Exact) else 1e-13
    assert bool((lowest >= -accuracy * recipe.size).all())


@examples
@given(activations, inputs, methods)
def test_what_does_not_vary_stays_the_function_of_its_mean(
    name: str, recipe: Input, method: Any
) -> None:
    x = recipe.build()
    y = propagate(CASES[name].function, x, method)
    still = x.variance == 0
    # torch's own gelu loses digits in the tail.
    assert_close(y.mean[still], CASES[name].function(x.mean)[still], rtol=1e-12, atol=1e-14)
    flat = still.reshape(*x.batch_shape, -1)
    assert not y.covariance_matrix[flat].any()
    assert not y.covariance_matrix.mT[flat].any()


@examples
@given(activations, inputs, methods)
def test_a_batch_is_a_loop(name: str, recipe: Input, method: Any) -> None:
    x = recipe.build()
    y = propagate(CASES[name].function, x, method)
    assert (y.batch_shape, y.event_shape) == (recipe.batch, recipe.event)
    count = x.batch_shape.numel()
    mean = x.mean.reshape(count, *recipe.event)
    matrix = x.covariance_matrix.reshape(count, recipe.size, recipe.size)
    for b in range(count):
        alone = propagate(CASES[name].function, cp.Gaussian(mean[b], matrix[b]), method)
        assert_close(y.mean.reshape(count, *recipe.event)[b], alone.mean, rtol=1e-9, atol=1e-9)
        got = y.covariance_matrix.reshape(count, recipe.size, recipe.size)[b]
        assert_near(got, alone.covariance_matrix, scale_of(alone), 1e-9)


@examples
@given(activations, vectors, methods, st.randoms(use_true_random=False))
def test_elements_may_change_places_and_be_left_out(
    name: str, recipe: Input, method: Any, random: Any
) -> None:
    x = recipe.build()
    order = random.sample(range(recipe.size), random.randint(1, recipe.size))
    y = propagate(CASES[name].function, x, method)
    moved = cp.Gaussian(x.mean[order], x.covariance_matrix[order][:, order])
    z = propagate(CASES[name].function, moved, method)
    assert_close(z.mean, y.mean[order], rtol=1e-9, atol=1e-9)
    assert_near(z.covariance_matrix, y.covariance_matrix[order][:, order], scale_of(z), 1e-9)


@examples
@given(vectors, st.integers(1, 5), st.integers(0, 1000))
def test_a_linear_map_commutes_with_propagation(recipe: Input, rows: int, seed: int) -> None:
    x = recipe.build()
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn((rows, recipe.size), dtype=torch.float64, generator=generator)
    y = propagate(lambda x: torch.nn.functional.linear(x, matrix) + 3, x)
    assert_close(y.mean, matrix @ x.mean + 3, atol=1e-13)
    magnitude = matrix.abs() @ x.covariance_matrix.abs() @ matrix.abs().mT
    expected = matrix @ x.covariance_matrix @ matrix.mT
    assert_near(y.covariance_matrix, expected, magnitude, 1e-14)


@examples
@given(vectors, st.floats(1e-3, 1e3))
def test_relu_is_homogeneous(recipe: Input, factor: float) -> None:
    x = recipe.build()
    y = propagate(torch.relu, x)
    z = propagate(lambda x: torch.relu(factor * x), x)
    assert_close(z.mean, factor * y.mean, rtol=1e-12, atol=1e-300)
    assert_near(z.covariance_matrix, factor**2 * y.covariance_matrix, scale_of(z), 1e-9)


@examples
@given(vectors, st.sampled_from(["tanh", "erf", "sin", "softsign", "sign", "softshrink(0.5)"]))
def test_an_odd_function_keeps_its_covariance_when_the_sign_changes(
    recipe: Input, name: str
) -> None:
    x = recipe.build()
    y = propagate(CASES[name].function, x)
    z = propagate(lambda x: CASES[name].function(-x), x)
    assert_close(z.mean, -y.mean, atol=1e-9)
    assert_near(z.covariance_matrix, y.covariance_matrix, scale_of(y), 1e-9)


@examples
@given(activations, inputs, methods)
def test_independent_inputs_stay_independent(name: str, recipe: Input, method: Any) -> None:
    x = recipe.build()
    variances = x.covariance.diagonal()
    diagonal = propagate(CASES[name].function, cp.Gaussian(x.mean, Diagonal(variances)), method)
    full = cp.Gaussian(x.mean, torch.diag_embed(variances))
    dense = propagate(CASES[name].function, full, method)
    assert isinstance(diagonal.covariance, Diagonal)
    # torch rounds a vector's last entries, and those of a strided one, in their own way
    assert_close(diagonal.mean, dense.mean, rtol=1e-13, atol=1e-16)
    assert_close(diagonal.variance, dense.variance, rtol=1e-13)
    assert_near(dense.covariance_matrix, diagonal.covariance_matrix, scale_of(dense), 1e-14)


@examples
@given(continuous, vectors, methods)
def test_float32_is_near_float64(name: str, recipe: Input, method: Any) -> None:
    x = recipe.build().to(torch.float32)
    y = propagate(CASES[name].function, x, method)
    assert y.dtype == y.covariance_matrix.dtype == torch.float32
    z = propagate(CASES[name].function, x.to(torch.float64), method)
    assert_close(y.mean.double(), z.mean, rtol=1e-6, atol=1e-6)
    resolved = (z.variance + 1e-4 * x.variance).sqrt()  # float32 cannot resolve a nearly constant g
    assert_near(y.covariance_matrix, z.covariance_matrix, resolved.outer(resolved), 2e-5)


@examples
@given(activations, inputs, methods)
def test_what_was_given_is_untouched(name: str, recipe: Input, method: Any) -> None:
    x = recipe.build()
    mean, matrix = x.mean.clone(), x.covariance_matrix.clone()
    propagate(CASES[name].function, x, method)
    assert torch.equal(x.mean, mean)
    assert torch.equal(x.covariance_matrix, matrix)


@examples
@given(activations, vectors)
def test_a_long_series_is_exact_for_moderate_correlations(name: str, recipe: Input) -> None:
    x = recipe.build()
    kept = torch.diag(x.variance)
    x = cp.Gaussian(x.mean, (x.covariance_matrix + kept) / 2)  # correlations up to one half
    exact = propagate(CASES[name].function, x)
    series = propagate(CASES[name].function, x, cp.Series(order=40))
    tolerance = ACCURACY[CASES[name].family]
    assert_close(series.mean, exact.mean, rtol=0.0)
    assert_near(series.covariance_matrix, exact.covariance_matrix, scale_of(exact), tolerance)
