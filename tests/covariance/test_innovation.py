"""What an operation adds, seen from the outputs, against its covariance written out."""

import pytest
import torch
from torch import Tensor

from covprop.covariance.innovation import Innovation, Pairs
from tests.oracles import assert_close

N = 7


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("held", "fewest"), [(2**18, 32), (40, 1), (40, 10**6)])
def test_rows_see_the_covariance_however_it_is_cut(
    batch: tuple[int, ...], held: int, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R_ij = sum_rs P_rsi P_rsj off the diagonal, P = sum_t w_t A_t B_t, and T^T T beside."""
    monkeypatch.setattr("covprop.covariance.innovation.HELD", held)
    monkeypatch.setattr("covprop.covariance.innovation.FEWEST", fewest)
    terms = [
        Pairs(numbers(*batch, N, seed=t), numbers(*batch, 2, N, seed=t + 9),
              numbers(*batch, 3, N, seed=t + 18))
        for t in range(2)
    ]  # fmt: skip
    variance, columns = numbers(*batch, N, seed=30).square(), numbers(*batch, 4, N, seed=31)
    products = sum(torch.einsum("...i,...ri,...si->...rsi", *term) for term in terms)
    matrix = torch.einsum("...rsi,...rsj->...ij", products, products)
    matrix = torch.diagonal_scatter(matrix, variance, dim1=-2, dim2=-1) + columns.mT @ columns
    rows = numbers(*batch, 5, N, seed=32)
    found = Innovation(variance, tuple(terms), columns).quadratic(rows)
    assert_close(found, rows @ matrix @ rows.mT, atol=1e-10)
