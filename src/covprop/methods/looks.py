"""Looks at a model with its input moved: what depends on it, and where the batch is.

A look moves one Gaussian of the batch, or all. By a deviation first, which stays where the input
is; then further, for deviations may be zero and units dead; at last to NaN, which reaches what
depends on it wherever a comparison does not stop it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

from covprop.dispatch import leaves
from covprop.errors import BatchDimensionError
from covprop.gaussian import Gaussian

Index: TypeAlias = tuple[int, ...]

FURTHER = (1.0, -1.0)
"""Moves, as multiples of one, the mean's magnitude and the deviation together."""


class Looks:
    """What a model returns elsewhere, compared with what it returned at the means."""

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
        looks = (self._elsewhere((), amount) for amount in (*FURTHER, math.nan))
        return any(after is not None and _differs(old, after[leaf]) for after in looks)

    def batch_at(self, leaf: int) -> int:
        """Where the batch is: the dimensions along which only what was moved has changed."""
        old, batch = self.before[leaf], self.batch_shape
        places = range(old.dim()) if len(batch) == 1 else [0]
        fit = [at for at in places if old.shape[at : at + len(batch)] == batch]
        if fit and (batch.numel() <= 1 or not old.numel()):
            return fit[0]
        touched = reached = False
        for element, amount in self._probes():
            if not fit or (touched and len(fit) == 1):
                break
            after = self._elsewhere(element, amount)
            if after is None or after[leaf].shape != old.shape:
                continue
            changed = _changed(old, after[leaf])
            apart = [at for at in fit if _apart(changed, at, element)]
            if amount is math.nan:  # 0 * NaN is NaN: it also gets where nothing depends on it
                fit, reached = apart or fit, bool(apart and changed.any())
            else:
                fit, touched = apart, touched or bool(changed.any())
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

    def _probes(self) -> Iterator[tuple[Index, float | None]]:
        """What to move and how far, the last of them to NaN."""
        first, last = (0,) * len(self.batch_shape), tuple(n - 1 for n in self.batch_shape)
        for amount in (None, *FURTHER):
            yield first, amount
            yield last, amount
        yield first, math.nan

    def _elsewhere(self, element: Index, amount: float | None) -> list[Any] | None:
        """The leaves there, or None where the model does not bear it or returns others."""
        try:
            after = self._after(element, amount)
        except Exception:  # whatever a model has against such an input
            return None
        same = [type(leaf) for leaf in after] == [type(leaf) for leaf in self.before]
        return after if same else None

    def _after(self, element: Index, amount: float | None) -> list[Any]:
        if (element, amount) not in self._known:
            moved = [self._moved(x, element, amount) for x in self.inputs]
            # Under a mode, as the trace is: torch has ways through attention that it takes without
            # one alone, which round otherwise.
            with torch.no_grad(), randomness_kept(self.means), BaseTorchFunctionMode():
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


def randomness_kept(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Random numbers that are drawn inside are taken back."""
    return torch.random.fork_rng(_cuda(tensors))


def random_state(tensors: Sequence[Tensor]) -> Tensor:
    """Of the generators that a model of these tensors may draw from."""
    states = [torch.cuda.get_rng_state(device) for device in _cuda(tensors)]
    return torch.cat([torch.get_rng_state(), *states])


def _cuda(tensors: Sequence[Tensor]) -> list[int]:
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})


def _changed(old: Tensor, new: Tensor) -> Tensor:
    return (old != new) & ~(old.isnan() & new.isnan())


def _differs(old: Tensor, new: Tensor) -> bool:
    return old.shape != new.shape or bool(_changed(old, new).any())


def _apart(changed: Tensor, at: int, element: Index) -> bool:
    """Whether nothing but this element of the batch has changed."""
    others = changed.movedim(at, 0).clone() if len(element) == 1 else changed.clone()
    if others.numel():
        others[element] = False
    return not bool(others.any())
