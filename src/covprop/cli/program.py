"""A program of `torch.export`, read from JSON as calls of operators on an allow-list.

Allowed are torch's operators that have a rule, some that make or change constants (`PLAIN`), and
arithmetic of sizes. Everything else that `torch.export` can write (files, any function of torch by
name, Python expressions, control flow, custom operators) is refused by its name.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from covprop.cli.output import Refusal
from covprop.flow.nests import instances
from covprop.flow.table import TABLE, as_torch_function

LARGEST_SIZE = 2**63  # torch's integers end here; products of larger ones would never end
ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")
CHECKS = re.compile(r"torch\.ops\.aten\.(_assert_\w+|sym_constrain_range\w*)\.\w+")
"""Assertions about sizes and types of the inputs it was exported with; they compute nothing."""
TRUSTED = "if you trust the file, --allow-pickle reads it with torch.export.load"
TRAINING = (
    "it was exported in training mode, and changes its own buffers; call model.eval() before "
    "torch.export.export"
)
DROPOUT = (
    "it was exported in training mode, so that dropout would add its noise to the output; call "
    "model.eval() before torch.export.export (noise that is meant goes through cp.propagate in "
    "Python)"
)
PLAIN = {
    # constants
    "arange", "empty", "eye", "full", "hann_window", "lift_fresh_copy", "linspace", "meshgrid",
    "one_hot", "ones", "scalar_tensor", "zeros",
    # element by element
    "acosh", "atanh", "erfinv", "isfinite", "isinf", "logaddexp", "logit", "nan_to_num",
    "tan",
    # places
    "affine_grid_generator", "copy", "embedding", "fill", "grid_sampler_2d", "grid_sampler_3d",
    "mH", "mT", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "select_scatter", "slice_scatter",
    # sums, orders and matrices
    "all", "any", "argsort", "dot", "linalg_matrix_exp", "matrix_exp", "outer", "vdot",
    "_weight_norm",
}  # fmt: skip
"""Operators without a rule that programs call on constants, or that samples go through.

They compute on nothing but their arguments: no files, no random numbers, no memory of others.
"""


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers whose results are at most as large as a size; no strings, no lists."""

    def bounded(*args: Any) -> Any:
        for arg in args:
            if not isinstance(arg, int | float):
                kind = type(arg).__name__
                raise Refusal(f"the program gives a {kind} to {name}, which is for sizes only")
        result = function(*args)
        if isinstance(result, int) and not -LARGEST_SIZE <= result < LARGEST_SIZE:
            raise Refusal(f"the program computes a size of more than 64 bits with {name}")
        return result

    return bounded


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg",
                 "eq", "ne", "lt", "le", "gt", "ge")
} | {
    "math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc,
    "torch.sym_int": int, "torch.sym_float": float, "torch.sym_not": operator.not_,
    "torch.sym_max": max, "torch.sym_min": min,
}  # fmt: skip
SIZES = {name: _bounded(name, function) for name, function in _ARITHMETIC.items()}


@cache
def allowed_operator(target: str) -> Callable[..., Any]:
    """The function of a name in a program, if it is one of those that are allowed."""
    if target in SIZES:
        return SIZES[target]
    match = ATEN.fullmatch(target)
    if match is None:
        what = "control flow" if "higher_order" in target else "no operator of torch's own"
        raise Refusal(f"it calls {target!r}, {what}; {TRUSTED}")
    name, overload = match.groups()
    function = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(function, OpOverload):
        raise Refusal(f"this torch ({torch.__version__}) has no operator {target!r}")
    known = _has_rule(function) or name in PLAIN or _is_in_place(function)
    if not known or not _of_tensors(function):
        raise Refusal(f"it calls {target!r}, for which covprop has no rule; {TRUSTED}")
    return function


def _has_rule(function: Callable[..., Any]) -> bool:
    known = as_torch_function(function)
    return known in TABLE


