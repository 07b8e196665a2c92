"""The nearest covariance to a matrix that is none."""

import pytest
import torch

from covprop.covariance.semidefinite import nearest_semidefinite
from tests.gaussians import covariance_matrix, numbers
from tests.oracles import assert_close

D = torch.float64


def test_a_covariance_stays_as_it_is() -> None:
    for size in (1, 5, 40):
        matrix = covariance_matrix(3, size=size)
        result, lowest = nearest_semidefinite(matrix)
        assert lowest == 0
        assert torch.equal(result, matrix)


def test_a_singular_covariance_stays_as_it_is() -> None:
    factor = numbers(2, 30, 3)
    matrix = factor @ factor.mT
    result, lowest = nearest_semidefinite((matrix + matrix.mT) / 2)
    assert lowest == 0
    assert_close(result, matrix, rtol=1e-12)
    assert nearest_semidefinite(torch.zeros(4, 4, dtype=D))[1] == 0


def test_negative_eigenvalues_go_and_variances_stay() -> None:
    vectors = torch.linalg.qr(numbers(6, 6))[0]
    spectrum = torch.tensor([2.0, 1.0, 0.5, 0.1, 0.0, -0.1], dtype=D)
    indefinite = (vectors * spectrum) @ vectors.mT
    matrix = torch.stack([indefinite, covariance_matrix(size=6)])
    result, lowest = nearest_semidefinite(matrix)
    assert -0.1 < lowest < -0.02
    assert nearest_semidefinite(
        matrix
        * torch.tensor([1e9, 1, 1, 1, 1, 1], dtype=D).outer(
            torch.tensor([1e9, 1, 1, 1, 1, 1], dtype=D)
        )
    )[1] == pytest.approx(lowest)
    assert torch.equal(result[1], matrix[1])
    assert torch.equal(result, result.mT)
    assert float(torch.linalg.eigvalsh(result[0])[0]) >= -1e-14
    diagonals = (m.diagonal(dim1=-2, dim2=-1) for m in (result, matrix))
    assert_close(*diagonals, rtol=1e-12)
    assert float((result[0] - matrix[0]).norm()) <= 0.25  # twice the part that was negative


def test_a_gradient_is_that_of_the_matrix() -> None:
    matrix = torch.tensor([[1.0, 1.5], [1.5, 1.0]], dtype=D, requires_grad=True)
    result, _ = nearest_semidefinite(matrix)
    (gradient,) = torch.autograd.grad(result.sum(), matrix)
    assert torch.equal(gradient, torch.ones_like(matrix))
