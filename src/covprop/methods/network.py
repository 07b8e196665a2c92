"""A network as a function of plain tensors, one for each of its Gaussian inputs.

It is run twice before anything else: at the means, where `Dependence` sees which of the results
depend on the inputs and how large tensors get on the way; and with the first Gaussian of the batch
moved, which shows where in each result the batch is, and that its elements are independent of each
other. Where these two leave it open, there are more probes (`Probes`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from covprop.covariance import Dense
from covprop.errors import BatchDimensionError, TooLarge, UnsupportedOperation
from covprop.flow.lineage import LARGE, free_bytes
from covprop.flow.nests import leaves, map_leaves
from covprop.flow.table import Entered
from covprop.gaussian import Gaussian, SamplingError
from covprop.kernels.gradients import quiet
from covprop.methods.call import check_returned, finite, random_state, random_state_kept
from covprop.methods.plan import WorkCounter
from covprop.modules import eager
from covprop.text_table import in_bytes
from covprop.validation import SUPPORTED

HELD = 2**20
"""Entries of the largest tensor on the way through the network that are held at a time."""
CONSTANTS = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip
"""Functions of a tensor whose results do not depend on its numbers."""
FURTHER = (1.0, -1.0)
"""Moves, as multiples of one, the mean's magnitude and the deviation together."""

Index: TypeAlias = tuple[int, ...]
Estimate: TypeAlias = tuple[Tensor, Tensor, SamplingError | None]
"""Mean (*batch, m) and covariance (*batch, m, m) of an output, and their standard errors."""


class Dependence(TorchFunctionMode):
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
        named = kwargs or {}
        self._entered.see(func, args)
        result = func(*args, **named)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in results)])
        name = getattr(func, "__name__", "")
        arguments = [leaf for leaf in leaves((args, named)) if isinstance(leaf, Tensor)]
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


