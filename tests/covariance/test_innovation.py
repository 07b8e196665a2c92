"""What an operation adds, seen from the outputs, against its covariance written out."""

import pytest
import torch

from covprop.carriers.innovation import Innovation, Pairs, joint_quadratic
from tests.gaussians import numbers
from tests.oracles import assert_close

N = 7


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("held", "fewest"), [(2**18, 32), (40, 1), (40, 10**6)])
def test_rows_see_the_covariance_however_it_is_cut(
    batch: tuple[int, ...], held: int, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R_ij = sum_rs P_rsi P_rsj off the diagonal, P = sum_t w_t A_t B_t, and T^T T beside."""
    monkeypatch.setattr("covprop.carriers.innovation.HELD", held)
    monkeypatch.setattr("covprop.carriers.innovation.SMALLEST_BLOCK", fewest)
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


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("held", [2**18, 40])
def test_innovations_of_the_same_noise_are_seen_together(
    batch: tuple[int, ...], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum of e^T M_l e' over both: rows of one name have one noise, others their own."""
    monkeypatch.setattr("covprop.carriers.innovation.HELD", held)
    names = {-1: slice(0, 2), 4: slice(2, 5), 7: slice(5, 6)}
    parts, total, alone = [], torch.zeros(()).double(), torch.zeros(()).double()
    for seed, layout in ((0, ((-1, 2), (4, 3))), (50, ((-1, 2), (7, 1)))):
        size = sum(count for _, count in layout)
        pair = Pairs(
            numbers(*batch, N, seed=seed), numbers(*batch, size, N, seed=seed + 1),
            numbers(*batch, size, N, seed=seed + 2),
        )  # fmt: skip
        rows, variance = numbers(*batch, 5, N, seed=seed + 3), numbers(*batch, N, seed=seed + 4)
        parts.append((Innovation(variance.square(), (pair,), layout=layout), rows))
        own = torch.einsum("...i,...ri,...si->...rsi", *pair)
        places = torch.cat([torch.arange(6)[names[name]] for name, _ in layout])
        placed = torch.zeros(*batch, 6, 6, N).double()
        placed[..., places[:, None], places, :] = own
        total = total + torch.einsum("...rsi,...pi->...prs", placed, rows)
        rest = variance.square() - own.square().sum((-3, -2))
        alone = alone + torch.einsum("...pi,...i,...qi->...pq", rows, rest, rows)
    expected = torch.einsum("...prs,...qrs->...pq", total, total) + alone
    assert_close(joint_quadratic(parts), expected, atol=1e-10)
