"""What a call takes: seconds, and bytes of the tensors that live at once."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from covprop.dispatch import leaves

BRIEF = 2.0
"""Seconds of a first run below which a second one is timed, which nothing watches."""
DISPATCH = 1e-5
"""Seconds that torch takes to hand an operator to Python, about."""


@dataclass(frozen=True)
class Footprint:
    """The result of a call, its seconds, and the most bytes of tensors that it held at a time."""

    result: Any
    seconds: float
    peak_bytes: int


@final
class PeakTensors(TorchDispatchMode):
    """Counts tensors made meanwhile, each storage once; what a kernel needs inside is not seen."""

    def __init__(self) -> None:
        """Nothing made yet."""
        super().__init__()
        self.alive = self.most = 0
        self.counting = 0.0
        """Seconds that the counting itself took."""
        self._known: dict[int, Any] = {}
        self._makes: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; views and operators that write into an argument make nothing."""
        del types
        result = func(*args, **(kwargs or {}))
        ended = time.perf_counter()
        makes = self._makes.get(func)
        if makes is None:
            makes = self._makes[func] = not (func.is_view or func._schema.is_mutable)
        if makes:
            for leaf in leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    self._record(leaf.untyped_storage())
        self.counting += time.perf_counter() - ended + DISPATCH
        return result

    def _record(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return

        def release(_: Any) -> None:
            del self._known[address]
            self.alive -= size

        self._known[address] = weakref.ref(storage, release)
        self.alive += size
        self.most = max(self.most, self.alive)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of a call, and its seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - started


def footprint(function: Callable[[], Any], device: torch.device, repeat: bool = True) -> Footprint:
    """Call a function and measure it; one that is brief is called once more for its time.

    repeat: whether the time is worth that.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result, seconds = timed(function, device)
        return Footprint(result, seconds, torch.cuda.max_memory_allocated(device) - before)
    with PeakTensors() as peak:
        result, seconds = timed(function, device)
    if repeat and seconds < BRIEF:
        _, seconds = timed(function, device)
    else:
        seconds -= peak.counting
    return Footprint(result, seconds, peak.most)
