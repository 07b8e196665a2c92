"""One loop for every experiment: measure what the record lacks, keep it, render it.

An experiment is a module with

    NAME                        of the command and of its files
    settings(options)           what must agree for a record to be continued
    units(options)              keys of the results, in the order in which they are measured
    measure(key, options)       one result, from nothing but the key and the options
    tables(record)              what to print: tables of the results so far
    figures(record)             by name, drawn from the results alone
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from experiments import drawing
from experiments.options import Options
from experiments.record import Record, read

UNDATED = {"CreationDate": None}
"""A figure drawn again from the same numbers is the same file."""


@torch.no_grad()
def run(experiment: ModuleType, options: Options) -> dict[str, Any]:
    """Measure the units that the record does not have yet."""
    record = Record(options.path(experiment.NAME), experiment.settings(options))
    wanted = [key for key in experiment.units(options) if _chosen(key, options.only)]
    if not wanted:
        raise ValueError(f"no result of {experiment.NAME} begins with {' or '.join(options.only)}")
    missing = [key for key in wanted if key not in record.results]
    bar = tqdm(missing, desc=experiment.NAME, disable=None)
    try:
        for key in bar:
            bar.set_postfix_str(key, refresh=False)
            record.add(key, experiment.measure(key, options))
    finally:
        record.write()
    return read(record.path)


def _chosen(key: str, only: tuple[str, ...]) -> bool:
    """All parts of a prefix, so that `FC-4` does not choose `FC-40`."""
    return not only or any(f"{key}/".startswith(f"{prefix}/") for prefix in only)


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
    return f"Made with {versions}; {settings}."