def _is_in_place(function: OpOverload) -> bool:
    """Whether it is the in-place form of an allowed operator."""
    base = function._schema.name.removeprefix("aten::").removesuffix("_")
    whole = getattr(torch.ops.aten, base, None)
    if not function._schema.name.endswith("_") or whole is None:
        return False
    return base in PLAIN or any(_has_rule(getattr(whole, name)) for name in whole.overloads())


def _of_tensors(function: OpOverload) -> bool:
    """Whether it takes or returns tensors, and has no `out`.

    TorchScript has operators of the same names for strings and lists of any length; forms with
    `out` write into any tensor that is named.
    """
    arguments, returns = function._schema.arguments, function._schema.returns
    tensors = any("Tensor" in str(item.type) for item in (*arguments, *returns))
    return tensors and not any(argument.is_out for argument in arguments)


def _check_evaluation_mode(arguments: Mapping[str, Any]) -> None:
    """Refuse a call, by the names of its arguments, that is made in training only."""
    if arguments.get("training") is True:
        raise Refusal(TRAINING)
    share = arguments.get("p", arguments.get("dropout", 0))  # of dropout itself, or in an LSTM
    trained = "train" in arguments and arguments["train"] is not False and share != 0
    if trained or arguments.get("dropout_p", 0) != 0:  # the latter is attention's
        raise Refusal(DROPOUT)


def check_graph(module: GraphModule) -> None:
    """Refuse a program that torch has loaded if it was exported in training mode."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            names = (argument.name for argument in node.target._schema.arguments)
            _check_evaluation_mode(dict(zip(names, node.args, strict=False)) | node.kwargs)


# The description of a program; see torch/_export/serde/schema.py.

MAJOR = 8  # version of the schema that torch writes since 2.5
KEYWORD = 2  # kind of an argument that is passed by name
STRIDED = 7
DTYPES: dict[int, torch.dtype] = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64,
    6: torch.float16, 7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16,
}  # fmt: skip
FORMATS = {
    1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d,
    4: torch.preserve_format,
}  # fmt: skip
LONGEST_CLASS = 60  # characters of the name of a module's class
DEEPEST = 100  # modules within each other, through which torch walks by recursion
MODULE_PATH = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)*")


class Name(str):
    """The name of a value that the program computes."""

    __slots__ = ()


def _size(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    return Name(content) if kind == "as_name" else content


def _layout(value: Any) -> torch.layout:
    if value != STRIDED:
        raise Refusal("it uses sparse tensors")
    return torch.strided


ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda _: None,
    "as_tensor": lambda value: Name(value["name"]),
    "as_optional_tensor": lambda value: (
        Name(value["as_tensor"]["name"]) if "as_tensor" in value else None
    ),
    "as_int": lambda value: value, "as_bool": lambda value: value, "as_string": lambda value: value,
    "as_float": lambda value: float(value) if isinstance(value, str) else value,  # "Infinity"
    "as_sym_int": _size, "as_sym_float": _size, "as_sym_bool": _size,
    "as_scalar_type": lambda value: DTYPES[value], "as_memory_format": lambda value: FORMATS[value],
    "as_layout": _layout,
    "as_device": lambda _: torch.device("cpu"),  # a program runs where its weights are
}  # fmt: skip
"""Arguments by their kind in the schema."""
LISTS = {
    f"as_{kind}s": ARGUMENTS[f"as_{kind}"]
    for kind in ("tensor", "optional_tensor", "int", "bool", "float", "sym_int", "sym_float",
                 "sym_bool")
}  # fmt: skip


def _argument(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind in LISTS:
        return [LISTS[kind](item) for item in content]
    if kind not in ARGUMENTS:
        raise Refusal(f"it passes {kind.removeprefix('as_')!r} to an operator; {TRUSTED}")
    return ARGUMENTS[kind](content)


class ProgramCall(NamedTuple):
    """One call of an operator."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Any]  # names
    module: str  # the path of the module that makes the call
    module_class: str
    released: list[str]  # names that no later call uses


