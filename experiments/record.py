"""Results as JSON, with what is needed to make them again."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

import covprop

RESULTS = Path(__file__).parent / "results"


def default_path(name: str, smoke: bool) -> Path:
    """Where an experiment keeps its results; a smoke run does not touch the real ones."""
    return (RESULTS / "smoke" if smoke else RESULTS) / f"{name}.json"


def write(path: Path, settings: dict[str, Any], results: Any) -> None:
    """Write settings, versions and results, replacing the file in one step."""
    versions = {
        "covprop": covprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    record = {"settings": settings, "versions": versions, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
