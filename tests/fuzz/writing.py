"""Random programs as Python text, so that one that fails can be read, run and cut down by hand."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp

LARGEST = 12
"""Elements of the event of any value on the way."""
GRID = 64
"""Constants are multiples of 1 / GRID, which float32 and a short text both hold exactly."""


class Value(NamedTuple):
    """A variable of a program: its event shape, and what is known of how it depends on the input.

    degree: of the polynomial in the input that it is, or 99; kinked: whether it, or something
    before it, is an activation.
    """

    name: str
    shape: tuple[int, ...]
    degree: int = 1
    kinked: bool = False

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Writer:
    """A program in the making."""

    random: Random
    batched: bool
    values: list[Value] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    lines: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    count: int = 0

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def constant(self, *shape: int, scale: float = 1.0, learned: bool = True) -> str:
        """The name of a tensor of constants; learned: torch has a gradient for it."""
        name = self.fresh("W")
        width = scale * GRID
        numbers = [
            round(self.random.gauss(0.0, width)) / GRID for _ in range(torch.Size(shape).numel())
        ]
        self.setup.append(f"{name} = torch.tensor({numbers}, dtype=dtype).reshape{tuple(shape)}")
        if learned:
            self.parameters.append(f"[{name}]")
        return name

    def weight(self, rows: int, columns: int) -> str:
        """A matrix that keeps the size of what it is applied to."""
        return self.constant(rows, columns, scale=columns**-0.5)

    def layer(self, expression: str) -> str:
        """The name of a module of torch, with weights from a seed of its own."""
        name = self.fresh("layer")
        seed = self.random.randrange(1000)
        self.setup.append(f"torch.manual_seed({seed}); {name} = {expression}.to(dtype).eval()")
        self.parameters.append(f"list({name}.parameters())")
        return name

    def emit(self, expression: str, shape: tuple[int, ...], *of: Value, **changes: Any) -> Value:
        """Assign an expression to a new variable."""
        degree = changes.get("degree", max((value.degree for value in of), default=1))
        kinked = changes.get("kinked", any(value.kinked for value in of))
        value = Value(self.fresh("v"), shape, degree, kinked)
        self.lines.append((f"{value.name} = {expression}", (value.name,)))
        self.values.append(value)
        return value

    def line(self, text: str, *changed: str) -> None:
        """Any other statement, and the variables that it assigns or changes."""
        self.lines.append((text, changed))

    def drop(self, value: Value) -> None:
        """Forget a variable, so that nothing uses it any more."""
        self.values.remove(value)


@dataclass(frozen=True)
class Program:
    """The text of a function of one tensor (*batch, *event), and what is known of it.

    operations: their names, in order; result: the last value.
    """

    setup: tuple[str, ...]
    lines: tuple[tuple[str, tuple[str, ...]], ...]
    parameters: tuple[str, ...]
    result: Value
    event: tuple[int, ...]
    batched: bool
    operations: tuple[str, ...]

    def text(self, watched: bool = False) -> str:
        """The source of `build(dtype)`; watched: with a call of `watch` after every assignment."""
        lines = ["def build(dtype):", *(f"    {line}" for line in self.setup)]
        lines.append("    def program(x):")
        for text, changed in self.lines:
            lines.append(f"        {text}")
            if watched:
                lines += [f"        {name} = watch({name})" for name in changed]
        lines.append(f"        return {self.result.name}")
        lines.append(f"    return program, {' + '.join(self.parameters) or '[]'}")
        return "\n".join(lines)

    @property
    def layers(self) -> list[bool]:
        """Whether each assigned value is made by a layer, which has several operations."""
        return [
            re.search(r"\blayer\d+\(|_attention\(", text) is not None
            for text, changed in self.lines
            for _ in changed
        ]

    @property
    def normalizes(self) -> bool:
        """Whether there is an operation whose derivative is a difference, as 1 - y y' of a norm."""
        named = (text for text, _ in self.lines)
        return any(re.search(r"(?<!batch)_norm\(|normalize\(|softm", text) for text in named)

    @cached_property
    def _codes(self) -> tuple[Any, Any]:
        return (
            compile(self.text(), "<program>", "exec"),
            compile(self.text(watched=True), "<watched program>", "exec"),
        )

    def build(
        self, dtype: torch.dtype, watch: Callable[[Any], Any] | None = None
    ) -> tuple[Callable[[Any], Any], list[Tensor]]:
        """The function, and its constants and parameters."""
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "cp": cp, "watch": watch}
        exec(self._codes[watch is not None], space)
        state = torch.random.get_rng_state()
        try:
            return space["build"](dtype)
        finally:
            torch.random.set_rng_state(state)
