"""A full matrix whose rows are spread over processes, and what these send each other."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from covprop.covariance.base import Covariance, LinearMap, PairFunction, symmetric
from covprop.covariance.dense import BLOCK, Dense, PlannedDense
from covprop.covariance.semidefinite import products_flaw
from covprop.errors import InvalidGaussian, LostRank, UnsupportedOperation

PLACE = re.compile(r"^\[\S+\] ")
"""The prefix by which a backend names the line of its own code."""
DTENSOR = "torch.distributed.tensor"
MATRIX = 2


@final
@dataclass(frozen=True)
class Team:
    """The processes of a mesh of one dimension; every method is called by all of them at once."""

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        """How many processes."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.mesh.get_local_rank()

    def bounds(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """The rows [start, stop) of `count` that a process holds, as `DTensor` shares them out."""
        rank = self.rank if rank is None else rank
        step = -(-count // self.size)
        return min(count, rank * step), min(count, (rank + 1) * step)

    def congruence(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Own rows of A S A^T, from own rows of a symmetric S (*batch, mine, n).

        function: A v of vectors (*batch, count, n). It turns the rows of S into those of S A^T,
        whose transpose is A S; between the two each process sends every other its columns.
        """
        return _of_rows(function, self._transposed(_of_rows(function, rows), rows.shape[-1]))

    def _transposed(self, part: Tensor, count: int) -> Tensor:
        """Own rows of the transpose (*batch, m, count), from own rows (*batch, mine, m)."""
        batch, width = part.shape[:-2], part.shape[-1]
        wide, high = self._shares(width), self._shares(count)
        own = wide[self.rank]
        sizes = [batch.numel() * part.shape[-2] * columns for columns in wide]
        arriving = [batch.numel() * own * rows for rows in high]
        sent = _in_columns(part, wide)
        del part  # whoever called holds no more of it
        received = sent.new_empty(sum(arriving))
        with self._all_there():
            dist.all_to_all_single(received, sent, arriving, sizes, group=self.mesh.get_group())
        del sent
        pieces = zip(received.split(arriving), high, strict=True)
        return torch.cat([piece.view(*batch, own, rows) for piece, rows in pieces], dim=-1)

    def _shares(self, count: int) -> list[int]:
        """How many of `count` rows each process holds."""
        return [len(range(*self.bounds(count, rank))) for rank in range(self.size)]

    def gathered(self, part: Tensor, count: int) -> Tensor:
        """All `count` rows of which every process has its own, (mine, *any) -> (count, *any)."""
        step = -(-count // self.size)
        padded = part.new_zeros(step, *part.shape[1:])
        padded[: len(part)] = part
        whole = part.new_empty(self.size * step, *part.shape[1:])
        if whole.numel():
            with self._all_there():
                dist.all_gather(list(whole.split(step)), padded, group=self.mesh.get_group())
        return whole[:count]

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        whole = part.clone()
        with self._all_there():
            dist.all_reduce(whole, dist.ReduceOp.SUM, group=self.mesh.get_group())
        return whole

    def largest(self, part: Tensor) -> float:
        """The largest of one number from every process."""
        whole = part.clone()
        with self._all_there():
            dist.all_reduce(whole, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return float(whole)

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """Turn errors of communication into `LostRank`; which process was lost is not known.

        The first to see it ends, and the others then miss that one.
        """
        try:
            yield
        except RuntimeError as error:
            reason = PLACE.sub("", str(error)).partition(". ")[0]
            raise LostRank(
                f"one of the {self.size} processes that share the rows of this covariance was lost "
                f"({reason}); see what it said before it ended, and start all of them again",
                speaker=dist.get_rank(),
            ) from error


def _in_columns(part: Tensor, widths: list[int]) -> Tensor:
    """The columns of a (*batch, rows, m), so many at a time, each as a row: one after another."""
    whole = part.new_empty(part.numel())
    start = 0
    for columns in part.split(widths, dim=-1):
        stop = start + columns.numel()
        whole[start:stop].view(columns.mT.shape).copy_(columns.mT)
        start = stop
    return whole


def _of_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of all rows; one that has none still learns how wide the result is."""
    if rows.shape[-2]:
        return function(rows)
    return function(rows.new_zeros(*rows.shape[:-2], 1, rows.shape[-1]))[..., :0, :]


def is_distributed(value: object) -> bool:
    """Whether it is a `DTensor`; who has one has imported its module, which takes a second."""
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(value, module.DTensor)


def undistributed(covariance: Tensor | Covariance) -> Tensor | Covariance:
    """A `DTensor` as what it is here, anything else as it is."""
    return Sharded.from_dtensor(covariance) if is_distributed(covariance) else covariance


@final
@dataclass(frozen=True)
class Sharded(Covariance):
    """Every process of a team holds some rows of the matrix, and all variances.

    Activations and factors stay where the rows are; a linear map sends each entry of S A^T once.
    What only rounding distinguishes from a symmetric matrix is not made symmetric, which would cost
    as much again.

    Args:
        values: The rows of this process, (*batch, mine, n).
        variance: All variances, (*batch, n).
        team: The processes; `from_diagonal` and `from_dtensor` take their mesh.

    Example:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))  # as many as torchrun has started
        cp.covariance.Sharded.from_diagonal(torch.ones(4), mesh)
        dist.destroy_process_group()
    """

    values: Tensor
    variance: Tensor
    team: Team

    distributed: ClassVar[bool] = True

    @classmethod
    def from_dtensor(cls, matrix: Any) -> "Sharded":
        """Of a `DTensor` (*batch, n, n) on a mesh of one dimension, sharded by `Shard(-2)`."""
        module = sys.modules[DTENSOR]
        wanted = (module.Shard(matrix.dim() - 2), module.Shard(-2))
        if matrix.dim() < MATRIX or matrix.shape[-1] != matrix.shape[-2]:
            raise InvalidGaussian(
                f"a covariance has shape (*batch, n, n), not {tuple(matrix.shape)}"
            )
        if len(matrix.placements) != 1 or matrix.placements[0] not in wanted:
            raise InvalidGaussian(
                f"a distributed covariance has its rows on a mesh of one dimension, and this one "
                f"has placements {tuple(matrix.placements)}; use "
                "covariance.redistribute(mesh, [Shard(-2)])"
            )
        return cls._of(matrix.to_local(), Team(matrix.device_mesh), matrix.shape[-1])

    @classmethod
    def from_diagonal(cls, variance: Tensor, mesh: DeviceMesh) -> "Sharded":
        """Of independent features with variances (*batch, n), which every process knows."""
        team = Team(mesh)
        start, stop = team.bounds(variance.shape[-1])
        rows = variance.new_zeros(*variance.shape[:-1], stop - start, variance.shape[-1])
        rows.diagonal(offset=start, dim1=-2, dim2=-1).copy_(variance[..., start:stop])
        return cls(rows, variance, team)

    @classmethod
    def _of(cls, rows: Tensor, team: Team, size: int) -> "Sharded":
        """From own rows; gathers the variances, which every operation needs."""
        start, _ = team.bounds(size)
        own = rows.diagonal(offset=start, dim1=-2, dim2=-1)  # (*batch, mine)
        return cls(rows, team.gathered(own.movedim(-1, 0), size).movedim(0, -1), team)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions."""
        return self.values.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.values.device

    @property
    def size(self) -> int:
        """The number of features n."""
        return self.values.shape[-1]

    @property
    def bounds(self) -> tuple[int, int]:
        """The rows [start, stop) that this process holds."""
        return self.team.bounds(self.size)

    def diagonal(self) -> Tensor:
        """Variances (*batch, n), on every process."""
        return self.variance

    def matrix(self) -> Tensor:
        """Refused: no process holds the matrix."""
        self._refuse("this")

    def to_dense(self) -> Dense:
        """The whole matrix on every process: n^2 entries on each."""
        whole = self.team.gathered(self.values.movedim(-2, 0), self.size)
        return Dense(symmetric(whole.movedim(0, -2).contiguous()))

    def to_dtensor(self) -> Any:
        """The same rows as a `DTensor` (*batch, n, n); nothing is sent."""
        module = importlib.import_module(DTENSOR)
        shape = torch.Size((*self.batch_shape, self.size, self.size))
        return module.DTensor.from_local(
            self.values.contiguous(), self.team.mesh, [module.Shard(len(shape) - 2)],
            run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    def planned(self) -> "PlannedSharded":
        """A share of the rows."""
        return PlannedSharded(self.batch_shape, self.size, self.values.itemsize, self.team.size)

    def push(self, linear: LinearMap) -> "Sharded":
        """A S A^T."""
        rows = self.team.congruence(self.values, partial(_unfollowed, linear))
        return self._of(rows, self.team, rows.shape[-1])

    def take(self, index: Tensor) -> "Sharded":
        """Rows and columns of the index; the same where nothing moves."""
        if len(index) == self.size and bool((index.diff() == 1).all()):
            return self
        rows = self.team.congruence(self.values, lambda rows: rows.index_select(-1, index))
        return Sharded(rows, self.variance.index_select(-1, index), self.team)

    def scale(self, factor: Tensor) -> "Sharded":
        """f_i S_ij f_j, without any sending."""
        _check_unfollowed(factor)
        left = factor[..., slice(*self.bounds), None]
        rows = self.values * (left * factor[..., None, :])
        return replace(self, values=rows, variance=self.variance * factor.square())

    def plus(self, variance: Tensor) -> "Sharded":
        """S + diag(v), without any sending."""
        _check_unfollowed(variance)
        start, stop = self.bounds
        rows = self.values.clone()
        rows.diagonal(offset=start, dim1=-2, dim2=-1).add_(variance[..., start:stop])
        return replace(self, values=rows, variance=self.variance + variance)

    def pairwise(
        self, pair: PairFunction, elements: Sequence[Tensor], variance: Tensor
    ) -> "Sharded":
        """Evaluate `pair` on own rows, without any sending."""
        _check_unfollowed(*elements, variance)
        variance = variance.to(self.dtype)
        start, stop = self.bounds
        rows = torch.empty_like(self.values)
        for first, last, block in self._blocks(pair, elements):
            rows[..., first - start : last - start, :] = block
        rows.diagonal(offset=start, dim1=-2, dim2=-1).copy_(variance[..., start:stop])
        return replace(self, values=rows, variance=variance)

    @torch.no_grad()
    def largest(self, pair: PairFunction, elements: Sequence[Tensor]) -> float:
        """The largest of what the processes find in their own rows."""
        largest = self.values.new_zeros(())
        for _, _, block in self._blocks(pair, elements):
            if block.numel():
                largest = torch.maximum(
                    largest, torch.stack(torch.aminmax(block)).abs().max().to(largest)
                )
        return self.team.largest(largest)

    def noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Refused: samples need a factor of the whole matrix."""
        del count, generator
        self._refuse("a sample")

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sharded":
        """Apply a function to the rows and to the variances."""
        return replace(self, values=function(self.values), variance=function(self.variance))

    def flaw(self, rounding: float) -> str | None:
        """Why it is no covariance, by a few products, with the same result on all processes."""
        return products_flaw(self.products, self.diagonal(), rounding)

    def products(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """S V and S^T V of vectors (*batch, n, count), on every process."""
        start, stop = self.bounds
        ours = (self.values @ vectors).movedim(-2, 0)
        right = self.team.gathered(ours, self.size).movedim(0, -2)
        return right, self.team.total(self.values.mT @ vectors[..., start:stop, :])

    def _blocks(
        self, pair: PairFunction, elements: Sequence[Tensor]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """`pair` of own rows, all columns: first, last, block (*batch, last - first, n)."""
        known = [element.to(self.dtype) for element in elements]
        right = tuple(element[..., None, :] for element in known)
        step = max(1, BLOCK // max(1, self.batch_shape.numel() * self.size))
        start, stop = self.bounds
        for first in range(start, stop, step):
            last = min(stop, first + step)
            block = self.values[..., first - start : last - start, :].contiguous().clone()
            block.diagonal(offset=first, dim1=-2, dim2=-1).zero_()  # known, and the hardest
            yield first, last, pair(tuple(e[..., first:last, None] for e in known), right, block)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedOperation(
            f"{what} needs the whole covariance, and its rows are spread over {self.team.size} "
            "processes, which carry it through chains of linear layers, convolutions, batch norm "
            "and activations, and no further; gather it with .covariance.to_dense(), or run the "
            "model in one process"
        )


@final
@dataclass(frozen=True)
class PlannedSharded(PlannedDense):
    """A matrix whose rows are spread over a team."""

    team: int

    @property
    def processes(self) -> int:
        """The size of the team."""
        return self.team


def _unfollowed(linear: LinearMap, rows: Tensor) -> Tensor:
    mapped = linear(rows)
    _check_unfollowed(mapped)
    return mapped


def _check_unfollowed(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedOperation(
            "autograd does not follow a covariance that is spread over processes; wrap the "
            "propagation in torch.no_grad()"
        )
