"""The plan of a propagation before it begins, its errors and its advice.

The speed of this machine is measured on small models whose work is known by their plans. A rate is
used for all work of its kind: the counts of a plan need not be exact, only alike in small and large
models. This takes about a second, once in a process for each kind of method, dtype, device and
number of threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, final

import torch
from torch import nn

from covprop.carriers import Work
from covprop.covariance import Diagonal
from covprop.errors import TooLarge, approximations_ignored, warn_user
from covprop.flow.lineage import GeneratorDraws, Lineage, free_bytes, sharers
from covprop.gaussian import Gaussian
from covprop.methods.call import Call
from covprop.methods.plan import TYPICAL, Plan, Planner
from covprop.text_table import in_bytes, in_seconds

SIZES = (64, 256, 1024)
"""Features of the models, up to the first that takes long enough."""
LONG_ENOUGH, ROUNDS, SHORT = 4e-3, 5, 0.05
"""Seconds from which a time is measured well, how often it is measured, and for how long."""
CHAIN = 16
"""Operations one after another, so small that it is only their Python that takes time."""
CHANNELS = 4
LEAST = 0.05
"""The share of a measured time that a kind of work has at least."""
LONG, MARGIN = 120.0, 10
"""Seconds from which a faster way is suggested, and how far typical rates may be off."""


@final
@dataclass(frozen=True)
class Setting:
    """The key of measured rates; method: its name and its order."""

    method: str
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    threads: int

    @classmethod
    def of(cls, method: Any, call: Call, needs_grad: bool) -> "Setting":
        """The setting of a call."""
        order = getattr(method, "order", None)
        name = f"{type(method).__name__}({order})"
        dtype = call.inputs[0].mean.dtype
        return cls(name, dtype, call.device, needs_grad, torch.get_num_threads())


def rates_of(method: Any, setting: Setting) -> Work:
    """Seconds for each kind of work."""
    return _cached_rates(_Method(setting.method, method), setting)


@final
@dataclass(frozen=True, eq=False)
class _Method:
    """A method by its name, since its fields need have no hash."""

    name: str
    method: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Method) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def _cached_rates(method: _Method, setting: Setting) -> Work:
    chosen = method.method
    if any(field.name == "generator" for field in fields(chosen)):  # whose draws are the caller's
        chosen = replace(chosen, generator=torch.Generator(setting.device).manual_seed(0))
    try:
        return measured_rates(partial(_timed, chosen, setting))
    except Exception:  # not every method, nor every dtype, runs every model
        return TYPICAL


def measured_rates(timed: Callable[[str, int], tuple[Work, float]]) -> Work:
    """Rates of one kind of work after the other, by models with little work of later kinds.

    timed: (kind, features) -> work and seconds of a model for this kind.
    """
    rates = Work(visits=TYPICAL.visits)
    for kind in ("operations", "products", "convolved", "entries", "pairs", "integrals"):
        for size in SIZES:
            work, seconds = timed(kind, size)
            rest = max(seconds - work.seconds(rates), LEAST * seconds)
            if (seconds > LONG_ENOUGH and rest > seconds / 2) or kind == "operations":
                break
        if count := getattr(work, kind):
            rates = replace(rates, **{kind: rest / count})
    return rates


class _EntryWise(nn.Module):
    """Operations on all entries: permuted, scaled, and added to the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)

    def forward(self, x: Any) -> Any:
        return self.norm(x) + x.flip(-1)


class _FirstTwo(nn.Module):
    """The first two elements, so that the result costs nothing."""

    def forward(self, x: Any) -> Any:
        return x.flatten(1)[:, :2]


