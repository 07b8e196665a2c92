"""Where `covprop` and `python -m covprop` begin, and how they end: always with an exit code."""

import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch

from covprop.cli.memory import limited
from covprop.cli.refusals import ExitCode, Refusal, named, printable, sentence
from covprop.errors import ApproximationWarning, LostRank
from covprop.ranks import Ranks, joined, own_rank

EXTRA = ("typer", "rich")
DEBUG = "--debug"


class Terminated(BaseException):
    """Somebody asked the process to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; whatever happens becomes an exit code, and one sentence if it is not 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    code: int = ExitCode.FINE  # of a process whose findings another one tells
    try:
        with joined() as ranks:
            code = _answered(given, ranks)
    except BrokenPipeError:
        # Whoever read the answer has seen enough; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return _ended(error, given)
    return int(code)


def _ending(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code and the sentence of what ended a command."""
    match error:
        case Refusal():
            return ExitCode.REFUSED, str(error)
        case LostRank():
            return ExitCode.LOST, f"{error}; nothing was written, so run the command again"
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED, "interrupted; nothing was written"
        case Terminated():
            return ExitCode.TERMINATED, "terminated; nothing was written"
    told = f"a fault of covprop itself, please report what {DEBUG} shows: {named(error)}"
    return ExitCode.BUG, told


def _answered(arguments: list[str], ranks: Ranks) -> int:
    """The exit code of a command that came to an end."""
    app, answers, typer = _application()
    command = typer.main.get_command(app)
    with _surroundings() as notes:
        try:
            answer = command.main(arguments, prog_name="covprop", standalone_mode=False, obj=ranks)
        except typer.TyperException as error:
            told = _flat(error.format_message())
            raise Refusal(f"{told} (covprop --help tells more)") from error
    if answer == ExitCode.INTERRUPTED:  # as typer tells of Ctrl-C
        raise KeyboardInterrupt
    if isinstance(answer, int) or answer is None:  # --help and its like
        return answer or ExitCode.FINE
    ranks.first_alone()
    for note in notes:
        sys.stderr.write(f"covprop: note: {note}\n")
    answers.show(answer)
    return answer.code


def _application() -> tuple[Any, Any, Any]:
    """The commands, which need the extra `cli`."""
    try:
        typer = importlib.import_module("typer")
        answers = importlib.import_module("covprop.cli.answers")
        return importlib.import_module("covprop.cli.app").app, answers, typer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise Refusal(
            f"the command line needs {error.name}; install it with pip install 'covprop[cli]'"
        ) from error


@contextmanager
def _surroundings() -> Iterator[list[str]]:
    """Limits, seeds, paths and warnings that a command may change, and that are put back."""
    paths = list(sys.path)
    notes: list[str] = []
    with (
        limited(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(record=True) as seen,
        _terminable(),
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ApproximationWarning)
        torch.manual_seed(0)
        try:
            yield notes
        finally:
            sys.path[:] = paths
            notes += dict.fromkeys(sentence(item.message) for item in seen)  # type: ignore[arg-type]


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that nothing is left behind."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _ended(error: BaseException, arguments: list[str]) -> int:
    """One of several processes says what has happened; with --debug all show where."""
    if DEBUG in arguments[:1]:
        raise error
    code, told = _ending(error)
    if own_rank() == (error.speaker if isinstance(error, LostRank) else 0):
        sys.stderr.write(f"covprop: {printable(_flat(told))}\n")
    return code
