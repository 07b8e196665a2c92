"""What the numbers depend on besides the code."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, Any]:
    """Processor, threads, versions of what does the arithmetic."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "numpy": metadata.version("numpy"),
        "system": platform.platform(),
    }


def cpu_model() -> str:
    """As the system names it."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def load() -> float:
    """How many processes wanted to run in the last minute: many of them make times doubtful."""
    return round(os.getloadavg()[0], 2)
