"""One loop for every experiment: measure what the record lacks, keep it, render it.

An experiment is a module with

    NAME                        of the command and of its files
    settings(options)           what must agree for a record to be continued
    units(options)              keys of the results, in the order in which they are measured
    measure(key, options)       one result, from nothing but the key and the options
    tables(record)              what to print: tables of the results so far
    figures(record)             by name, drawn from the results alone
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from covprop.cli.ranks import Ranks
from experiments import drawing
from experiments.options import Options
from experiments.record import PAUSE, Record, absorb_parts, part, read

ALONE = Ranks()
UNDATED = {"CreationDate": None}
"""A figure drawn again from the same numbers is the same file."""


@torch.no_grad()
def run(experiment: ModuleType, options: Options, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Measure the units that the record does not have yet, shared among processes.

    The first process keeps the record, each other a part of it beside, which the first absorbs at
    the end; after a run that failed the next one begins with that.
    """
    path, settings = options.path(experiment.NAME), experiment.settings(options)
    missing: list[str] = [] if ranks.rank else _missing(experiment, options)
    missing = json.loads(ranks.broadcast(json.dumps(missing)))
    pause = PAUSE if ranks.size == 1 else 0.0  # so that nothing is lost with a process
    record = Record(part(path, ranks.rank) if ranks.rank else path, settings, pause)
    bar = tqdm(ranks.take(missing), experiment.NAME, len(missing), disable=_quiet(ranks))
    try:
        for key in bar:
            bar.set_postfix_str(key, refresh=False)
            record.add(key, experiment.measure(key, options))
    finally:
        record.write()
    ranks.gather(None)
    absorb_parts(record, experiment.units(options))
    return read(record.path)


def _missing(experiment: ModuleType, options: Options) -> list[str]:
    """What is still to be measured."""
    record = Record(options.path(experiment.NAME), experiment.settings(options))
    units = experiment.units(options)
    wanted = [key for key in units if _chosen(key, options.only)]
    if not wanted:
        which = (
            f"begins with {' or '.join(options.only)}" if options.only else "is of these options"
        )
        raise ValueError(f"no result of {experiment.NAME} {which}")
    absorb_parts(record, units)
    return [key for key in wanted if key not in record.results]


def _quiet(ranks: Ranks) -> bool | None:
    """One bar, and that on a terminal."""
    return True if ranks.rank else None


def _chosen(key: str, only: tuple[str, ...]) -> bool:
    """All parts of a prefix, so that `FC-4` does not choose `FC-40`; a part may be a pattern."""
    return not only or any(_begins(key.split("/"), prefix.split("/")) for prefix in only)


def _begins(key: list[str], prefix: list[str]) -> bool:
    both = zip(key, prefix, strict=False)
    return len(prefix) <= len(key) and all(fnmatchcase(part, pattern) for part, pattern in both)


def render(experiment: ModuleType, folder: Path) -> list[Path]:
    """Tables as Markdown and LaTeX, figures as PNG and PDF, beside the JSON; the files made."""
    record = read(folder / f"{experiment.NAME}.json")
    tables, drawn = experiment.tables(record), experiment.figures(record)
    made = []
    if tables:
        made += [folder / f"{experiment.NAME}.md", folder / f"{experiment.NAME}.tex"]
        made[0].write_text(markdown(experiment, record, drawn))
        made[1].write_text("\n".join(table.latex() for table in tables))
    for name, figure in drawn.items():
        made += [folder / f"{name}.png", folder / f"{name}.pdf"]
        figure.savefig(made[-2], dpi=drawing.RESOLUTION)
        figure.set_layout_engine("none")  # everything has its place by now
        figure.savefig(made[-1], dpi=drawing.RESOLUTION, metadata=UNDATED)
    return made


def markdown(experiment: ModuleType, record: dict[str, Any], drawn: dict[str, Any]) -> str:
    """What it is, the tables, the figures, and what it was made with."""
    about = (experiment.__doc__ or experiment.NAME).strip()
    title, _, text = about.partition("\n")
    parts = [f"# {title.rstrip('.')}", text.strip()]
    parts += [table.markdown().strip() for table in experiment.tables(record)]
    parts += [f"![{name}]({name}.png)" for name in drawn]
    parts.append(_conditions(record))
    return "\n\n".join(part for part in parts if part) + "\n"


def _conditions(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
    return f"Made with {versions}; {settings}.{_runs(record)}"


def _runs(record: dict[str, Any]) -> str:
    """Commits, threads and load, in words, and of how many results they are known."""
    runs = record.get("runs", [])
    if not runs:
        return ""
    known, total = sum(run["results"] for run in runs), len(record["results"])
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    threads = ", ".join(dict.fromkeys(str(run["threads"]) for run in runs))
    loads = [run[when] for run in runs for when in ("load", "load at the end") if when in run]
    some = f" Of {known} of the {total} results: commit" if known < total else " Commit"
    return f"{some} {commits}; threads {threads}; load {min(loads)} to {max(loads)}."
