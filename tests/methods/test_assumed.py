"""Assumed density filtering: variances as if everything were independent, in O(n)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import covprop as cp
from covprop.covariance import Diagonal
from tests.architectures import ARCHITECTURES
from tests.cases import CASES
from tests.largest import Largest
from tests.layers import propagate
from tests.oracles import assert_close
from tests.rules.linear_cases import BATCH, LINEAR_CASES, LinearCase

D = torch.float64
ADF = cp.AssumedDensity()


def independent(*shape: int, batch_dims: int = 0) -> cp.Gaussian:
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(shape, dtype=D, generator=generator)
    variance = torch.rand(shape, dtype=D, generator=generator) + 0.1
    return cp.Gaussian.diagonal(mean, variance=variance, batch_dims=batch_dims)


ONE_STEP = [
    case
    for case in LINEAR_CASES
    if not case.alias
    and not any(word in case.label for word in ("reflect", "replicate", "scatter_add: both"))
]
"""Copies count as independent: not paddings that copy before a convolution, and no x + x."""


@torch.no_grad()
@pytest.mark.parametrize("case", ONE_STEP, ids=lambda case: case.label)
def test_one_linear_operation_has_the_variances_of_exact(case: LinearCase) -> None:
    x = independent(BATCH, *case.event, batch_dims=1)
    got, want = propagate(case.function, x, ADF), propagate(case.function, x)
    many = isinstance(want, list | tuple)
    for y, z in zip(got if many else [got], want if many else [want], strict=True):
        if isinstance(z, cp.Gaussian):
            assert_close(y.mean, z.mean, rtol=1e-12, atol=1e-12)
            assert_close(y.variance, z.variance, rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_one_activation_has_the_moments_of_exact(name: str) -> None:
    x = independent(5)
    y, z = propagate(CASES[name].function, x, ADF), propagate(CASES[name].function, x)
    assert isinstance(y.covariance, Diagonal)
    assert_close(y.mean, z.mean, rtol=1e-12, atol=1e-14)
    assert_close(y.variance, z.variance, rtol=1e-9, atol=1e-14)


@torch.no_grad()
def test_products_sums_and_maxima_of_independent_tensors_are_right() -> None:
    x = independent(2, 4)
    for function in (
        lambda x: x[0] * x[1],
        lambda x: x[0] - 2 * x[1],
        lambda x: torch.maximum(x[0], x[1]),
        lambda x: torch.square(x[0]),
        lambda x: torch.cat([x[0], x[1] + 1]),
    ):
        y, z = propagate(function, x, ADF), propagate(function, x)
        assert_close(y.mean, z.mean, rtol=1e-12)
        assert_close(y.variance, z.variance, rtol=1e-11)


@torch.no_grad()
def test_a_matrix_product_of_independent_tensors_is_right() -> None:
    a, b = (
        independent(3, 4),
        cp.Gaussian.diagonal(torch.randn(4, 2).double(), variance=torch.rand(4, 2).double()),
    )
    y, z = propagate(torch.matmul, a, b, ADF), propagate(torch.matmul, a, b)
    assert_close(y.mean, z.mean, rtol=1e-12)
    assert_close(y.variance, z.variance, rtol=1e-11)


@torch.no_grad()
def test_a_contraction_to_one_number_for_each_of_a_batch_is_right() -> None:
    a, b = (independent(2, 3, batch_dims=1) + offset for offset in (0, 1))

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,bi->b", a, b)

    y, z = propagate(dot, a, b, ADF), propagate(dot, a, b)
    assert_close(y.mean, z.mean, rtol=1e-12)
    assert_close(y.variance, z.variance, rtol=1e-11)
    sketched = cp.propagate(dot, a, b, method=cp.Sketched(1024))
    assert_close(sketched.mean, z.mean, rtol=1e-9)
    error = (sketched.covariance_matrix - z.covariance_matrix).abs()
    assert bool((error <= 5 * sketched.covariance_stderr).all())


@torch.no_grad()
def test_dependence_is_left_out() -> None:
    x = independent(3)
    assert_close(propagate(lambda x: (x + 0) + x * 1.0, x, ADF).variance, 2 * x.variance)
    twice = propagate(lambda x: x.repeat(2).sum(), x, ADF)
    assert_close(twice.variance, 2 * x.variance.sum())


@torch.no_grad()
def test_the_correlations_of_the_input_are_left_out_and_the_result_is_diagonal() -> None:
    full = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=D)
    y = propagate(torch.sum, cp.Gaussian(torch.zeros(2, dtype=D), full), ADF)
    assert float(y.variance) == pytest.approx(2.0)
    x = independent(3)
    y = propagate(torch.relu, x, ADF)
    again = propagate(lambda x: x @ torch.ones(3, 3, dtype=D), y)
    assert not isinstance(again.covariance, Diagonal)  # exact from here on


@torch.no_grad()
def test_memory_is_linear_in_the_number_of_features() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Dropout(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).double().eval()  # fmt: skip
    most = []
    for side in (32, 64):
        with Largest() as largest:
            propagate(model, independent(1, 1, side, side, batch_dims=1), ADF)
        most.append(largest.nbytes // 8)
    assert most[1] <= 5 * most[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_goes_through(name: str) -> None:
    model = ARCHITECTURES[name].build()
    x = independent(2, *ARCHITECTURES[name].shape, batch_dims=1)
    x = cp.Gaussian.diagonal(x.mean, variance=1e-4 * x.variance, batch_dims=1)
    y = propagate(model, x, ADF)
    assert isinstance(y.covariance, Diagonal)
    assert_close(y.mean, model(x.mean), atol=0.05)
    assert bool((y.variance > 0).all())


def test_dropout_adds_its_noise() -> None:
    x = independent(2, 3)
    y = propagate(lambda x: F.dropout(x, 0.25, True), x, ADF)
    assert_close(y.variance, propagate(lambda x: F.dropout(x, 0.25, True), x).variance)
