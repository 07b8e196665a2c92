"""What of a model's results depends on its inputs, and where in them the batch is."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from covprop.errors import BatchDimensionError
from covprop.flow.lineage import GeneratorDraws
from covprop.flow.nests import leaves
from covprop.flow.table import UsedWeights
from covprop.gaussian import Gaussian
from covprop.methods.call import random_state_kept

CONSTANTS = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip
"""Functions of a tensor whose results do not depend on its numbers."""
FURTHER = (1.0, -1.0)
"""Moves, as multiples of one, the mean's magnitude and the deviation together."""

Index: TypeAlias = tuple[int, ...]


class Dependence(TorchFunctionMode):
    """A mode that tracks which tensors depend on given ones, by the memory that is written to."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Track these tensors."""
        super().__init__()
        self.largest = 1
        self.most_work = 0.0
        """Operations at most: each number made takes a product with all of the largest argument."""
        self.drawn = GeneratorDraws()
        """What the model draws from generators of its own."""
        self._entered = UsedWeights()
        self._held: dict[int, Tensor] = {}  # for as long, no other tensor has their memory
        self._mark(tensors)

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor may depend on the tracked ones."""
        return _memory(tensor) in self._held

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; its results depend if an argument does, also in place."""
        del types
        named = kwargs or {}
        self._entered.see(func, args)
        self.drawn.see(func, args, named)
        result = func(*args, **named)
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        made = sum(tensor.numel() for tensor in results)
        self.largest = max([self.largest, *(tensor.numel() for tensor in results)])
        name = getattr(func, "__name__", "")
        arguments = [leaf for leaf in leaves((args, named)) if isinstance(leaf, Tensor)]
        self.most_work += 2.0 * made * max((tensor.numel() for tensor in arguments), default=1)
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
        self.deviations = [x.stddev.detach() for x in inputs]
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
            if fit else f"the elements of the batch {tuple(batch)} are mixed"
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
        """The leaves at these inputs, None where the model raises or returns other leaves."""
        try:
            after = self._after(element, amount)
        except Exception:  # whatever a model has against such an input
            return None
        same = [type(leaf) for leaf in after] == [type(leaf) for leaf in self.before]
        return after if same else None

    def _after(self, element: Index, amount: float | None) -> list[Any]:
        if (element, amount) not in self._known:
            both = zip(self.means, self.deviations, strict=True)
            moved = [_moved(mean, stddev, element, amount) for mean, stddev in both]
            # Under a mode, as `Dependence` is: torch has ways through attention that it takes
            # without one alone, which round otherwise.
            with torch.no_grad(), random_state_kept(self.means), BaseTorchFunctionMode():
                self._known[element, amount] = list(leaves(self.call(*moved)))
        return self._known[element, amount]


def _moved(mean: Tensor, stddev: Tensor, element: Index, amount: float | None) -> Tensor:
    moved = mean.clone()
    if not moved.numel():  # a batch may be empty
        return moved
    shift = stddev[element]
    if amount is None:
        shift = shift.clone(memory_format=torch.contiguous_format)
        shift.view(-1)[1::2].neg_()
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
