"""Commands under torchrun: processes share a batch, and one of them answers as if it was alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import covprop as cp
from covprop.cli import propagation
from covprop.cli.joining import concatenate
from experiments import figure2, runner
from experiments.options import Options
from experiments.record import read
from tests.cli.running import FEATURES, Ended, covprop, network
from tests.teams import started

COUNT = 5
GIVEN = ("made_by_test:make", "--weights=weights.pt", "--mean", "means.npy", "--covariance",
         "covariance.npy", "--batch-dims", "1")  # fmt: skip


@pytest.fixture
def batch(folder: Path) -> Path:
    """Five inputs in a file."""
    means = np.random.default_rng(0).normal(size=(COUNT, FEATURES)).astype(np.float32)
    np.save(folder / "means.npy", means)
    return folder


def _command(folder: Path, words: tuple[str, ...], killed: int | None = None) -> None:
    """Run a command in this process, and keep what it leaves behind."""
    os.chdir(folder)
    if killed == int(os.environ["RANK"]):
        propagation.propagate = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    elif killed is not None:
        # What torchrun does to the others, once it has seen that one is gone.
        propagation.propagate = lambda *_, **__: time.sleep(0.3) or _terminated()
    torch.save(covprop(*words), folder / f"ended{os.environ['RANK']}.pt")


def _terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


def command(folder: Path, size: int, *words: str) -> list[Ended]:
    assert started(size, _command, folder, words) == [0] * size
    return [torch.load(folder / f"ended{rank}.pt", weights_only=False) for rank in range(size)]


def check_only_the_first_tells(ended: list[Ended], err: str = "") -> None:
    assert ended[0].err == err
    for other in ended[1:]:
        assert (other.out, other.err) == ("", "")


def check_numbers(shared: Ended, alone: Ended) -> None:
    assert shared.told.keys() == alone.told.keys()
    for name in ("mean", "stddev", "covariance"):
        got, expected = (torch.tensor(one.told[name]) for one in (shared, alone))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "method"), [(2, "exact"), (4, "split")])
def test_propagate_gives_the_numbers_of_one_process(batch: Path, size: int, method: str) -> None:
    words = "propagate", *GIVEN, "--method", method, "--json"
    alone, ended = covprop(*words), command(batch, size, *words, "--out", "y.npz")
    check_only_the_first_tells(ended)
    check_numbers(ended[0], alone)
    assert np.load(batch / "y.npz")["covariance"].shape == (COUNT, 3, 3)
    assert len(list(batch.glob("*.npz*"))) == 2  # with that of the inputs


def test_more_processes_than_inputs_and_no_batch_at_all(batch: Path) -> None:
    np.save(batch / "means.npy", np.load(batch / "means.npy")[:3])
    words = "propagate", *GIVEN, "--json"
    check_numbers(command(batch, 4, *words)[0], covprop(*words))
    single = ("propagate", *GIVEN[:2], "--mean", "mean.npy", "--stddev", "0.1", "--json")
    ended = command(batch, 2, *single)
    check_only_the_first_tells(ended)
    check_numbers(ended[0], covprop(*single))


def test_robustness_gives_what_one_process_does(batch: Path) -> None:
    words = ("robustness", *GIVEN, "--label", "0,1,2,0,1", "--samples", "500", "--json")
    alone, ended = covprop(*words), command(batch, 2, *words)
    check_only_the_first_tells(ended)
    got, expected = ended[0].told, alone.told
    assert got.keys() == expected.keys()
    for name in ("label", "predicted", "rivals", "margin_mean", "margin_stddev"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        got["misclassification"]["probability"], expected["misclassification"]["probability"],
        atol=1e-3,
    )  # fmt: skip
    assert got["budget"]["reason"] == expected["budget"]["reason"]
    for name, value in shapes(expected).items():
        # Levels and reasons are of each process's part of the batch.
        free = name.endswith(("levels", "probabilities", "notes"))
        assert free or shapes(got)[name] == value, name


def shapes(told: Any, name: str = "") -> dict[str, tuple[int, ...]]:
    if isinstance(told, dict):
        return {
            k: v for key, item in told.items() for k, v in shapes(item, f"{name}.{key}").items()
        }
    return {name: np.shape(told)}


def test_samples_are_joined_with_their_errors(batch: Path) -> None:
    ended = command(batch, 2, "propagate", *GIVEN, "--method", "montecarlo:200", "--json")
    told = ended[0].told
    assert (told["samples"], np.shape(told["covariance_stderr"])) == (200, (COUNT, 3, 3))
    x = cp.Gaussian(
        torch.from_numpy(np.load(batch / "means.npy")),
        torch.from_numpy(np.load(batch / "covariance.npy")).float().expand(COUNT, -1, -1),
    )
    with torch.no_grad():
        y = cp.propagate(network(), x)
    away = (torch.tensor(told["mean"]) - y.mean).abs() / torch.tensor(told["mean_stderr"])
    assert float(away.max()) < 5


@pytest.mark.parametrize("words", [("plan",), ("compare", "--samples", "50")], ids=lambda w: w[0])
def test_what_cannot_be_shared_is_left_to_the_first(batch: Path, words: tuple[str, ...]) -> None:
    ended = command(batch, 2, words[0], *GIVEN, *words[1:])
    check_only_the_first_tells(ended)
    assert ended[0].out


def test_a_refusal_is_told_once(batch: Path) -> None:
    ended = command(batch, 2, "propagate", *GIVEN[:-1], "3")
    assert [one.code for one in ended] == [2, 2]
    check_only_the_first_tells(
        ended, "covprop: a mean of shape (5, 4) cannot have 3 batch dimensions\n"
    )


def test_what_one_process_refuses_the_first_tells(batch: Path) -> None:
    (batch / "picky.py").write_text(
        "from tests.cli.running import network\nimport os\n\n"
        "def make():\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise ValueError('not here')\n"
        "    return network()\n"
    )
    ended = command(batch, 2, "propagate", "picky:make", *GIVEN[2:])
    assert [one.code for one in ended] == [4, 2]
    assert ended[0].err.startswith("covprop: of 2 processes rank 1 failed (")
    assert "not here" in ended[0].err
    assert ended[1].err == ""


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(batch: Path) -> None:
    words = ("propagate", *GIVEN, "--out", "y.npz")
    assert started(2, _command, batch, words, 1) == [0, -signal.SIGKILL]
    ended = torch.load(batch / "ended0.pt", weights_only=False)
    assert ended.code == 4
    assert ended.err == (
        "covprop: of 2 processes rank 1 was lost; nothing was written, so run the command again\n"
    )
    assert not (batch / "y.npz").exists()


def test_batches_of_every_structure_are_joined() -> None:
    mean = torch.arange(12.0).reshape(4, 3)
    for whole in (
        cp.Gaussian(mean, torch.eye(3).expand(4, 3, 3)),
        cp.Gaussian.isotropic(mean, stddev=0.5, batch_dims=1),
        cp.Gaussian.constant(mean, batch_dims=1),
        cp.Gaussian.low_rank(
            mean, torch.ones(4, 3, 2), variance=0.1 * torch.ones(4, 3), batch_dims=1
        ),
    ):
        joined = concatenate([whole[:1], whole[1:3], whole[3:]], None)
        assert type(joined.covariance) is type(whole.covariance)
        assert torch.equal(joined.mean, whole.mean)
        assert torch.equal(joined.covariance_matrix, whole.covariance_matrix)


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(folder), str(Path.cwd()), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*run, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_torchrun_itself(batch: Path) -> None:
    words = "propagate", *GIVEN, "--json"
    ended = torchrun(batch, "covprop", *words)
    assert ended.returncode == 0, ended.stderr
    check_numbers(Ended(0, ended.stdout, ""), covprop(*words))
    (batch / "dying.py").write_text(
        "import os, signal, time\n\n"
        "import torch\n\n"
        "class Dying(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        time.sleep(30)\n\n"
        "make = Dying\n"
    )
    ended = torchrun(batch, "covprop", "propagate", "dying:make", *GIVEN[2:])
    assert ended.returncode != 0
    assert "covprop: of 2 processes rank 1 was lost; nothing was written" in ended.stderr


@pytest.mark.slow
def test_an_experiment_under_torchrun(batch: Path) -> None:
    ended = torchrun(batch, "experiments", "figure2", "--smoke", "--out", str(batch / "f.json"))
    assert ended.returncode == 0, ended.stderr
    alone = runner.run(figure2, Options(smoke=True, out=batch / "alone.json"))
    assert read(batch / "f.json") == alone
    assert not list(batch.glob("*rank*"))
