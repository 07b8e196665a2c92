"""What another machine rounds differently: the last bits of inputs, and those of every product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import covprop as cp
from covprop.covariance import Covariance, Dense, LinearMap
from tests.another_blas import AnotherBLAS
from tests.architectures import ARCHITECTURES
from tests.cases import CASES
from tests.covariance.test_structures import BATCHES, STRUCTURES
from tests.gaussians import numbers
from tests.layers import propagate
from tests.oracles import assert_close

EPS = torch.finfo(torch.float64).eps


def asymmetric(matrix: Tensor, seed: int = 0) -> Tensor:
    """Each entry the one given, or the next number above or below it, at random."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(-1, 2, matrix.shape, generator=generator)
    beside = torch.nextafter(matrix, torch.where(step > 0, torch.inf, -torch.inf).to(matrix))
    result = torch.where(step == 0, matrix, beside)
    assert matrix.shape[-1] == 1 or not torch.equal(result, result.mT)
    return result


def covariance(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    factor = numbers(size, size + 1).to(dtype)
    return 0.01 * asymmetric(factor @ factor.mT / size)


def is_symmetric(y: Any) -> bool:
    return torch.equal(y.covariance_matrix, y.covariance_matrix.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("wrapped", [Dense, lambda matrix: matrix], ids=["Dense", "tensor"])
def test_a_gaussian_symmetrises_what_it_is_given(
    dtype: torch.dtype, validate: bool, wrapped: Callable[[Tensor], Any]
) -> None:
    matrix = covariance(5, dtype)
    if wrapped is Dense and not validate:
        return  # what the library makes, which sees to it before
    x = cp.Gaussian(torch.zeros(5, dtype=dtype), wrapped(matrix), validate_args=validate)
    assert is_symmetric(x)
    assert_close(x.covariance_matrix, (matrix + matrix.mT) / 2, rtol=0.0)


def test_a_symmetric_matrix_is_not_copied() -> None:
    matrix = covariance(5)
    matrix = (matrix + matrix.mT) / 2
    assert cp.Gaussian(torch.zeros(5).double(), matrix).covariance_matrix is matrix


def test_gradients_by_the_covariance_are_symmetric_whatever_its_last_bits() -> None:
    """Of an entry and its mirror image: the result knows their mean alone."""
    for matrix in (covariance(4), (covariance(4) + covariance(4).mT) / 2):
        matrix.requires_grad_()
        y = propagate(torch.relu, cp.Gaussian(numbers(4), matrix))
        (gradient,) = torch.autograd.grad(y.covariance_matrix[0, 1] + y.mean.sum(), matrix)
        assert torch.equal(gradient, gradient.mT)


@pytest.mark.parametrize("name", CASES)
def test_activations_of_asymmetric_input_are_symmetric(name: str) -> None:
    case = CASES[name]
    matrix = covariance(6)
    results = [
        propagate(case.function, cp.Gaussian(numbers(6), given, validate_args=False))
        for given in (matrix, (matrix + matrix.mT) / 2)
    ]
    assert all(is_symmetric(y) for y in results)
    size = results[1].variance.amax()
    # Moments are smooth in the covariance: its last bit moves them by their condition number,
    # here at most one over its smallest eigenvalue, times epsilon.
    condition = float(torch.linalg.cond((matrix + matrix.mT) / 2))
    assert_close(results[0].mean, results[1].mean, atol=8 * condition * EPS)
    atol = 8 * condition * EPS * float(1 + size)
    assert_close(results[0].covariance_matrix, results[1].covariance_matrix, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ResNet, basic", "U-Net", "VGG", "MobileNet", "gated MLP", "ViT"])
def test_whole_networks_give_symmetric_covariances(name: str) -> None:
    """With asymmetric input, and with products that are rounded in other ways."""
    architecture = ARCHITECTURES[name]
    mean = numbers(*architecture.shape)[None]
    x = cp.Gaussian(mean, covariance(mean.numel())[None])
    y = propagate(architecture.build(), x)
    with AnotherBLAS():
        z = propagate(architecture.build(), x)
    for result in (y, z):
        assert is_symmetric(result)
        assert float(result.variance.min()) >= 0
    deviation = float(y.stddev.max())
    # Sums of up to 2,000 products in each of a dozen layers, of what is a hundred times its result.
    assert_close(z.stddev, y.stddev, atol=2_000 * 12 * 100 * EPS * deviation)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", STRUCTURES)
def test_every_matrix_of_a_structure_is_symmetric(name: str, batch: tuple[int, ...]) -> None:
    structure = STRUCTURES[name](batch)
    with AnotherBLAS():
        weight = numbers(4, structure.size)
        wide = numbers(9, structure.size)
        index = torch.tensor([3, 1, 1, 0])
        made: dict[str, Covariance | Tensor] = {
            "itself": structure,
            "push": structure.push(_times(weight)),
            "push to more": structure.push(_times(wide)),
            "take": structure.take(index),
            "scale": structure.scale(numbers(*batch, structure.size)),
            "plus": structure.plus(torch.ones(*batch, structure.size).double()),
            "quadratic": structure.quadratic(numbers(*batch, 4, structure.size)),
            "conditioned": structure.conditioned(index[:1], index[2:], None)[1],
        }
        for operation, result in made.items():
            matrix = result if isinstance(result, Tensor) else result.matrix()
            assert torch.equal(matrix, matrix.mT), operation


def _times(weight: Tensor) -> LinearMap:
    return LinearMap(lambda t: t @ weight.mT, torch.Size((weight.shape[-1],)), leading=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "method",
    [cp.Exact(), cp.Series(), cp.AssumedDensity(), cp.Wu2019(), cp.Linearized(), cp.Unscented(),
     cp.MonteCarlo(50), cp.Sketched(16), cp.Split(3), cp.ControlVariate(128)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_results_of_every_method_are_symmetric(method: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)).double()
    x = cp.Gaussian(numbers(6), covariance(6))
    with AnotherBLAS():
        assert is_symmetric(propagate(model, x, method=method))
