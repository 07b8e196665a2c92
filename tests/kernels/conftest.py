"""Every compiled library that this machine can run."""

import pytest
import torch

from covprop.kernels import compiled
from covprop.native import build

RUNNABLE = compiled.LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ("portable",))


@pytest.fixture(params=RUNNABLE)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, the library for which is used; `torch` by itself has no library."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "library", lambda: None)
        return "torch"
    library = compiled.load(build.library_path(request.param))
    monkeypatch.setattr(compiled, "library", lambda: library)
    return str(request.param)
