"""Eight threads get the numbers of one, whatever rules and methods they use."""

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covprop as cp
from covprop.flow.nests import leaves
from covprop.flow.table import TABLE
from covprop.kernels.gradients import quiet
from covprop.methods import Method
from covprop.methods.call import Call
from tests.cases import CASES as ACTIVATIONS
from tests.gaussians import gaussian
from tests.layers import propagate
from tests.oracles import assert_close
from tests.rules import test_attention, test_composed, test_delta, test_maximum
from tests.rules.linear_cases import BATCH, LINEAR_CASES

THREADS = 8


class Case(NamedTuple):
    """A call of `propagate`: methods that draw get a generator of their own each time."""

    label: str
    function: Callable[..., Any]
    x: cp.Gaussian
    method: Callable[[], Method] = cp.Exact


def linear() -> Iterator[Case]:
    for operation, case in {case.operation: case for case in LINEAR_CASES}.items():
        yield Case(operation, case.function, gaussian(*case.event, batch=(BATCH,)))


def nonlinear() -> Iterator[Case]:
    for case in {case.declaration: case for case in ACTIVATIONS.values()}.values():
        yield Case(case.declaration, case.function, gaussian(3))
    for name, (function, shape) in test_delta.CASES.items():
        yield Case(name, function, gaussian(*shape))
    for name in ("2d", "adaptive 1d"):
        pool, shape = test_maximum.POOLS[name]
        yield Case(name, pool, test_maximum.separated(shape, 0.02))
    for name in ("amax", "amin", "max dim", "min keyword"):
        yield Case(name, test_maximum.REDUCTIONS[name], test_maximum.separated((1, 2, 2), 0.02))
    for name, polynomial in test_composed.POLYNOMIALS.items():
        yield Case(name, polynomial, gaussian(4))
    for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        cell = kind(2, 2).double().requires_grad_(requires_grad=False)
        shape = (1, 2) if issubclass(kind, nn.RNNBase) else (2,)
        yield Case(
            kind.__name__, cell, cp.Gaussian.isotropic(torch.ones(shape).double(), stddev=0.1)
        )
    for name in ("MHA: batch first", "SDPA: plain"):
        function, shape = test_attention.CASES[name]
        yield Case(name, function, test_attention.given(0.1, batch=1, shape=shape))


POSITIVE = cp.Gaussian.isotropic(torch.full((3,), 9.0, dtype=torch.float64), stddev=0.3)
RUNNING_SUM = torch.arange(3, dtype=torch.float64)
RUNNING = torch.ones(2, dtype=torch.float64)
WAVE = cp.activation(lambda x: torch.sin(x) * x)
OTHERS: dict[str, tuple[Callable[[Any], Any], cp.Gaussian]] = {
    "sqrt": (torch.sqrt, POSITIVE),
    "reciprocal": (lambda x: 2 / x, POSITIVE),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x), POSITIVE),
    "prelu": (nn.PReLU(dtype=torch.float64).requires_grad_(requires_grad=False), POSITIVE),
    "activation": (lambda x: WAVE(x) + WAVE(2 * x), POSITIVE),
    "maximum": (lambda x: torch.maximum(x, x.flip(0)) + torch.minimum(x, x.flip(0)), POSITIVE),
    "pool": (lambda x: F.max_pool1d(x[None, None], 2, return_indices=True)[0], POSITIVE),
    "dropout": (lambda x: F.dropout(x, 0.3), POSITIVE),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.3), POSITIVE),
    "instance_norm": (F.instance_norm, gaussian(1, 2, 4)),
    "batch_norm": (lambda x: torch.batch_norm(x, None, None, RUNNING, RUNNING, False, 0.1, 1e-5,
                                              False), gaussian(1, 2, 4)),
    "glu": (F.glu, gaussian(4)),
    "expm1": (lambda x: torch.expm1(x / 9), POSITIVE),
    "angle": (lambda x: torch.asin(x / 100), POSITIVE),
    "rounding": (lambda x: x.round() + x.frac() + x // 2 + x % 2 + x.fmod(2), POSITIVE),
    "rounding around means": (lambda x: (x + 1000 * RUNNING_SUM).trunc(), POSITIVE),
    "atan2": (lambda x: torch.atan2(x, x.flip(0)), POSITIVE),
    "scatter": (lambda x: x.scatter_reduce(0, torch.tensor([1, 0, 1]), x, "amax"), POSITIVE),
    "index_reduce": (lambda x: x.index_reduce(0, torch.tensor([1, 0, 1]), x, "mean"), POSITIVE),
    "copy": (lambda x: torch.zeros(3).double().copy_(x), POSITIVE),
    "index_put": (lambda x: x.index_put((torch.tensor([1]),), x[:1]), POSITIVE),
    "sort": (lambda x: x.sort().values, POSITIVE),
    "topk": (lambda x: x.topk(2).values, POSITIVE),
    "power of a number": (lambda x: 2**x, gaussian(4)),
    "where": (lambda x: x.where(x.loc > 9, 2 * x) + torch.where(x.loc > 9, x, 0), POSITIVE),
    "eval batch_norm": (lambda x: F.batch_norm(x, RUNNING, RUNNING), gaussian(1, 2, 4)),
    "var": (torch.var, gaussian(4)),
    "size": (lambda x: x / torch.numel(x), gaussian(4)),
    "operator": (torch.ops.aten.alias.default, gaussian(4)),
    "Bayesian": (cp.bayes.BayesLinear(3, 2).double().requires_grad_(requires_grad=False), POSITIVE),
}  # fmt: skip
NETWORK = nn.Sequential(
    nn.Linear(3, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4), nn.Softmax(-1)
).double().requires_grad_(requires_grad=False)  # fmt: skip


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


