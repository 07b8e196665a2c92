"""The files that one call passes: docs/architecture.md lists them, and this counts them."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from covprop.kernels.compiled import library
from tests.test_architecture import LAYERS

MOST = 14
"""Files that a call may pass, but for those of the compiled kernels' library."""
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
WALK = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import covprop as cp

SOURCE = Path(cp.__file__).parent

def entered(call):
    files, calls = {}, set()
    def watch(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event != "call" or SOURCE not in path.parents:
            return
        name = path.relative_to(SOURCE).as_posix()
        files.setdefault(name)
        above = frame.f_back
        while above is not None and SOURCE not in Path(above.f_code.co_filename).parents:
            above = above.f_back
        if above is not None:
            calls.add((Path(above.f_code.co_filename).relative_to(SOURCE).as_posix(), name))
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files), sorted(calls)

model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
root = torch.randn(3, 3)
inputs = {
    "full": cp.Gaussian(torch.zeros(3), root @ root.mT),
    "independent": cp.Gaussian.isotropic(torch.zeros(3), stddev=0.1),
}
method, found = cp.GaussianLayers(), {}
found["cold"] = entered(lambda: cp.propagate(model, inputs["full"], method))
for name, x in inputs.items():
    cp.propagate(model, x, method)
    found[name] = entered(lambda: cp.propagate(model, x, method))
print(json.dumps(found))
"""
pytestmark = pytest.mark.skipif(library() is None, reason="no compiler was found")


@cache
def walks() -> dict[str, Any]:
    """(files in order, pairs of files of which the first calls the second), for some calls."""
    # Another process: this one may have imported more, as torch's compiler.
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def written() -> list[str]:
    """The files in the list of the page."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`:", PAGE.read_text(), re.MULTILINE)


def test_a_call_passes_the_files_that_the_page_lists_and_few() -> None:
    files, _ = walks()["full"]
    assert files == written()
    assert len(files) <= MOST


def test_independent_elements_and_the_first_call_pass_what_the_page_says_beside_them() -> None:
    full = set(walks()["full"][0])
    assert set(walks()["independent"][0]) - full == {"covariance/diagonal.py"}
    assert set(walks()["cold"][0]) - full == {
        "activations/rectifiers.py", "kernels/rounding.py", "native/build.py",
    }  # fmt: skip


UPWARD = {
    ("flow", "rules"),  # the row of the table
    ("flow", "carriers"),  # the carrier of a tensor
    ("flow", "methods"),  # what a lineage, and a walk over a nest, were given
    ("carriers", "methods"),  # the method that treats an activation
    ("covariance", "methods"),  # its function of a matrix
    ("covariance", "rules"),  # the layer of a linear map
}
"""Layers that call what stands above them: through an object that they were given."""


def test_calls_go_down_but_through_objects() -> None:
    def layer(file: str) -> str:
        return file.partition("/")[0].removesuffix(".py")

    calls = {(layer(a), layer(b)) for name in walks() for a, b in walks()[name][1]}
    assert {(a, b) for a, b in calls if LAYERS.index(b) < LAYERS.index(a)} <= UPWARD
