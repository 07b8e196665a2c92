"""The operators that a program in a file may call: a list of what is allowed.

Those are torch's operators that have a rule, some that make or change constants (`PLAIN`), and
arithmetic of sizes. Everything else that `torch.export` can write (files, any function of torch by
name, Python expressions, control flow, custom operators) is refused by its name.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from covprop.cli.refusals import Refusal
from covprop.dispatch import IN_PLACE, RULES, spelled

LARGEST_SIZE = 2**63
"""Torch's own integers end here; products of larger ones would never come to an end."""


def _of_sizes(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers whose results are as large as a size may be; no words, no lists."""

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
SIZES = {name: _of_sizes(name, function) for name, function in _ARITHMETIC.items()}
"""Arithmetic of sizes."""

PLAIN = {
    # constants
    "arange", "empty", "eye", "full", "hann_window", "lift_fresh_copy", "linspace", "meshgrid",
    "one_hot", "ones", "scalar_tensor", "zeros",
    # element by element
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "cosh", "erfc", "erfinv", "exp2", "expm1", "floor",
    "floor_divide", "fmod", "frac", "isfinite", "isinf", "log10", "log1p", "log2", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "nan_to_num", "remainder",
    "round", "sinh", "tan", "trunc",
    # places
    "affine_grid_generator", "copy", "detach", "embedding", "fill", "grid_sampler_2d",
    "grid_sampler_3d", "index_put", "mH", "mT", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d", "scatter",
    "select_scatter", "slice_scatter",
    # sums, orders and matrices
    "all", "any", "argsort", "cumprod", "dot", "linalg_matrix_exp", "matrix_exp", "outer", "prod",
    "sort", "topk", "vdot", "_weight_norm",
}  # fmt: skip
"""Operators without a rule that programs call on constants, or that samples go through.

They compute on their arguments alone: no files, no random numbers, no memory of others.
"""

CHECKS = re.compile(r"torch\.ops\.aten\.(_assert_\w+|sym_constrain_range\w*)\.\w+")
"""Of sizes and types, for the inputs it was exported with; they compute nothing."""

TRAINING = (
    "it was exported in training mode, and changes its own buffers; call model.eval() before "
    "torch.export.export"
)
DROPOUT = (
    "it was exported in training mode, so that dropout would add its noise to the output; call "
    "model.eval() before torch.export.export (noise that is meant goes through cp.propagate in "
    "Python)"
)

ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def is_check(target: str) -> bool:
    """Whether a call only asserts something."""
    return CHECKS.fullmatch(target) is not None


@cache
def operator_of(target: str) -> Callable[..., Any]:
    """The function of a name in a program, if it is one of those that are allowed."""
    if target in SIZES:
        return SIZES[target]
    match = ATEN.fullmatch(target)
    if match is None:
        what = "control flow" if "higher_order" in target else "no operator of torch's own"
        raise Refusal(_foreign(target, what))
    name, overload = match.groups()
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(found, OpOverload):
        raise Refusal(f"this torch ({torch.__version__}) has no operator {target!r}")
    if not (_has_rule(found) or name in PLAIN or _is_in_place(found)) or not _of_tensors(found):
        raise Refusal(_foreign(target, "for which covprop has no rule"))
    return found


def _has_rule(function: Callable[..., Any]) -> bool:
    known = spelled(function)
    return known in RULES or known in IN_PLACE


def _is_in_place(function: OpOverload) -> bool:
    """Whether it writes its result into its first argument, as an allowed operator's own form."""
    base = function._schema.name.removeprefix("aten::").removesuffix("_")
    whole = getattr(torch.ops.aten, base, None)
    if not function._schema.name.endswith("_") or whole is None:
        return False
    return base in PLAIN or any(_has_rule(getattr(whole, name)) for name in whole.overloads())


def _of_tensors(function: OpOverload) -> bool:
    """Whether it returns what it computes from tensors or as tensors.

    TorchScript has operators of the same names for words and lists of any length; forms with `out`
    write into any tensor that is named.
    """
    arguments, returns = function._schema.arguments, function._schema.returns
    tensors = any("Tensor" in str(item.type) for item in (*arguments, *returns))
    return tensors and not any(argument.is_out for argument in arguments)


def _foreign(target: str, what: str) -> str:
    return (
        f"it calls {target!r}, {what}; if you trust the file, --allow-pickle reads it with "
        "torch.export.load"
    )


def check_evaluated(given: Mapping[str, Any]) -> None:
    """Refuse a call, by the names of its arguments, that does what is done in training only."""
    if given.get("training") is True:
        raise Refusal(TRAINING)
    share = given.get("p", given.get("dropout", 0))  # of dropout itself, or within an LSTM
    trained = "train" in given and given["train"] is not False and share != 0
    if trained or given.get("dropout_p", 0) != 0:  # the latter is attention's
        raise Refusal(DROPOUT)


def check_graph(module: GraphModule) -> None:
    """The same for every call of a program that torch has loaded."""
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            names = (argument.name for argument in node.target._schema.arguments)
            check_evaluated(dict(zip(names, node.args, strict=False)) | node.kwargs)


def written(function: Callable[..., Any]) -> set[str]:
    """The names of the arguments that an operator writes into."""
    if not isinstance(function, OpOverload):
        return set()
    return {
        argument.name
        for argument in function._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
