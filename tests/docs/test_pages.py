"""Every block of Python in README and docs runs, and prints what stands below it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import covprop as cp
from covprop.kernels.compiled import library
from tests.cli.running import covprop
from tests.pages import ROOT, assert_agree, blocks, examples, rewritten, run, words
from tests.torchvision_names import without_torchvision

with without_torchvision():
    import onnx2pytorch

DOCS = ROOT / "docs"
LARGEST_PICTURE, SMALLEST_PICTURE = 150_000, 10_000


def model_and_input() -> dict[str, Any]:
    """A model and a Gaussian, under the names that fragments of code use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    mean, covariance = torch.zeros(3), 0.1 * torch.eye(3)
    x = cp.Gaussian(mean, covariance)
    return {
        "torch": torch, "cp": cp, "model": model, "x": x, "y": cp.propagate(model, x),
        "mean": mean, "covariance": covariance, "variance": torch.ones(3),
        "images": torch.zeros(2, 1, 4, 4),
    }  # fmt: skip


def model_and_sensor() -> dict[str, Any]:
    """And a state, a sensor that reads it, and a reading."""
    state, sensor = cp.Gaussian(torch.zeros(3), torch.eye(3)), nn.Linear(3, 2)
    return model_and_input() | {
        "state": state, "sensor": sensor.requires_grad_(False), "reading": torch.ones(2),
    }  # fmt: skip


def model_and_file() -> dict[str, Any]:
    """And a model in a file, in the folder where the page runs."""
    names = model_and_input()
    inside, outside = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3])
        for name in "xy"
    )
    relu = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([relu], "relu", [inside], [outside])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), "model.onnx")
    return names | {"onnx": onnx, "onnx2pytorch": onnx2pytorch}


@dataclass(frozen=True)
class Page:
    """How the code of a page is run.

    relative: by how much numbers may differ, None to compare words alone; names: makes what the
    fragments of a page take for granted; quicker: what is run in place of some of its code, where
    words alone are compared.
    """

    relative: float | None = 0.0
    names: Callable[[], dict[str, Any]] = dict
    quicker: dict[str, str] = field(default_factory=dict)


PAGES = {
    "README.md": Page(relative=1e-3, names=model_and_file),  # an estimated error has two digits
    "docs/index.md": Page(relative=1e-3),
    "docs/quickstart.md": Page(relative=None),  # times and free memory
    "docs/why.md": Page(relative=0.1),
    "docs/extending.md": Page(relative=0.02),
    "docs/interoperability.md": Page(  # a network trained in float32
        relative=None, quicker={"epochs=40": "epochs=4", "range(300)": "range(30)"}
    ),
    "docs/methods.md": Page(names=model_and_input),
    "docs/operations.md": Page(names=model_and_sensor),
    "docs/trust.md": Page(relative=None),  # times
    "docs/bayes.md": Page(),
    "docs/robustness.md": Page(relative=None),  # a network trained in float32, and samples of it
}
ELSEWHERE = {
    "docs/cli.md": "with its commands, in tests/cli/test_page.py",
    "docs/conformal.md": "with MAPIE and crepes, in tests/interoperability/test_conformal.py",
    "docs/scale.md": "by two processes, in tests/docs/test_scale.py",
    "docs/report.md": "with a network of its own, in tests/report/test_page.py",
    "CONTRIBUTING.md": "pieces of the library itself",
}


UNLISTED = Page(relative=None)
"""Another page is run as it is, and its words compared."""


def with_code() -> list[str]:
    """The pages that have blocks of Python."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    found = (path for path in paths if examples(path.read_text()))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def test_no_page_is_listed_that_has_no_code() -> None:
    assert {*PAGES, *ELSEWHERE} <= set(with_code())


@pytest.mark.parametrize("name", [name for name in with_code() if name not in ELSEWHERE])
def test_a_page_shows_what_its_code_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "docs/trust.md" and library() is None:
        pytest.skip("it shows how many terms compiled kernels take")
    monkeypatch.chdir(tmp_path)
    page, text = PAGES.get(name, UNLISTED), (ROOT / name).read_text()
    for long, short in page.quicker.items():
        assert long in text
        text = text.replace(long, short)
    for example, printed in run(text, page.names(), name):
        if example.shown is None:
            continue
        if page.relative is None:
            assert words(printed) == words(example.shown), f"{name}, line {example.line}"
        else:
            assert_agree(printed, example.shown, page.relative)
    shown = re.findall(r"\(images/(\S+\.png)\)", text)
    for picture in tmp_path.glob("*.png"):
        assert picture.name in shown, "a page draws what it does not show"
        assert SMALLEST_PICTURE < picture.stat().st_size < LARGEST_PICTURE


def test_the_commands_of_readme_run_on_what_its_code_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    up_to_the_commands = text[: text.index("covprop propagate")]
    list(run(up_to_the_commands, page="README.md"))
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("covprop ")]
    assert len(commands) == 3
    for command in commands:
        ended = covprop(*shlex.split(command, comments=True)[1:])
        assert (ended.code, ended.err) == (0, ""), command
    assert (tmp_path / "y.html").stat().st_size > SMALLEST_PICTURE


def test_pictures_are_small_and_on_a_page() -> None:
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert set(pictures) == set(re.findall(r"\(images/(\S+)\)", pages))
    assert max(pictures.values()) < LARGEST_PICTURE


def test_a_page_that_says_otherwise_is_found() -> None:
    page = "```python\nprint('a mean of', 0.5)\n```\n\n```text\na mean of {}\n```\n"
    ((example, printed),) = run(page.format("0.50"))
    assert example.shown is not None
    assert_agree(printed, example.shown, relative=0.02)
    for wrong in ("a mean of 0.55", "a median of 0.50", "a mean of 0.50 0.50"):
        with pytest.raises(AssertionError):
            assert_agree(printed, wrong, relative=0.02)
    assert words("1.2 ms 3e-05 a ± 0.1") == words("40 ms 2 a ± 7") == ["a"]


def test_a_page_is_rewritten_with_what_it_prints(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "One.\n\n```python\nfrom pathlib import Path\n\nx = 2\nprint(x)\n"
        "Path('two.png').write_text('2')\n```\n```text\n3\n```\n\n"
        "```python\nprint(x + 1)\n```\n\n```text\nold\nold\n```\nEnd.\n"
    )
    expected = page.read_text().replace("text\n3\n", "text\n2\n").replace("old\nold\n", "3\n")
    assert rewritten(page, tmp_path) == expected
    assert (tmp_path / "two.png").read_text() == "2"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "api" / "index.html").exists()
