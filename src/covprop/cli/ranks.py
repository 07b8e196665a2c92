"""Processes that `torchrun` has started, and that share many inputs among them.

They meet at the store of torchrun. Each writes a heartbeat there, so that one that waits for a
process, or is terminated because of one, can tell which it was. Without torchrun there is one
process, and no store.
"""

import contextlib
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

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # as torchrun sets it
# All in seconds.
HEARTBEAT = 0.5  # between two beats
TIMEOUT = 60.0  # without a beat, after which a process is lost
TERMINATION_TIMEOUT = 3.0  # the same once torchrun terminates all, because one is lost
SEARCH_TIME = 20.0  # for finding out which; torchrun grants 30 before it kills
START_TIMEOUT = 600.0  # for the first beat of a process
POLL = 0.05  # between two reads of the store
TERMINATED = 143
FINISHED, ENDED, FAILED = "finished", "ended", "failed: "
Item = TypeVar("Item")


def own_rank() -> int:
    """The rank that a launcher has given this process, 0 without a launcher."""
    return int(os.environ["RANK"]) if _launched() else 0


def _launched() -> bool:
    return all(name in os.environ for name in ENVIRONMENT)


class Finished(BaseException):
    """This process is not the first and has nothing left to do."""


@final
class Ranks:
    """This process among all; the first, with rank 0, reports the result."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        now = time.monotonic()
        self._beats = {other: ("", now) for other in range(size) if other != rank}
        self._checked = now

    def part(self, count: int) -> slice:
        """Which of so many inputs, in their order, are this process's."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def finish_unless_first(self) -> None:
        """Leave to the first process what cannot be shared."""
        if self.rank:
            raise Finished

    def broadcast(self, value: str) -> str:
        """The first process's value, in all processes."""
        if self._store is None:
            return value
        if not self.rank:
            self._store.set("broadcast", value)
        self._wait(self._store, ["broadcast"])
        return self._store.get("broadcast").decode()

    def take(self, items: Sequence[Item]) -> Iterator[Item]:
        """The next item that no process has taken, until there is none; all pass the same items."""
        if self._store is None:
            yield from items
            return
        while (number := self._store.add("taken", 1)) <= len(items):
            self.check()
            yield items[number - 1]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order, for the first; others end here."""
        if self._store is None:
            return [value]
        self._store.set(f"here/{self.rank}", "")
        self._wait(self._store, [f"here/{rank}" for rank in range(self.size)])
        # A group only now, when all are there: nobody waits in it for one that will not come.
        group = PrefixStore("group", self._store)
        dist.init_process_group("gloo", store=group, rank=self.rank, world_size=self.size)
        values: list[Any] = [None] * self.size
        dist.gather_object(value, None if self.rank else values, dst=0)
        dist.destroy_process_group()
        self.finish_unless_first()
        return values

    def _wait(self, store: Store, keys: list[str]) -> None:
        while not store.check(keys):
            self.check()
            time.sleep(POLL)

    def check(self) -> None:
        """Raise if another process has failed or is lost; checks once in a heartbeat."""
        if time.monotonic() - self._checked < HEARTBEAT:
            return
        self._checked = time.monotonic()
        marks = self._marks()
        for rank, mark in marks.items():
            if mark.startswith(FAILED):
                raise self._error(marks, [])
            if not mark and self._silent(rank, TIMEOUT if self._beats[rank][0] else START_TIMEOUT):
                raise self._error(marks, [rank])

    def explain(self) -> None:
        """Raise if it was another process because of which all are terminated."""
        end = time.monotonic() + SEARCH_TIME
        while True:
            marks = self._marks()
            unknown = [rank for rank, mark in marks.items() if not mark]
            lost = [rank for rank in unknown if self._silent(rank, TERMINATION_TIMEOUT)]
            if len(lost) == len(unknown) or time.monotonic() > end:
                break
            time.sleep(POLL)
        if lost or any(mark.startswith(FAILED) for mark in marks.values()):
            raise self._error(marks, lost)

    def leave(self, mark: str) -> None:
        """Write to the store why this process ends."""
        if self._store is not None:
            self._store.set(f"left/{self.rank}", mark)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Write a beat to the store now and then, in a thread of its own."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat(self, done: threading.Event) -> None:
        number = 0
        while self._store is not None and not done.wait(HEARTBEAT if number else 0):
            number += 1
            try:
                self._store.set(f"beat/{self.rank}", str(number))
            except RuntimeError:  # the store is gone, and so is this run
                return

    def _marks(self) -> dict[int, str]:
        """Why other processes have ended, "" while they run."""
        return {rank: self._read(f"left/{rank}") for rank in self._beats}

    def _read(self, key: str) -> str:
        assert self._store is not None
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError as error:
            message = (
                "the process that keeps the store of torchrun was lost, and all others with it"
            )
            raise LostRank(message, speaker=min(1, self.size - 1)) from error

    def _silent(self, rank: int, seconds: float) -> bool:
        beat, now = self._read(f"beat/{rank}"), time.monotonic()
        if beat != self._beats[rank][0]:
            self._beats[rank] = beat, now
        return now - self._beats[rank][1] > seconds

    def _error(self, marks: dict[int, str], lost: list[int]) -> LostRank:
        """One sentence, which the first process that is not lost prints."""
        failed = [rank for rank, mark in marks.items() if mark.startswith(FAILED)]
        reasons = [f"rank {rank} failed ({marks[rank].removeprefix(FAILED)})" for rank in failed]
        reasons += [f"rank {rank} was lost" for rank in lost]
        speaker = min({self.rank, *self._beats} - set(lost))
        return LostRank(f"of {self.size} processes {', '.join(reasons)}", speaker)


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the processes that the environment names; one that is not the first may end early.

    Whatever ends this process, the others learn of it; if torchrun terminates it because of
    another, the error says which.
    """
    if not _launched() or os.environ["WORLD_SIZE"] == "1":
        yield Ranks()
        return
    timeout = timedelta(seconds=START_TIMEOUT)
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    ranks = Ranks(rank, size, PrefixStore("covprop", store))
    handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    sigterm = contextlib.nullcontext() if handled else raise_on_sigterm(SystemExit(TERMINATED))
    with ranks.heartbeat(), sigterm:
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
def raise_on_sigterm(error: BaseException | type[BaseException]) -> Iterator[None]:
    """Let SIGTERM raise an error, as Ctrl-C does, so that nothing is left behind."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise error

    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
