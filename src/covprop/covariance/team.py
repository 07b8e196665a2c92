"""Processes that hold a matrix together, each some of its rows: what they send each other."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from covprop.errors import LostRank

PLACE = re.compile(r"^\[\S+\] ")
"""Where in its own code a backend found something wrong."""


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
        """Which of them this one is."""
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
        """Say in one sentence that a process no longer answers; whose fault it was, nobody knows.

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