class Probes:
    """What a model returns elsewhere, compared with what it returned at the means.

    A probe moves one Gaussian of the batch, or all. By a deviation first, which stays where the
    input is; then further, for deviations may be zero and units dead; at last to NaN, which reaches
    what depends on it wherever a comparison does not stop it.
    """

    def __init__(self, call: Callable[..., Any], inputs: Sequence[Gaussian]) -> None:
        """Nothing is evaluated yet; `before` are the leaves at the means."""
        self.call, self.inputs = call, tuple(inputs)
        self.batch_shape = inputs[0].batch_shape
        self.means = [x.mean.detach() for x in inputs]
        self.before: list[Any] = []
        self._known: dict[tuple[Index, float | None], list[Any]] = {}

    def after_a_deviation(self) -> list[Any]:
        """The leaves with the first Gaussian of the batch moved by a deviation."""
        return self._after((0,) * len(self.batch_shape), None)

    def depends(self, leaf: int) -> bool:
        """Whether a tensor changes when the inputs are moved, as far as it takes."""
        old = self.before[leaf]
        if _differs(old, self.after_a_deviation()[leaf]):
            return True
        if not old.is_floating_point():
            return False
        probes = (self._elsewhere((), amount) for amount in (*FURTHER, math.nan))
        return any(after is not None and _differs(old, after[leaf]) for after in probes)

    def batch_at(self, leaf: int) -> int:
        """Where the batch is: the dimensions along which only what was moved has changed."""
        old, batch = self.before[leaf], self.batch_shape
        places = range(old.dim()) if len(batch) == 1 else [0]
        fit = [at for at in places if old.shape[at : at + len(batch)] == batch]
        if fit and (batch.numel() <= 1 or not old.numel()):
            return fit[0]
        touched = reached = False
        for element, amount in self._moves():
            if not fit or (touched and len(fit) == 1):
                break
            after = self._elsewhere(element, amount)
            if after is None or after[leaf].shape != old.shape:
                continue
            changed = _changed(old, after[leaf])
            separate = [at for at in fit if _changes_one(changed, at, element)]
            if amount is math.nan:  # 0 * NaN is NaN: it also gets where nothing depends on it
                fit, reached = separate or fit, bool(separate and changed.any())
            else:
                fit, touched = separate, touched or bool(changed.any())
        if len(fit) == 1 or (fit and reached):
            return fit[0]
        what = (
            "it is ambiguous which dimension is the batch, as nothing in it changes with the "
            f"input; propagate it with a batch size other than {batch.numel()}"
            if fit else f"the elements of the batch {tuple(batch)} are not kept apart"
        )  # fmt: skip
        raise BatchDimensionError(
            f"the model returns a tensor of shape {tuple(old.shape)} in which {what}"
        )

    def _moves(self) -> Iterator[tuple[Index, float | None]]:
        """What to move and how far, the last of them to NaN."""
        first, last = (0,) * len(self.batch_shape), tuple(n - 1 for n in self.batch_shape)
        for amount in (None, *FURTHER):
            yield first, amount
            yield last, amount
        yield first, math.nan

    def _elsewhere(self, element: Index, amount: float | None) -> list[Any] | None:
        """The leaves there, or None where the model raises or returns others."""
        try:
            after = self._after(element, amount)
        except Exception:  # whatever a model has against such an input
            return None
        same = [type(leaf) for leaf in after] == [type(leaf) for leaf in self.before]
        return after if same else None

    def _after(self, element: Index, amount: float | None) -> list[Any]:
        if (element, amount) not in self._known:
            moved = [self._moved(x, element, amount) for x in self.inputs]
            # Under a mode, as `Dependence` is: torch has ways through attention that it takes
            # without one alone, which round otherwise.
            with torch.no_grad(), random_state_kept(self.means), BaseTorchFunctionMode():
                self._known[element, amount] = list(leaves(self.call(*moved)))
        return self._known[element, amount]

    def _moved(self, x: Gaussian, element: Index, amount: float | None) -> Tensor:
        moved = x.mean.detach().clone()
        if not moved.numel():  # a batch may be empty
            return moved
        shift = x.stddev.detach()[element]
        if amount is None:
            signs = torch.ones_like(shift).flatten()
            signs[1::2] = -1
            shift = shift * signs.reshape(shift.shape)
        else:
            shift = amount * (1 + moved[element].abs() + shift)
        moved[element] += shift
        return moved


def _changed(old: Tensor, new: Tensor) -> Tensor:
    return (old != new) & ~(old.isnan() & new.isnan())


def _differs(old: Tensor, new: Tensor) -> bool:
    return old.shape != new.shape or bool(_changed(old, new).any())


