"""Processes that share many inputs: dealt, gathered, and lost."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from covprop.cli import ranks
from covprop.cli.ranks import Ranks, process_group
from covprop.errors import LostRank
from experiments import runner
from experiments.options import Options
from experiments.record import Record, part, read
from tests.teams import started

INSTANCES = 9


def test_without_torchrun_there_is_one_process_and_no_group() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with process_group() as alone:
        assert (alone.rank, alone.size) == (0, 1)
        assert list(alone.take("abc")) == ["a", "b", "c"]
        assert alone.gather(3) == [3]
        assert alone.broadcast("x") == "x"
        assert alone.part(5) == slice(0, 5)
        assert signal.getsignal(signal.SIGTERM) is before
        alone.finish_unless_first()
        alone.check()
    assert not dist.is_initialized()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
def test_the_parts_of_a_batch_are_all_of_it_in_order(count: int) -> None:
    parts = [list(range(count))[Ranks(rank, 4).part(count)] for rank in range(4)]
    assert [item for own in parts for item in own] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def _gathered(folder: Path) -> None:
    with process_group() as here:
        mine = list(here.take(range(20)))
        word = here.broadcast(f"by {here.rank}")
        found = here.gather((here.rank, word, mine, torch.full((3,), here.rank)))
        torch.save(found, folder / "found.pt")
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_dealt_is_gathered_by_the_first(size: int, tmp_path: Path) -> None:
    assert started(size, _gathered, tmp_path) == [0] * size
    found = torch.load(tmp_path / "found.pt")
    assert [rank for rank, *_ in found] == list(range(size))
    assert {word for _, word, *_ in found} == {"by 0"}
    assert sorted(item for _, _, mine, _ in found for item in mine) == list(range(20))
    assert [int(tensor[0]) for *_, tensor in found] == list(range(size))


# Experiments.


def counting(folder: Path, fatal: str | None = None, slow: float = 0.0) -> Any:
    """An experiment whose results say who measured them; rank 1 does not survive the fatal one."""

    def measure(key: str, options: Options) -> dict[str, Any]:
        del options
        time.sleep(slow)
        if os.environ.get("RANK") == "1" and fatal is not None:
            finished = Record(part(folder / "r.json", 1), {}).results
            if fatal == "killed" and finished:
                os.kill(os.getpid(), signal.SIGKILL)
            if fatal == "fails" and finished:
                raise ValueError("a bad instance")
        return {"square": int(key) ** 2}

    return SimpleNamespace(
        NAME="counting",
        settings=lambda _: {},
        units=lambda _: [str(number) for number in range(INSTANCES)],
        measure=measure,
    )


def _experiment(folder: Path, fatal: str | None, slow: float) -> None:
    ranks.TIMEOUT = 4.0  # in place of a minute
    try:
        with process_group() as here:
            runner.run(counting(folder, fatal, slow), Options(out=folder / "r.json"), here)
    except LostRank as error:
        (folder / f"told{os.environ['RANK']}").write_text(f"{error.speaker}: {error}")
        raise SystemExit(2) from error


@pytest.mark.parametrize("size", [2, 4])
def test_an_experiment_of_several_processes_is_that_of_one(size: int, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    whole = runner.run(counting(alone), Options(out=alone / "r.json"))
    assert started(size, _experiment, shared, None, 0.05) == [0] * size
    files = [read(folder / "r.json") for folder in (shared, alone)]
    for file in files:
        del file["runs"]  # their commits, threads and loads
    assert str(files[0]) == str(files[1])  # also in the same order
    assert read(alone / "r.json") == whole
    assert [path.name for path in shared.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("fatal", "told"),
    [("killed", "rank 1 was lost"), ("fails", r"rank 1 failed (a bad instance)")],
)
def test_a_process_that_ends_is_named_and_what_is_finished_is_kept(
    fatal: str, told: str, tmp_path: Path
) -> None:
    codes = started(3, _experiment, tmp_path, fatal, 0.4)
    assert codes == [2, -signal.SIGKILL if fatal == "killed" else 1, 2]
    for rank in (0, 2):
        assert (tmp_path / f"told{rank}").read_text() == f"0: of 3 processes {told}"
    finished = set()
    for path in tmp_path.glob("*.json"):
        finished |= set(read(path)["results"])
    assert read(part(tmp_path / "r.json", 1))["results"]  # of the process that ended
    assert 3 <= len(finished) < INSTANCES
    asked: list[str] = []
    experiment = counting(tmp_path)
    measure = experiment.measure
    experiment.measure = lambda key, options: asked.append(key) or measure(key, options)
    whole = runner.run(experiment, Options(out=tmp_path / "r.json"))
    assert set(asked) == {str(number) for number in range(INSTANCES)} - finished
    assert whole["results"] == {str(number): {"square": number**2} for number in range(INSTANCES)}
    assert not list(tmp_path.glob("*rank*.json"))


# As torchrun ends processes: by SIGTERM, shortly after one was lost.


def _ended(folder: Path) -> None:
    try:
        with process_group() as here:
            here.broadcast("begun")
            if here.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(30)
    except LostRank as error:
        (folder / f"told{os.environ['RANK']}").write_text(f"{error.speaker}: {error}")


def test_who_is_ended_because_of_another_says_which(tmp_path: Path) -> None:
    codes = started(3, _ended, tmp_path)
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert (tmp_path / f"told{rank}").read_text() == "0: of 3 processes rank 1 was lost"
