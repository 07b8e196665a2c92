"""Bad input gets one sentence, and nothing is computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import covprop as cp
from covprop.covariance import Dense, Diagonal
from tests.layers import propagate

SMALL, LARGE = 5, 600
"""Sizes whose eigenvalues are computed, and whose are not."""


def identity(n: int = SMALL, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.eye(n, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape or (SMALL,), dtype=dtype)


def changed(matrix: Tensor, entries: dict[tuple[int, ...], float]) -> Tensor:
    matrix = matrix.clone()
    for index, value in entries.items():
        matrix[index] = value
    return matrix


def indefinite(n: int) -> Tensor:
    """Every pair is a possible one, and all together are not: 1 on the diagonal, -0.9 elsewhere."""
    return 1.9 * identity(n) - 0.9


NAN, INFINITY = float("nan"), float("inf")
BAD: dict[str, tuple[Any, Any, str]] = {
    "mean is a list": ([0.0], identity(1), "the mean must be a tensor, not list"),
    "covariance is a number": (zeros(), 1.0, "must be a tensor or a Covariance, not float"),
    "covariance is a vector": (zeros(), torch.ones(SMALL).double(),
                               r"a covariance has shape \(\*batch, n, n\), not \(5,\); for"),
    "covariance is not square": (zeros(), zeros(5, 4), r"\(\*batch, n, n\), not \(5, 4\)"),
    "too few features": (zeros(), identity(4), "is for 4 features, but the mean has 5"),
    "event not flattened": (zeros(2, 3), identity(3), "for 3 features, but the mean has 6"),
    "other batch": (zeros(3, 2), identity(2).expand(4, 2, 2),
                    r"a batch of shape \(4,\), but the mean has shape \(3, 2\)"),
    "batch without mean": (zeros(2), identity(2).expand(4, 2, 2), "does not begin with it"),
    "structure of another size": (zeros(), Diagonal(zeros(4)), "4 features, but the mean has 5"),
    "not symmetric": (zeros(), changed(identity(), {(0, 1): 0.5}),
                      r"not symmetric \(entries differ by up to 0\.5\); use \(covariance"),
    "not symmetric, large": (zeros(LARGE), changed(identity(LARGE), {(0, 599): 1e-6}),
                             "not symmetric"),
    "negative variance": (zeros(), -identity(), r"negative variance \(-1\)"),
    "negative variance, diagonal": (zeros(), Diagonal(-torch.ones(SMALL).double()),
                                    "negative variance"),
    "negative variance, large": (zeros(LARGE), changed(identity(LARGE), {(7, 7): -1e-3}),
                                 "negative variance"),
    "negative eigenvalue": (zeros(), indefinite(SMALL),
                            r"semi-definite \(an eigenvalue of its correlations is -2\.6\)"),
    "small negative eigenvalue": (
        zeros(2), changed(identity(2), {(0, 1): 1 + 1e-9, (1, 0): 1 + 1e-9}), "semi-definite"),
    "impossible correlation": (zeros(), changed(identity(), {(0, 1): 1.5, (1, 0): 1.5}),
                               "an entry exceeds the product of its two standard deviations"),
    "impossible correlation, large": (
        zeros(LARGE), changed(identity(LARGE), {(3, 500): 1.1, (500, 3): 1.1}), "an entry exceeds"),
    "covariance with a constant, large": (
        zeros(LARGE), changed(identity(LARGE), {(3, 3): 0.0, (500, 3): 0.1, (3, 500): 0.1}),
        "an entry exceeds"),
    "NaN in the mean": (changed(zeros(), {(2,): NAN}), identity(), "the mean has NaN or infinite"),
    "infinite mean": (changed(zeros(), {(2,): -INFINITY}), identity(), "mean has NaN or infinite"),
    "NaN off the diagonal": (zeros(), changed(identity(), {(2, 3): NAN, (3, 2): NAN}),
                             "the covariance has NaN or infinite"),
    "NaN on the diagonal": (zeros(), changed(identity(), {(2, 2): NAN}), "covariance has NaN"),
    "infinite variance": (zeros(), Diagonal(changed(torch.ones(SMALL).double(), {(0,): INFINITY})),
                          "covariance has NaN or infinite"),
    "NaN, large": (zeros(LARGE), changed(identity(LARGE), {(2, 3): NAN}), "covariance has NaN"),
    "one of a batch": (zeros(2, SMALL), torch.stack([identity(), indefinite(SMALL)]),
                       "not positive semi-definite"),
    "integers": (torch.zeros(2, dtype=torch.long), torch.eye(2, dtype=torch.long),
                 r"the mean has dtype torch\.int64; .* \.float\(\) or \.double\(\)"),
    "integer covariance": (zeros(2), torch.eye(2).int(), "covariance has dtype torch.int"),
    "half": (zeros(2, dtype=torch.half), identity(2, torch.half), r"has dtype torch\.float16"),
    "bfloat16": (zeros(2, dtype=torch.bfloat16), identity(2, torch.bfloat16), "float32 or float64"),
    "complex": (zeros(2, dtype=torch.complex64), identity(2, torch.complex64), "complex64"),
    "two dtypes": (zeros(2), identity(2, torch.float32),
                   r"the mean has dtype torch\.float64 and the covariance torch\.float32; convert"),
    "two dtypes, structure": (zeros(2), Dense(identity(2, torch.float32)), "convert one"),
    "two devices": (zeros(2), identity(2).to("meta"), "mean is on cpu and the covariance on meta"),
}  # fmt: skip
STRUCTURAL = [
    "mean is a list", "covariance is a number", "covariance is a vector", "too few features",
    "other batch", "integers", "half", "two dtypes", "two devices",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name: str) -> None:
    mean, covariance, message = BAD[name]
    with pytest.raises(cp.InvalidGaussian, match=message) as caught:
        cp.Gaussian(mean, covariance)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, cp.CovpropError)


@pytest.mark.parametrize("name", STRUCTURAL)
def test_types_and_shapes_are_checked_always(name: str) -> None:
    mean, covariance, message = BAD[name]
    with pytest.raises(cp.InvalidGaussian, match=message):
        cp.Gaussian(mean, covariance, validate_args=False)


@pytest.mark.parametrize(
    "name", ["not symmetric", "negative eigenvalue", "NaN in the mean", "NaN on the diagonal"]
)
def test_values_are_not_checked_on_request(name: str) -> None:
    mean, covariance, _ = BAD[name]
    x = cp.Gaussian(mean, covariance, validate_args=False)
    assert x.mean is mean
    symmetric = (covariance + covariance.mT) / 2
    assert torch.equal(x.covariance_matrix.nan_to_num(), symmetric.nan_to_num())


def factored(n: int, rank: int, dtype: torch.dtype) -> Tensor:
    factor = torch.randn(n, rank, dtype=dtype, generator=torch.Generator().manual_seed(n))
    return factor @ factor.mT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize(("n", "rank"), [(1, 1), (SMALL, 1), (SMALL, SMALL), (200, 3), (LARGE, 2)])
def test_what_rounding_does_is_forgiven(
    n: int, rank: int, scale: float, dtype: torch.dtype
) -> None:
    covariance = scale * factored(n, rank, dtype)
    noise = torch.rand(n, n, dtype=dtype, generator=torch.Generator().manual_seed(1)) - 0.5
    covariance = covariance * (1 + 4 * torch.finfo(dtype).eps * noise)
    assert cp.Gaussian(torch.zeros(n, dtype=dtype), covariance).event_shape == (n,)


@pytest.mark.parametrize("shape", [(SMALL,), (0,), (0, 3), (2, 0)])
def test_the_zero_covariance_and_the_empty_one_are_valid(shape: tuple[int, ...]) -> None:
    x = cp.Gaussian(zeros(*shape), zeros(*shape, shape[-1]))
    assert (*x.batch_shape, *x.event_shape) == shape
    assert not x.variance.any()


@pytest.mark.parametrize(
    "bad", [Dense(1e-12 * indefinite(SMALL)), Dense(-1e-12 * identity()), Diagonal(zeros() - 1e-12)]
)
def test_a_large_neighbour_in_the_batch_excuses_nothing(bad: Dense | Diagonal) -> None:
    good = 1e6 * torch.ones(SMALL).double()
    good = torch.diag(good) if isinstance(bad, Dense) else good
    with pytest.raises(cp.InvalidGaussian, match=r"negative variance|semi-definite"):
        cp.Gaussian(zeros(2, SMALL), bad.map(lambda values: torch.stack([good, values])))


def test_an_output_that_is_not_finite_is_refused() -> None:
    x = cp.Gaussian(zeros(), identity())
    with pytest.raises(cp.MomentOverflow, match="NaN or infinity in the model's weights"):
        propagate(lambda x: x * NAN, x)


CONSTRUCTORS: dict[str, tuple[Any, str]] = {
    "negative stddev": (lambda: cp.Gaussian.isotropic(zeros(), stddev=-0.1), "cannot be negative"),
    "NaN stddev": (lambda: cp.Gaussian.isotropic(zeros(), stddev=NAN), "NaN or infinite"),
    "many stddevs": (lambda: cp.Gaussian.isotropic(zeros(), stddev=torch.ones(SMALL)),
                     r"more than one number .* use cp\.Gaussian\.diagonal"),
    "stddevs of another batch": (
        lambda: cp.Gaussian.isotropic(zeros(3, 2), stddev=torch.ones(2), batch_dims=1),
        "and the noise"),
    "integer mean": (lambda: cp.Gaussian.isotropic(torch.arange(3), stddev=1.0),
                     "dtype torch.int64"),
    "not a tensor": (lambda: cp.Gaussian.isotropic([1.0], stddev=1.0), "must be a tensor"),
    "other shape": (lambda: cp.Gaussian.diagonal(zeros(2, 3), variance=zeros(3)),
                    r"variances have the shape of the mean \(2, 3\), not \(3,\)"),
    "negative variance": (
        lambda: cp.Gaussian.diagonal(zeros(), variance=-torch.ones(SMALL).double()),
        "negative variance"),
    "too many batch dimensions": (
        lambda: cp.Gaussian.diagonal(zeros(2, 3), variance=zeros(2, 3), batch_dims=3),
        "2 dimensions cannot have 3 batch dimensions"),
    "negative batch dimensions": (
        lambda: cp.Gaussian.isotropic(zeros(2, 3), stddev=1.0, batch_dims=-1),
        "-1 batch dimensions"),
    "two dtypes": (lambda: cp.Gaussian.diagonal(zeros(), variance=torch.ones(SMALL)),
                   "convert one"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_check_too(name: str) -> None:
    build, message = CONSTRUCTORS[name]
    with pytest.raises(cp.InvalidGaussian, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)
