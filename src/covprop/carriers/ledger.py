"""The cost of a planned propagation: memory that is held, and work by its kind."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, final

from covprop.flow.nests import leaves
from covprop.flow.tensor import is_plain


@final
@dataclass(frozen=True)
class Work:
    """Numbers of operations by kind; also the seconds that one operation of each kind takes.

    products, convolved: floating-point operations of linear maps by a matrix, and of other linear
    maps; entries: operations on entries of covariances; pairs: operations of activations on pairs;
    integrals: features whose activation is integrated by quadrature; operations: calls of a
    carrier's methods, each with its overhead of Python; visits: pairs of vectors that the search
    for common ancestors looks at.
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
    """A recorded operation: bytes at its peak, its work, and the serial of the carrier it made."""

    peak: int
    work: Work
    serial: int | None


class Ledger:
    """The record of memory and work of one plan, with facts of the current operation.

    fan_in: products for each feature of its result; linear: whether a linear map counts as
    `products` or as `convolved`; needs_grad: whether autograd follows a parameter; done: all work
    so far; visited: pairs of vectors that were looked at and are not counted yet.
    """

    def __init__(self) -> None:
        """Begin without carriers."""
        self.fan_in, self.linear, self.needs_grad = 1.0, "convolved", False
        self.done, self.visited = Work(), 0
        self._events: list[Event] = []
        self._graph = 0
        self._carriers: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, arguments: Any) -> None:
        """Begin an operation: find its fan-in, and whether its weight is a matrix."""
        given = [leaf for leaf in leaves(arguments) if is_plain(leaf)]
        weights = [leaf for leaf in given if leaf.dim() > 1 and len(leaf)]
        self.fan_in = weights[0].numel() / len(weights[0]) if weights else 1.0
        is_matrix = bool(weights) and weights[0].dim() == 2  # noqa: PLR2004
        self.linear = "products" if is_matrix else "convolved"

    def add(self, carrier: Any) -> None:
        """Count a carrier for as long as it lives."""
        self._carriers.add(carrier)

    def held(self) -> int:
        """Bytes of all living carriers, and of what autograd keeps."""
        return self._graph + sum(carrier.nbytes for carrier in self._carriers)

    def record(self, more: int, work: Work, serial: int | None = None) -> None:
        """Record an operation that takes `more` bytes beside what is held."""
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
        """The operations recorded since the last call."""
        events, self._events = self._events, []
        return events


@final
class FanInWatcher:
    """A watcher that tells a ledger the fan-in of each operation, which carriers do not see."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def run(self, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Record the fan-in of an operation, and run it."""
        del function
        self._ledger.begin((args, kwargs))
        return proceed()

    def advance(self, share: float) -> None:
        """Nothing is shown of a step."""


def in_all(works: Sequence[Work]) -> Work:
    """Their sum."""
    return sum(works, Work())
