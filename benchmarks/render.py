"""`python -m benchmarks.render [FILE] [--out FOLDER]`: a Markdown table and plots of the JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import plots

OUT = Path(__file__).parent / "out"
LARGE = 1000
VERDICTS = {True: "yes", False: "**no**", None: ""}


def table(record: dict[str, Any]) -> str:
    """Every figure beside its target, and what was measured on what."""
    lines = [
        _conditions(record),
        "",
        "| figure | target | reached | met? |",
        "| --- | --- | --- | --- |",
    ]
    for name, result in record["results"].items():
        for row in result["figures"]:
            cells = f"{row['target']} | {number(row['reached'])} | {VERDICTS[row['met']]}"
            lines.append(f"| {name}: {row['figure']} | {cells} |")
        if result.get("failure"):
            failure = " ".join(result["failure"].split()).replace("|", "\\|")
            lines.append(f"| {name} | | failed: {failure} | **no** |")
    return "\n".join(lines) + "\n"


def _conditions(record: dict[str, Any]) -> str:
    settings, versions = record["settings"], record["versions"]
    loads = [load for result in record["results"].values() for load in result["load"]]
    smoke = "**A smoke run: sizes of seconds, which say nothing about speed.** "
    return (
        f"{smoke if settings['smoke'] else ''}{settings['cpu']}, {settings['threads']} threads, "
        f"{settings['vector instructions']}; torch {versions['torch']}, numpy {settings['numpy']}, "
        f"Python {versions['python']}, covprop {versions['covprop']}; load {min(loads):g} to "
        f"{max(loads):g}."
    )


def number(value: float) -> str:
    """Three digits; thousands separated; tiny ones with an exponent."""
    if abs(value) >= LARGE:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1 / LARGE else f"{value:.1e}"


def main() -> None:
    """Read, write, say where."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=OUT / "benchmarks.json")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table and the plots")
    arguments = parser.parse_args()
    record = json.loads(arguments.file.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "table.md"
    path.write_text(table(record))
    for made in (path, *plots.draw(record["results"], arguments.out)):
        print(made)


if __name__ == "__main__":
    main()
