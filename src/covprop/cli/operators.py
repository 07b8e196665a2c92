"""The operators that a program in a file may call: torch's own, and arithmetic of sizes.

Everything else that `torch.export` can write (any function of torch by name, Python expressions,
control flow, custom objects) would run what the file says.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule

from covprop.cli.refusals import Refusal

SIZES: dict[str, Callable[..., Any]] = {
    f"_operator.{name}": getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem",
                 "eq", "ne", "lt", "le", "gt", "ge")
} | {
    "math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc,
    "torch.sym_int": int, "torch.sym_float": float, "torch.sym_not": operator.not_,
    "torch.sym_max": max, "torch.sym_min": min,
}  # fmt: skip
"""Arithmetic of sizes and the choice of one of several results."""

INTERNAL = {
    "_to_copy", "_unsafe_view", "_softmax", "_log_softmax", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "_native_batch_norm_legit_no_training",
    "_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip
"""Operators with a leading underscore that programs have; most such trust their arguments."""

CHECKS = re.compile(r"torch\.ops\.aten\.(_assert_\w+|sym_constrain_range\w*)\.\w+")
"""Of sizes and types, for the inputs it was exported with; they compute nothing."""

OUTWARD = {"from_file", "set_", "set_data", "resize_", "resize_as_", "resize_as_sparse_"}
"""Operators that reach files, or memory that is not the tensor's own."""

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


def operator_of(target: str) -> Callable[..., Any]:
    """The function of a name in a program."""
    if target in SIZES:
        return SIZES[target]
    match = ATEN.fullmatch(target)
    if match is None:
        raise Refusal(_foreign(target))
    name, overload = match.groups()
    if name in OUTWARD or (name.startswith("_") and name not in INTERNAL):
        raise Refusal(_foreign(target))
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(found, OpOverload):
        raise Refusal(f"this torch ({torch.__version__}) has no operator {target!r}")
    return found


def _foreign(target: str) -> str:
    what = "control flow" if "higher_order" in target else "what is not an operator of torch's own"
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
