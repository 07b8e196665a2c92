"""The shape of the code: layers whose imports point down, and modules of a readable length."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import covprop

SOURCE = Path(covprop.__file__).parent
LONGEST = 400
"""Lines of a module."""

LAYERS = (
    "__main__",
    "cli",
    "demo",
    "report",
    "robustness",
    "bayes",
    "diagnostics",
    "operations",
    "propagate",
    "methods",
    "rules",
    "carriers",
    "flow",
    "mixture",
    "gaussian",
    "validation",
    "activations",
    "covariance",
    "kernels",
    "ranks",
    "plots",
    "text_table",
    "files",
    "errors",
    "module_paths",
)
"""From top to bottom: a module imports from its own layer and from those below it, nothing else.

The package itself offers the public names, and is imported by clients alone."""
CLIENTS = LAYERS[: LAYERS.index("bayes") + 1]

MODULES = {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


@cache
def nodes(name: str) -> list[ast.AST]:
    """All nodes of a module, found once: walking takes longer than any test."""
    return list(ast.walk(TREES[name]))


def imports(name: str) -> Iterator[tuple[int, str]]:
    """(line, layer) for every import of covprop, wherever in the module; "" is the package."""
    for node in nodes(name):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for dotted in names:
            package, _, rest = dotted.partition(".")
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
    assert sorted(wrong) == []


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
    top = {id(node) for tree in TREES.values() for node in tree.body}
    nested = [
        f"{name}:{node.lineno}"
        for name in MODULES.keys() - {"demo.py"}  # which asks for scikit-learn only when it runs
        for node in nodes(name)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
    ]
    assert sorted(nested) == []


def test_modules_are_short() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_modules_are_named_after_a_concept() -> None:
    words = ("util", "helper", "common", "misc")
    assert [
        name for name in MODULES if any(word in Path(name).stem.lower() for word in words)
    ] == []


def test_nothing_prints() -> None:
    calls = [
        f"{name}:{node.lineno}"
        for name in MODULES.keys() - {"diagnostics/compare.py", "demo.py"}  # which show a table
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert sorted(calls) == []


def carriers() -> set[str]:
    """The names of `Carrier` and of all classes that come of it."""
    classes = [node for name in MODULES for node in nodes(name) if isinstance(node, ast.ClassDef)]
    found, before = {"Carrier"}, 0
    while len(found) > before:
        before = len(found)
        found |= {
            node.name
            for node in classes
            if any(isinstance(base, ast.Name) and base.id in found for base in node.bases)
        }
    return found


def test_nothing_asks_which_carrier_it_has() -> None:
    """Outside the files of the carriers; methods name the carrier that they start with."""
    kinds = carriers()
    assert kinds >= {"Full", "IndependentMaxima", "Variances", "Tangents", "Planned"}
    asked = [
        f"{name}:{node.lineno}"
        for name in MODULES
        if not name.startswith("carriers/")
        for node in nodes(name)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and any(isinstance(part, ast.Name) and part.id in kinds for part in ast.walk(node.args[1]))
    ]
    assert asked == []


def test_a_class_is_abstract_or_final() -> None:
    """Only classes that say so are subclassed; autograd's functions and errors are torch's way."""
    kinds = {"Covariance", "Activation", "LayerwiseMethod", "FunctionMethod", "Likelihood"}
    open_ones = []
    for name in MODULES:
        for node in nodes(name):
            if name.endswith("__init__.py") or not isinstance(node, ast.ClassDef):
                continue
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
            if bases & kinds and "ABC" not in bases and "final" not in marks:
                open_ones.append(f"{name}: {node.name} is not marked final")
    assert open_ones == []
