"""Where `covprop` and `python -m covprop` begin, and how they end: always with an exit code."""

import contextlib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from covprop.cli.output import ExitCode, Note, Refusal, describe_error, printable, sentence
from covprop.cli.ranks import Ranks, own_rank, process_group, raise_on_sigterm
from covprop.errors import ApproximationWarning, BatchWarning, LostRank
from covprop.flow.lineage import free_bytes

EXTRA = ("typer", "rich")  # packages of the extra `cli`
DEBUG = "--debug"
resource: Any = (
    importlib.import_module("resource") if importlib.util.find_spec("resource") else None
)  # Windows has none
STATUS = Path("/proc/self/status")


class Terminated(BaseException):
    """SIGTERM was received."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; whatever happens becomes an exit code, and one sentence if it is not 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code: int = ExitCode.OK  # of a process whose results another one prints
    try:
        with process_group() as ranks:
            code = _run(words, ranks)
    except BrokenPipeError:
        # Nobody reads on; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.BROKEN_PIPE
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if DEBUG in words[:1]:
            raise
        code, message = _failure(error)
        if own_rank() == (error.speaker if isinstance(error, LostRank) else 0):
            sys.stderr.write(f"covprop: {printable(' '.join(message.split()))}\n")
    return int(code)


def _failure(error: BaseException) -> tuple[ExitCode, str]:
    match error:
        case Refusal():
            return ExitCode.REFUSED, str(error)
        case LostRank():
            return ExitCode.LOST, f"{error}; nothing was written, so run the command again"
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED, "interrupted; nothing was written"
        case Terminated():
            return ExitCode.TERMINATED, "terminated; nothing was written"
    what = describe_error(error)
    return ExitCode.BUG, f"a fault of covprop itself, please report what {DEBUG} shows: {what}"


def _run(arguments: list[str], ranks: Ranks) -> int:
    try:
        typer, _ = map(importlib.import_module, EXTRA)
        app = importlib.import_module("covprop.cli.app").app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        raise Refusal(
            f"the command line needs {error.name}; install it with "
            "pip install '.[cli]' in covprop's folder"
        ) from error
    command = typer.main.get_command(app)
    with _isolated() as notes:
        try:
            result = command.main(arguments, prog_name="covprop", standalone_mode=False, obj=ranks)
        except typer.TyperException as error:
            message = " ".join(error.format_message().split())
            raise Refusal(f"{message} (covprop --help tells more)") from error
    if result == ExitCode.INTERRUPTED:  # as typer reports Ctrl-C
        raise KeyboardInterrupt
    if isinstance(result, int) or result is None:  # --help and its like
        return result or ExitCode.OK
    ranks.finish_unless_first()
    for note in notes:
        sys.stderr.write(f"covprop: note: {note}\n")
    result.show()
    return int(result.code)


@contextmanager
def _isolated() -> Iterator[list[str]]:
    """Collect warnings; restore limits, seeds, paths and handlers that a command may change."""
    paths = list(sys.path)
    notes: list[str] = []
    with (
        limited_memory(),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(record=True) as seen,
        raise_on_sigterm(Terminated),
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ApproximationWarning)
        warnings.simplefilter("always", BatchWarning)
        warnings.simplefilter("always", Note)
        torch.manual_seed(0)
        try:
            yield notes
        finally:
            sys.path[:] = paths
            notes += dict.fromkeys(sentence(item.message) for item in seen)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process take no more memory than is free now, where the system can do that.

    The kernel promises more memory than there is and kills who uses it; a model in a file may ask
    for any size, and gets an error instead.
    """
    lines = STATUS.read_text().splitlines() if STATUS.exists() and resource is not None else []
    mapped = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    if not mapped:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    wanted = min([1024 * mapped[0] + free_bytes(torch.device("cpu")), *limits])
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
