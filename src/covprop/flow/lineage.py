"""One propagation: the graph of its random vectors, its living tensors, and its memory."""

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Generator, Tensor, nn
from torch.overrides import TorchFunctionMode

from covprop.activations import Activation
from covprop.covariance import Covariance
from covprop.errors import (
    ApproximationWarning,
    RandomDraws,
    UnsupportedOperation,
    name_of,
    warn_user,
)

LARGE = 2**26
"""Bytes of covariances, in sum, beyond which the propagation is planned to see whether it fits."""
UNRELEASED, UNSEEN = 2**20, 256
"""Bytes of covariances, and number of tensors, from which unused covariances are released."""
Step = TypeVar("Step")
Result = TypeVar("Result")
Transfer: TypeAlias = Callable[[Tensor], Tensor]
"""Cov(parent, w) -> its share of Cov(child, w): (*batch, n_parent, m) -> (*batch, n_child, m)."""
Replacements: TypeAlias = Mapping[Callable[..., Any], Activation | Callable[..., Activation]]
"""Activations to use in place of the declared ones, by torch function."""


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device, as far as the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        limits = [1024 * int(fields["MemAvailable"].split()[0])]
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (group / "memory.current").exists():
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit():
            limits.append(int(limit) - int((group / "memory.current").read_text()))
    return max(0, min(limits))


def sharers(covariance: Covariance) -> int:
    """Processes of this machine that share the memory, because they share the covariance."""
    several = covariance.distributed and covariance.device.type == "cpu"
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if several else 1


def calling_module() -> nn.Module | None:
    """The innermost module that is being called.

    Only frames of torch's own call are read: locals that are read live as long as their frame, and
    these frames hold their arguments anyway.
    """
    frame: FrameType | None = sys._getframe(1)
    call = nn.Module._call_impl.__code__
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


class Holder(Protocol):
    """An in-flight tensor, which keeps a carrier alive."""

    @property
    def carrier(self) -> Any:
        """The random vector."""

    @property
    def is_pending(self) -> bool:
        """Whether it has no carrier yet; the tensor that it is a function of has one."""


