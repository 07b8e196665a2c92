"""Seconds of a plan: rates from runs of small models, warnings, bars that advance by time."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import covprop as cp
from covprop.carriers import Work
from covprop.methods import planning
from covprop.methods.plan import TYPICAL, Plan, Step, folded

RATES = Work(2e-9, 3e-9, 5e-9, 7e-9, 1.1e-6, 1.3e-4, 1.7e-6)


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> list[planning.Setting]:
    """Rates without a calibration, and the settings that they are asked for."""
    asked: list[planning.Setting] = []

    def given(method: Any, setting: planning.Setting) -> Work:
        del method
        asked.append(setting)
        return RATES

    monkeypatch.setattr(planning, "rates_of", given)
    return asked


def chain(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    pairs = pairwise(sizes)
    parts = [part for pair in pairs for part in (nn.Linear(*pair), activation())]
    return nn.Sequential(*parts[:-1]).eval().requires_grad_(requires_grad=False)


def isotropic(*shape: int, batch_dims: int = 0) -> cp.Gaussian:
    size = torch.Size(shape[batch_dims:]).numel()
    return cp.Gaussian(torch.zeros(shape), torch.eye(size).repeat(*shape[:batch_dims], 1, 1) / 4)


def test_work_is_counted_by_kinds() -> None:
    linear, relu, last = cp.plan(chain(7, 20, 2), isotropic(7)).steps
    # A S A^T: 2 * 20 * 7 * 7 for the rows, 2 * 20 * 20 * 7 for the columns.
    assert linear.counts == Work(products=2 * 20 * 7 * (7 + 20), operations=1)
    assert relu.counts == Work(pairs=40 * 20**2 / 2, operations=1)
    assert last.counts.products == 2 * 2 * 20 * (20 + 2)
    assert cp.plan(torch.tanh, isotropic(7)).counts.integrals == 7
    conv = nn.Conv2d(1, 2, 3)
    image = isotropic(1, 1, 5, 5, batch_dims=1)
    assert cp.plan(conv, image).counts.convolved == 2 * 9 * 18 * (25 + 18)


def test_seconds_are_counts_times_rates(known_rates: list[planning.Setting]) -> None:
    plan = cp.plan(chain(7, 20, 2), isotropic(7))
    products = 2 * 20 * 7 * 27 + 2 * 2 * 20 * 22
    expected = 2e-9 * products + 7e-9 * 8000 + 3 * 1.3e-4
    assert not known_rates  # only when it is asked for
    assert plan.seconds == pytest.approx(expected)
    assert plan.seconds == pytest.approx(sum(s.counts.seconds(RATES) for s in plan.steps))
    assert known_rates[0].dtype is torch.float32
    assert str(plan).splitlines()[0].endswith("time")
    assert "465 µs" in str(plan).splitlines()[-1]


def test_settings_tell_what_rates_depend_on(known_rates: list[planning.Setting]) -> None:
    x, model = isotropic(3), nn.Linear(3, 3)
    for method in (cp.GaussianLayers(), cp.Series(4), cp.Series(5), cp.Cumulants()):
        _ = cp.plan(model, x, method=method).seconds
    with torch.no_grad():
        _ = cp.plan(model, x).seconds
    _ = cp.plan(model.double(), x.to(dtype=torch.float64)).seconds
    assert len(set(known_rates)) == 6
    assert [setting.needs_grad for setting in known_rates] == [True] * 4 + [False, True]


def test_rates_are_those_that_the_times_were_made_of() -> None:
    """Of models that do other work as well, whose rates are known by then."""
    unit = Work(operations=4.0)
    works = {
        "operations": unit,
        "products": unit + Work(products=1e9),
        "convolved": unit + Work(convolved=1e9),
        "entries": unit + Work(entries=1e8),
        "pairs": unit + Work(pairs=1e8, entries=1e5),
        "integrals": unit + Work(integrals=1e4, pairs=1e5),
    }
    expected = Work(*(*tuple(vars(RATES).values())[:-1], TYPICAL.visits))
    found = planning.measured_rates(lambda kind, _: (works[kind], works[kind].seconds(expected)))
    for kind, rate in vars(expected).items():
        assert getattr(found, kind) == pytest.approx(rate), kind


def test_models_grow_until_they_take_long_enough() -> None:
    asked: list[tuple[str, int]] = []

    def timed(kind: str, size: int) -> tuple[Work, float]:
        asked.append((kind, size))
        return Work(**{kind: 1.0}), 1e-5 * size

    planning.measured_rates(timed)
    assert [size for kind, size in asked if kind == "products"] == [64, 256, 1024]
    assert [size for kind, size in asked if kind == "operations"] == [64]


def test_a_calibration_gives_every_rate_and_draws_no_numbers() -> None:
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(3)
    for method in (cp.Sketched(16, generator=generator), cp.Sketched(16)):
        planning._cached_rates.cache_clear()
        assert cp.plan(torch.relu, isotropic(3), method=method).rates() != TYPICAL
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
    rates = cp.plan(torch.relu, isotropic(3)).rates()
    assert all(rate > 0 for rate in vars(rates).values())


def test_a_long_propagation_names_faster_methods(
    known_rates: list[planning.Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    del known_rates
    monkeypatch.setattr("covprop.flow.lineage.LARGE", 10)
    model, x = chain(7, 20, 2), isotropic(7)
    cp.propagate(model, x, cp.GaussianLayers())  # half a millisecond: no warning
    monkeypatch.setattr(planning, "LONG", 4e-4)
    expected = (
        "cp.GaussianLayers() will take about 465 µs here; faster are cp.Sketched(), which has no "
        "covariances on the way, or samples, cp.MonteCarlo()"
    )
    with pytest.warns(UserWarning, match=re.escape(expected)):
        cp.propagate(model, x, cp.GaussianLayers())


def test_what_is_surely_short_is_not_measured(
    known_rates: list[planning.Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covprop.flow.lineage.LARGE", 10)
    cp.propagate(chain(7, 20, 2), isotropic(7), cp.GaussianLayers(), progress=True)
    assert not known_rates


def step(operation: str, peak: int = 1) -> Step:
    return Step("m", operation, (2,), 2, 16, peak, Work(products=1.0, operations=1.0))


def test_repeated_operations_are_folded() -> None:
    steps = [step("a"), *(step(name, i) for i in range(5) for name in "bcc"), step("d")]
    assert [len(some) for some in folded(steps)] == [1, 5, 5, 5, 1]
    *rows, _ = str(Plan(tuple(steps), 100, lambda: RATES)).splitlines()[1:]
    assert [row.split()[1:4] for row in rows][1:3] == [["b", "(5", "times)"], ["c", "(5", "times)"]]
    assert all("4 B" in row and "5.0e+00" in row for row in rows[1:4])


def test_what_is_not_repeated_is_not_folded() -> None:
    steps = [step(name) for name in "abababc"[2:]]  # twice
    assert [some[0].operation for some in folded(steps)] == list("ababc")


class Bar:
    """Notes the seconds by which it advances."""

    def __init__(self, total: float, **_: Any) -> None:
        self.total = total
        self.seen: list[float] = []

    def set_postfix_str(self, text: str) -> None: ...

    def update(self, seconds: float) -> None:
        self.seen.append(seconds)

    def close(self) -> None: ...


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bar]]:
    made: list[Bar] = []

    def begun(**options: Any) -> Bar:
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setattr("covprop.methods.progress.tqdm", begun)
    yield made
    for bar in made:
        assert sum(bar.seen) == pytest.approx(bar.total)


@pytest.mark.parametrize(
    ("make", "method", "growing"),
    [
        (lambda: nn.LSTM(2, 3, batch_first=True), cp.GaussianLayers(), False),
        (lambda: nn.RNN(2, 2, batch_first=True), cp.Cumulants(), True),
    ],
)
@torch.no_grad()
def test_the_bar_advances_inside_a_recurrent_layer(
    make: Callable[[], nn.Module], method: Any, growing: bool, bars: list[Bar]
) -> None:
    model, x = make().eval(), isotropic(1, 10, 2, batch_dims=1)
    plan = cp.plan(model, x, method=method)
    (layer,) = [one for one in plan.steps if one.operation == "recurrent_layer"]
    cp.propagate(model, x, method, progress=True)
    seconds, seen = layer.counts.seconds(TYPICAL), bars[0].seen
    shares = [(2 * i + 1) / 100 if growing else 0.1 for i in range(10)]
    start = next(i for i, one in enumerate(seen) if one == pytest.approx(shares[0] * seconds))
    assert seen[start : start + 10] == pytest.approx([share * seconds for share in shares])
