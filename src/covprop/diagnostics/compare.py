"""`cp.compare`: methods against samples, on a user's own network and input."""

import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from covprop.diagnostics.comparison import Agreement, Comparison, ComparisonRow, Reference
from covprop.errors import CovpropError, approximations_ignored
from covprop.flow.nests import leaves
from covprop.gaussian import Gaussian
from covprop.methods import (
    AssumedDensity,
    Auto,
    ControlVariate,
    Cumulants,
    GaussianLayers,
    Linearized,
    Method,
    MonteCarlo,
    PiecewiseLinear,
    Series,
    Split,
    Unscented,
    Wu2019,
    as_method,
)
from covprop.methods.control import MIN_SAMPLES
from covprop.methods.progress import StageBar
from covprop.modules import EagerMode
from covprop.propagate import plan, propagate

METHODS: tuple[Method, ...] = (
    Auto(), GaussianLayers(), Cumulants(), Split(), Series(order=4), Linearized(), Unscented(),
    PiecewiseLinear(), AssumedDensity(), Wu2019(),
)  # fmt: skip
"""The methods that are compared by default; the verdict is on the first that does not refuse."""
SAMPLES = 75_000  # plain samples, whose standard errors any default reference has
PILOT = 1024  # samples of both kinds, which tell how many with a control variate suffice
MARGIN = 1.25  # factor on that number, since it is estimated from few samples
LEAST = 4096  # samples with a control variate, at least, for rare events
WORTHWHILE = 0.5  # share of the plain samples up to which a control variate replaces them
WIDEST = SAMPLES // 40  # units of a layer for `GaussianLayers` as the base: 2 samples for each
BRIEF = 2.0  # seconds of a run below which a second one is timed, without counting memory
DISPATCH = 1e-5  # seconds that torch takes to pass an operator to Python, about
FAILURES = (CovpropError, ValueError, RuntimeError)
"""What a method may raise on a network that samples go through."""

Run = partial[Any]
"""`propagate` with a module and its inputs; it takes the method."""
Sampler = MonteCarlo | ControlVariate


@torch.no_grad()
def compare(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    methods: Method | str | Iterable[Method | str] | Mapping[str, Method | str] = METHODS,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    reference: Sampler | None = None,
    show: bool = True,
    progress: bool = False,
    **named_inputs: Any,
) -> Comparison:
    """Compare methods with samples of this network and input: their errors, time and memory.

    The reference is 75,000 plain samples, or a control variate if that reaches the same standard
    errors with at most half as many. The table says which.

    Args:
        module: a network or function, as for `cp.propagate`; it returns one tensor.
        inputs: its inputs, as for `cp.propagate`.
        methods: a method, several, or a mapping from names to methods; by default all methods of
            covprop. The verdict is on the first. Methods that refuse or fail are listed with the
            reason.
        samples: use this many plain samples as the reference.
        generator: a random generator for the reference.
        reference: another sampling method, such as cp.ControlVariate(5_000, cp.Linearized()).
        show: whether to print verdict and table.
        progress: whether to show a progress bar.
        named_inputs: keyword arguments of the module.

    Returns:
        A `Comparison`: verdict, table and advice as `str()`, and all numbers of every output.

    Example:
        comparison = cp.compare(model, x, methods=[cp.GaussianLayers(), cp.Linearized()])
    """
    named = _named(methods)
    arguments = list(leaves((inputs, named_inputs)))
    for argument in arguments:
        kind = argument if isinstance(argument, type) else type(argument)
        if issubclass(kind, Method):
            raise TypeError(
                f"compare takes methods as methods=[cp.{kind.__name__}(), ...], and not as an "
                "input or as method=..."
            )
    if reference is not None and not isinstance(reference, MonteCarlo | ControlVariate):
        raise TypeError(
            "reference samples, as cp.MonteCarlo(75_000) or cp.ControlVariate(5_000) do, and is "
            f"not {reference!r}"
        )
    run = partial(propagate, module, *inputs, **named_inputs)
    devices = (x.device for x in arguments if isinstance(x, Gaussian))
    device = next(devices, torch.device("cpu"))
    with StageBar(1 + len(named), progress, unit="method") as bar:
        bar.begin("sampling")
        if reference is None and samples is not None:
            reference = MonteCarlo(samples, generator)
        truth = _sampled(run, reference, generator, device)
        rows = []
        for name, method in named.items():
            bar.begin(name)
            rows.append(_row(name, method, run, truth, device))
    comparison = Comparison(truth, tuple(rows))
    if show:
        print(comparison)
    return comparison


def _named(methods: Any) -> dict[str, Method]:
    """Methods by name; a repeated name is numbered."""
    if isinstance(methods, Method | str) or not isinstance(methods, Iterable):
        methods = [methods]
    mapped = isinstance(methods, Mapping)
    objects = [as_method(method) for method in (methods.values() if mapped else methods)]
    names = [str(name) for name in methods] if mapped else [method_name(m) for m in objects]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    numbers = ["" if count == 1 else f" {count}" for count in counts]
    return {n + number: m for n, number, m in zip(names, numbers, objects, strict=True)}


def _row(
    name: str, method: Method, run: Run, reference: Reference, device: torch.device
) -> ComparisonRow:
    """The result of a method; the samples went through, so an error is the method's own."""
    try:
        call = footprint(partial(run, method=method), device)
        agreement = Agreement.of(call.result, reference)
    except FAILURES as error:
        reason = str(error).strip() or type(error).__name__
        return ComparisonRow(name, method, refusal=reason.splitlines()[0])
    return ComparisonRow(name, method, call.seconds, call.peak_bytes, call.result, agreement)


