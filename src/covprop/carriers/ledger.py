"""What the carriers of a plan write down: bytes that are held, and work by what it is made of."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, final

from covprop.flow.nests import leaves
from covprop.flow.tensor import is_plain


@final
@dataclass(frozen=True)
class Work:
    """Counts of what takes time; with seconds in place of counts, how long one of each takes.

    products, convolved: operations of linear maps by a matrix, and of others; entries: operations
    on entries of covariances; pairs: those of activations on pairs; integrals: features of which an
    activation is integrated; operations: those that a carrier is asked for, with all their Python;
    visits: pairs of vectors that are looked at, to see what may be released.
    """

    products: float = 0.0
    convolved: float = 0.0
    entries: float = 0.0
    pairs: float = 0.0
    integrals: float = 0.0
    operations: float = 0.0
    visits: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        """Both."""
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, count: float) -> "Work":
        """So many times the same."""
        return Work(*(count * own for own in astuple(self)))

    def backward(self, share: float) -> "Work":
        """A pass back through linear maps, for this share of what was carried on before."""
        return Work(self.products, self.convolved, self.entries, self.pairs) * share + Work(
            operations=self.operations
        )

    @property
    def total(self) -> float:
        """Floating-point operations, about."""
        return self.products + self.convolved + self.entries + self.pairs

    def seconds(self, rates: "Work") -> float:
        """What it takes, at so many seconds for each count."""
        return sum(a * b for a, b in zip(astuple(self), astuple(rates), strict=True))


class Event(NamedTuple):
    """Something that takes memory: what is held at its peak, its work, and the carrier it made."""

    peak: int
    work: Work
    serial: int | None


class Ledger:
    """What the carriers of one plan write down, and what they cannot see of the operation.

    taps: products for each feature of its result; linear: how a linear map is counted, as products
    or as convolved; followed: whether autograd follows a parameter; done: all work so far;
    visited: pairs of vectors that were looked at since this was counted.
    """

    def __init__(self) -> None:
        """Begin without carriers."""
        self.taps, self.linear, self.followed = 1.0, "convolved", False
        self.done, self.visited = Work(), 0
        self._events: list[Event] = []
        self._graph = 0
        self._carriers: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, arguments: Any) -> None:
        """An operation with these arguments: what its weights say of it."""
        given = [leaf for leaf in leaves(arguments) if is_plain(leaf)]
        weights = [leaf for leaf in given if leaf.dim() > 1 and len(leaf)]
        self.taps = weights[0].numel() / len(weights[0]) if weights else 1.0
        is_matrix = bool(weights) and weights[0].dim() == 2  # noqa: PLR2004
        self.linear = "products" if is_matrix else "convolved"

    def add(self, carrier: Any) -> None:
        """Count a carrier for as long as it lives."""
        self._carriers.add(carrier)

    def held(self) -> int:
        """Bytes of all carriers that are there, and of what autograd keeps."""
        return self._graph + sum(carrier.nbytes for carrier in self._carriers)

    def record(self, more: int, work: Work, serial: int | None = None) -> None:
        """Write down an operation that takes so many bytes beside what is held."""
        self.done += work
        self._events.append(Event(self.held() + more, work, serial))

    @property
    def kept(self) -> int:
        """Bytes that autograd keeps."""
        return self._graph

    def keep(self, nbytes: int) -> None:
        """Autograd keeps so many bytes until the end."""
        self._graph += nbytes

    def pop(self) -> list[Event]:
        """What has been written down since this was last asked."""
        events, self._events = self._events, []
        return events


@final
class Taps:
    """Tells a ledger what its carriers do not see of the operations of a step."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Run an operation, its taps known."""
        del function
        self._ledger.begin((args, kwargs))
        return proceed()

    def advance(self, share: float) -> None:
        """Nothing is shown of a step."""


def in_all(works: Sequence[Work]) -> Work:
    """Their sum."""
    return sum(works, Work())
