"""Compiled products, slices and power series against sums in float64, for every instruction set."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from covprop.kernels import compiled, products
from covprop.kernels.polynomials import power_series
from covprop.kernels.products import matmul, slices_of

pytestmark = [
    pytest.mark.skipif(compiled.library() is None, reason="no compiler was found"),
    pytest.mark.usefixtures("instructions"),
    pytest.mark.parametrize("dtype", [torch.float32, torch.float64]),
]
SIZES = (1, 7, 33, 130, 270)
"""Below, beside and beyond tiles of 4 to 8 rows, strips of 8 to 32 columns and parts of 256."""


@pytest.fixture(autouse=True)
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones as well; what torch would do is an error."""
    monkeypatch.setattr(products, "COMPILED", 1)
    monkeypatch.setattr(products, "_slices", None)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_sum(found: Tensor, expected: Tensor, size: Tensor, terms: int) -> None:
    """A sum of so many products of at most four factors: size is that of absolute values."""
    assert found.shape == expected.shape
    bound = (terms + 4) * torch.finfo(found.dtype).eps * size
    assert bool(((found - expected).abs() <= bound).all())


@pytest.mark.parametrize("terms", SIZES)
def test_a_product_is_the_sum_of_products(dtype: torch.dtype, terms: int) -> None:
    for rows, columns in itertools.product(SIZES, SIZES):
        a, b = normal(rows, terms, dtype=dtype), normal(terms, columns, dtype=dtype, seed=1)
        expected, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        across, down = a.mT.contiguous().mT, b.mT.contiguous().mT
        for left, right in ((a, b), (across, b), (a, down), (a[:, ::2], b[::2])):
            if left.shape[1] < terms:
                expected, size = left.double() @ right.double(), left.abs() @ right.abs()
            assert_sum(matmul(left, right), expected, size, terms)


def test_batches_have_their_own_matrices_or_one(dtype: torch.dtype) -> None:
    a, b = normal(2, 3, 20, 30, dtype=dtype), normal(2, 3, 30, 40, dtype=dtype, seed=1)
    for right in (b, b[0, 0], b[:, :1]):
        expected, size = a.double() @ right.double(), a.abs() @ right.abs()
        assert_sum(matmul(a, right), expected, size, 30)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_slices_are_those_of_the_tensor(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    """T = 1/2 sum over the 6 orders of e w q and r e e, written out."""
    for count, n, m in ((1, 1, 2), (5, 7, 33), (70, 33, 9)):
        x = normal(*batch, 4, count, n, dtype=dtype)
        z = normal(*batch, 4, count, m, dtype=dtype, seed=1)
        wide = torch.cat([x, z], dim=-1).double()
        totals = [torch.zeros(*batch, n, m, dtype=torch.float64) for _ in range(2)]
        for total, t in zip(totals, (wide, wide.abs()), strict=True):
            e, w, q, r = t.unbind(-3)
            for factors in ((e, w, q), (r, e, e)):
                for one, two, three in itertools.permutations(factors):
                    left = (one * two)[..., :n] / 2
                    total += torch.einsum("...ri,...rj->...ij", left, three[..., n:])
        assert_sum(slices_of(x, x, z), totals[0], totals[1], 6 * count)


def test_several_parts_of_rows_and_of_terms(dtype: torch.dtype) -> None:
    x = normal(4, 150, 270, dtype=dtype)
    e, w, q, r = x.double().unbind(0)
    expected = (w * q + 2 * r * e).mT @ e + (e * q).mT @ w + (e * w).mT @ q + (e * e).mT @ r
    e, w, q, r = x.double().abs().unbind(0)
    size = (w * q + 2 * r * e).mT @ e + (e * q).mT @ w + (e * w).mT @ q + (e * e).mT @ r
    assert_sum(slices_of(x, x, x), expected, size, 4 * 150)


def test_a_power_series_is_its_sum(dtype: torch.dtype) -> None:
    for rows, columns, orders in ((1, 1, 1), (5, 70, 4), (40, 130, 9)):
        rho = normal(2, rows, columns, dtype=dtype).tanh()
        left = normal(orders, 3, 2, rows, 1, dtype=dtype)
        right = normal(orders, 3, 2, 1, columns, dtype=dtype, seed=1)
        terms = torch.stack(
            [rho.double() ** k * left[k].double() * right[k].double() for k in range(orders)]
        )
        found = power_series(rho.expand(3, 2, rows, columns), left, right)
        # Horner's rule rounds a product and a sum for each order above.
        assert_sum(found, terms.sum(0), terms.abs().sum(0), 2 * orders)
        one = power_series(rho[0], left[:, 0, 0], right[:, 0, 0])
        assert torch.equal(one, found[0, 0])


def test_threads_change_nothing(dtype: torch.dtype) -> None:
    x, matrix = normal(4, 100, 600, dtype=dtype), normal(600, 600, dtype=dtype)
    found = []
    for count in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        found.append((slices_of(x, x, x), matmul(x, matrix)))
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_what_is_no_number_stays_so(dtype: torch.dtype) -> None:
    a, b = normal(20, 30, dtype=dtype), normal(30, 20, dtype=dtype)
    a[3, 4] = math.nan
    assert bool(matmul(a, b)[3].isnan().all())
    assert not bool(matmul(a, b)[:3].isnan().any())
