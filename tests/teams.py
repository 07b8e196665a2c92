"""Work done by several processes at once, as `torchrun` would start them on one machine.

A server imports torch once and forks the processes; the store that they meet at is this one's, so
that no port is guessed. Nothing outlives its deadline.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from covprop import ApproximationWarning

DEADLINE = 90.0
"""Seconds after which the processes are ended."""
PRELOADED = ["covprop", "matplotlib.pyplot", "mpmath", "pytest", "rich.console", "torch._dynamo",
             "torch.distributed.tensor", "typer"]  # fmt: skip
"""What processes would import, each for itself; DTensor imports dynamo when it is first used."""


class Lost(AssertionError):
    """A process that ended in another way than by returning."""


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns in each of `size` processes that are one group."""
    with tempfile.TemporaryDirectory() as folder:
        codes = started(size, _in_group, work, arguments, Path(folder))
        found = []
        for rank, code in enumerate(codes):
            wrong = Path(folder) / f"{rank}.txt"
            if code:
                text = wrong.read_text() if wrong.exists() else ""
                raise Lost(f"rank {rank} ended with {code}\n{text}")
            found.append(torch.load(Path(folder) / f"{rank}.pt", weights_only=False))
        return found


def started(size: int, work: Callable[..., Any], *arguments: Any) -> list[int]:
    """The exit codes of `work(*arguments)` in processes with the environment of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [
        context.Process(target=_with_environment, args=(rank, size, store.port, work, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert not late, f"after {DEADLINE} s, ranks {late} have not ended"
    return [int(process.exitcode or 0) for process in processes]


def _with_environment(
    rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ApproximationWarning)
    work(*arguments)


def _in_group(work: Callable[..., Any], arguments: tuple[Any, ...], folder: Path) -> None:
    rank = os.environ["RANK"]
    try:
        dist.init_process_group("gloo")
        torch.save(work(*arguments), folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.txt").write_text(traceback.format_exc())
        raise
