"""`python -m experiments NAME`: measure; `python -m experiments render [NAME ...]`: draw.

Measuring writes JSON as results come and goes on where it was stopped; rendering only reads it.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

from covprop.cli.ranks import Ranks, own_rank, process_group
from covprop.errors import LostRank
from experiments import (
    accuracy,
    architectures,
    auto,
    cumulants,
    deep,
    field,
    figure2,
    figure3,
    figure4,
    figure5,
    filters,
    mc_dropout,
    noisy,
    ood,
    penultimate,
    record,
    runner,
    sampling,
    split,
    table1,
    table2,
    table3,
    toy,
    training,
    uci,
)
from experiments.options import RESULTS, Options

EXPERIMENTS: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        figure2, figure3, figure4, figure5, table1, table2, table3, deep, noisy, toy, ood, split,
        accuracy, cumulants, auto, sampling, filters, mc_dropout, field, penultimate,
        architectures,
    )
}  # fmt: skip
ANY = "`*` for any part: CNN-8/*/0"
OF_UCI = (table3.NAME, deep.NAME, noisy.NAME)
"""Experiments with a choice of data sets."""


def parser() -> argparse.ArgumentParser:
    """One command for each experiment, one to train, one to render."""
    root = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = root.add_subparsers(dest="name", required=True)
    for name, module in {**EXPERIMENTS, training.NAME: training}.items():
        text = (module.__doc__ or "").replace("%", "%%")  # argparse formats it
        command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
        command.add_argument("--instances", type=_count, help="how many random instances")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--data", type=Path, help="folder of the data sets")
        command.add_argument("--out", type=Path, help="where to write the JSON")
        command.add_argument("--smoke", action="store_true", help="seconds, to see that it works")
        command.add_argument("--weights", type=Path, help="file of the trained MNIST network")
        command.add_argument(
            "--only", nargs="+", default=[], help=f"beginnings of result keys, {ANY}"
        )
        if name in OF_UCI:
            command.add_argument("--datasets", nargs="+", default=[], choices=uci.CHECKSUMS)
        if name == table3.NAME:
            protocols = (*table3.PROTOCOLS, table3.OWN)
            command.add_argument("--protocol", choices=protocols, help="all unless given")
    render = commands.add_parser("render", help="tables and figures of what was measured")
    render.add_argument(
        "names", nargs="*", metavar="NAME",
        help=f"of {', '.join(EXPERIMENTS)}; all that have results unless given",
    )  # fmt: skip
    render.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    joined = commands.add_parser("merge", help="results of runs side by side into one record")
    joined.add_argument("into", choices=EXPERIMENTS)
    joined.add_argument("files", nargs="+", type=Path)
    joined.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    return root


def _count(text: str) -> int:
    """A number of instances, for argparse."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"at least one instance, not {count}")
    return count


def main() -> int:
    """Run a command; what cannot be done is one sentence and exit code 2."""
    arguments = parser().parse_args()
    try:
        with process_group() as ranks:
            command(arguments, ranks)
    except LostRank as error:
        if own_rank() == error.speaker:
            told = f"{error}; results that were finished are kept: run the command again to go on"
            print(f"{type(error).__name__}: {told}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # files, data, settings
        if own_rank() == 0:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def command(arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Measure and print, or render and say where; under torchrun processes share the measuring."""
    if arguments.name not in EXPERIMENTS:
        ranks.finish_unless_first()
    if arguments.name == "merge":
        merged = record.merge(arguments.out / f"{arguments.into}.json", arguments.files)
        print(f"{merged.path}: {len(merged.results)} results")
        return
    if arguments.name == "render":
        chosen = arguments.names or [
            name for name in EXPERIMENTS if (arguments.out / f"{name}.json").exists()
        ]
        for name in chosen:
            if name not in EXPERIMENTS:
                raise ValueError(f"{name!r} is none of {', '.join(EXPERIMENTS)}")
            for path in runner.render(EXPERIMENTS[name], arguments.out):
                print(path)
        return
    values = {key: value for key, value in vars(arguments).items() if key != "name"}
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    options = Options(**{**values, **lists})
    if arguments.name == training.NAME:
        training.show(training.run(options))
        return
    experiment = EXPERIMENTS[arguments.name]
    for table in experiment.tables(runner.run(experiment, options, ranks)):
        print(table.markdown())


if __name__ == "__main__":
    sys.exit(main())