METHODS: dict[str, Callable[[], Method]] = {
    "linearized": cp.Linearized,
    "unscented": cp.Unscented,
    "series": lambda: cp.Series(order=4),
    "assumed density": cp.AssumedDensity,
    "Monte Carlo": lambda: cp.MonteCarlo(64, drawn()),
    "sketched": lambda: cp.Sketched(64, generator=drawn()),
    "split": lambda: cp.Split(3),
    "control variate": lambda: cp.ControlVariate(128, generator=drawn()),
}
UNREACHABLE = {
    "covprop.rules.movement.value",
    "covprop.rules.movement.no_nested_tensor",
    "covprop.rules.logic.logic",
    "covprop.rules.recurrent.packed",
}
"""Rules that refuse."""


def named(body: Callable[..., Any]) -> str:
    return f"{body.__module__}.{body.__qualname__}"


def cases() -> list[Case]:
    others = [Case(name, *pair) for name, pair in OTHERS.items()]
    methods = [Case(name, NETWORK, gaussian(3), make) for name, make in METHODS.items()]
    wide = nn.Sequential(nn.Linear(3, 8), nn.Tanh()).double().requires_grad_(requires_grad=False)
    columns = Case("linearized by columns", wide, gaussian(3), cp.Linearized)
    return [*linear(), *nonlinear(), *others, *methods, columns]


def answer(case: Case) -> list[Tensor]:
    with torch.no_grad():
        found = propagate(case.function, case.x, method=case.method())
    results = [y for y in leaves(found) if isinstance(y, cp.Gaussian)]
    return [t for y in results for t in (y.mean, y.covariance_matrix)]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns a hundred times as often as they do by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore::covprop.ApproximationWarning")
@pytest.mark.usefixtures("switching")
def test_every_rule_and_method_in_eight_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    class Recorder(dict[Any, Any]):
        def __getitem__(self, function: Any) -> Any:
            used.add(super().__getitem__(function))
            return super().__getitem__(function)

    every = cases()
    with monkeypatch.context() as patched:
        patched.setattr("covprop.flow.tensor.TABLE", Recorder(TABLE))
        expected = [answer(case) for case in every]
    unused = {named(row.body) for row in TABLE.values() if row.body} - {
        named(row.body) for row in used
    }
    unused -= UNREACHABLE
    assert sorted(unused) == []

    wrong: list[str] = []

    def run(turn: int) -> None:
        for i in range(turn % 4, len(every), 4):  # each by two of them, beside all others
            try:
                for found, right in zip(answer(every[i]), expected[i], strict=True):
                    assert_close(found, right, rtol=1e-10, atol=1e-13)
            except Exception as error:  # of any kind: a thread would swallow it
                wrong.append(f"{every[i].label}: {error!r}"[:200])

    together(run)
    assert wrong == []


def together(run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(turn,)) for turn in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("switching")
def test_gradients_in_eight_threads() -> None:
    x = gaussian(3)

    def gradient() -> Tensor:
        mean = x.mean.clone().requires_grad_()
        y = propagate(NETWORK, cp.Gaussian(mean, x.covariance_matrix))
        (y.mean[0] + y.variance.sum()).backward()
        assert mean.grad is not None
        return mean.grad

    expected, found = gradient(), list[Tensor]()
    together(lambda _: found.extend(gradient() for _ in range(3)))
    assert len(found) == 3 * THREADS
    for one in found:
        assert_close(one, expected, rtol=1e-12)


@pytest.mark.usefixtures("switching")
def test_filters_of_warnings_are_what_they_were_after_eight_threads() -> None:
    before = list(warnings.filters)

    def run(turn: int) -> None:
        for _ in range(50):
            with quiet():
                threading.Event().wait(1e-5 * turn)

    together(run)
    assert warnings.filters == before


@pytest.mark.usefixtures("switching")
def test_a_comparison_in_another_thread_hides_no_warning() -> None:
    """Its base of control variates is rough, of which it says nothing."""
    x = cp.Gaussian.isotropic(torch.zeros(3, dtype=torch.float64), stddev=3.0)
    softmax, busy = nn.Softmax(-1), threading.Event()

    def compare() -> None:
        while not busy.is_set():
            cp.compare(softmax, x, methods=[cp.Linearized()], samples=100, show=False)

    thread = threading.Thread(target=compare)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread.start()
        for _ in range(20):
            propagate(softmax, x)
        busy.set()
        thread.join()
    shown = [str(item.message) for item in seen if item.category is cp.ApproximationWarning]
    assert len(shown) >= 20  # more where the other's random numbers made a pass run again


@pytest.mark.parametrize(
    "method",
    [cp.Sketched, cp.Split, lambda **own: cp.Split(base=cp.Sketched(**own)), cp.ControlVariate],
    ids=["sketched", "split", "split of sketched", "control"],
)
def test_numbers_do_not_depend_on_what_another_thread_draws(
    method: Callable[..., Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    model = nn.Sequential(*layers).double().requires_grad_(requires_grad=False)

    def found() -> cp.Gaussian:
        own = {} if method is cp.Split else {"generator": torch.Generator().manual_seed(3)}
        y: cp.Gaussian = propagate(model, gaussian(4), method(**own))
        return y

    alone, states, in_flight = found(), itertools.count(), Call.in_flight

    def interrupted(*args: Any) -> Any:
        torch.manual_seed(next(states))  # as another thread might, during every pass
        return in_flight(*args)

    monkeypatch.setattr(Call, "in_flight", interrupted)
    beside = found()
    assert next(states) > 1
    assert_close(beside.mean, alone.mean, rtol=1e-10, atol=1e-13)
    assert_close(beside.covariance_matrix, alone.covariance_matrix, rtol=1e-10, atol=1e-13)
