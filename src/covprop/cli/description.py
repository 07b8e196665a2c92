"""What a program of `torch.export` says it is: calls of operators, read from JSON."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from covprop.cli.operators import TRAINING, check_evaluated, is_check, operator_of, written
from covprop.cli.refusals import Refusal

MAJOR = 8
"""Of the schema that torch writes since 2.5; see torch/_export/serde/schema.py."""
POSITIONAL, KEYWORD = 1, 2
DTYPES: dict[int, torch.dtype] = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
"""Numbers of types in the schema."""
FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d,
    4: torch.preserve_format,
}  # fmt: skip
STRIDED = 7
LONGEST_KIND = 60
"""Characters of the name of a class."""
DEEPEST = 100
"""Modules within each other; torch walks through them by recursion."""
SCOPE = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)*")


class Name(str):
    """A value that the program made before."""

    __slots__ = ()


def _number(value: Any) -> float:
    """JSON has no infinity; torch writes it as a word."""
    return float(value) if isinstance(value, str) else value


def _strided(value: Any) -> torch.layout:
    if value != STRIDED:
        raise Refusal("it uses sparse tensors")
    return torch.strided


def _named_or(value: dict[str, Any]) -> Any:
    """A size: a number, or one that the program computed."""
    ((kind, content),) = value.items()
    return Name(content) if kind == "as_name" else content


def _optional(value: dict[str, Any]) -> Any:
    return Name(value["as_tensor"]["name"]) if "as_tensor" in value else None


def _same(value: Any) -> Any:
    return value


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda _: None,
    "as_tensor": lambda value: Name(value["name"]),
    "as_tensors": lambda value: [Name(item["name"]) for item in value],
    "as_optional_tensor": _optional,
    "as_optional_tensors": lambda value: [_optional(item) for item in value],
    "as_int": _same, "as_ints": list, "as_bool": _same, "as_bools": list, "as_string": _same,
    "as_float": _number, "as_floats": lambda value: [_number(item) for item in value],
    "as_sym_int": _named_or, "as_sym_ints": lambda value: [_named_or(item) for item in value],
    "as_sym_float": _named_or, "as_sym_floats": lambda value: [_named_or(item) for item in value],
    "as_sym_bool": _named_or, "as_sym_bools": lambda value: [_named_or(item) for item in value],
    "as_scalar_type": lambda value: DTYPES[value],
    "as_memory_format": lambda value: FORMATS[value],
    "as_layout": _strided,
    "as_device": lambda _: torch.device("cpu"),
}  # fmt: skip
"""What an argument is, by its kind in the schema; a program runs where its weights are."""


def argument(value: dict[str, Any]) -> Any:
    """One argument, with names for what the program computes."""
    ((kind, content),) = value.items()
    if kind not in ARGUMENTS:
        raise Refusal(
            f"it passes {kind.removeprefix('as_')!r} to an operator; if you trust the file, "
            "--allow-pickle reads it with torch.export.load"
        )
    return ARGUMENTS[kind](content)


class Call(NamedTuple):
    """One call: what, with what, what to call its results, and what nobody needs after it."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]
    module: str
    kind: str
    """The class of that module."""
    dead: list[str]


@final
@dataclass(frozen=True)
class Description:
    """A program without its tensors: calls, and which names are what."""

    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    """Names in the program of what the user gives."""
    tensors: dict[str, str]
    """Names in the program, and in the file, of weights, buffers and constants."""
    known: dict[str, dict[str, Any]]
    """What the program says of each tensor, by its name in the program."""
    constants: dict[str, Any]
    outputs: tuple[Any, ...]


def describe(content: dict[str, Any]) -> Description:
    """The program that a file describes, if it is one that can be run."""
    version = content["schema_version"]["major"]
    if version != MAJOR:
        raise Refusal(f"its schema has version {version}, and {MAJOR} is known; export it again")
    graph, signature = content["graph_module"]["graph"], content["graph_module"]["signature"]
    inputs: list[str] = []
    tensors: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for entry in signature["input_specs"]:
        ((kind, spec),) = entry.items()
        if kind == "user_input":
            name = argument(spec["arg"])
            if isinstance(name, Name):
                inputs.append(name)
        elif kind in ("parameter", "buffer", "tensor_constant"):
            tensors[spec["arg"]["name"]] = spec[f"{kind}_name"]
        elif kind == "constant_input":
            constants[spec["name"]] = argument(spec["value"])
        else:
            raise Refusal(f"it takes a {kind.replace('_', ' ')}, which only torch can load")
    if any("user_output" not in entry for entry in signature["output_specs"]):
        raise Refusal(TRAINING)
    calls = [_call(node, tensors) for node in graph["nodes"] if not is_check(node["target"])]
    outputs = tuple(argument(value) for value in graph["outputs"])
    known = {name: graph["tensor_values"].get(name, {}) for name in (*inputs, *tensors)}
    _check_names({*inputs, *tensors, *constants}, calls, outputs)
    timed = _with_deaths(calls, outputs)
    return Description(timed, tuple(inputs), tensors, known, constants, outputs)


def _call(node: dict[str, Any], tensors: Mapping[str, str]) -> Call:
    function = operator_of(node["target"])
    changed = written(function)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    check_evaluated({given["name"]: argument(given["arg"]) for given in node["inputs"]})
    for given in node["inputs"]:
        name, value = given["name"], argument(given["arg"])
        if name in changed and isinstance(value, Name) and value in tensors:
            raise Refusal(TRAINING)
        if given.get("kind", POSITIONAL) == KEYWORD:
            kwargs[name] = value
        else:
            args.append(value)
    results = [argument(value) for value in node["outputs"]]
    return Call(function, args, kwargs, results, *_module(node["metadata"]), [])


def _module(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The path and the class of the module that a call was made in; no path for the whole."""
    innermost = str(metadata.get("nn_module_stack", "")).rpartition(";")[2].split(",")
    path, kind = (*innermost[1:], "", "")[:2]
    path, kind = path.partition("@")[0], kind.rpartition(".")[2]
    if not SCOPE.fullmatch(path):
        return "", ""
    depth = path.count(".") + 1
    if depth > DEEPEST:
        raise Refusal(f"it has modules {depth:,} deep within each other; {DEEPEST} are the most")
    return path, kind if kind.isidentifier() and len(kind) <= LONGEST_KIND else "module"


def _check_names(given: set[str], calls: list[Call], outputs: tuple[Any, ...]) -> None:
    """Refuse names that nothing has made before they are used."""
    for call in calls:
        _check_made((call.args, call.kwargs), given)
        given |= set(_names(call.results))
    _check_made(outputs, given)


def _check_made(nest: Any, given: set[str]) -> None:
    unknown = sorted(set(_names(nest)) - given)
    if unknown:
        raise Refusal(f"it is damaged: it uses {unknown[0]!r}, which nothing before makes")


def _with_deaths(calls: list[Call], outputs: tuple[Any, ...]) -> tuple[Call, ...]:
    """Each value is let go after its last use: covariances are large."""
    used = set(_names(outputs))
    timed = []
    for call in reversed(calls):
        mine = set(_names((call.args, call.kwargs, call.results)))
        timed.append(call._replace(dead=sorted(mine - used)))
        used |= mine
    return tuple(reversed(timed))


def _names(nest: Any) -> list[str]:
    if isinstance(nest, Name):
        return [nest]
    if isinstance(nest, dict):
        nest = list(nest.values())
    return (
        [name for item in nest for name in _names(item)] if isinstance(nest, list | tuple) else []
    )