def _model(kind: str, size: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A model that does this kind of work, and the shape of its input."""
    side = int((size / CHANNELS) ** 0.5)
    make: dict[str, Callable[[], nn.Module]] = {
        "operations": lambda: nn.Sequential(
            *(part for _ in range(CHAIN // 2) for part in (nn.Linear(2, 2), nn.ReLU()))
        ),
        "products": lambda: nn.Linear(size, size),
        "convolved": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        "entries": lambda: _EntryWise(size),
        "pairs": nn.ReLU,
        "integrals": nn.Tanh,
    }
    shapes = {"operations": (1, 2), "convolved": (1, CHANNELS, side, side)}
    return nn.Sequential(make[kind](), _FirstTwo()), shapes.get(kind, (1, size))


def _timed(method: Any, setting: Setting, kind: str, size: int) -> tuple[Work, float]:
    """The planned work of a model, and the shortest time of a few runs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, shape = _model(kind, size)
        model = model.to(setting.device, setting.dtype).eval().requires_grad_(setting.needs_grad)
        features = shape[1:]
        count = torch.Size(features).numel()
        # Correlations of about 1 / 4, as in a layer behind another.
        factor = torch.randn(1, count, 16) / 4
        mean = torch.randn(shape) / 2
    covariance: Any = factor @ factor.mT / 2 + torch.eye(count) / 2
    covariance = covariance.to(setting.device, setting.dtype)
    if method.backward:  # the root of a matrix takes longer than all of the model
        covariance = Diagonal(covariance.diagonal(dim1=-2, dim2=-1))
    x = Gaussian(mean.to(setting.device, setting.dtype), covariance, validate_args=False)
    call = Call(model, (x,), {})
    with torch.set_grad_enabled(setting.needs_grad), approximations_ignored():
        plan: Plan = method.plan(call)
        _once(method, call)  # the first makes tables
        times = [_once(method, call)]
        while len(times) < ROUNDS and sum(times) < SHORT:
            times.append(_once(method, call))
    return plan.counts, min(times)


def _once(method: Any, call: Call) -> float:
    # Of one thread, the time of the processor does not depend on other programs.
    alone = call.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    start = clock()
    method.passes(call)
    if call.device.type == "cuda":
        torch.cuda.synchronize(call.device)
    return clock() - start


def planned(call: Call, method: Any) -> Plan:
    """The operations of a propagation, from the means alone."""
    lineage = Lineage(method)
    planner = Planner(call.module, follows=torch.is_grad_enabled() and not method.backward)
    lineage.watcher = planner
    drawn = GeneratorDraws()
    with torch.no_grad():
        planner.end(call.in_flight(lambda x: planner.wrap(x, lineage), drawn))
    drawn.rewind()
    free = free_bytes(call.device) // sharers(call.inputs[0].covariance)
    setting = Setting.of(method, call, planner.needs_grad)
    return Plan(tuple(planner.steps), free, partial(rates_of, method, setting))


def check(plan: Plan, method: Any) -> None:
    """Refuse a propagation that does not fit, and name a faster way where it takes long."""
    if not plan.fits:
        largest = max(plan.steps, key=lambda step: step.peak_bytes)
        raise TooLarge(
            f"the covariances would need {in_bytes(plan.peak_bytes)} at {largest.operation} "
            f"({largest.module or 'the function'}, {largest.features:,} features), and "
            f"{in_bytes(plan.free_bytes)} are free. A batch of inputs needs batch_dims=1, and "
            "may be propagated in parts; float32 takes half of float64; wide layers between "
            "narrower ones are streamed; else take cp.Sketched(), which has no covariances on the "
            "way, or sample: cp.MonteCarlo(). The plan:\n"
            f"{plan.table_at(TYPICAL)}"
        )
    rates = plan.rates_for(LONG / MARGIN)
    if (seconds := plan.counts.seconds(rates)) > LONG:
        others = (
            "" if method.backward else "cp.Sketched(), which has no covariances on the way, or "
        )
        warn_user(
            f"cp.{type(method).__name__}() will take about {in_seconds(seconds)} here; faster are "
            f"{others}samples, cp.MonteCarlo()"
        )
