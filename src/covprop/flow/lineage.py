"""One propagation: the tensors that the program still holds, and the memory that is free."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from covprop.activations import Activation
from covprop.covariance import Covariance
from covprop.errors import ApproximationWarning, warn_user

LARGE = 2**26
"""Bytes of covariances, all that are made, from which it is asked before whether they fit."""
UNRELEASED, UNSEEN = 2**20, 256
"""Bytes of covariances, and tensors, from which it is asked what of them may be released."""
Step = TypeVar("Step")
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


class Holder(Protocol):
    """What keeps a carrier alive: an in-flight tensor."""

    @property
    def carrier(self) -> Any:
        """The random vector."""

    @property
    def is_pending(self) -> bool:
        """Whether it has no carrier yet; the tensor that it is a function of has one."""


class Watcher(Protocol):
    """What sees the operations of a propagation."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        proceed: Callable[[], Any],
    ) -> Any:
        """Give the result of an operation, which is that of `proceed`, or another."""

    def advance(self, share: float) -> None:
        """Such a share of the operation that runs is done."""


class Lineage:
    """One propagation: its tensors, its guard of memory and what watches it."""

    def __init__(self, method: Any) -> None:
        """Begin without tensors; method: a `LayerwiseMethod`."""
        self.method = method.for_one_run()
        self.activations: Replacements = self.method.activations
        self.watcher: Watcher | None = None
        self.observe: Callable[[Activation], Activation] | None = None
        """Replaces the activation that a carrier sees by one that tells what is done with it."""
        self.guard: Callable[[], None] | None = None
        self.patient = True
        """Whether a little memory may pile up before it is released, as all carriers allow: in a
        small network it takes longer to see what is needed than to compute it."""
        self.notes: dict[str, None] = {}
        """What the results have to say of how they were computed, in order."""
        self.crosses: dict[tuple[int, int], torch.Tensor | None] = {}
        """Covariances of two vectors by their serials, for carriers that remember them."""
        self.origins: list[weakref.ref[Any]] = []
        """Nonlinear operations, for carriers that remember them."""
        self._expected = self._unreleased = 0
        self._holders: list[weakref.ref[Holder]] = []
        self._carriers: list[weakref.ref[Any]] = []
        self._sources: set[int] = set()

    def inner(self) -> "Lineage":
        """A propagation inside this one, of tensors of its own that nothing watches or guards."""
        made = Lineage(self.method)
        made.observe, made.notes = self.observe, self.notes
        return made

    def observed(self, activation: Activation) -> Activation:
        """The activation, or what `observe` puts in its place."""
        return activation if self.observe is None else self.observe(activation)

    def claim(self, source: object) -> bool:
        """Whether randomness of the model's own, known by what holds it, enters for the first time.

        It is independent of everything then, and of nothing that came of it the second time.
        """
        first = id(source) not in self._sources
        self._sources.add(id(source))
        return first

    def note(self, message: str, warn: bool = True) -> None:
        """Keep a sentence for the results, and warn the user of what could not be done as asked."""
        self.notes[warn_user(message, ApproximationWarning) if warn else message] = None

    def repeated(self, steps: Sequence[Step], growing: bool = False) -> Iterator[Step]:
        """The steps of an operation, whose watcher sees each; growing: each takes more."""
        count = len(steps)
        for i, step in enumerate(steps):
            yield step
            if self.watcher is not None:
                self.watcher.advance((2 * i + 1) / count**2 if growing else 1 / count)

    def expect(self, nbytes: int) -> None:
        """Before a covariance of that size is made, see once whether all will fit."""
        self._expected += nbytes
        self._unreleased += nbytes
        if self.guard is not None and self._expected > LARGE:
            guard, self.guard = self.guard, None
            guard()

    def add(self, holder: Holder) -> None:
        """Watch a tensor for as long as the program holds it."""
        self._holders.append(weakref.ref(holder))
        self._carriers.append(weakref.ref(holder.carrier))

    def revisit(self, carrier: Any) -> None:
        """Have a carrier that has been released once more among those to be released."""
        self._carriers.append(weakref.ref(carrier))

    def collect(self) -> None:
        """Release what no two living tensors, nor what comes of them, can meet at."""
        if self.patient and self._unreleased < UNRELEASED and len(self._holders) < UNSEEN:
            return
        self._holders = [ref for ref in self._holders if ref() is not None]
        living = (holder for ref in self._holders if (holder := ref()) is not None)
        held = {holder.carrier for holder in living if not holder.is_pending}
        others = {one for ref in self._carriers if (one := ref()) is not None}
        for kind in {type(one) for one in held}:
            kind.collect(held, others)
        self._carriers = [weakref.ref(one) for one in held]  # the others have been released
        self._unreleased = 0
