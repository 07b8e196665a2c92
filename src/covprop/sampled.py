"""Plain samples through a module, watched at the operations that a propagation went through."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from covprop.dispatch import IN_PLACE, RULES, leaves, spelled
from covprop.kernels.forward import quiet
from covprop.plan import running_module, short_name

Key: TypeAlias = tuple[str, str, int]
"""A call: the path of the module, the name of the operation, how often it was called there."""
Recorded: TypeAlias = dict[int, Tensor]
"""Samples (count, *shape of the mean) of the results of calls, by place."""

PROPERTIES: dict[str, Callable[..., Any]] = {"T": Tensor.t, "mT": Tensor.transpose}
"""What in-flight Gaussians make of a tensor's properties."""
ALIASES = {"view": "reshape"}
AGREEMENT = 1e-3
"""Relative difference of a sample in a merged batch and alone that is rounding."""


@dataclass(frozen=True)
class Place:
    """One result of a call: where its samples go, and what they have to look like."""

    index: int
    shape: torch.Size
    """Of the mean, the batch first."""
    batch_at: int


def operation_name(function: Callable[..., Any]) -> str | None:
    """What an operation is called in a trace, however it is spelled; None if it has no rule."""
    if short_name(function) == "__get__":
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        function = PROPERTIES.get(owner, function)
    function = spelled(function)
    function = IN_PLACE.get(function, function)
    name = short_name(function)
    return ALIASES.get(name, name).strip("_") if function in RULES else None


@final
class Recorder(TorchFunctionMode):
    """Sees every torch function, and keeps a copy of the results that have a place.

    A call counts if an argument came of the samples, as in-flight Gaussians come of the inputs.
    """

    def __init__(
        self, names: Mapping[int, str], calls: Mapping[Key, Sequence[Place | None]]
    ) -> None:
        """Know the paths of modules and the calls to look for."""
        super().__init__()
        self._recorded: Recorded = {}
        self._names, self._calls = names, calls
        self._seen: Counter[tuple[str, str]] = Counter()
        self._varies = WeakIdKeyDictionary()

    def begin(self, samples: Sequence[Tensor]) -> None:
        """These vary."""
        for tensor in samples:
            self._varies[tensor] = True

    def matched(self) -> Recorded:
        """What was recorded of operations that were called as often as they were expected."""
        expected = Counter(key[:2] for key in self._calls)
        odd = {where for where in self._seen if self._seen[where] != expected[where]}
        doubtful = {
            place.index
            for key, places in self._calls.items()
            if key[:2] in odd
            for place in places
            if place is not None
        }
        return {i: values for i, values in self._recorded.items() if i not in doubtful}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it; torch calls nothing of this mode meanwhile."""
        del types
        result = func(*args, **(kwargs or {}))
        given = leaves((args, kwargs or {}))
        if not any(isinstance(leaf, Tensor) and leaf in self._varies for leaf in given):
            return result
        outputs, name = list(leaves(result)), operation_name(func)
        places: Sequence[Place | None] | None = None
        if name is not None:
            where = running_module(self._names), name
            places = self._calls.get((*where, self._seen[where]))
            self._seen[where] += 1
        if places is None or len(places) != len(outputs):
            self.begin([out for out in outputs if isinstance(out, Tensor)])
            return result
        for out, place in zip(outputs, places, strict=True):
            if place is not None and isinstance(out, Tensor):
                self.begin([out])
                self._recorded[place.index] = out.clone()  # which may be changed in place
        return result


@final
class SampledRuns:
    """Runs a function of tensors on many samples, in the first of three ways that works.

    With a batch, samples are more of it; else `torch.func.vmap` adds a dimension that the module
    does not see; what has no batching rule runs on one sample after another.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        names: Mapping[int, str],
        calls: Mapping[Key, Sequence[Place | None]],
        batch_shape: torch.Size,
    ) -> None:
        """The function takes the inputs that vary."""
        self._function, self._names, self._calls = function, names, calls
        self._places = {p.index: p for places in calls.values() for p in places if p is not None}
        self._batch = batch_shape
        self._ways = [self._mapped, self._one_by_one]
        if len(batch_shape) == 1:
            self._ways.insert(0, self._merged)

    def __call__(self, samples: Sequence[Tensor]) -> Recorded:
        """Results of all calls for samples (count, *batch, *event) of each input."""
        while len(self._ways) > 1:
            try:
                return self._ways[0](samples)
            except Exception:  # a module may raise anything; the last way lets it through
                self._ways.pop(0)
        return self._ways[0](samples)

    def _recorded(self, inputs: Sequence[Tensor]) -> Recorded:
        recorder = Recorder(self._names, self._calls)
        recorder.begin(inputs)
        with recorder:
            self._function(*inputs)
        return recorder.matched()

    def _merged(self, samples: Sequence[Tensor]) -> Recorded:
        count = len(samples[0])
        found = self._recorded([tensor.flatten(0, 1) for tensor in samples])
        laid = {
            i: self._batch_to_front(i, values).unflatten(0, (count, *self._batch))
            for i, values in found.items()
        }
        alone = self._one_by_one([tensor[:1] for tensor in samples])
        if laid.keys() != alone.keys():
            raise RuntimeError("the module takes another way for another size of its batch")
        for i, values in alone.items():
            torch.testing.assert_close(laid[i][:1], values, rtol=AGREEMENT, atol=AGREEMENT)
        return laid

    def _batch_to_front(self, index: int, values: Tensor) -> Tensor:
        """The merged batch is where the batch was; one of one may have been anywhere."""
        place = self._places[index]
        ways = sorted(range(values.dim()), key=lambda dim: dim != place.batch_at)
        moved = (values.movedim(dim, 0) for dim in ways)
        return next(tensor for tensor in moved if tensor.shape[1:] == place.shape[1:])

    def _mapped(self, samples: Sequence[Tensor]) -> Recorded:
        def one(*inputs: Tensor) -> Recorded:
            return self._recorded(inputs)

        with quiet():
            found = torch.func.vmap(one, randomness="different")(*samples)
        return {i: self._batch_first(i, values) for i, values in found.items()}

    def _one_by_one(self, samples: Sequence[Tensor]) -> Recorded:
        runs = [self._recorded(inputs) for inputs in zip(*samples, strict=True)]
        return {i: self._batch_first(i, torch.stack([run[i] for run in runs])) for i in runs[0]}

    def _batch_first(self, index: int, values: Tensor) -> Tensor:
        return values.movedim(self._places[index].batch_at + 1, 1) if self._batch else values
