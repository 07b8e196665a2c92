"""The shape of the code: which module may import which, and how long modules are."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import covprop

SOURCE = Path(covprop.__file__).parent
LONGEST = 400
"""Lines of a module; the aim is 250."""

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "eager": set(),
    "kernels": {"errors"},
    "covariance": {"errors", "kernels"},
    "activations": {"errors", "kernels"},
    "dispatch": {"errors"},
    "validation": {"errors", "kernels", "covariance"},
    "sampling": set(),
    "room": {"covariance"},
    "counted": {"covariance", "dispatch", "errors"},
    "distributions": {"errors", "kernels", "covariance"},
    "gaussian": {"errors", "kernels", "covariance", "distributions", "sampling", "validation"},
    "mixture": {"covariance", "gaussian", "sampling"},
    "gate": {"dispatch", "errors", "gaussian", "methods"},
    "ranks": {"errors"},
    "methods": {"errors", "kernels", "covariance", "activations", "dispatch", "eager",
                "validation", "gaussian", "mixture", "report", "sampling", "room"},
    "transfers": {"covariance"},
    "contraction": set(),
    "lineage": {"errors", "kernels", "contraction", "covariance", "activations", "methods",
                "room"},
    "layout": {"errors", "dispatch", "lineage"},
    "facts": set(),
    "pending": {"errors", "activations"},
    "tensor": {"errors", "covariance", "activations", "methods", "lineage", "dispatch", "facts",
               "layout", "pending", "transfers", "validation"},
    "rules": {"errors", "kernels", "contraction", "covariance", "activations", "methods",
              "lineage", "dispatch", "layout", "pending", "tensor", "transfers"},
    "bound": {"errors", "kernels", "activations", "methods", "rules", "gaussian"},
    "operations": {"errors", "dispatch", "activations", "rules"},
    "report": {"errors"},
    "divergences": {"gaussian"},
    "moves": set(),
    "extents": {"errors"},
    "costs": {"activations", "counted", "covariance", "dispatch", "extents"},
    "plan": {"errors", "costs", "counted", "covariance", "dispatch", "gaussian", "lineage", "moves",
             "report", "tensor"},
    "progress": {"plan"},
    "retrace": {"errors", "covariance", "dispatch", "gaussian", "lineage", "methods", "report",
                "room", "sampling", "tensor", "transfers"},
    "departure": set(),
    "orders": {"activations", "methods"},
    "sampled": {"dispatch", "kernels", "plan"},
    "remedy": set(),
    "steps": {"departure", "gaussian", "kernels", "orders", "remedy", "report"},
    "trace": {"covariance", "departure", "dispatch", "eager", "gaussian", "kernels", "lineage",
              "methods", "orders", "plan", "propagate", "sampled", "steps", "tensor"},
    "running": {"errors", "kernels", "covariance", "dispatch", "eager", "gaussian", "lineage",
                "methods", "retrace", "sampling", "tensor"},
    "propagate": {"errors", "covariance", "dispatch", "eager", "gate", "gaussian", "methods",
                  "lineage", "tensor", "rules", "plan", "progress", "report", "retrace",
                  "room", "running", "sampling"},
    "footprint": {"dispatch"},
    "comparison": {"gaussian", "methods", "remedy", "report"},
    "verdict": {"comparison", "divergences", "gaussian", "report"},
    "reference": {"comparison", "errors", "footprint", "gaussian", "methods", "plan", "verdict"},
    "compare": {"comparison", "dispatch", "divergences", "footprint", "gaussian", "methods",
                "plan", "progress", "propagate", "reference", "verdict"},
    "bayes": {"errors", "kernels", "covariance", "activations", "dispatch", "gaussian", "methods",
              "propagate", "report", "rules", "tensor"},
    "robustness": {"compare", "errors", "kernels", "covariance", "gate", "gaussian", "methods",
                   "progress", "propagate", "report", "verdict"},
    "joint": {"errors", "gaussian", "methods", "propagate", "tensor"},
    "report.page": {"", "comparison", "departure", "gaussian", "report", "robustness", "steps"},
    "demo": {"", "report.page", "robustness"},
    "cli": {"compare", "comparison", "covariance", "dispatch", "errors", "gaussian", "methods",
            "mixture", "plan", "propagate", "ranks", "reference", "remedy", "report", "report.page",
            "robustness", "room", "sampling", "steps", "trace", "validation"},
    "__main__": {"cli"},
    "": {"activations", "bayes", "covariance", "rules", "bound", "compare", "comparison",
         "dispatch", "divergences", "errors", "gaussian", "joint", "methods", "mixture",
         "operations", "plan", "propagate", "robustness", "steps", "tensor", "trace"},
}  # fmt: skip
"""What each part may import besides itself; "" is the package itself, "a.b" within a."""

MODULES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
every_module = pytest.mark.parametrize("name", MODULES)


def part_of(name: str) -> str:
    """The part that a file or a dotted name belongs to: the innermost that has a place."""
    words = name.removesuffix(".py").replace("/", ".").removesuffix("__init__").split(".")
    found = (".".join(words[:length]) for length in range(len(words), 0, -1))
    return next((part for part in found if part in LAYERS), "")


def parts_imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, part) for every import of covprop, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "covprop":
                yield node.lineno, part_of(name.removeprefix("covprop").removeprefix("."))


@every_module
def test_imports_point_one_way(name: str) -> None:
    part = part_of(name)
    assert part or name == "__init__.py", f"give {name} a place in LAYERS"
    wrong = [
        f"{name}:{line} imports {target or 'covprop'}"
        for line, target in parts_imported(ast.parse(MODULES[name].read_text()))
        if target not in LAYERS[part] | {part}
    ]
    assert wrong == []


def test_the_order_of_the_parts_has_no_cycle() -> None:
    placed: set[str] = set()
    waiting = dict(LAYERS)
    while waiting:
        ready = [part for part, needs in waiting.items() if needs <= placed]
        assert ready, f"a cycle among {sorted(waiting)}"
        for part in ready:
            placed.add(part)
            del waiting[part]


def test_every_part_exists() -> None:
    assert sorted(set(LAYERS) - {part_of(name) for name in MODULES}) == []


@every_module
def test_imports_are_at_the_top(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    top = {id(node) for node in tree.body}
    nested = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
    ]
    assert nested == [] or name == "demo.py"  # which asks for scikit-learn only when it runs


@every_module
def test_a_module_is_short_and_named_after_a_concept(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= LONGEST
    stem = Path(name).stem.lower()
    assert not any(word in stem for word in ("util", "helper", "common", "misc"))


@every_module
def test_nothing_prints(name: str) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == [] or name in ("compare.py", "demo.py")  # which are to show a table


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__init__.py")])
def test_a_class_is_abstract_or_final(name: str) -> None:
    """Only classes that say so are subclassed; autograd's functions and errors are torch's way."""
    tree = ast.parse(MODULES[name].read_text())
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
        if (
            bases & {"Covariance", "Activation", "LayerwiseMethod", "FunctionMethod", "Likelihood"}
            and "ABC" not in bases
        ):
            assert "final" in marks, f"{name}: {node.name} is not marked final"