class Watcher(Protocol):
    """An observer of the operations of a propagation."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:
        """Run an operation by `proceed()`, and return its result or another."""

    def advance(self, share: float) -> None:
        """Advance by a share of the current operation."""


class Lineage:
    """One propagation: its tensors, its check of memory and its watcher."""

    def __init__(self, method: Any) -> None:
        """Begin without tensors; method: a `LayerwiseMethod`."""
        self.method = method.for_one_run()
        self.activations: Replacements = self.method.activations
        self.watcher: Watcher | None = None
        self.observe: Callable[[Activation], Activation] | None = None
        """Replaces the activation that a carrier sees by one that tells what is done with it."""
        self.guard: Callable[[], None] | None = None
        self.lazy_release = True
        """Whether release waits until some memory has piled up, which all carriers must allow: in a
        small network the search for what is needed takes longer than the computation."""
        self.notes: dict[str, None] = {}
        """Notes for the results on how they were computed, in order."""
        self.cross_cache: dict[tuple[int, int], Tensor | None] = {}
        """Covariances of two vectors by their serials, for carriers that remember them."""
        self.origins: list[weakref.ref[Any]] = []
        """Nonlinear operations, for carriers that remember them."""
        self._expected = self._unreleased = 0
        self._holders: list[weakref.ref[Holder]] = []
        self._carriers: list[weakref.ref[Any]] = []
        self._sources: set[int] = set()

    def inner(self) -> "Lineage":
        """A propagation inside this one, with its own tensors, without watcher and memory check."""
        made = Lineage(self.method)
        made.observe, made.notes = self.observe, self.notes
        return made

    def observed(self, activation: Activation) -> Activation:
        """The activation, or what `observe` puts in its place."""
        return activation if self.observe is None else self.observe(activation)

    def is_first_use(self, source: object) -> bool:
        """Whether random weights, known by the object that holds them, are used the first time.

        Only then are they independent of everything else in the pass.
        """
        first = id(source) not in self._sources
        self._sources.add(id(source))
        return first

    def note(self, message: str, warn: bool = True) -> None:
        """Add a note to the results, with or without a warning."""
        self.notes[warn_user(message, ApproximationWarning) if warn else message] = None

    def repeated(self, steps: Sequence[Step], growing: bool = False) -> Iterator[Step]:
        """Iterate over steps of an operation and advance the bar; growing: later ones cost more."""
        count = len(steps)
        for i, step in enumerate(steps):
            yield step
            if self.watcher is not None:
                self.watcher.advance((2 * i + 1) / count**2 if growing else 1 / count)

    def reserve(self, nbytes: int) -> None:
        """Count the bytes of a covariance that will be made; when they are many, plan memory."""
        self._expected += nbytes
        self._unreleased += nbytes
        if self.guard is not None and self._expected > LARGE:
            guard, self.guard = self.guard, None
            guard()

    def add(self, holder: Holder) -> None:
        """Track a tensor by a weak reference."""
        self._holders.append(weakref.ref(holder))
        self._carriers.append(weakref.ref(holder.carrier))

    def track(self, carrier: Any) -> None:
        """Track a carrier again that has been released, so that it is released once more."""
        self._carriers.append(weakref.ref(carrier))

    def collect(self) -> None:
        """Release the covariances that no living tensor nor any result of theirs can need."""
        if self.lazy_release and self._unreleased < UNRELEASED and len(self._holders) < UNSEEN:
            return
        self._holders = [ref for ref in self._holders if ref() is not None]
        living = (holder for ref in self._holders if (holder := ref()) is not None)
        held = {holder.carrier for holder in living if not holder.is_pending}
        others = {one for ref in self._carriers if (one := ref()) is not None}
        for kind in {type(one) for one in held}:
            kind.collect(held, others)
        self._carriers = [weakref.ref(one) for one in held]  # the others have been released
        self._unreleased = 0


_serials = itertools.count()


class Node:
    """The place of a random vector in a propagation: edges lead to those that it came from.

    depth: how many nonlinear operations, one after another, lead to it at most; rank: higher than
    of all that it came from, and of nonlinear ones lower than of others as deep.
    """

    lazy_release: ClassVar[bool] = False
    """Whether a little of what is no longer needed may be kept; `Lineage.reserve` counts it."""

    def __init__(
        self,
        lineage: Lineage,
        edges: Iterable[tuple[Any, Transfer]] = (),
        *,
        nonlinear: bool = False,
        opaque: bool = False,
    ) -> None:
        self.lineage = lineage
        self.edges = tuple(edges)
        self.opaque = opaque
        """Whether it does not say how it depends on what it came from."""
        self.dtype: torch.dtype | None = None
        """That of the tensors of this vector, which set it."""
        self.recast: tuple[Any, ...] | None = None
        """Weak references to the same tensor in a wider or a narrower dtype, and to the values."""
        self.serial = next(_serials)
        depth = 0
        for parent, _ in self.edges:
            depth = max(depth, parent.depth)
        self.depth: int = depth + nonlinear
        self.rank = self.depth, not nonlinear, self.serial
        if opaque or not self.lazy_release:
            lineage.lazy_release = False


FACTORIES = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("empty", "zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
) | {"clone", "to", "type", "float", "double"}
"""Names of the functions that make a tensor with memory of its own, but where they return it."""

_in_rule: ContextVar[bool] = ContextVar("in_rule", default=False)


def as_rule(run: Callable[[], Result]) -> Result:
    """Run a rule: what it draws, or a carrier for it, is not drawn by the model."""
    token = _in_rule.set(True)
    try:
        return run()
    finally:
        _in_rule.reset(token)


@final
class GeneratorDraws:
    """The states in which a model's generators were before each draw, in order.

    A generator that the model seeds anew in every call draws constants: it is in the same state
    before the same draw of another call.
    """

    def __init__(self, constants: "GeneratorDraws | None" = None) -> None:
        """constants: draws of another call, of which others are refused."""
        self._constants = constants
        self._first: dict[int, tuple[Generator, Tensor]] = {}
        self._states: list[Tensor] = []

    def __bool__(self) -> bool:
        """Whether there were any."""
        return bool(self._states)

    def see(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Note the generator that a function is given, if any, before it draws."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Generator) and not _in_rule.get():
                state = value.get_state()
                if self._constants is not None and not self._constants._has(self._states, state):
                    raise random_draws(function)
                self._first.setdefault(id(value), (value, state))
                self._states.append(state)

    def constant_in(self, other: "GeneratorDraws") -> list[bool]:
        """Of each draw, whether it is the same in another call."""
        return [other._has(self._states[:i], state) for i, state in enumerate(self._states)]

    def rewind(self) -> None:
        """Put all generators back into the state before the first of these draws."""
        for generator, state in self._first.values():
            generator.set_state(state)

    def _has(self, before: list[Tensor], state: Tensor) -> bool:
        """Whether the draw after so many others began in this state."""
        return len(before) < len(self._states) and torch.equal(self._states[len(before)], state)


@final
class KeptGenerators(TorchFunctionMode):
    """A mode that puts the generators which functions are given back into their states."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = GeneratorDraws()

    def __exit__(self, *exception: Any) -> None:
        """Put them back."""
        super().__exit__(*exception)
        self._drawn.rewind()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run torch's function."""
        del types
        named = kwargs or {}
        self._drawn.see(func, args, named)
        return func(*args, **named)


