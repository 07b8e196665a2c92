"""Every structure behind every door, against the full matrix written out."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from covprop.covariance import Covariance, Deflated, Dense, Diagonal, LinearMap, LowRank
from covprop.covariance.base import symmetric, symmetrised
from tests.oracles import assert_close

BATCHES = [(), (2,), (2, 3)]
N = 6


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def variances(batch: tuple[int, ...]) -> Tensor:
    return numbers(*batch, N).square()


def dense(batch: tuple[int, ...]) -> Dense:
    factor = numbers(*batch, N, N)
    return Dense(symmetric(factor @ factor.mT))


def units(batch: tuple[int, ...]) -> Tensor:
    """Two orthonormal columns."""
    return torch.linalg.qr(numbers(*batch, N, 2, seed=10))[0]


STRUCTURES: dict[str, Callable[[tuple[int, ...]], Covariance]] = {
    "dense": dense,
    "diagonal": lambda batch: Diagonal(variances(batch)),
    "low rank": lambda batch: LowRank(numbers(*batch, N, 2), variances(batch)),
    "a factor alone": lambda batch: LowRank(numbers(*batch, N, 2)),
    "deflated": lambda batch: Deflated(variances(batch), units(batch)),
    "deflated in part": lambda batch: Deflated(
        variances(batch), units(batch) * torch.tensor([0.5, 0.9], dtype=torch.float64)
    ),
    "dense without dependence": lambda batch: Dense(torch.diag_embed(variances(batch))),
}
every_batch = pytest.mark.parametrize("batch", BATCHES)
every_structure = pytest.mark.parametrize("name", STRUCTURES)


def pair(left: Sequence[Tensor], right: Sequence[Tensor], covariance: Tensor) -> Tensor:
    """Any function of two elements and their covariance that is symmetric and 0 at covariance 0."""
    return covariance * torch.exp(left[0] * right[0]) + covariance.square() * (left[1] + right[1])


def paired(matrix: Tensor, elements: Sequence[Tensor], variance: Tensor) -> Tensor:
    """The same written as a loop over the entries."""
    result = torch.zeros_like(matrix)
    for i in range(N):
        for j in range(N):
            c = matrix[..., i, j]
            scale = torch.exp(elements[0][..., i] * elements[0][..., j])
            added = c.square() * (elements[1][..., i] + elements[1][..., j])
            result[..., i, j] = variance[..., i] if i == j else c * scale + added
    return result


@every_structure
@every_batch
def test_the_basic_facts_are_those_of_the_matrix(name: str, batch: tuple[int, ...]) -> None:
    covariance = STRUCTURES[name](batch)
    matrix = covariance.matrix()
    assert matrix.shape == (*batch, N, N)
    assert covariance.batch_shape == batch
    assert covariance.size == N
    assert (covariance.dtype, covariance.device) == (matrix.dtype, matrix.device)
    assert_close(covariance.diagonal(), matrix.diagonal(dim1=-2, dim2=-1), rtol=1e-14)


MATRIX, KERNEL = numbers(N, 4), numbers(3, 2, 3)
MAPS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "matrix": (lambda t: t.flatten(-2) @ MATRIX, True),
    "convolution": (lambda t: F.conv1d(t, KERNEL, padding=1), False),
    "sum": (lambda t: t.sum(-1), True),
    "to a number": (lambda t: t.flatten(-2) @ MATRIX[:, 0], True),
}


@pytest.mark.parametrize("kind", MAPS)
@every_structure
@pytest.mark.parametrize("batch", BATCHES[:2])
def test_push_is_a_product_from_both_sides(name: str, kind: str, batch: tuple[int, ...]) -> None:
    function, leading = MAPS[kind]
    covariance = STRUCTURES[name](batch)
    slope = torch.autograd.functional.jacobian(function, numbers(1, 2, 3)).reshape(-1, N)
    expected = slope @ covariance.matrix() @ slope.mT
    for flag in {leading, False}:
        result = covariance.push(LinearMap(function, torch.Size((2, 3)), flag))
        assert result.batch_shape == batch
        assert_close(result.matrix(), expected, atol=1e-12)
        assert_close(result.matrix(), result.matrix().mT, rtol=0.0)


@every_structure
@every_batch
@pytest.mark.parametrize("index", [range(N), [3, 0, 5], [2, 2, 1], [0, 0, 1, 3], [4], []], ids=repr)
def test_take_leaves_rows_and_columns(
    name: str, batch: tuple[int, ...], index: Sequence[int]
) -> None:
    covariance = STRUCTURES[name](batch)
    chosen = torch.tensor(list(index), dtype=torch.long)
    expected = covariance.matrix()[..., chosen, :][..., :, chosen]
    result = covariance.take(chosen)
    assert result.batch_shape == batch
    assert_close(result.matrix(), expected, rtol=1e-14)  # products of a factor are summed anew


@every_structure
@every_batch
def test_plus_adds_to_the_diagonal(name: str, batch: tuple[int, ...]) -> None:
    covariance, variance = STRUCTURES[name](batch), numbers(*batch, N, seed=8).square()
    expected = covariance.matrix() + torch.diag_embed(variance)
    result = covariance.plus(variance)
    assert_close(result.matrix(), expected, rtol=1e-14, atol=1e-14)  # of a difference, deflated


@every_structure
@every_batch
def test_quadratic_is_a_product_from_both_sides(name: str, batch: tuple[int, ...]) -> None:
    covariance, rows = STRUCTURES[name](batch), numbers(*batch, 4, N, seed=3)
    result = covariance.quadratic(rows)
    assert_close(result, rows @ covariance.matrix() @ rows.mT, rtol=1e-12, atol=1e-12)
    assert_close(result, result.mT, rtol=0.0)


@every_structure
@every_batch
@pytest.mark.parametrize("noise", [None, 0.3])
def test_conditioning_is_a_schur_complement(
    name: str, batch: tuple[int, ...], noise: float | None
) -> None:
    covariance = STRUCTURES[name](batch)
    seen, hidden = torch.tensor([4, 1]), torch.tensor([0, 2, 3, 5])
    error = None if noise is None else noise * torch.eye(2, dtype=torch.float64)
    gain, left = covariance.conditioned(seen, hidden, error)
    matrix = covariance.matrix()
    observed = matrix[..., seen, :][..., :, seen] + (0.0 if error is None else error)
    across = matrix[..., hidden, :][..., :, seen]
    expected = across @ torch.linalg.inv(observed)
    assert_close(gain, expected, rtol=1e-9, atol=1e-9)
    rest = matrix[..., hidden, :][..., :, hidden] - expected @ across.mT
    got = left if isinstance(left, Tensor) else left.matrix()
    assert_close(got, rest, rtol=1e-8, atol=1e-7)  # a rank of zero is left by rounding alone


@every_structure
@every_batch
def test_scale_multiplies_rows_and_columns(name: str, batch: tuple[int, ...]) -> None:
    covariance, factor = STRUCTURES[name](batch), numbers(*batch, N, seed=4)
    expected = torch.diag_embed(factor) @ covariance.matrix() @ torch.diag_embed(factor)
    result = covariance.scale(factor)
    assert_close(result.matrix(), expected, rtol=1e-14, atol=1e-14)  # of a difference, deflated


@every_structure
@every_batch
@pytest.mark.parametrize("block", [1, 20, 2**18])
def test_pairwise_is_a_loop_over_the_entries(
    name: str, batch: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    covariance = STRUCTURES[name](batch)
    elements = numbers(*batch, N, seed=5), numbers(*batch, N, seed=6)
    variance = numbers(*batch, N, seed=7).square()
    result = covariance.pairwise(pair, elements, variance)
    assert_close(result.matrix(), paired(covariance.matrix(), elements, variance), rtol=1e-14)


@every_structure
@every_batch
@pytest.mark.parametrize("block", [1, 20, 2**18])
def test_largest_is_over_the_entries_off_the_diagonal(
    name: str, batch: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    covariance = STRUCTURES[name](batch)
    elements = numbers(*batch, N, seed=5).abs(), numbers(*batch, N, seed=6).abs()
    zero = torch.zeros(*batch, N, dtype=torch.float64)
    entries = paired(covariance.matrix(), elements, zero)
    expected = float(entries.abs().max())
    assert covariance.largest(pair, elements) == pytest.approx(expected, rel=1e-14)


@every_structure
@every_batch
def test_noise_has_the_covariance(name: str, batch: tuple[int, ...]) -> None:
    covariance, count = STRUCTURES[name](batch), 20_000
    draws = covariance.noise(count, torch.Generator().manual_seed(9))
    assert draws.shape == (count, *batch, N)
    got = torch.einsum("s...i,s...j->...ij", draws, draws) / count
    matrix, variance = covariance.matrix(), covariance.diagonal()
    spread = variance[..., :, None] * variance[..., None, :] + matrix.square()
    assert bool(((got - matrix).abs() <= 5 * (spread / count).sqrt()).all())


@every_structure
def test_map_reaches_every_tensor_inside(name: str) -> None:
    covariance = STRUCTURES[name]((2,))
    assert covariance.map(torch.Tensor.float).dtype == torch.float32
    first = covariance.map(lambda t: t[0])
    assert type(first) is type(covariance)
    assert_close(first.matrix(), covariance.matrix()[0], rtol=1e-14)


def test_independent_elements_stay_diagonal_where_they_can() -> None:
    covariance, ones = Diagonal(variances(())), torch.ones(N, dtype=torch.float64)
    assert isinstance(covariance.take(torch.tensor([3, 0])), Diagonal)
    assert isinstance(covariance.take(torch.tensor([3, 3])), Dense)
    assert isinstance(covariance.scale(ones), Diagonal)
    assert isinstance(covariance.pairwise(pair, (ones, ones), ones), Diagonal)
    assert isinstance(covariance.push(LinearMap(lambda t: t, torch.Size((N,)))), Dense)


@every_structure
def test_structures_are_frozen(name: str) -> None:
    with pytest.raises(AttributeError):
        STRUCTURES[name](()).values = numbers(N)


def test_a_covariance_that_stays_in_order_is_not_copied() -> None:
    covariance = dense(())
    assert covariance.take(torch.arange(N)) is covariance


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("strip", [1, 7, 64])
def test_the_symmetric_part_of_large_matrices_is_made_in_strips(
    batch: tuple[int, ...], strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = numbers(*batch, 30, 30)
    expected = (matrix + matrix.mT) / 2
    monkeypatch.setattr("covprop.covariance.base.SMALL", 0)
    monkeypatch.setattr("covprop.covariance.base.STRIP", strip)
    for given in (matrix, matrix.mT):
        result = symmetric(given)
        assert torch.equal(result, result.mT)
        assert_close(result, expected, rtol=0.0)


@pytest.mark.parametrize("strip", [1, 4, 100])
def test_one_bit_anywhere_makes_a_matrix_asymmetric(
    strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.base.SMALL", 0)
    monkeypatch.setattr("covprop.covariance.base.STRIP", strip)
    matrix = symmetric(numbers(2, 7, 7))
    assert symmetrised(matrix) is matrix
    for row, column in ((0, 6), (6, 0), (3, 4), (5, 2)):
        other = matrix.clone()
        other[1, row, column] = torch.nextafter(other[1, row, column], other[0, 0, 0] + 100)
        result = symmetrised(other)
        assert torch.equal(result, result.mT)
        assert torch.equal(result, symmetric(other))
    assert symmetrised(numbers(0, 0)).shape == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_feature_without_variance_has_no_root(dtype: torch.dtype) -> None:
    factor = numbers(12, 12).to(dtype)
    factor[3] = 0
    root = Dense(factor @ factor.mT).root()
    columns = root.columns(0, root.width)
    assert bool((columns[3] == 0).all())
    assert_close(columns @ columns.mT, factor @ factor.mT, atol=300 * torch.finfo(dtype).eps)
