"""Processes that `torchrun` has started, and that share many inputs among them.

They meet at the store of torchrun. Each keeps a count going there, so that who waits for a process,
or is ended because of one, can tell which it was. Without torchrun there is one, and no store.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar, final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from covprop.errors import LostRank

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, or another launcher, tells a process."""
BEAT = 0.5
"""Seconds between two counts."""
SILENCE = 60.0
"""Seconds without a count after which a process is lost."""
SOON = 3.0
"""The same once torchrun ends everybody, which it does because one is lost."""
PATIENCE = 20.0
"""Seconds for finding out which; torchrun grants 30 before it kills."""
STARTING = 600.0
"""Seconds for a process to begin."""
LOOK = 0.05
"""Seconds between two looks at the store."""
TERMINATED = 143
FINISHED, ENDED, FAILED = "finished", "ended", "failed: "
Item = TypeVar("Item")


def own_rank() -> int:
    """The number that a launcher has given this process, 0 if there was none."""
    return int(os.environ["RANK"]) if _launched() else 0


def _launched() -> bool:
    return all(name in os.environ for name in ENVIRONMENT)


class Finished(BaseException):
    """This process has handed over what it found, and is not the first."""


@final
class Ranks:
    """This process among all; the first, with rank 0, is the one that answers."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """One process alone needs no store."""
        self.rank, self.size, self._store = rank, size, store
        now = time.monotonic()
        self._heard = {other: ("", now) for other in range(size) if other != rank}
        self._looked = now

    def part(self, count: int) -> slice:
        """Which of so many inputs, in their order, are this process's."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def first_alone(self) -> None:
        """Leave to the first process what cannot be shared."""
        if self.rank:
            raise Finished

    def agreed(self, value: str) -> str:
        """What the first process says, whatever the others do."""
        if self._store is None:
            return value
        if not self.rank:
            self._store.set("agreed", value)
        while not self._store.check(["agreed"]):
            self.check()
            time.sleep(LOOK)
        return self._store.get("agreed").decode()

    def dealt(self, items: Sequence[Item]) -> Iterator[Item]:
        """The next item that nobody has had, until there is none; all have the same items."""
        if self._store is None:
            yield from items
            return
        while (number := self._store.add("dealt", 1)) <= len(items):
            self.check()
            yield items[number - 1]

    def gather(self, value: Any) -> list[Any]:
        """What all processes have found, in their order, for the first; others end here."""
        if self._store is None:
            return [value]
        self._store.set(f"here/{self.rank}", "")
        while not self._store.check([f"here/{rank}" for rank in range(self.size)]):
            self.check()
            time.sleep(LOOK)
        # A group only now, when all are there: nobody waits in it for one that will not come.
        group = PrefixStore("group", self._store)
        dist.init_process_group("gloo", store=group, rank=self.rank, world_size=self.size)
        found: list[Any] = [None] * self.size
        dist.gather_object(value, None if self.rank else found, dst=0)
        dist.destroy_process_group()
        self.first_alone()
        return found

    def check(self) -> None:
        """Raise if another process has failed or is lost; not more often than they count."""
        if time.monotonic() - self._looked < BEAT:
            return
        self._looked = time.monotonic()
        marks = self._marks()
        for rank, mark in marks.items():
            if mark.startswith(FAILED):
                raise self._error(marks, [])
            if not mark and self._silent(rank, SILENCE if self._heard[rank][0] else STARTING):
                raise self._error(marks, [rank])

    def explain(self) -> None:
        """Raise if it was another process that has brought all to an end."""
        end = time.monotonic() + PATIENCE
        while True:
            marks = self._marks()
            unknown = [rank for rank, mark in marks.items() if not mark]
            lost = [rank for rank in unknown if self._silent(rank, SOON)]
            if len(lost) == len(unknown) or time.monotonic() > end:
                break
            time.sleep(LOOK)
        if lost or any(mark.startswith(FAILED) for mark in marks.values()):
            raise self._error(marks, lost)

    def leave(self, mark: str) -> None:
        """Tell the others why this process ends."""
        if self._store is not None:
            self._store.set(f"left/{self.rank}", mark)

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Count at the store until all is done."""
        done = threading.Event()
        thread = threading.Thread(target=self._count, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _count(self, done: threading.Event) -> None:
        number = 0
        while self._store is not None and not done.wait(BEAT if number else 0):
            number += 1
            try:
                self._store.set(f"count/{self.rank}", str(number))
            except RuntimeError:  # the store is gone, and so is this run
                return

    def _marks(self) -> dict[int, str]:
        """What other processes have left behind, or nothing while they go on."""
        return {rank: self._read(f"left/{rank}") for rank in self._heard}

    def _read(self, key: str) -> str:
        assert self._store is not None
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError as error:
            told = "the process that keeps the store of torchrun was lost, and all others with it"
            raise LostRank(told, speaker=min(1, self.size - 1)) from error

    def _silent(self, rank: int, seconds: float) -> bool:
        count, since = self._read(f"count/{rank}"), time.monotonic()
        if count != self._heard[rank][0]:
            self._heard[rank] = count, since
        return since - self._heard[rank][1] > seconds

    def _error(self, marks: dict[int, str], lost: list[int]) -> LostRank:
        """One sentence, which the first process that is not lost says."""
        failed = [rank for rank, mark in marks.items() if mark.startswith(FAILED)]
        told = [f"rank {rank} failed ({marks[rank].removeprefix(FAILED)})" for rank in failed]
        told += [f"rank {rank} was lost" for rank in lost]
        speaker = min({self.rank, *self._heard} - set(lost))
        return LostRank(f"of {self.size} processes {', '.join(told)}", speaker)


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that the environment tells of; one that is not the first may end.

    Whatever ends this process, the others learn of it; if torchrun ends it because of another, the
    error says which.
    """
    if not _launched() or os.environ["WORLD_SIZE"] == "1":
        yield Ranks()
        return
    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=STARTING))))
    ranks = Ranks(rank, size, PrefixStore("covprop", store))
    with ranks.alive(), _terminable():
        try:
            yield ranks
        except Finished:
            ranks.leave(FINISHED)
        except LostRank:
            ranks.leave(ENDED)
            raise
        except (Exception, KeyboardInterrupt) as error:
            ranks.leave(f"{FAILED}{' '.join(str(error).split()) or type(error).__name__}")
            raise
        except BaseException:  # SIGTERM, by whatever name
            ranks.leave(ENDED)
            ranks.explain()
            raise
        else:
            ranks.leave(FINISHED)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, unless somebody has seen to that."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
