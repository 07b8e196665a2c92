"""Linear operations: the mean is the function's, the covariance J S J^T to rounding."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import covprop as cp
from covprop.activations import DECLARATIONS
from covprop.covariance import Dense, Diagonal
from covprop.errors import name_of
from covprop.flow.table import TABLE, Kind
from tests.layers import propagate
from tests.oracles import assert_close
from tests.rules import test_composed, test_in_place
from tests.rules.linear_cases import BATCH, LINEAR_CASES, Layer, LinearCase

ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-5}
"""Relative to |J| |S| |J|^T, which is what rounding is relative to."""

FUNCTIONS = [case for case in LINEAR_CASES if not case.alias]
"""One case for each rule and its arguments: other names have the same rule, by identity."""

every_case = pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.label)
every_structure = pytest.mark.parametrize("structure", [Dense, Diagonal])


def numbers(shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return size * torch.randn(shape, dtype=torch.float64, generator=generator)


def gaussian(
    shape: tuple[int, ...], batch_dims: int, structure: type = Dense, **sizes: float
) -> cp.Gaussian:
    """A Gaussian whose elements all depend on each other, or are all independent."""
    n = torch.Size(shape[batch_dims:]).numel()
    factor = numbers((*shape[:batch_dims], n, n + 1))
    matrix = sizes.get("variance", 1.0) * (factor @ factor.mT) / n
    values = Dense(matrix) if structure is Dense else Diagonal(matrix.diagonal(dim1=-2, dim2=-1))
    return cp.Gaussian(numbers(shape, sizes.get("mean", 1.0)), values)


@cache
def jacobians(function: Callable[[Tensor], Any], shape: tuple[int, ...]) -> list[Tensor]:
    """(*output, *input) for each output of the function, by autograd."""
    result = torch.autograd.functional.jacobian(function, numbers(shape))
    return [t.double() for t in (result if isinstance(result, tuple) else [result])]


def assert_affine(function: Callable[[Any], Any], x: cp.Gaussian) -> None:
    """propagate gives function(mean) and J S J^T for every output and element of the batch."""
    means, results = function(x.mean.clone()), propagate(function, x)
    if isinstance(means, Tensor):
        means, results = [means], [results]
    assert len(means) == len(results)
    count, size = x.batch_shape.numel(), x.event_shape.numel()
    matrices = x.covariance_matrix.reshape(count, size, size).double()
    slopes = jacobians(function, tuple(x.mean.shape))
    for mean, result, slope in zip(means, results, slopes, strict=True):
        rounding = ROUNDING[mean.dtype]
        assert result.batch_shape == x.batch_shape
        assert_close(result.mean, mean, rtol=0.0)
        features = mean.numel() // count
        covariances = result.covariance_matrix.reshape(count, features, features)
        assert_close(covariances, covariances.mT, rtol=0.0)
        blocks = slope.reshape(count, features, count, size)
        for b, covariance in enumerate(covariances):
            assert not any(blocks[b, :, c].any() for c in range(count) if c != b)
            own = blocks[b, :, b]
            scale = own.abs() @ matrices[b].abs() @ own.abs().mT
            scale = torch.where(scale > 0, scale, 1)
            expected = own @ matrices[b] @ own.mT
            assert_close(covariance.double() / scale, expected / scale, atol=rounding)


@every_case
def test_gaussians_go_through_and_nothing_that_was_given_changes(case: LinearCase) -> None:
    shape = (BATCH, *case.event)
    # A tiny covariance, which must not see a large mean or offset.
    x = gaussian(shape, 1, mean=1e3, variance=1e-12)
    given = [x.mean, x.covariance_matrix]
    if isinstance(case.function, Layer):
        given += case.function.modules[torch.float64].state_dict().values()
    before = [tensor.clone() for tensor in given]
    assert_affine(case.function, x)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    assert_affine(case.function, gaussian(shape, 1, Diagonal))
    assert_affine(case.function, gaussian(shape, 0))  # what is a batch to torch is in the event
    assert_affine(case.function, gaussian(shape, 1).to(torch.float32))
    if case.single is not None:
        assert_affine(case.single, gaussian(case.event, 0))


@pytest.mark.parametrize("batch", [(2, 3), (1,), (1, 2), (0,)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.linear(x, numbers((2, 4)), numbers((2,))),
        lambda x: x.sum(-1),
        lambda x: (3 - x * numbers((3, 4))).mT,
        lambda x: x[..., 1:, [0, 2]].flatten(-2),
    ],
)
def test_a_batch_has_any_shape(batch: tuple[int, ...], function: Callable[[Any], Any]) -> None:
    x = gaussian((*batch, 3, 4), len(batch))
    y = propagate(function, x)
    assert y.batch_shape == batch
    assert y.mean.shape == function(x.mean).shape
    for index in torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)):
        one, alone = y[tuple(index)], propagate(function, x[tuple(index)])
        assert_close(one.mean, alone.mean, rtol=1e-14)
        assert_close(one.covariance_matrix, alone.covariance_matrix, rtol=1e-12, atol=1e-13)


@every_structure
def test_nothing_may_be_left(structure: type) -> None:
    y = propagate(lambda x: x[..., :0], gaussian((2, 3, 4), 1, structure))
    assert (y.mean.shape, y.covariance_matrix.shape) == ((2, 3, 0), (2, 0, 0))


def test_every_linear_operation_has_a_case() -> None:
    rows = [row.name for row in TABLE.values() if row.kind in (Kind.LINEAR, Kind.MOVEMENT)]
    listed = {name for row in rows for name in row.split(", ")}
    tested = {name for case in LINEAR_CASES for name in case.operation.split(", ")}
    assert sorted(listed - tested) == []


def test_every_spelling_of_a_linear_operation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    class Recorder(dict):
        def get(self, function: Any, default: Any = None) -> Any:
            used.add(function)
            return super().get(function, default)

    monkeypatch.setattr("covprop.flow.tensor.TABLE", Recorder(TABLE))
    for case in LINEAR_CASES:
        with suppress(Exception):  # what fails fails in a test of its own
            propagate(case.function, gaussian((BATCH, *case.event), 1))
        if case.single is not None:
            with suppress(Exception):
                propagate(case.single, gaussian(case.event, 0))
    for polynomial in test_composed.POLYNOMIALS.values():  # forms in place of what is not linear
        with suppress(Exception):
            propagate(polynomial, gaussian((4,), 0))
    elementwise = {f for row in DECLARATIONS for f in (*row.functions, *row.in_place)}
    elementwise |= {f for f in TABLE if "prelu" in name_of(f)}
    elementwise |= set(test_in_place.FORMS)
    single = ("affine", "movement")
    rules = {
        f
        for f, row in TABLE.items()
        if row.body is None
        or (_home(row.body) in single and row.kind not in (Kind.CONSTANT, Kind.ORDER, Kind.OTHER))
    }
    unused = rules - elementwise - used - UNREACHABLE
    assert sorted(map(repr, unused)) == []


def _home(body: Any) -> str:
    return str(body.__module__).rpartition(".")[2]


UNREACHABLE = {
    torch.Tensor.cuda,  # no such device here
    torch.Tensor.half,  # refused: tests/test_calls.py
    torch.Tensor.bfloat16,  # refused
    torch.Tensor.view,  # is reshape
    torch.Tensor.__rtruediv__,  # division by a Gaussian: test_products has it
}


def test_a_variance_that_cancels_over_several_operations_is_zero() -> None:
    """The last partial sum of deviations from the mean: the rounding of the steps before counts."""
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        root, weight = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)

        def model(x: Tensor, weight: Tensor = weight) -> Tensor:
            y = torch.nn.functional.linear(x, weight)
            return (y - y.mean(-1, keepdim=True)).cumsum(-1)

        y = propagate(model, cp.Gaussian(root[0], root @ root.mT), cp.Exact())
        assert 0 <= float(y.variance[-1]) <= 1e-14 * float(root.square().sum())
