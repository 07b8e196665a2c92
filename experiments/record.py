"""Results as JSON, with what is needed to make them again; a run that was stopped goes on."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch

import covprop
from covprop.files import write_atomically
from experiments.options import ROOT

PAUSE = 5.0
"""Seconds between two writes of a growing file: what a run loses when it is killed."""


class OtherSettings(ValueError):
    """The file holds results that were made in another way."""


@final
class Record:
    """Results by key, kept in a file as they come.

    An existing file is continued if its settings agree, and refused otherwise: nobody's hours of
    results are overwritten. `instances` is no setting: more of them extend a record.
    pause: seconds between two writes.
    """

    def __init__(self, path: Path, settings: dict[str, Any], pause: float = PAUSE) -> None:
        self.path, self.settings, self._pause = path, _as_json(settings), pause
        self.results: dict[str, Any] = {}
        self.earlier: list[dict[str, str]] = []
        self.runs: list[dict[str, Any]] = []
        self._run, self._added = conditions(), False
        self._written = time.monotonic()
        if path.exists():
            self._continue(read(path))

    def _continue(self, old: dict[str, Any]) -> None:
        differing = {
            f"{key}: {old['settings'].get(key)!r} there, {self.settings.get(key)!r} now"
            for key in old["settings"].keys() | self.settings.keys()
            if old["settings"].get(key) != self.settings.get(key)
        }
        if differing:
            raise OtherSettings(
                f"{self.path} was made with other settings ({'; '.join(sorted(differing))}); "
                "delete it or give another --out"
            )
        self.results, self.runs = old["results"], old.get("runs", [])
        self.earlier = old.get("earlier versions", [])
        if old["versions"] != versions() and old["versions"] not in self.earlier:
            self.earlier.append(old["versions"])

    def add(self, key: str, result: Any) -> None:
        """Keep one more result; write it soon."""
        self.results[key] = _as_json(result)
        if not self._added:
            self._added = True
            self.runs.append(self._run)
        self._run["results"] += 1
        if time.monotonic() - self._written > self._pause:
            self.write()

    def write(self) -> None:
        """Write now."""
        further: dict[str, Any] = {"earlier versions": self.earlier} if self.earlier else {}
        if self._added:
            self._run["load at the end"] = load()
        write(self.path, self.settings, self.results, **further, runs=self.runs)
        self._written = time.monotonic()


def merge(path: Path, others: list[Path]) -> Record:
    """Add to a record what files of the same settings have and it has not: runs side by side."""
    record = Record(path, read(path if path.exists() else others[0])["settings"])
    for other in others:
        added = Record(other, record.settings)
        record.runs += [run for run in added.runs if run not in record.runs]
        for key, result in added.results.items():
            if key not in record.results:
                record.results[key] = result
    record.write()
    return record


def part(path: Path, rank: int) -> Path:
    """Where a process that is not the first keeps its share of a record."""
    return path.with_suffix(f".rank{rank}.json")


def absorb_parts(record: Record, units: Iterable[str]) -> None:
    """Add what other processes have left beside a record, in this run or in one that failed.

    units: the keys in the order in which one process measures them, which the record gets.
    """
    parts = sorted(record.path.parent.glob(f"{record.path.stem}.rank*.json"))
    if not parts:
        return
    found = record.results
    for path in parts:
        left = Record(path, record.settings)
        found |= left.results
        record.runs += left.runs
    order = dict.fromkeys((*(key for key in units if key in found), *found))
    record.results = {key: found[key] for key in order}
    record.write()
    for path in parts:
        path.unlink()


def versions() -> dict[str, str]:
    """Of what made the numbers."""
    return {
        "covprop": covprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def conditions() -> dict[str, Any]:
    """Of a run that begins: the commit, with + where sources differ, the machine and its load."""
    return {
        "commit": commit(), "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(), "load": load(), "results": 0,
    }  # fmt: skip


def commit() -> str:
    """Of the sources; unknown outside of a clone."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "experiments", ":!experiments/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def load() -> float:
    """Processes that wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def read(path: Path) -> dict[str, Any]:
    """Settings, versions and results."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def write(path: Path, settings: dict[str, Any], results: Any, **further: Any) -> None:
    """Write all of it, one result to a line, replacing the file in one step."""
    record = {"settings": settings, "versions": versions(), **further, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = ",\n".join(f" {json.dumps(key)}: {_lines(part)}" for key, part in record.items())
    text = f"{{\n{sections}\n}}\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _lines(section: Any) -> str:
    if not isinstance(section, dict) or not section:
        return json.dumps(section)
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(part)}" for key, part in section.items())
    return f"{{\n{rows}\n }}"


def _as_json(value: Any) -> Any:
    """As it will be read back: tuples are lists, keys are words."""
    return json.loads(json.dumps(value))
