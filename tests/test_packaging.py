"""The wheel: built, installed into an empty environment and imported from there."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from covprop.native import build

ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")

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


def run(*command: str | Path, **options: Path) -> str:
    finished = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, "--no-build-isolation", "--no-deps", "--no-index", "-w", target, ROOT)
    (built,) = target.glob("*.whl")
    return built


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
    archive = zipfile.ZipFile(wheel)
    (points,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
    assert "covprop = covprop.cli.entry:main" in archive.read(points).decode()


def test_the_wheel_needs_torch_numpy_and_tqdm_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    needed = [
        line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in needed) == ["numpy", "torch", "tqdm"]


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    (packages,) = home.glob("lib/python*/site-packages")
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    # The environment sees torch where it is installed already; what it has itself comes first.
    (packages / "installed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    where, mean, kernels = run(python, "-I", "-c", PROGRAM, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(packages)
    assert (packages / "covprop" / "py.typed").exists()
    assert float(mean) == pytest.approx(0.3989423, rel=1e-6)
    libraries = list((packages / "covprop" / "native").glob("*.so"))
    assert kernels.startswith("compiled") == bool(libraries)
    assert bool(libraries) == (build.compiler() is not None)
    for library in libraries:  # the same without them, as where no compiler was found
        library.unlink()
    _, mean, kernels = run(python, "-I", "-c", PROGRAM, cwd=tmp_path).splitlines()
    assert kernels.startswith("torch code: no compiled library")
    assert float(mean) == pytest.approx(0.3989423, rel=1e-6)


def test_a_wheel_with_compiled_kernels_names_its_platform(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if name.endswith(".so")]
    assert wheel.stem.endswith("py3-none-any") != bool(libraries)
    expected = build.INSTRUCTION_SETS if build.compiler() else ()
    assert len(libraries) == len(expected)
