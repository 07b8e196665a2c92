"""Peaks of resident memory, each in a fresh process (Linux)."""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PROCESS = Path("/proc/self")


def spawned(function: Callable[..., Any], *arguments: Any, limit: int | None = None) -> Any:
    """Call a module-level function in a new process, in at most so many bytes of address space.

    What it raises is raised here; a process that is killed raises BrokenProcessPool.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_limit, initargs=(limit,)) as pool:
        return pool.submit(function, *arguments).result()


def _limit(limit: int | None) -> None:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resident() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def peak(function: Callable[[], object]) -> int:
    """The most bytes in memory while the function ran, everything that was there included."""
    (PROCESS / "clear_refs").write_text("5")  # the high-water mark starts again from here
    function()
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{PROCESS}/status has no {key}: memory is measured on Linux only")
