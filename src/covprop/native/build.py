"""Build the compiled kernels: `python src/covprop/native/build.py`.

The hook of the package's build runs it, and so does `make`. A library for each instruction set
stands beside the sources, with a digest of them in its name: one of other sources is never loaded.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parent
SOURCE = "kernels.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall",
    "-fno-math-errno",  # square roots in vectors
    "-fno-trapping-math",  # choices in vectors
    "-Wno-psabi",  # vectors cross no boundary of the library
)  # fmt: skip
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"portable": ()}
"""Names of libraries and the options that make them."""
if platform.machine().lower() in {"x86_64", "amd64"}:
    INSTRUCTION_SETS["avx2"] = ("-mavx2", "-mfma")
    INSTRUCTION_SETS["avx512"] = (
        "-mavx2", "-mfma", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw",
        "-mprefer-vector-width=512",
    )  # fmt: skip


@cache
def digest() -> str:
    """A few digits that change with the sources and the options of the compiler."""
    sources = sorted([*DIRECTORY.glob("*.cpp"), *DIRECTORY.glob("*.h"), Path(__file__)])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def library_path(instructions: str) -> Path:
    """Where the library for an instruction set is, once it is built."""
    return DIRECTORY / f"kernels_{instructions}_{digest()}.so"


def compiler() -> str | None:
    """The C++ compiler: that of CXX, or the first that is found."""
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build() -> list[Path]:
    """Build what is not there, and return the libraries; none, with a message, where it fails."""
    found = compiler()
    missing = [name for name in INSTRUCTION_SETS if not library_path(name).exists()]
    if missing and found is None:
        sys.stderr.write("covprop: no C++ compiler; the torch code is used instead\n")
        return []
    if missing:
        for old in DIRECTORY.glob("kernels_*.so"):
            if digest() not in old.name:
                old.unlink()
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda name: _compile(str(found), name), missing))
    return [path for name in INSTRUCTION_SETS if (path := library_path(name)).exists()]


def _compile(found: str, name: str) -> None:
    """Compile one library; a file appears under its name only when it is whole."""
    target = library_path(name)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    options = [*FLAGS, *INSTRUCTION_SETS[name]]
    if sys.platform == "linux":
        options += ["-static-libgcc", "-static-libstdc++"]  # no version of them is asked for
    command = [found, *options, str(DIRECTORY / SOURCE), "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        partial.replace(target)
        return
    partial.unlink(missing_ok=True)
    message = f"covprop: {SOURCE} does not compile for {name}; other code is used\n{result.stderr}"
    sys.stderr.write(message)


if __name__ == "__main__":
    build()