def _changes_one(changed: Tensor, at: int, element: Index) -> bool:
    """Whether nothing but this element of the batch has changed."""
    others = changed.movedim(at, 0).clone() if len(element) == 1 else changed.clone()
    if others.numel():
        others[element] = False
    return not bool(others.any())


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
        """Run it once at the means; call takes a tensor for each of the inputs."""
        self.call, self.inputs = eager(call), tuple(inputs)
        self.batch_shape = inputs[0].batch_shape
        self._vectorised = True
        probes = Probes(self.call, inputs)
        with torch.no_grad(), random_state_kept(probes.means):
            state = random_state(probes.means)
            with Dependence(copies := [mean.clone() for mean in probes.means]) as dependence:
                self.result = self.call(*copies)
            self.draws = not torch.equal(random_state(probes.means), state)
            """Whether it takes random numbers."""
            self.largest = dependence.largest
            before = list(leaves(self.result))
            for leaf in before:
                check_returned(leaf)
            marked = [isinstance(leaf, Tensor) and dependence.depends(leaf) for leaf in before]
            before = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in before]
        probes.before, after = before, probes.after_a_deviation()
        _check_same(before, after)
        found = [
            (i, old, new)
            for i, (old, new) in enumerate(zip(before, after, strict=True))
            if isinstance(old, Tensor) and (marked[i] or probes.depends(i))
        ]
        self.visible = all(marked[i] for i, _, _ in found)
        """Whether torch showed how the outputs depend on the inputs; of scripts it does not."""
        self.outputs = tuple(_output(probes, i, old, new) for i, old, new in found)

    @property
    def means(self) -> tuple[Tensor, ...]:
        """The means of the inputs, to evaluate at."""
        return tuple(x.mean for x in self.inputs)

    @cached_property
    def work(self) -> float:
        """Floating-point operations of an evaluation, about, for all of the batch."""
        with torch.no_grad(), random_state_kept(self.means), WorkCounter() as work:
            self(*self.means)
        return work.total

    @cached_property
    def vectorised(self) -> bool:
        """Whether many points are evaluated at once, and not one after another in Python."""
        with torch.no_grad(), random_state_kept(self.means):
            try:
                self.at([torch.stack([mean, mean]) for mean in self.means])
            except Exception:  # whatever a model has against it
                return False
        return self._vectorised

    @cached_property
    def rounding(self) -> tuple[Tensor, ...]:
        """How far evaluations are off by rounding, about, for every output (*batch, m).

        By how much last bits of the inputs change them: where large numbers cancel on the way, much
        more than last bits of the outputs.
        """
        with torch.no_grad(), random_state_kept(self.means):
            before, found = self(*self.means), []
            for sign in (1, -1):
                moved = []
                for x in self.inputs:
                    signs = torch.ones_like(x.mean).flatten()
                    signs[1::2] = -1
                    bits = torch.finfo(x.dtype).eps * (x.mean.abs() + x.stddev)
                    moved.append(x.mean + sign * signs.reshape(x.mean.shape) * bits)
                found.append(
                    [(a - b).abs().double() for a, b in zip(self(*moved), before, strict=True)]
                )
        return tuple(torch.maximum(*both) for both in zip(*found, strict=True))

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

    def gaussians(self, estimates: Sequence[Estimate], method: object) -> Any:
        """What the model returns, with a Gaussian in place of each output."""
        results: dict[int, Gaussian] = {}
        for output, (mean, covariance, error) in zip(self.outputs, estimates, strict=True):
            shape = (*self.batch_shape, *output.event_shape)
            if error is not None:
                error = SamplingError(error.samples, error.mean.reshape(shape), error.covariance)
            results[output.leaf] = finite(mean.reshape(shape), Dense(covariance), method, error)
        numbers = count()
        return map_leaves(self.result, lambda leaf: results.get(next(numbers), leaf))

    def _flat(self, result: Tensor, output: Output) -> Tensor:
        _check_shape(output.shape, result.shape)
        if self.batch_shape:
            result = result.movedim(output.batch_at, 0)
        return result.reshape(*self.batch_shape, output.event_shape.numel())


def _output(probes: Probes, leaf: int, old: Tensor, new: Tensor) -> Output:
    if old.dtype not in SUPPORTED:
        raise UnsupportedOperation(
            f"the model returns {old.dtype} numbers, which have no Gaussian; return the "
            "float32 or float64 tensor that they come from"
        )
    _check_shape(old.shape, new.shape)
    at = probes.batch_at(leaf) if probes.batch_shape else 0
    event = list(old.shape)
    del event[at : at + len(probes.batch_shape)]
    return Output(leaf, old.shape, at, torch.Size(event), old.dtype)


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


def check_outputs(
    network: Network, entry_bytes: Callable[[torch.dtype], int], beside: int = 0
) -> None:
    """Raise if what a method holds for the covariances of the outputs would not fit.

    entry_bytes: for each entry of the covariance of an output of this dtype; beside: float64
    numbers for each output that are held, too.
    """
    needed, outputs = 0, 0
    for output in network.outputs:
        size = output.event_shape.numel()
        outputs += size
        needed += entry_bytes(output.dtype) * size**2 + torch.float64.itemsize * beside * size
    needed *= network.batch_shape.numel()
    if needed > LARGE and needed > (free := free_bytes(network.means[0].device)):
        raise TooLarge(
            f"the covariances of {outputs:,} outputs would need {in_bytes(needed)}, and "
            f"{in_bytes(free)} are free; return fewer outputs, or propagate parts of the batch"
        )
