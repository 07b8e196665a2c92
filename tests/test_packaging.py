"""Source archive and wheel: built, installed by file name into an empty environment, used there."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest
import torch

import covprop
from covprop.native import build

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")
pytest.importorskip("build")

PROGRAM = """
import warnings; warnings.simplefilter("error")
import torch, covprop as cp
from covprop.report import page
x = cp.Gaussian(torch.zeros(2), torch.eye(2))
y = cp.propagate(torch.nn.ReLU(), x)
assert "</html>" in page.render(model_name="relu", x=x, y=y)
print(cp.__file__)
print(float(y.mean[0]))
from covprop.kernels import compiled
print(compiled.description())
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints, which finds no package but by its own environment."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, check=False, cwd=cwd, env=surroundings,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both: `python -m build` makes the wheel of the source archive."""
    target = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", target, ROOT)
    assert len(list(target.iterdir())) == 2
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def archive(built: Path) -> Path:
    (path,) = built.glob("*.tar.gz")
    return path


class Environment:
    """A file installed where there is nothing else, but for what the package depends on."""

    def __init__(self, home: Path, path: Path) -> None:
        self.home, self.python = home, home / "bin" / "python"
        run(sys.executable, "-m", "venv", "--without-pip", home)
        (self.packages,) = home.glob("lib/python*/site-packages")
        # What the environment has itself comes first; editable installs there are not followed.
        (self.packages / "installed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        run(*pip, "install", *options, path)

    def used(self) -> tuple[float, str]:
        """A mean from two lines of Python, and what computed it."""
        where, mean, kernels = run(self.python, "-I", "-c", PROGRAM, cwd=self.home).splitlines()
        assert Path(where).is_relative_to(self.packages)
        return float(mean), kernels


def test_the_wheel_has_the_package_its_types_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "covprop").rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert source <= set(names)
    assert "covprop/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"covprop", next(top for top in tops if top.endswith(".dist-info"))}


def test_the_wheel_has_the_command(wheel: Path) -> None:
    opened = zipfile.ZipFile(wheel)
    (points,) = (name for name in opened.namelist() if name.endswith("/entry_points.txt"))
    assert "covprop = covprop.cli.entry:main" in opened.read(points).decode()


def test_the_wheel_needs_torch_numpy_and_tqdm_alone(wheel: Path) -> None:
    opened = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
    lines = opened.read(metadata).decode().splitlines()
    needed = [
        line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in needed) == ["numpy", "torch", "tqdm"]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheel)


def test_the_wheel_works_in_an_empty_environment(environment: Environment) -> None:
    assert (environment.packages / "covprop" / "py.typed").exists()
    mean, kernels = environment.used()
    assert mean == pytest.approx(0.3989423, rel=1e-6)
    libraries = list((environment.packages / "covprop" / "native").glob("*.so"))
    assert kernels.startswith("compiled") == bool(libraries)
    assert bool(libraries) == (build.compiler() is not None)


def test_its_command_works_in_an_empty_environment(
    environment: Environment, tmp_path: Path
) -> None:
    pytest.importorskip("typer")
    command = environment.home / "bin" / "covprop"
    assert run(command, "--version").split() == [covprop.__version__]
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()).eval()
    torch.export.save(torch.export.export(model, (torch.zeros(1, 2),)), tmp_path / "model.pt2")
    np.save(tmp_path / "mean.npy", np.zeros((1, 2)))
    words = ("propagate", "model.pt2", "--mean", "mean.npy", "--stddev", "1")
    assert "estimated error" in run(command, *words, cwd=tmp_path)


def test_the_archive_works_in_an_empty_environment_without_a_compiler(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one, `python -m build` has made the wheel of it."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    mean, kernels = Environment(tmp_path / "environment", archive).used()
    assert mean == pytest.approx(0.3989423, rel=1e-6)
    assert kernels.startswith("torch code: no compiled library")


def test_the_archive_builds_and_tests_itself(archive: Path) -> None:
    """What it has beside the package is what `make test` needs, and no result of a build."""
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {"README.md", "LICENSE", "CITATION.cff", "Makefile", "constraints.txt", "mkdocs.yml"}
    assert needed <= names
    assert {"src/covprop/native/kernels.cpp", "tests/conftest.py", "docs/index.md"} <= names
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {covprop.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_classifiers_and_addresses_are_valid(wheel: Path) -> None:
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    opened = zipfile.ZipFile(wheel)
    (name,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
    metadata = message_from_bytes(opened.read(name))
    assert set(metadata.get_all("Classifier")) <= set(classifiers)
    assert all(" https://" in address for address in metadata.get_all("Project-URL"))
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_a_wheel_with_compiled_kernels_names_its_platform(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert wheel.stem.endswith("py3-none-any") != bool(libraries)
    expected = build.INSTRUCTION_SETS if build.compiler() else ()
    assert len(libraries) == len(expected)
