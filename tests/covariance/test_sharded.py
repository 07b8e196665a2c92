"""A covariance whose rows are spread over processes: the numbers of one process."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import covprop as cp
from covprop.covariance import Covariance, Dense, LinearMap, Sharded
from covprop.errors import LostRank
from tests.covariance.test_streamed import model
from tests.covariance.test_structures import pair
from tests.gaussians import gaussian, numbers
from tests.layers import propagate
from tests.oracles import assert_close
from tests.teams import started, together

every_size = pytest.mark.parametrize("size", [2, 4])
BATCHES = [(), (3,)]
N = 10
"""Over four processes: 3, 3, 3 and 1 rows."""


def team() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def spread(matrix: Tensor, mesh: DeviceMesh) -> Any:
    """The matrix as a DTensor, which every process knows whole."""
    # Imported here: the module takes a second, and only the processes need it.
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(matrix, mesh, [Shard(matrix.dim() - 2)])


# Each door of the structure.


def matrix_of(batch: tuple[int, ...], count: int = N) -> Tensor:
    factor = numbers(*batch, count, count, seed=1)
    return factor @ factor.mT


def _elements(batch: torch.Size) -> tuple[tuple[Tensor, Tensor], Tensor]:
    elements = numbers(*batch, N, seed=5) / 3, numbers(*batch, N, seed=6) / 3
    return elements, numbers(*batch, N, seed=7).square()


def _narrow(t: Tensor) -> Tensor:
    return t[..., ::4].cumsum(-1)  # three outputs, fewer than four processes


def _widen(t: Tensor) -> Tensor:
    return torch.cat([t, t.cumsum(-1)], dim=-1)


def _line(t: Tensor) -> Tensor:
    return F.avg_pool1d(t, 2)


def _taken(*index: int) -> Callable[[Covariance], Covariance]:
    return lambda c: c.take(torch.tensor(index, dtype=torch.long))


DOORS: dict[str, Callable[[Covariance], Covariance]] = {
    "itself": lambda c: c,
    "push to fewer": lambda c: c.push(LinearMap(_narrow, torch.Size((N,)), leading=True)),
    "push to more": lambda c: c.push(LinearMap(_widen, torch.Size((N,)), leading=True)),
    "push of a function": lambda c: c.push(LinearMap(_line, torch.Size((1, N)))),
    "take": _taken(4, 2, 2, 9, 0, 1),
    "take two": _taken(7, 3),
    "take none": _taken(),
    "take all": _taken(*range(N)),
    "scale": lambda c: c.scale(numbers(*c.batch_shape, N, seed=9)),
    "plus": lambda c: c.plus(numbers(*c.batch_shape, N, seed=9).square()),
    "pairwise": lambda c: c.pairwise(pair, *_elements(c.batch_shape)),
    "a chain": lambda c: (
        c.pairwise(pair, *_elements(c.batch_shape))
        .push(LinearMap(_narrow, torch.Size((N,)), leading=True))
        .push(LinearMap(_widen, torch.Size((3,)), leading=True))
        .take(torch.tensor([5, 0]))
    ),
    "a part of the batch": lambda c: c.map(lambda t: t[:2] if c.batch_shape else t),
    "in float32": lambda c: c.map(lambda t: t.float()),
}  # fmt: skip


def _doors() -> None:
    mesh = team()
    for batch in BATCHES:
        _doors_of(batch, mesh)


def _doors_of(batch: tuple[int, ...], mesh: DeviceMesh) -> None:
    whole = Dense(matrix_of(batch))
    mine = Sharded.from_dtensor(spread(whole.values, mesh))
    for name, door in DOORS.items():
        got, expected = door(mine), door(whole)
        assert isinstance(got, Sharded), name
        assert (got.size, got.batch_shape) == (expected.size, expected.batch_shape), name
        start, stop = got.bounds
        assert got.values.shape == (*expected.batch_shape, stop - start, expected.size), name
        scale = float(1 + expected.matrix().abs().max()) if expected.size else 1.0
        tolerance = scale * (1e-13 if expected.dtype == torch.float64 else 1e-6)
        assert_close(got.to_dense().values, expected.matrix(), atol=tolerance)
        assert_close(got.diagonal(), expected.diagonal(), atol=tolerance)
        assert_close(got.values, expected.matrix()[..., start:stop, :], atol=tolerance)
        assert_close(got.to_dtensor().full_tensor(), expected.matrix(), atol=tolerance)
    elements = _elements(mine.batch_shape)[0]
    assert mine.largest(pair, elements) == pytest.approx(whole.largest(pair, elements), rel=1e-14)
    variance = numbers(*batch, N, seed=3).square()
    assert_close(
        Sharded.from_diagonal(variance, mesh).to_dense().values, torch.diag_embed(variance)
    )


@every_size
def test_every_door_is_that_of_one_process(size: int) -> None:
    together(size, _doors)


# Networks.


def networks(dtype: torch.dtype) -> dict[str, tuple[nn.Module, cp.Gaussian]]:
    return {
        "fully connected": (
            model(nn.Linear(13, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Linear(70, 9), nn.Tanh(),
                  nn.Dropout(), nn.Linear(9, 3), dtype=dtype),
            gaussian(13, batch=(2,), dtype=dtype),
        ),
        "wide enough for the series": (
            model(nn.Linear(60, 200), nn.GELU(), nn.Linear(200, 5), dtype=dtype),
            gaussian(60, dtype=dtype),
        ),
        "convolutional": (
            model(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.AvgPool2d(2),
                  nn.Conv2d(5, 4, 2, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(4, 2),
                  dtype=dtype),
            gaussian(2, 6, 6, batch=(1,), dtype=dtype),
        ),
        "partly constant": (
            model(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 2), dtype=dtype), constant_half(dtype)
        ),
    }  # fmt: skip


def constant_half(dtype: torch.dtype) -> cp.Gaussian:
    """Every other feature does not vary."""
    matrix = matrix_of((), 12).to(dtype)
    matrix[::2] = 0
    matrix[:, ::2] = 0
    return cp.Gaussian(numbers(12, seed=2).to(dtype), matrix)


METHODS = [cp.Exact(), cp.Series(order=4), cp.Series(tolerance=1e-3), cp.Wu2019()]
WITHOUT_WU2019 = ("fully connected", "wide enough for the series", "convolutional")
"""Which has closed forms for ReLU alone."""


def _dropout(z: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cp.DropoutWarning)
        return F.dropout(torch.relu(z), 0.3, training=True)


@torch.no_grad()
def _networks() -> None:
    mesh = team()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for name, (network, x) in networks(dtype).items():
            spread_x = cp.Gaussian(x.mean, spread(x.covariance_matrix, mesh))
            assert_close(
                propagate(network, spread_x, cp.AssumedDensity()).variance,
                propagate(network, x, cp.AssumedDensity()).variance,
            )
            dropped, expected = (propagate(_dropout, z) for z in (spread_x, x))
            matrix = expected.covariance_matrix
            got = dropped.covariance.to_dense().values
            assert_close(got, matrix, atol=tolerance * float(matrix.abs().max()))
            for method in METHODS:
                if isinstance(method, cp.Wu2019) and name in WITHOUT_WU2019:
                    continue
                expected = propagate(network, x, method)
                y = propagate(network, spread_x, method)
                assert isinstance(y.covariance, Sharded), name
                matrix = expected.covariance_matrix
                assert_close(y.mean, expected.mean, atol=tolerance)
                scale = tolerance * float(matrix.abs().max())
                assert_close(y.covariance.to_dense().values, matrix, atol=scale)
                assert_close(y.variance, expected.variance, atol=scale)
                assert_close(y.covariance.to_dtensor().full_tensor(), matrix, atol=scale)


def test_networks_give_the_numbers_of_one_process() -> None:
    together(3, _networks)


# What is refused, by all processes at once.


def _refusals() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = team()
    matrix, mean = matrix_of(()), numbers(N)
    y = cp.Gaussian(mean, spread(matrix, mesh))
    for ask in (
        lambda: y.covariance_matrix,
        lambda: y.sample(2),
        lambda: y.to_torch(),
        lambda: propagate(lambda z: torch.relu(z) + torch.tanh(z), y),
        lambda: propagate(lambda z: F.max_pool1d(z[None], 2), y),
        lambda: propagate(torch.relu, y, cp.MonteCarlo(10)),
        lambda: propagate(torch.relu, y, cp.Sketched(16)),
    ):
        with pytest.raises(cp.UnsupportedOperation, match=r"spread over \d processes"):
            ask()
    with pytest.raises(cp.UnsupportedOperation, match=r"wrap the propagation in torch.no_grad\(\)"):
        propagate(nn.Sequential(nn.Linear(N, 3).double(), nn.ReLU()), y)
    for wrong, told in (
        (distribute_tensor(matrix, mesh, [Shard(1)]), r"redistribute\(mesh, \[Shard\(-2\)\]\)"),
        (distribute_tensor(matrix, mesh, [Replicate()]), "has placements"),
        (spread(matrix[:, :4], mesh), r"has shape \(\*batch, n, n\)"),
        (spread(matrix.triu(), mesh), "not symmetric"),
        (spread(-matrix, mesh), "negative variance"),
        (spread(matrix - matrix.max() * (1 - torch.eye(N)), mesh), "positive semi-definite"),
        (spread(matrix.index_fill(0, torch.tensor(8), torch.nan), mesh), "NaN"),
        (spread(torch.where(matrix == matrix[0, 8], torch.inf, matrix), mesh), "infinite"),
        (spread(matrix.float(), mesh), "convert one"),
    ):
        with pytest.raises(cp.InvalidGaussian, match=told):
            cp.Gaussian(mean, wrong)
    with pytest.raises(cp.InvalidGaussian, match="the mean is whole on every process"):
        cp.Gaussian(distribute_tensor(mean, mesh, [Shard(0)]), matrix)


def test_what_needs_the_whole_matrix_is_refused() -> None:
    together(2, _refusals)


class Ends(nn.Module):
    """The second process ends here, as one without memory is ended."""

    def forward(self, x: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            os._exit(9)
        return x


def _without_the_second(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    x = cp.Gaussian(torch.zeros(N), Sharded.from_diagonal(torch.ones(N), team()))
    layers = nn.Linear(N, N), nn.ReLU(), Ends(), nn.Linear(N, 4)
    with torch.no_grad():
        try:
            propagate(nn.Sequential(*layers), x)
        except LostRank as error:
            told = f"{error.speaker} {error}"
            (folder / f"{torch.distributed.get_rank()}.txt").write_text(told)


def test_a_process_that_ends_on_the_way_is_told_of_in_one_sentence(tmp_path: Path) -> None:
    assert started(3, _without_the_second, tmp_path) == [0, 9, 0]
    for rank in (0, 2):
        told = (tmp_path / f"{rank}.txt").read_text()
        assert told.startswith(f"{rank} one of the 3 processes that share")
        assert told.endswith("start all of them again")
        assert ".cc" not in told
