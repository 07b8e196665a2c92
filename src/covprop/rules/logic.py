"""Logic of comparisons of one tensor: piecewise constant functions of it.

A single comparison is one too: its rule refuses the value, and its parser is with arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch

from covprop.activations import spellings
from covprop.activations.expression import AND, EITHER, NOT, OR, Operation
from covprop.errors import UnsupportedOperation, name_of
from covprop.flow.table import Batch, Kind, rule
from covprop.flow.tensor import GaussianTensor
from covprop.rules.composition import Application, Parser, register_parser

NAMES: dict[tuple[str, ...], Operation] = {
    ("bitwise_and", "logical_and", "__and__", "__rand__"): AND,
    ("bitwise_or", "logical_or", "__or__", "__ror__"): OR,
    ("bitwise_xor", "logical_xor", "__xor__", "__rxor__"): EITHER,
    ("bitwise_not", "logical_not", "__invert__"): NOT,
}


def is_condition(operand: Any) -> bool:
    """Whether a tensor is a comparison that is yet to be evaluated, or made of such."""
    if not isinstance(operand, GaussianTensor) or operand.pending is None:
        return False
    return operand.pending.expression.condition


def _parser(operation: Operation) -> Parser:
    """The parser of an operation on conditions, some of which may be constants."""

    def parse(*operands: Any) -> Application | None:
        known = all(
            is_condition(one) or getattr(one, "dtype", type(one)) in (torch.bool, bool)
            for one in operands
        )
        return Application(operation, operands) if known else None

    return parse


@rule(*spellings(*(name for names in NAMES for name in names)), kind=Kind.OTHER, name="logic",
      batch=Batch.STEPWISE)  # fmt: skip
def logic(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse logic of anything but comparisons of one tensor, which are a function of it."""
    raise UnsupportedOperation(
        f"{name_of(function)} has no rule for these arguments: only comparisons of one tensor with "
        "numbers may be joined, as where((x > 0) & (x < 1), x, 0.0)"
    )


for _names, _operation in NAMES.items():
    register_parser(spellings(*_names), _parser(_operation))
