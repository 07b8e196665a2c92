"""Every structure behind every door, against the full matrix written out."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import covprop as cp
from covprop.covariance import (
    Covariance,
    Deflated,
    Dense,
    Diagonal,
    LinearMap,
    LowRank,
    Sharded,
    Streamed,
    Zero,
)
from covprop.covariance.base import symmetric
from covprop.covariance.dense import symmetrised
from covprop.covariance.planned import Result
from tests.gaussians import covariance_matrix, numbers
from tests.oracles import assert_close

Batch = tuple[int, ...]
BATCHES: list[Batch] = [(), (2,), (2, 3)]
N = 6


def variances(batch: Batch) -> Tensor:
    return numbers(*batch, N).square()


def units(batch: Batch) -> Tensor:
    """Two orthonormal columns."""
    return torch.linalg.qr(numbers(*batch, N, 2, seed=10))[0]


def streamed(batch: Batch) -> Streamed:
    """Six outputs of a layer with four inputs."""
    weight, matrix = numbers(N, 4, seed=7), covariance_matrix(*batch, size=4, seed=8)
    linear = LinearMap(lambda t: t @ weight.mT, torch.Size((4,)), leading=True)
    return Streamed.through(linear(matrix), linear, Dense)


def activated(batch: Batch) -> Covariance:
    """The same after an activation, whose pairs c exp(u_i u_j) are positive semi-definite."""
    elements = numbers(*batch, N, seed=5) / 3, torch.zeros(*batch, N, dtype=torch.float64)
    return streamed(batch).pairwise(pair, elements, 40 + variances(batch))


STRUCTURES: dict[str, Callable[[Batch], Covariance]] = {
    "dense": lambda batch: Dense(covariance_matrix(*batch, size=N)),
    "diagonal": lambda batch: Diagonal(variances(batch)),
    "low rank": lambda batch: LowRank(numbers(*batch, N, 2), variances(batch)),
    "a factor alone": lambda batch: LowRank(numbers(*batch, N, 2)),
    "deflated": lambda batch: Deflated(variances(batch), units(batch)),
    "deflated in part": lambda batch: Deflated(
        variances(batch), units(batch) * torch.tensor([0.5, 0.9], dtype=torch.float64)
    ),
    "dense without dependence": lambda batch: Dense(torch.diag_embed(variances(batch))),
    "zero": lambda batch: Zero.like(torch.zeros(*batch, N, dtype=torch.float64), len(batch)),
    "streamed": streamed,
    "streamed, activated": activated,
}
PARTIAL: dict[str, Callable[[Batch], Covariance]] = {
    "sharded": lambda batch: Sharded.from_dtensor(
        distributed(covariance_matrix(*batch, size=N, seed=2))
    ),
}
"""Structures that no process has as a matrix; those of several are in `test_sharded`."""
KNOWN = [name for name in STRUCTURES if "streamed" not in name]
"""Which a user can give."""
PAIRED = [*STRUCTURES, "sharded"]
"""Which have a function of every pair."""


@cache
def alone() -> DeviceMesh:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        alone.cache_clear()
        dist.destroy_process_group()


def distributed(matrix: Tensor) -> Tensor:
    # Imported here: the module takes a second.
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(matrix, alone(), [Shard(matrix.dim() - 2)])


def made(name: str, batch: Batch) -> Covariance:
    return (STRUCTURES | PARTIAL)[name](batch)


def matrix_of(covariance: Covariance) -> Tensor:
    """The matrix, also of what does not write it out."""
    if isinstance(covariance, Sharded):
        return covariance.to_dense().values
    return covariance.matrix()


every_batch = pytest.mark.parametrize("batch", BATCHES)
every_structure = pytest.mark.parametrize("name", [*STRUCTURES, *PARTIAL])
every_written = pytest.mark.parametrize("name", STRUCTURES)
every_known = pytest.mark.parametrize("name", KNOWN)
every_paired = pytest.mark.parametrize("name", PAIRED)


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
def test_the_basic_facts_are_those_of_the_matrix(name: str, batch: Batch) -> None:
    covariance = made(name, batch)
    matrix = matrix_of(covariance)
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
def test_push_is_a_product_from_both_sides(name: str, kind: str, batch: Batch) -> None:
    function, leading = MAPS[kind]
    covariance = made(name, batch)
    slope = torch.autograd.functional.jacobian(function, numbers(1, 2, 3)).reshape(-1, N)
    expected = slope @ matrix_of(covariance) @ slope.mT
    for flag in {leading, False}:
        result = covariance.push(LinearMap(function, torch.Size((2, 3)), flag))
        assert result.batch_shape == batch
        found = matrix_of(result)
        assert_close(found, expected, atol=1e-12)
        assert_close(found, found.mT, rtol=0.0)


@every_structure
@every_batch
@pytest.mark.parametrize("index", [range(N), [3, 0, 5], [2, 2, 1], [0, 0, 1, 3], [4], []], ids=repr)
def test_take_leaves_rows_and_columns(name: str, batch: Batch, index: Sequence[int]) -> None:
    covariance = made(name, batch)
    chosen = torch.tensor(list(index), dtype=torch.long)
    expected = matrix_of(covariance)[..., chosen, :][..., :, chosen]
    result = covariance.take(chosen)
    assert result.batch_shape == batch
    # Products of a factor are summed anew.
    assert_close(matrix_of(result), expected, rtol=1e-14, atol=1e-14)


@every_structure
@every_batch
def test_plus_adds_to_the_diagonal(name: str, batch: Batch) -> None:
    covariance, variance = made(name, batch), numbers(*batch, N, seed=8).square()
    result = covariance.plus(variance)
    expected = matrix_of(covariance) + torch.diag_embed(variance)
    assert_close(matrix_of(result), expected, rtol=1e-13, atol=1e-13)  # of a difference, deflated


@every_written
@every_batch
def test_quadratic_is_a_product_from_both_sides(name: str, batch: Batch) -> None:
    covariance, rows = made(name, batch), numbers(*batch, 4, N, seed=3)
    result = covariance.quadratic(rows)
    assert_close(result, rows @ covariance.matrix() @ rows.mT, rtol=1e-12, atol=1e-12)
    assert_close(result, result.mT, rtol=0.0)


@every_written
@every_batch
def test_directions_can_be_taken_out_of_the_root(name: str, batch: Batch) -> None:
    """L (1 - U^T U) L^T for orthonormal rows U."""
    covariance = made(name, batch)
    root, known = covariance.root(), covariance.directions
    columns, matrix = root.columns(0, root.width), covariance.matrix()
    assert_close(columns @ columns.mT, matrix, atol=1e-7)  # of a rank that is not full
    for start in range(1, root.width):
        assert_close(root.columns(start, root.width), columns[..., start:], atol=1e-14)
    count = min(2, known)
    taken = torch.linalg.qr(numbers(*batch, known, count, seed=13))[0].mT
    vectors = taken @ columns[..., :known].mT
    left = covariance.without(taken, vectors)
    got = left @ left.mT if isinstance(left, Tensor) else left.matrix()
    assert_close(got, matrix - vectors.mT @ vectors, atol=1e-7)


@every_written
@every_batch
@pytest.mark.parametrize("noise", [None, 0.3])
def test_conditioning_is_a_schur_complement(name: str, batch: Batch, noise: float | None) -> None:
    covariance = made(name, batch)
    seen, hidden = torch.tensor([4, 1]), torch.tensor([0, 2, 3, 5])
    error = None if noise is None else noise * torch.eye(2, dtype=torch.float64)
    gain, left = covariance.conditioned(seen, hidden, error)
    matrix = covariance.matrix()
    observed = matrix[..., seen, :][..., :, seen] + (0.0 if error is None else error)
    across = matrix[..., hidden, :][..., :, seen]
    expected = across @ torch.linalg.pinv(observed, hermitian=True)
    assert_close(gain, expected, rtol=1e-9, atol=1e-9)
    rest = matrix[..., hidden, :][..., :, hidden] - expected @ across.mT
    got = left if isinstance(left, Tensor) else left.matrix()
    assert_close(got, rest, rtol=1e-8, atol=1e-7)  # a rank of zero is left by rounding alone


@every_structure
@every_batch
def test_scale_multiplies_rows_and_columns(name: str, batch: Batch) -> None:
    covariance, factor = made(name, batch), numbers(*batch, N, seed=4)
    expected = torch.diag_embed(factor) @ matrix_of(covariance) @ torch.diag_embed(factor)
    result = covariance.scale(factor)
    assert_close(matrix_of(result), expected, rtol=1e-13, atol=1e-13)  # of a difference, deflated


@every_paired
@every_batch
@pytest.mark.parametrize("block", [1, 20, 2**18])
def test_pairwise_is_a_loop_over_the_entries(
    name: str, batch: Batch, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    covariance = made(name, batch)
    elements = numbers(*batch, N, seed=5), numbers(*batch, N, seed=6)
    variance = numbers(*batch, N, seed=7).square() * (name != "zero")  # a constant stays one
    result = covariance.pairwise(pair, elements, variance)
    expected = paired(matrix_of(covariance), elements, variance)
    assert_close(matrix_of(result), expected, rtol=1e-13, atol=1e-13)


@every_paired
@every_batch
@pytest.mark.parametrize("block", [1, 20, 2**18])
def test_largest_is_over_the_entries_off_the_diagonal(
    name: str, batch: Batch, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.covariance.dense.BLOCK", block)
    covariance = made(name, batch)
    elements = numbers(*batch, N, seed=5).abs(), numbers(*batch, N, seed=6).abs()
    zero = torch.zeros(*batch, N, dtype=torch.float64)
    entries = paired(matrix_of(covariance), elements, zero)
    expected = float(entries.abs().max())
    assert covariance.largest(pair, elements) == pytest.approx(expected, rel=1e-13)


@every_written
@every_batch
def test_noise_has_the_covariance(name: str, batch: Batch) -> None:
    covariance, count = made(name, batch), 20_000
    draws = covariance.noise(count, torch.Generator().manual_seed(9))
    assert draws.shape == (count, *batch, N)
    got = torch.einsum("s...i,s...j->...ij", draws, draws) / count
    matrix, variance = covariance.matrix(), covariance.diagonal()
    spread = variance[..., :, None] * variance[..., None, :] + matrix.square()
    assert bool(((got - matrix).abs() <= 5 * (spread / count).sqrt()).all())


@every_structure
def test_map_reaches_every_tensor_inside(name: str) -> None:
    covariance = made(name, (2,))
    assert covariance.map(torch.Tensor.float).dtype == torch.float32
    first = covariance.map(lambda t: t[0])
    assert isinstance(first, Dense if isinstance(covariance, Streamed) else type(covariance))
    assert_close(matrix_of(first), matrix_of(covariance)[0], rtol=1e-13, atol=1e-13)


def held(covariance: Covariance) -> int:
    """Bytes of the tensors inside."""
    tensors = [value for value in vars(covariance).values() if isinstance(value, Tensor)]
    return 0 if covariance.constant else sum(tensor.nbytes for tensor in tensors)


INDICES = [[*range(N)], [3, 0, 5], [2, 2, 1], [1, 0, 5, 4]]


@torch.no_grad()
@every_batch
@every_known
def test_a_plan_goes_the_way_of_the_structure(name: str, batch: Batch) -> None:
    """What is planned of a result is what the real result says of itself."""
    covariance = made(name, batch)
    planned, vector = covariance.planned(), numbers(*batch, N, seed=8).square()
    same, narrow = Result(N, 8), Result(4, 8)
    assert planned.nbytes == held(covariance)
    elements = torch.ones_like(vector), torch.ones_like(vector)
    linear = LinearMap(lambda t: t @ MATRIX, torch.Size((N,)), leading=True)
    steps = [
        (covariance.push(linear), planned.push(narrow)),
        (covariance.scale(vector), planned.scale(same)),
        (covariance.plus(vector), planned.plus(same)),
        (covariance.pairwise(pair, elements, vector), planned.pairwise(same, 0, 0)),
        (covariance.map(Tensor.float), planned.map(Result(N, 4))),
    ]
    for index in INDICES:
        chosen = torch.tensor(index)
        steps.append((covariance.take(chosen), planned.take(chosen, Result(len(index), 8))))
    for real, cost in steps:
        assert cost.structure == real.planned()
        assert cost.structure.nbytes == held(real)


@every_written
@every_batch
def test_a_covariance_has_no_flaw(name: str, batch: Batch) -> None:
    """And survives being given by a user, with its numbers."""
    covariance = made(name, batch)
    x = cp.Gaussian(torch.zeros(*batch, N, dtype=torch.float64), covariance)
    assert_close(x.covariance_matrix, covariance.matrix(), rtol=0.0)


@every_known
@every_batch
def test_files_give_a_structure_back(name: str, batch: Batch, tmp_path: Path) -> None:
    x = cp.Gaussian(torch.zeros(*batch, N, dtype=torch.float64), made(name, batch))
    x.save(tmp_path / "x.safetensors")
    torch.save(x, tmp_path / "x.pt")
    for again in (cp.Gaussian.load(tmp_path / "x.safetensors"), torch.load(tmp_path / "x.pt")):
        assert type(again.covariance) is type(x.covariance)
        assert again.covariance.batch_shape == batch
        assert_close(again.covariance_matrix, x.covariance_matrix, rtol=0.0)


REFUSED: dict[str, Callable[[Covariance], object]] = {
    "matrix": lambda c: c.matrix(),
    "noise": lambda c: c.noise(2, None),
    "quadratic": lambda c: c.quadratic(numbers(2, N)),
    "conditioned": lambda c: c.conditioned(torch.tensor([0]), torch.tensor([1]), None),
}
PAIRS: dict[str, Callable[[Covariance], object]] = {
    "pairwise": lambda c: c.pairwise(pair, (numbers(N), numbers(N)), numbers(N).square()),
    "largest": lambda c: c.largest(pair, (numbers(N), numbers(N))),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_what_a_structure_does_not_have_is_refused(name: str) -> None:
    for ask in (REFUSED if name in PAIRED else REFUSED | PAIRS).values():
        with pytest.raises(cp.UnsupportedOperation):
            ask(made(name, ()))


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
        made(name, ()).values = numbers(N)


def test_a_covariance_that_stays_in_order_is_not_copied() -> None:
    covariance = made("dense", ())
    assert covariance.take(torch.arange(N)) is covariance


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("strip", [1, 7, 64])
def test_the_symmetric_part_of_large_matrices_is_made_in_strips(
    batch: Batch, strip: int, monkeypatch: pytest.MonkeyPatch
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