@final
@dataclass(frozen=True)
class Description:
    """A program without its tensors."""

    calls: tuple[ProgramCall, ...]
    inputs: tuple[str, ...]
    tensors: dict[str, str]  # weights, buffers and constants: names in the program and in the file
    metadata: dict[str, dict[str, Any]]  # shape, dtype and strides of inputs and tensors
    constants: dict[str, Any]
    outputs: tuple[Any, ...]


def parse(content: dict[str, Any]) -> Description:
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
            name = _argument(spec["arg"])
            if isinstance(name, Name):
                inputs.append(name)
        elif kind in ("parameter", "buffer", "tensor_constant"):
            tensors[spec["arg"]["name"]] = spec[f"{kind}_name"]
        elif kind == "constant_input":
            constants[spec["name"]] = _argument(spec["value"])
        else:
            raise Refusal(f"it takes a {kind.replace('_', ' ')}, which only torch can load")
    if any("user_output" not in entry for entry in signature["output_specs"]):
        raise Refusal(TRAINING)
    nodes = [node for node in graph["nodes"] if CHECKS.fullmatch(node["target"]) is None]
    calls = [_call(node, tensors) for node in nodes]
    outputs = tuple(_argument(value) for value in graph["outputs"])
    metadata = {name: graph["tensor_values"].get(name, {}) for name in (*inputs, *tensors)}
    known = {*inputs, *tensors, *constants}
    for call in calls:
        _check_known((call.args, call.kwargs), known)
        known |= set(instances(Name, (call.results,), {}))
    _check_known(outputs, known)
    released = _with_releases(calls, outputs)
    return Description(released, tuple(inputs), tensors, metadata, constants, outputs)


def _call(node: dict[str, Any], tensors: Mapping[str, str]) -> ProgramCall:
    function = allowed_operator(node["target"])
    schema = function._schema.arguments if isinstance(function, OpOverload) else []
    written = {item.name for item in schema if item.alias_info and item.alias_info.is_write}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    _check_evaluation_mode({item["name"]: _argument(item["arg"]) for item in node["inputs"]})
    for item in node["inputs"]:
        name, value = item["name"], _argument(item["arg"])
        if name in written and isinstance(value, Name) and value in tensors:
            raise Refusal(TRAINING)
        if item.get("kind") == KEYWORD:
            kwargs[name] = value
        else:
            args.append(value)
    results = [_argument(value) for value in node["outputs"]]
    return ProgramCall(function, args, kwargs, results, *_module(node["metadata"]), [])


def _module(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """The path and the class of the module that a call was made in; no path for the whole."""
    innermost = str(metadata.get("nn_module_stack", "")).rpartition(";")[2].split(",")
    path, kind = (*innermost[1:], "", "")[:2]
    path, kind = path.partition("@")[0], kind.rpartition(".")[2]
    if not MODULE_PATH.fullmatch(path):
        return "", ""
    depth = path.count(".") + 1
    if depth > DEEPEST:
        raise Refusal(f"it has modules {depth:,} deep within each other; {DEEPEST} are the most")
    return path, kind if kind.isidentifier() and len(kind) <= LONGEST_CLASS else "module"


def _check_known(nest: Any, known: set[str]) -> None:
    unknown = sorted(set(instances(Name, (nest,), {})) - known)
    if unknown:
        raise Refusal(f"it is damaged: it uses {unknown[0]!r}, which nothing before makes")


def _with_releases(calls: list[ProgramCall], outputs: tuple[Any, ...]) -> tuple[ProgramCall, ...]:
    """Release each value after its last use: covariances are large."""
    used = set(instances(Name, (outputs,), {}))
    result = []
    for call in reversed(calls):
        own = set(instances(Name, (call.args, call.results), call.kwargs))
        result.append(call._replace(released=sorted(own - used)))
        used |= own
    return tuple(reversed(result))