def method_name(method: Any) -> str:
    """The class of a method, and its fields that differ from their defaults."""
    if not dataclasses.is_dataclass(method):
        return type(method).__name__
    fields = [
        f"{field.name}={method_name(value) if isinstance(value, Method) else repr(value)}"
        for field in dataclasses.fields(method)
        if field.compare  # a generator is no property of the method
        and (value := getattr(method, field.name)) is not None
        and value != _default(field)
    ]
    return f"{type(method).__name__}({', '.join(fields)})"


def _default(field: Any) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@approximations_ignored()  # a rough base makes the reference no less right
def _sampled(
    run: Run, method: Sampler | None, generator: torch.Generator | None, device: torch.device
) -> Reference:
    """The reference by a method, or by one that is chosen for the network."""
    with _own_generator(device) as own:
        result = run(method=MonteCarlo(2, own))
    if not isinstance(result, Gaussian):
        raise TypeError(
            f"compare takes a module that returns one tensor, and this one returns a "
            f"{type(result).__name__}; wrap it in a function that picks one"
        )
    reason = ""
    if method is None:
        method, reason = _chosen(run, generator, device)
    truth, seconds = timed(partial(run, method=method), device)
    # Memory is that of another run, of as many samples as are brief.
    brief = max(2, min(method.samples, int(method.samples * BRIEF / max(seconds, BRIEF))))
    with _own_generator(device) as own:
        again: Method = MonteCarlo(brief, own)
        if isinstance(method, ControlVariate):
            again = dataclasses.replace(method, samples=max(brief, MIN_SAMPLES), generator=own)
        peak_bytes = footprint(partial(run, method=again), device, repeat=False).peak_bytes
    return Reference.of(truth, seconds, peak_bytes, method, reason)


def _chosen(
    run: Run, generator: torch.Generator | None, device: torch.device
) -> tuple[Sampler, str]:
    """A control variate if at most half of the plain samples have their standard errors with it.

    That depends on the network, so both are tried, with few samples and a fixed generator. The
    second result is the reason for the choice.
    """
    plain = MonteCarlo(SAMPLES, generator)
    with _own_generator(device) as own:
        pilot = run(method=MonteCarlo(PILOT, own))
        for base in _bases(run):
            try:
                needed = _needed(run(method=ControlVariate(PILOT, base, own)), pilot)
            except FAILURES:
                continue  # such as an operation without a rule, or a linear map that does not fit
            name = f"control variate by cp.{type(base).__name__}()"
            if math.isinf(needed):
                return plain, f"plain samples, as few do not tell what a {name} saves"
            if needed > WORTHWHILE * SAMPLES:
                return plain, f"plain samples, as a {name} would save less than half"
            return ControlVariate(int(needed), base, generator), (
                f"a {name}, unbiased even where that is wrong, for the standard errors of "
                f"{SAMPLES:,} plain samples"
            )
    return plain, "plain samples, as neither cp.GaussianLayers() nor cp.Linearized() can control"


def _bases(run: Run) -> tuple[Method, ...]:
    """Gaussian layers where they cost little beside samples, then what nearly always works."""
    try:
        widths = [step.features for step in plan(*run.args, **run.keywords).steps]
    except FAILURES:
        return (Linearized(),)
    return (GaussianLayers(), Linearized()) if max(widths, default=0) <= WIDEST else (Linearized(),)


def _needed(controlled: Gaussian, plain: Gaussian) -> float:
    """Samples for every standard error to be that of `SAMPLES` plain ones; infinite if unknown.

    An output that has not varied may do so rarely, which few samples do not show.
    """
    ours, theirs = controlled.sampling_error, plain.sampling_error
    assert ours is not None
    assert theirs is not None
    means = (ours.mean / theirs.mean).flatten()
    variances = (ours.covariance / theirs.covariance).diagonal(dim1=-2, dim2=-1).flatten()
    shares = torch.cat([means, variances]).square()
    if not shares.numel() or not bool(torch.isfinite(shares).all()):
        return math.inf
    trials = math.ceil(float(shares.max()) * MARGIN * SAMPLES / PILOT)
    return max(LEAST, trials * PILOT)


@contextmanager
def _own_generator(device: torch.device) -> Iterator[torch.Generator]:
    """A generator with a fixed seed; the global one is restored, whatever the network draws."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield torch.Generator(device).manual_seed(0)


class Footprint(NamedTuple):
    """The result of a call, its seconds, and the most bytes of tensors that it held at a time."""

    result: Any
    seconds: float
    peak_bytes: int


@final
class PeakTensors(EagerMode):
    """Counts the bytes of new tensors, each storage once, without a kernel's own workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self.counting = 0.0
        """Seconds that the counting itself took."""
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; views and operators that write into an argument allocate nothing."""
        del types
        result = func(*args, **(kwargs or {}))
        ended = time.perf_counter()
        if not (func.is_view or func._schema.is_mutable):
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
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    synchronize(device)
    started = time.perf_counter()
    result = function()
    synchronize(device)
    return result, time.perf_counter() - started


def footprint(function: Callable[[], Any], device: torch.device, repeat: bool = True) -> Footprint:
    """Time and memory of a call; with `repeat` a brief one is called once more for its time."""
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
