# ruff: noqa: T201 - a command reports on standard output
"""Would the tests notice? Small mutations of the numerical sources, each run against its tests.

    python -m tests.mutants --count 60 --output mutants.json

Mutations are generated from the syntax trees of the sources (a sign, a dropped term or factor, a
factor 2, a wrong index or axis, a missing transposition, a reversed comparison) and drawn with a
seed, the same number from each file. Each is written into a copy of the repository, whose related
tests run until the first failure. `--tests FOLDER` takes the tests of another checkout, to compare
two versions of the suite with the same mutants.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "src/covprop"
FOLDERS = ["kernels", "activations", "covariance", "rules"]
"""Sources that are mutated, by default."""
RELATED = {
    "kernels": "kernels activations/test_correlated activations/test_moments test_gradients",
    "activations": "activations test_oracle test_gradients rules/test_elementwise",
    "activations/expression": "rules/test_composition rules/test_elementwise",
    "activations/correlated": "activations/test_correlated activations/test_waves "
    "rules/test_composition",
    "activations/nested": "rules/test_composition activations/test_waves",
    "covariance": "covariance test_gaussian test_last_bits",
    "covariance/semidefinite": "covariance/test_structures covariance/test_deflated "
    "methods/test_split test_validation",
    "covariance/sharded": "covariance/test_sharded covariance/test_sharded_cost",
    "rules": "rules test_branches",
    "rules/affine": "rules/test_affine rules/test_calls methods/test_assumed",
    "rules/aten": "test_exported",
    "rules/composed": "rules/test_composed rules/test_affine rules/test_attention",
    "rules/composition": "rules/test_composition rules/test_elementwise",
    "rules/elementwise": "rules/test_elementwise rules/test_prelu rules/test_user_rules",
    "rules/joint": "rules/test_product test_contraction methods/test_assumed test_lineage "
    "test_branches rules/test_affine",
    "rules/layers": "rules/test_layers rules/test_affine covariance/test_streamed",
    "rules/maximum": "rules/test_maximum rules/test_rising rules/test_independent_maxima",
    "rules/movement": "rules/test_affine rules/test_batch_layout rules/test_batch_dimension",
    "rules/noise": "rules/test_noise rules/test_attention rules/test_recurrent",
    "rules/norms": "rules/test_normalised rules/test_delta",
    "rules/operands": "rules/test_affine rules/test_arguments rules/test_batch_layout",
    "rules/recurrent": "rules/test_recurrent",
    "rules/smooth": "rules/test_delta rules/test_normalised",
}
"""Tests of a source, or of its folder: files or folders in the order in which they run."""
LIMIT = 900.0
"""Seconds for the tests of one mutant: what does not end is noticed."""
PLAIN = ("bytes", "cost", "repr", "str", "describe", "message", "name")
"""Functions with these in their names are not numbers of a result."""


@dataclass(frozen=True)
class Mutant:
    """One expression of one file, and what takes its place."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    stop: int


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutation of the functions of a file."""
    text = path.read_text()
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))

    def place(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    name = str(path.relative_to(ROOT))
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if any(word in function.name for word in PLAIN):
            continue
        for node in _expressions(function.body):
            start, stop = place(node)
            for kind, after in _mutations(node):
                yield Mutant(name, node.lineno, kind, text[start:stop], after, start, stop)


def _expressions(body: list[ast.stmt]) -> Iterator[ast.expr]:
    """Of a function and not of those inside it; no annotations, messages or raised errors."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(
            node, ast.Raise | ast.Assert | ast.FunctionDef | ast.ClassDef | ast.JoinedStr
        ):
            continue
        if isinstance(node, ast.expr):
            yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            children = [] if node.value is None else [node.value]
        pending += reversed(children)


