"""A network as a function of plain tensors, one for each of its Gaussian inputs.

It is run twice before anything else: at the means, where a `Trace` sees which of the results depend
on the inputs and how large tensors get on the way; and with the first Gaussian of the batch moved,
which shows where in each result the batch is, and that its elements stay apart. Where these two
looks leave it open, there are more (`Looks`).
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from covprop.dispatch import Entered, leaves, map_leaves
from covprop.eager import eager
from covprop.errors import UnsupportedOperation
from covprop.gaussian import Gaussian
from covprop.kernels.forward import quiet
from covprop.methods.looks import Looks, random_state, randomness_kept
from covprop.validation import SUPPORTED

HELD = 2**20
"""Entries of the largest tensor on the way through the network that are held at a time."""
CONSTANTS = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip
"""Functions of a tensor whose results do not depend on its numbers."""


class Trace(TorchFunctionMode):
    """Follows what depends on some tensors, by the memory that torch functions write to."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin with these."""
        super().__init__()
        self.largest = 1
        self._entered = Entered()
        self._held: dict[int, Tensor] = {}  # for as long, no other tensor has their memory
        self._mark(tensors)

    def depends(self, tensor: Tensor) -> bool:
        """Whether it may depend on them."""
        return _memory(tensor) in self._held

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function; what comes of something dependent is dependent, also in place."""
        del types
        given = kwargs or {}
        self._entered.see(func, args)
        result = func(*args, **given)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in results)])
        name = getattr(func, "__name__", "")
        arguments = [leaf for leaf in leaves((args, given)) if isinstance(leaf, Tensor)]
        if name not in CONSTANTS and any(map(self.depends, arguments)):
            self._mark(results)
            if name == "__setitem__":
                self._mark(args[:1])
        return result

    def _mark(self, tensors: Sequence[Tensor]) -> None:
        self._held.update((_memory(tensor), tensor) for tensor in tensors)


def _memory(tensor: Tensor) -> int:
    plain = tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if plain else id(tensor)


class Output(NamedTuple):
    """A result that depends on the inputs: which leaf, where its batch is, its shape without."""

    leaf: int
    shape: torch.Size
    batch_at: int
    event_shape: torch.Size
    dtype: torch.dtype


class Network:
    """A function of tensors whose results are nests, seen as a function to vectors."""

    def __init__(self, call: Callable[..., Any], inputs: Sequence[Gaussian]) -> None:
        """Look at it once at the means; call takes a tensor for each of the inputs."""
        call = eager(call)
        self.call, self.inputs = call, tuple(inputs)
        self.batch_shape = inputs[0].batch_shape
        self._vectorised = True
        looks = Looks(call, inputs)
        with torch.no_grad(), randomness_kept(looks.means):
            state = random_state(looks.means)
            with Trace(copies := [mean.clone() for mean in looks.means]) as trace:
                self.result = call(*copies)
            self.draws = not torch.equal(random_state(looks.means), state)
            """Whether it takes random numbers."""
            _check(self.result)
            self.largest = trace.largest
            before = list(leaves(self.result))
            marked = [isinstance(leaf, Tensor) and trace.depends(leaf) for leaf in before]
            before = map_leaves(before, lambda leaf: leaf.clone() if _is(leaf) else leaf)
        looks.before, after = before, looks.after_a_deviation()
        _check_same(before, after)
        found = [
            (i, old, new)
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if _is(old) and (marked[i] or looks.depends(i))
        ]
        self.seen = all(marked[i] for i, _, _ in found)
        """Whether torch showed how the outputs depend on the inputs; of scripts it does not."""
        self.outputs = tuple(_output(looks, i, old, new) for i, old, new in found)

    @property
    def means(self) -> tuple[Tensor, ...]:
        """The means of the inputs, to evaluate at."""
        return tuple(x.mean for x in self.inputs)

    @property
    def step(self) -> int:
        """How many points may be evaluated at a time."""
        return max(1, HELD // self.largest)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Every output (*batch, m) at one tensor (*batch, *event) for each input."""
        result = list(leaves(self.call(*(tensor.clone() for tensor in tensors))))
        return tuple(self._flat(result[output.leaf], output) for output in self.outputs)

    def at(self, points: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Every output (count, *batch, m) at points (count, *batch, *event) of each input."""
        if self._vectorised:
            try:
                with quiet():
                    return vmap(self, randomness="different")(*points)
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                # vmap cannot do all that models do; a mistake of the model shows up once more.
                self._vectorised = False
        rows = [self(*point) for point in zip(*points, strict=True)]
        return tuple(torch.stack(part) for part in zip(*rows, strict=True))

    def nest(self, values: Sequence[Any]) -> Any:
        """What the model returns, with a value in place of each output."""
        given = {output.leaf: value for output, value in zip(self.outputs, values, strict=True)}
        numbers = count()
        return map_leaves(self.result, lambda leaf: given.get(next(numbers), leaf))

    def _flat(self, result: Tensor, output: Output) -> Tensor:
        _check_shape(output.shape, result.shape)
        if self.batch_shape:
            result = result.movedim(output.batch_at, 0)
        return result.reshape(*self.batch_shape, output.event_shape.numel())


def _output(looks: Looks, leaf: int, old: Tensor, new: Tensor) -> Output:
    if old.dtype not in SUPPORTED:
        raise UnsupportedOperation(
            f"the model returns {old.dtype} numbers, which have no Gaussian; return the "
            "float32 or float64 tensor that they come from"
        )
    _check_shape(old.shape, new.shape)
    at = looks.batch_at(leaf) if looks.batch_shape else 0
    event = list(old.shape)
    del event[at : at + len(looks.batch_shape)]
    return Output(leaf, old.shape, at, torch.Size(event), old.dtype)


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _check_shape(expected: torch.Size, found: torch.Size) -> None:
    if expected != found:
        raise UnsupportedOperation(
            f"the shape of the model's result depends on its input: {tuple(expected)} at the mean "
            f"and {tuple(found)} elsewhere"
        )


def _check_same(before: list[Any], after: list[Any]) -> None:
    if [type(leaf) for leaf in after] != [type(leaf) for leaf in before]:
        raise UnsupportedOperation("the model returns another nest for another input")
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, Tensor) and old != new:
            raise UnsupportedOperation(
                f"the model returns the number {old} at the mean and {new} elsewhere; return it as "
                "a tensor"
            )


def _check(result: Any) -> None:
    for leaf in leaves(result):
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise UnsupportedOperation(
                f"the model returns a {type(leaf).__name__}; covprop unwraps tensors, tuples, "
                "lists and dicts"
            )
