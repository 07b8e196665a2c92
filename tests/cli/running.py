"""Commands run in this process, as a shell would see them; and files to run them on."""

import contextlib
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from covprop.cli.entry import main

FEATURES = 4


@dataclass(frozen=True)
class Ended:
    """What a command left behind: an exit code and two streams."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        """The object on standard output, which holds nothing else."""
        return json.loads(self.out)


def covprop(*words: str | Path | float) -> Ended:
    """Run a command; an exception that comes out of it fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Ended(code, out.getvalue(), err.getvalue())


def refused(*words: str | Path | float) -> str:
    """The one sentence of a command that is refused."""
    ended = covprop(*words)
    check_refused(ended)
    return ended.err.removeprefix("covprop: ").strip()


def check_refused(ended: Ended) -> None:
    """Exit code 2, one sentence on standard error, nothing on standard output."""
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("covprop: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    assert "Traceback" not in ended.err


def network() -> nn.Module:
    """A small network, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def export(model: nn.Module, path: Path, *shape: int, dynamic: bool = True) -> Path:
    """A network as an archive, for any batch or for one."""
    dims = ({0: torch.export.Dim("batch")},) if dynamic else None
    example = torch.zeros(2 if dynamic else 1, *shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=dims), path)
    return path


def write_files(folder: Path) -> None:
    """A model in every format, and arrays that go with it."""
    model = network()
    export(model, folder / "model.pt2", FEATURES)
    save_file(model.state_dict(), folder / "weights.safetensors")
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(model, folder / "pickled.pt")
    (folder / "made_by_test.py").write_text(
        "from tests.cli.running import network as make\n\nNUMBER = 3\n"
    )
    mean = np.linspace(-1, 1, FEATURES, dtype=np.float32)
    root = np.cos(np.arange(FEATURES**2)).reshape(FEATURES, FEATURES)
    covariance = 0.04 * root @ root.T
    np.save(folder / "mean.npy", mean[None])
    np.save(folder / "covariance.npy", covariance)
    np.savez(folder / "arrays.npz", mean=mean[None], covariance=covariance)
    np.savetxt(folder / "mean.csv", mean[None], delimiter=",")
    np.savetxt(folder / "covariance.csv", covariance, delimiter=",")
    torch.save(torch.from_numpy(mean[None]), folder / "mean.pt")
    torch.save({"covariance": torch.from_numpy(covariance)}, folder / "covariance.pt")