def random_draws(function: Callable[..., Any]) -> RandomDraws:
    """The error of a model that draws random numbers where one pass has to do."""
    return RandomDraws(
        f"the model draws random numbers ({name_of(function)}), and one pass would take a "
        "single draw as a constant; average over them with cp.MonteCarlo(), or pass the "
        "numbers to the model, as a cp.Gaussian if they are to vary"
    )


_passes: ContextVar[tuple["CreatedTensors", ...]] = ContextVar("passes", default=())


@final
class CreatedTensors(TorchFunctionMode):
    """Remembers, while a model runs, the plain tensors that its calls of torch have made.

    A write in place may make them Gaussian. Others, as buffers and what the caller holds, outlive
    the pass, and may not become Gaussian. in_flight: the class whose calls have rules, also those
    of Python functions that only ask. drawn: notes what the model draws itself.
    """

    def __init__(self, in_flight: type[Tensor], drawn: GeneratorDraws) -> None:
        """Begin without any."""
        super().__init__()
        self._in_flight, self._drawn = in_flight, drawn
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._token: Token[tuple[CreatedTensors, ...]] | None = None

    def __enter__(self) -> "CreatedTensors":
        """Begin to watch."""
        super().__enter__()
        self._token = _passes.set((*_passes.get(), self))
        return self

    def __exit__(self, *exception: Any) -> None:
        """Forget all."""
        assert self._token is not None
        _passes.reset(self._token)
        super().__exit__(*exception)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run torch's function."""
        if self._in_flight in types:
            result = self._in_flight.__torch_function__(func, types, args, kwargs)
        else:
            named = kwargs or {}
            self._drawn.see(func, args, named)
            result = func(*args, **named)
        made = getattr(func, "__name__", None) in FACTORIES and type(result) is Tensor
        if made and all(result is not argument for argument in args):
            self._known[id(result)] = weakref.ref(result)
        return result

    def knows(self, tensor: Tensor) -> bool:
        """Whether it has seen this tensor made."""
        found = self._known.get(id(tensor))
        return found is not None and found() is tensor


def _check_writable(function: Callable[..., Any], target: Tensor) -> None:
    """Refuse to write a Gaussian into a plain tensor that outlives the pass, or into a view."""
    passes = _passes.get()
    if not (target.is_floating_point() and passes and passes[-1].knows(target)):
        raise UnsupportedOperation(
            f"{name_of(function)} would write a Gaussian into a plain tensor that is a view, or "
            "was not made by torch.zeros, torch.empty or the like while the model ran; write the "
            "out-of-place form, as in t = t + x, t = torch.where(mask, x, t) or torch.cat([t, x])"
        )


def turn_into(function: Callable[..., Any], target: Tensor, result: Any) -> None:
    """Turn a plain tensor into the in-flight tensor of a result.

    Other views of its memory stay plain tensors, and are filled with NaN.
    """
    _check_writable(function, target)
    result.materialize()
    with torch.no_grad():
        target.fill_(torch.nan)
    target.__class__ = type(result)
    type(result).__init__(target, result.loc, result.carrier, batch_at=result.batch_at)
