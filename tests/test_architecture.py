"""The shape of the code: layers whose imports point down, and modules of a readable length."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import covprop

SOURCE = Path(covprop.__file__).parent
LONGEST = 400
"""Lines of a module."""

LAYERS = (
    "__main__",
    "cli",
    "demo",
    "report",
    "attribution",
    "robustness",
    "sklearn_models",
    "filters",
    "bayes",
    "diagnostics",
    "operations",
    "mc_dropout",
    "propagate",
    "methods",
    "extending",
    "rules",
    "carriers",
    "flow",
    "mixture",
    "skewed",
    "gaussian",
    "gaussian_files",
    "arithmetic",
    "distribution",
    "error_estimate",
    "validation",
    "activations",
    "covariance",
    "kernels",
    "native",
    "plots",
    "text_table",
    "files",
    "errors",
    "modules",
)
"""From top to bottom: a module imports from its own layer and from those below it, nothing else.

The package itself offers the public names, and is imported by clients alone."""
CLIENTS = LAYERS[: LAYERS.index("bayes") + 1]

MODULES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def nodes(module: str) -> list[ast.AST]:
    """All nodes of its syntax tree; the first is the module itself."""
    return list(ast.walk(ast.parse(MODULES[module].read_text())))


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, layer) for every import of covprop, wherever in the module; "" is the package."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "covprop":
                layer = rest.partition(".")[0]
                yield node.lineno, layer if layer in LAYERS else ""


def test_imports_point_down() -> None:
    wrong = []
    for name in MODULES.keys() - {"__init__.py"}:
        own = name.partition("/")[0].removesuffix(".py")
        assert own in LAYERS, f"give {own} a place in LAYERS"
        above = LAYERS[: LAYERS.index(own)]
        wrong += [
            f"{name}:{line} imports {layer or 'covprop'}"
            for line, layer in imports(name)
            if layer in above or (not layer and own not in CLIENTS)
        ]
    assert wrong == []


def test_every_layer_exists() -> None:
    names = {name.partition("/")[0].removesuffix(".py") for name in MODULES} - {"__init__"}
    assert sorted(names) == sorted(LAYERS)


def test_modules_of_a_layer_have_no_cycle() -> None:
    """Also within a folder an order exists in which modules can be read."""
    dotted = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
              for name in MODULES if name != "__init__.py"}  # fmt: skip
    needs: dict[str, set[str]] = {}
    for module, name in dotted.items():
        found = set()
        for node in nodes(name):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("covprop."):
                base = (node.module or "").removeprefix("covprop.")
                parts = [f"{base}.{alias.name}" for alias in node.names]
                found |= {part if part in dotted else base for part in parts}
        needs[module] = {one for one in found if one in dotted and one != module}
    # A package's __init__ imports its modules, which import each other and never the package.
    for module in list(needs):
        needs[module] = {one for one in needs[module] if not module.startswith(f"{one}.")}
    placed: set[str] = set()
    while len(placed) < len(needs):
        ready = {module for module in needs if module not in placed and needs[module] <= placed}
        assert ready, f"a cycle among {sorted(set(needs) - placed)}"
        placed |= ready


def test_imports_are_at_the_top() -> None:
    nested = []
    for name in MODULES.keys() - {"demo.py"}:  # which asks for scikit-learn only when it runs
        body = nodes(name)[0].body
        for_types = [
            node
            for block in body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in block.body
        ]
        top = {id(node) for node in (*body, *for_types)}
        nested += [
            f"{name}:{node.lineno}"
            for node in nodes(name)
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
        ]
    assert nested == []


def test_modules_are_short_and_named_after_a_concept() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
    stems = {Path(name).stem.lower() for name in MODULES}
    words = ("util", "helper", "common", "misc")
    assert [stem for stem in stems if any(word in stem for word in words)] == []


def test_nothing_prints() -> None:
    calls = [
        f"{name}:{node.lineno}"
        for name in MODULES.keys() - {"diagnostics/compare.py", "demo.py"}  # which show a table
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


@cache
def descendants(root: str) -> set[str]:
    """The names of a class and of all classes that come of it."""
    classes = [node for name in MODULES for node in nodes(name) if isinstance(node, ast.ClassDef)]
    found, before = {root}, 0
    while len(found) > before:
        before = len(found)
        found |= {
            node.name
            for node in classes
            if any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        }
    return found


def type_tests(name: str, kinds: set[str]) -> list[str]:
    """The lines of a module that ask by `isinstance` whether something is one of these classes."""
    return [
        f"{name}:{node.lineno}"
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in kinds for part in ast.walk(node.args[1]))
    ]


def defined(name: str) -> set[str]:
    """The names of the classes of a module."""
    return {node.name for node in nodes(name) if isinstance(node, ast.ClassDef)}


FAMILIES = {
    "Carrier": {"Full", "IndependentMaxima", "Variances", "Tangents", "Planned"},
    "Covariance": {"Dense", "Diagonal", "Sharded", "Zero"},
    "Activation": {"Piecewise", "Quadrature", "Rescaled"},
}
"""Types that are asked by their methods, and some of their kinds."""


@pytest.mark.parametrize("root", FAMILIES)
def test_nothing_asks_which_kind_it_has(root: str) -> None:
    """Of carrier, of structure, of activation: but in the file of that kind."""
    kinds = descendants(root) - {root}
    assert kinds >= FAMILIES[root]
    found = [place for name in MODULES for place in type_tests(name, kinds - defined(name))]
    assert found == []


SUBCLASSED = {
    "Activation", "Covariance", "FunctionMethod", "LayerwiseMethod", "Likelihood",
}  # fmt: skip


def test_a_class_is_abstract_or_final() -> None:
    """Only classes that say so are subclassed; autograd's functions and errors are torch's way."""
    unmarked = []
    for name in MODULES:
        for node in [node for node in nodes(name) if isinstance(node, ast.ClassDef)]:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
            if bases & SUBCLASSED and "ABC" not in bases and "final" not in marks:
                unmarked.append(f"{name}: {node.name}")
    assert unmarked == []
