"""Memory that is free."""

import os
from pathlib import Path

import torch

from covprop.covariance import Covariance, Sharded

LARGE = 2**26
"""Bytes of covariances, all that are made, from which it is asked before whether they fit."""


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device, as far as the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits = [1024 * int(fields["MemAvailable"].split()[0])]
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (group / "memory.current").exists():
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit():
            limits.append(int(limit) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def sharers(covariance: Covariance) -> int:
    """Processes of this machine that share the memory, because they share the covariance."""
    several = isinstance(covariance, Sharded) and covariance.device.type == "cpu"
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if several else 1
