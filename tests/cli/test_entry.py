"""How a command ends: always with an exit code, one sentence, and nothing half written."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from covprop import __version__
from covprop.cli import app, entry, output, propagation
from tests.cli.running import check_refused, covprop, refused

ROOT = Path(__file__).parents[2]
GIVEN = ("model.pt2", "--mean", "mean.npy", "--covariance", "covariance.npy")


@pytest.mark.parametrize(
    "words",
    [
        ["propagate"], ["propagate", *GIVEN, "--nonsense"], ["nonsense"], ["--nonsense"],
        ["propagate", *GIVEN, "more"], ["propagate", *GIVEN, "--seed", "x"],
        ["propagate", *GIVEN, "--seed", "-1"], ["propagate", *GIVEN, "--seed", "9" * 40],
        ["propagate", *GIVEN, "--batch-dims", "-1"], ["propagate", *GIVEN, "--mean"],
        ["compare", *GIVEN, "--samples", "1"], ["compare", *GIVEN, "--tolerance", "-1"],
        ["propagate", *GIVEN, "--method", ""], ["propagate", *GIVEN, "--method", "best"],
        ["propagate", *GIVEN, "--method", "exact:3"], ["propagate", *GIVEN, "--method", "series:0"],
        ["propagate", *GIVEN, "--method", "series:x"],
        ["propagate", *GIVEN, "--method", "montecarlo:1"],
        ["propagate", *GIVEN, "--method", "montecarlo:-5"],
        ["propagate", *GIVEN, "--method", "montecarlo:1e3"],
        ["propagate", *GIVEN, "--method", "series:" + "9" * 5000],
        ["propagate", *GIVEN, "--method", "piecewise:99"],
        ["compare", *GIVEN, "--method", "exact", "--method", "worst"],
    ],
    ids=lambda words: " ".join(words)[-30:],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_bad_usage_is_one_sentence(words: list[str]) -> None:
    check_refused(covprop(*words))


def test_without_a_command_there_is_help() -> None:
    ended = covprop()
    assert ended.code == 2
    assert "propagate" in ended.out
    assert covprop("--help").code == 0


def test_the_version_is_that_of_the_package() -> None:
    ended = covprop("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("y.txt", "--out 'y.txt': the name ends with none of .npz, .pt, .json"),
        ("y", "the name ends with none of"),
        ("nowhere/y.npz", "nowhere does not exist"),
        ("folder.npz", "--out 'folder.npz' exists and is not a regular file"),
        ("pipe.npz", "--out 'pipe.npz' exists and is not a regular file"),
        ("loop.npz", "--out 'loop.npz' cannot be written"),
        ("a\0b.npz", "cannot be written: embedded null byte"),
        ("x" * 300 + ".npz", "File name too long"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    out: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "folder.npz").mkdir()
    os.mkfifo(folder / "pipe.npz")
    (folder / "loop.npz").symlink_to("loop.npz")
    monkeypatch.setattr(propagation, "run", lambda *_: pytest.fail("it began"))
    assert told in refused("propagate", *GIVEN, "--out", out)


class Failing:
    """Writers that fail half-way, in every way."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, file: Any, *rest: Any) -> None:
        del rest
        file.write(b"half")
        file.flush()
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (KeyboardInterrupt(), 130),
        (entry.Terminated(), 143),
        (RuntimeError("a mistake"), 1),
    ],
    ids=["full disk", "Ctrl-C", "SIGTERM", "a fault"],
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    error: BaseException, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "y.npz").write_text("old")
    before = sorted(os.listdir(folder))
    monkeypatch.setitem(output.WRITERS, ".npz", Failing(error))
    ended = covprop("propagate", *GIVEN, "--out", "y.npz")
    assert ended.code == code
    assert ended.out == ""
    assert ended.err.count("\n") == 1
    assert (folder / "y.npz").read_text() == "old"
    assert sorted(os.listdir(folder)) == before