def _mutations(node: ast.expr) -> Iterator[tuple[str, str]]:
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not _is_text(left, right):
            other = "-" if isinstance(op, ast.Add) else "+"
            yield "sign", f"({ast.unparse(left)} {other} ({ast.unparse(right)}))"
            yield "dropped term", f"({ast.unparse(left)})"
        case ast.BinOp(left, ast.Mult() | ast.Div(), right) if not _is_text(left, right):
            yield "dropped factor", f"({ast.unparse(left)})"
            yield "factor 2", f"(2 * ({ast.unparse(node)}))"
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "sign", f"({ast.unparse(operand)})"
        case ast.Attribute(value, "mT", ast.Load()):
            yield "transposition", f"({ast.unparse(value)})"
        case ast.Subscript(value, ast.Constant(int() as index), ast.Load()):
            yield "index", f"{ast.unparse(value)}[{0 if index else -1}]"
        case ast.Compare(left, [ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as op], [right]):
            other = ">=" if isinstance(op, ast.Lt | ast.LtE) else "<"
            yield "comparison", f"({ast.unparse(left)} {other} {ast.unparse(right)})"
        case ast.Call(ast.Attribute(value, "square" | "clamp" | "neg" | "abs", ast.Load())):
            yield "dropped call", ast.unparse(value)
        case ast.Call(function, [ast.UnaryOp(ast.USub(), ast.Constant(1)), *rest], keywords) if (
            isinstance(function, ast.Attribute) and function.attr in ("sum", "mean", "amax")
        ):
            moved = ast.Call(function, [ast.Constant(-2), *rest], keywords)
            yield "axis", ast.unparse(ast.fix_missing_locations(moved))


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )


def drawn(count: int, seed: int, folders: list[str]) -> list[Mutant]:
    """The same number from each file, as far as there are so many; files in a random order."""
    generator = random.Random(seed)
    files = [
        path
        for name in folders
        for path in sorted([ROOT / PACKAGE / name] if name.endswith(".py")
                           else (ROOT / PACKAGE / name).glob("*.py"))
    ]  # fmt: skip
    decks = []
    for path in files:
        deck = [m for m in mutants_of(path)]
        generator.shuffle(deck)
        if deck:
            decks.append(deck)
    generator.shuffle(decks)
    found: list[Mutant] = []
    while len(found) < count and any(decks):
        found += [deck.pop() for deck in decks if deck]
    return found[:count]


def related(path: str, tests: Path) -> list[str]:
    """Test files for a source: those of its own name first."""
    source = Path(path).relative_to(PACKAGE).with_suffix("")
    places = RELATED.get(str(source), RELATED.get(source.parts[0], "."))
    files: list[Path] = []
    for place in places.split():
        found = (
            [tests / f"{place}.py"] if "test_" in place else sorted(tests.glob(f"{place}/test_*"))
        )
        files += [file for file in found if file.exists()]
    files.sort(key=lambda file: file.stem != f"test_{source.stem}")
    return [f"tests/{file.relative_to(tests)}" for file in dict.fromkeys(files)]


def copied(folder: Path, tests: Path) -> None:
    """A repository with sources of its own and the given tests."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    shutil.copytree(tests, folder / "tests", ignore=ignored)
    for name in ("benchmarks", "experiments", "docs"):
        (folder / name).symlink_to(ROOT / name)


def run(mutant: Mutant, tests: Path) -> dict[str, object]:
    """Whether the related tests notice, which of them is the first, and after how long."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder, tests)
        file = folder / mutant.path
        text = file.read_text()
        file.write_text(text[: mutant.start] + mutant.after + text[mutant.stop :])
        paths = os.pathsep.join([str(folder / "src"), str(folder)])
        environment = os.environ | {
            "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no",
                   "-p", "no:cacheprovider", *related(mutant.path, tests)]  # fmt: skip
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            caught, output = done.returncode != 0, done.stdout
        except subprocess.TimeoutExpired:
            caught, output = True, "FAILED: no end"
    by = [row for row in output.splitlines() if row.startswith(("FAILED", "ERROR"))]
    seconds = round(time.monotonic() - began, 1)
    return asdict(mutant) | {"caught": caught, "by": by[:1], "seconds": seconds}


def main() -> None:
    """Draw, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help=f"in {PACKAGE}")
    options = parser.parse_args()
    results = []
    for mutant in drawn(options.count, options.seed, options.folders):
        print(f"{mutant.path}:{mutant.line}: {mutant.kind}: {mutant.before} -> {mutant.after}")
        if options.list:
            continue
        results.append(run(mutant, options.tests))
        last = results[-1]
        print("   ", "caught" if last["caught"] else "NOT CAUGHT", last["seconds"], *last["by"],
              flush=True)  # fmt: skip
        caught = sum(bool(row["caught"]) for row in results)
        if options.output:
            counts = {"caught": caught, "of": len(results), "seed": options.seed}
            options.output.write_text(json.dumps(counts | {"mutants": results}, indent=1))
    if results:
        print(f"{caught} of {len(results)} caught")


if __name__ == "__main__":
    main()
