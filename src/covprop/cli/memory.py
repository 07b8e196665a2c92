"""A limit on the memory of this process: what does not fit becomes an error, not a kill."""

import contextlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from covprop.room import free_bytes

resource: Any = (
    importlib.import_module("resource") if importlib.util.find_spec("resource") else None
)
"""Windows has none."""
STATUS = Path("/proc/self/status")


@contextmanager
def limited() -> Iterator[None]:
    """Let this process take no more than what is free now, where the system can do that.

    The kernel promises more memory than there is, and kills who uses it; a model in a file may ask
    for any size.
    """
    taken = _taken()
    if resource is None or taken is None:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = taken + free_bytes(torch.device("cpu"))
    for limit in (before, most):
        wanted = wanted if limit == resource.RLIM_INFINITY else min(wanted, limit)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _taken() -> int | None:
    """Bytes of data that the process has mapped, used or not."""
    if not STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(fields["VmData"].split()[0]) if "VmData" in fields else None