@pytest.mark.usefixtures("folder")
def test_a_fault_of_covprop_is_exit_code_1_and_shown_with_debug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(app.doctor, "result", broken)
    ended = covprop("doctor")
    assert ended.code == 1
    assert ended.err == (
        "covprop: a fault of covprop itself, please report what --debug shows: "
        "ZeroDivisionError: oh\n"
    )
    with pytest.raises(ZeroDivisionError, match="oh"):
        covprop("--debug", "doctor")


def test_debug_shows_what_is_behind_a_refusal() -> None:
    with pytest.raises(entry.Refusal) as found:
        covprop("--debug", "propagate", "nobody_here:x", "--mean", "m.npy", "--stddev", "1")
    assert isinstance(found.value.__cause__, ModuleNotFoundError)


@pytest.mark.usefixtures("folder")
def test_too_little_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covprop.methods.planning.free_bytes", lambda _: 10)
    monkeypatch.setattr(sys.modules["covprop.flow.lineage"], "LARGE", 10)
    told = refused("propagate", *GIVEN, "--method", "gaussian-layers")
    assert "the covariances would need" in told
    assert told.endswith("(covprop plan shows it all)")


def test_a_covariance_beyond_memory_is_not_written_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "free_bytes", lambda _: 10)
    assert "would take" in refused("propagate", *GIVEN, "--json")
    assert "would take" in refused("propagate", *GIVEN, "--out", "y.npz")
    assert not (folder / "y.npz").exists()
    assert covprop("propagate", *GIVEN).code == 0


def test_without_typer_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert refused("doctor") == (
        "the command line needs typer; install it with pip install '.[cli]' in covprop's folder"
    )


def test_memory_is_limited_while_a_command_runs(folder: Path) -> None:
    """A model that asks for more than there is gets an error, and the limit goes with it."""
    resource = pytest.importorskip("resource")
    (folder / "greedy_by_test.py").write_text(
        "import torch\n\ndef make():\n    return lambda x: x + torch.ones(2**45).sum()\n"
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    given = ("--mean", "mean.npy", "--stddev", 1)
    assert refused("propagate", "greedy_by_test:make", *given) == (
        "there is not enough memory for this"
    )
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


SIGNALLED_MODEL = """
import os
import time
import torch

class Signalled(torch.nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), {number})
        time.sleep(60)
        return x

make = Signalled
"""


def started(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "covprop", *words],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_during_work_leaves_nothing_behind(
    number: signal.Signals, code: int, word: str, folder: Path
) -> None:
    name = f"{word}_by_test"
    (folder / f"{name}.py").write_text(SIGNALLED_MODEL.format(number=int(number)))
    files = sorted(os.listdir(folder))
    words = ("--mean", "mean.npy", "--stddev", "1", "--out", "y.npz")
    # Jobs in the background are begun with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = covprop("propagate", f"{name}:make", *words)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err == f"covprop: {word}; nothing was written\n"
    assert [name for name in sorted(os.listdir(folder)) if name != "__pycache__"] == files


def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    with started(folder, "propagate", *GIVEN, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_a_terminal_gets_a_bar_and_a_table_that_fits(folder: Path) -> None:
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    methods = ("--method", "exact", "--method", "linearized")
    command = [sys.executable, "-m", "covprop", "compare", *GIVEN, "--samples", "200", *methods]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(leader, 4096):
            shown += part
    os.close(leader)
    assert process.wait(timeout=30) == 0
    text = shown.decode()
    assert "3/3" in text  # sampling and two methods
    table = text[text.rindex("3/3") :].split("\n")[1:]
    assert any("verdict" in line for line in table)
    assert max(len(plain(line)) for line in table) <= 80


def plain(line: str) -> str:
    """Without colours."""
    while "\x1b[" in line:
        before, _, rest = line.partition("\x1b[")
        line = before + rest[rest.index("m") + 1 :]
    return line.rstrip("\r\n ")
