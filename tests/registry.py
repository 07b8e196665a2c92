"""The table of rules: what a function has there, and how to leave it as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import covprop.bayes  # its layers' rule is of the library: not to be forgotten with what follows
from covprop.flow.table import TABLE

assert covprop.bayes.random_weights

WITHOUT_RULE = torch.logcumsumexp
"""A torch function of a tensor and a dimension that has no rule: another, once it has one."""
ELEMENTWISE_WITHOUT_RULE = torch.sinc
"""The same of every element alone; the method of the tensor has its name."""


def rule_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of the rule of a torch function, that of `relu` for `relu_`; None without a rule."""
    row = TABLE.get(function)
    if row is None or row.in_place_of is None:
        return None if row is None else row.body
    return TABLE[row.in_place_of].body


@contextmanager
def registry_kept() -> Iterator[None]:
    """Forget every rule that is registered inside."""
    before = TABLE.copy()
    try:
        yield
    finally:
        TABLE.clear()
        TABLE.update(before)
