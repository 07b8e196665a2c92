"""Moments from blocks against the same moments from everything at once."""

import pytest
import torch
from torch import Tensor

from covprop.methods.streaming import Moments, Replicates
from tests.oracles import assert_close

D = torch.float64


def draws(count: int = 60, batch: tuple[int, ...] = (2,), offset: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn((count, *batch, 3), dtype=D, generator=generator)
    return offset + normal @ torch.tensor([[1, 2, 0], [0, 1, 0.5], [0, 0, 1]], dtype=D).exp() / 3


def in_blocks(values: Tensor, sizes: list[int], opposite: Tensor | None = None) -> Moments:
    parts = values.split(sizes)
    others = [None] * len(parts) if opposite is None else opposite.split(sizes)
    total = Moments()
    for both in zip(parts, others, strict=True):
        total.add(*both)
    return total


def expected(groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, covariance and standard errors of independent groups (count, size, *batch, m)."""
    count = len(groups)
    centre = groups.mean((0, 1))
    d = groups - centre
    w = (d[..., :, None] * d[..., None, :]).mean(1)  # of each group
    inner = groups.mean(1) - centre
    of_mean = (inner[..., :, None] * inner[..., None, :]).sum(0) / (count * (count - 1))
    covariance = w.mean(0) + of_mean
    mean_error = of_mean.diagonal(dim1=-2, dim2=-1).sqrt()
    return centre, covariance, mean_error, (w.var(0, correction=0) / (count - 1)).sqrt()


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 50, 3], [59, 1]])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
def test_single_samples(sizes: list[int], offset: float) -> None:
    values = draws(offset=offset)
    mean, covariance, error = in_blocks(values, sizes).result()
    want = expected(values[:, None])
    rounding = 1e-12 if offset < 10 else 1e-7  # what the samples themselves have lost
    assert error.samples == 60
    for got, value in zip((mean, covariance, error.mean, error.covariance), want, strict=True):
        assert_close(got, value, rtol=rounding)
    flat = values[:, 0]
    assert_close(covariance[0], torch.cov(flat.mT), rtol=rounding)


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 50, 3]])
def test_antithetic_pairs(sizes: list[int]) -> None:
    values = draws()
    opposite = 6.5 - values + 0.1 * values.square()
    mean, covariance, error = in_blocks(values, sizes, opposite).result()
    want = expected(torch.stack([values, opposite], 1))
    assert error.samples == 120
    for got, value in zip((mean, covariance, error.mean, error.covariance), want, strict=True):
        assert_close(got, value, rtol=1e-11)


@pytest.mark.parametrize("length", [2, 6, 30])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
def test_replicates(length: int, offset: float) -> None:
    groups = draws(offset=offset).reshape(-1, length, 2, 3)
    tally = Replicates()
    for group in groups:
        for block in group.split([1, length - 1]):
            tally.add(block)
        tally.close()
    mean, covariance, error = tally.result()
    rounding = 1e-11 if offset < 10 else 1e-7
    assert error.samples == 60
    for got, value in zip(
        (mean, covariance, error.mean, error.covariance), expected(groups), strict=True
    ):
        assert_close(got, value, rtol=rounding)


def test_replicates_that_hardly_differ_have_small_errors() -> None:
    one = draws(count=40)
    change = draws(count=10, offset=0.0)[:, None]
    groups = one * (1 + 1e-9 * change)  # (10, 40, 2, 3)
    tally = Replicates()
    for group in groups:
        tally.add(group)
        tally.close()
    error = tally.result()[2]
    want = expected(groups)
    assert_close(error.covariance, want[3], rtol=1e-3)
    assert_close(error.mean, want[2], rtol=1e-3)


def test_the_mean_of_the_covariance_is_the_covariance() -> None:
    """Unbiased also for groups of a few, whose mean is uncertain."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn((4, 20_000, 1), dtype=D, generator=generator)
    for sign, truth in ((1.0, 1.0), (-1.0, 1.0)):  # pairs that move together, and against
        moments = Moments()
        moments.add(z, sign * z)
        found = moments.result()[1][:, 0, 0]
        error = found.std() / len(found) ** 0.5
        assert abs(float(found.mean() - truth)) < 5 * float(error)
