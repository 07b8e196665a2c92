"""The Gaussian after every operation of a network: where uncertainty grows and where it bends."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from covprop.covariance import Dense, Sharded, Sketch, Streamed
from covprop.departure import Departing, Departure
from covprop.dispatch import leaves, map_leaves
from covprop.eager import eager
from covprop.gaussian import Gaussian
from covprop.kernels.normal import correlation, inverse_deviation
from covprop.lineage import Lineage
from covprop.methods import LayerwiseMethod, Method
from covprop.methods.roots import Root
from covprop.orders import observed
from covprop.plan import module_names, running_module
from covprop.propagate import EXACT, propagate_along
from covprop.sampled import Key, Place, SampledRuns, operation_name
from covprop.steps import Trace, TraceStep
from covprop.tensor import GaussianTensor

CHUNK = 2**25
"""Bytes of samples of all steps that are held at a time."""
LEAST = 100
"""Samples from which their distribution says something."""


@dataclass
class _Draft:
    """A step before what is told late is known: the orders of a streamed covariance."""

    step: TraceStep
    place: Place
    batch_dims: int
    orders: set[int] = field(default_factory=set)

    def finished(self) -> TraceStep:
        return replace(self.step, orders=tuple(sorted(self.orders)))


@final
class Tracer:
    """Watches a propagation; of operations made of others it sees the outer one."""

    def __init__(self, module: object, method: LayerwiseMethod, keep: bool) -> None:
        """Know the names of the modules."""
        self.names = module_names(module)
        self.drafts: list[_Draft] = []
        self.calls: dict[Key, list[Place | None]] = {}
        self._method, self._keep = method, keep
        self._seen: Counter[tuple[str, str]] = Counter()
        self._orders: set[int] | None = None

    def observe(self, activation: Any) -> Any:
        """Note the orders of what is running now, whenever they are chosen."""
        orders = self._orders
        return activation if orders is None else observed(activation, self._method, orders.add)

    def begin(self, inputs: list[Gaussian]) -> None:
        """The inputs are the first steps."""
        for i, x in enumerate(inputs):
            name = "input" if len(inputs) == 1 else f"input {i}"
            self._draft(("", name), x.mean, x.covariance, 0, set(), 0.0)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],  # noqa: ARG002
        kwargs: dict[str, Any],  # noqa: ARG002
        proceed: Callable[[], Any],
    ) -> Any:
        """Run an operation and write down its results."""
        if self._orders is not None:
            return proceed()
        self._orders = orders = set[int]()
        started = time.perf_counter()
        try:
            result = proceed()
            outputs = list(leaves(result))
            for out in outputs:
                if isinstance(out, GaussianTensor):
                    out.evaluate()
        finally:
            self._orders = None
        several = sum(isinstance(out, GaussianTensor) for out in outputs)
        where = running_module(self.names), operation_name(function) or ""
        key = (*where, self._seen[where])
        self._seen[where] += 1
        self.calls[key] = []
        for i, out in enumerate(outputs):
            if not isinstance(out, GaussianTensor):
                self.calls[key].append(None)
                continue
            if out.loc.is_cuda:
                torch.cuda.synchronize(out.loc.device)
            seconds = 0.0 if i else time.perf_counter() - started
            name = where[1] if several == 1 else f"{where[1]} {i}"
            self._draft((where[0], name), out.loc, out.covariance, out.batch_at, orders, seconds)
            self.calls[key].append(self.drafts[-1].place)
        return result

    def _draft(
        self,
        where: tuple[str, str],
        mean: Tensor,
        covariance: Any,
        batch_at: int,
        orders: set[int],
        seconds: float,
    ) -> None:
        variance = covariance.diagonal()
        inverse = inverse_deviation(variance)
        largest = math.nan  # of a sketch, which has no pairs
        if not isinstance(covariance, Sketch):
            largest = min(1.0, covariance.largest(_correlation, (inverse,)))
        whole = None
        if self._keep:
            kept = covariance
            if isinstance(kept, Sharded | Sketch | Streamed):
                kept = Dense(covariance.matrix())
            whole = Gaussian(mean, kept, validate_args=False, method=self._method)
        shape = list(mean.shape)
        shape.insert(batch_at, shape.pop(0)) if batch_at else None
        step = TraceStep(
            *where, tuple(shape), mean.clone(), variance.reshape(mean.shape).clone(), largest, (),
            seconds, whole,
        )  # fmt: skip
        place = Place(len(self.drafts), mean.shape, batch_at)
        self.drafts.append(_Draft(step, place, len(covariance.batch_shape), orders))


def _correlation(left: Any, right: Any, covariance: Tensor) -> Tensor:
    return correlation(covariance, left[0], right[0])


@torch.no_grad()
def trace(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: LayerwiseMethod = EXACT,
    samples: int = 0,
    generator: torch.Generator | None = None,
    keep: bool = False,
    **named_inputs: Any,
) -> Trace:
    """The Gaussian after every operation of `propagate` with the same arguments.

    Each step has mean, variance, the largest correlation, the orders that series used and the time.
    samples: also run the module on so many samples (100 or more) and tell, step by step, how far
    they are from Gaussian (skewness, excess kurtosis, Kolmogorov distance) and how far their mean
    and variance are from those propagated. keep: keep the whole Gaussian of every step. Without
    gradients.
    """
    if inputs and isinstance(inputs[-1], Method):
        *inputs, method = inputs  # type: ignore[assignment]
    if not isinstance(method, LayerwiseMethod):
        raise TypeError(
            f"a trace follows a method that goes from layer to layer, such as cp.Exact(), and not "
            f"{method!r}; for samples, give cp.trace samples=10_000"
        )
    if type(samples) is not int or (samples != 0 and samples < LEAST):
        raise ValueError(
            f"samples is a whole number from {LEAST}, or 0 to take none, not {samples!r}; fewer do "
            "not tell how a step is distributed"
        )
    lineage, tracer = Lineage(method), Tracer(module, method, keep)
    lineage.watcher, lineage.observe = tracer, tracer.observe
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    tracer.begin(given)
    output = propagate_along(lineage, module, tuple(inputs), named_inputs)
    steps = tuple(draft.finished() for draft in tracer.drafts)
    if samples:
        departures = _departures(module, (inputs, named_inputs), tracer, samples, generator)
        steps = tuple(replace(step, departure=departures.get(i)) for i, step in enumerate(steps))
    return Trace(steps, output, samples)


def _departures(
    module: Any,
    arguments: Any,
    tracer: Tracer,
    samples: int,
    generator: torch.Generator | None,
) -> dict[int, Departure]:
    """Run samples through the module and compare them, chunk by chunk."""
    given = [leaf for leaf in leaves(arguments) if isinstance(leaf, Gaussian)]

    def of_varying(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = map_leaves(
            arguments, lambda leaf: next(rest) if isinstance(leaf, Gaussian) else leaf
        )
        return module(*args, **kwargs)

    runs = SampledRuns(eager(of_varying), tracer.names, tracer.calls, given[0].batch_shape)
    gathered = {i: Departing(d.step.mean.numel()) for i, d in enumerate(tracer.drafts)}
    size = sum(draft.step.mean.nbytes for draft in tracer.drafts)
    count = max(1, min(samples, CHUNK // max(1, size)))
    roots = [Root.of(x) for x in given]
    for start in range(0, samples, count):
        drawn = [_draw(root, min(count, samples - start), generator) for root in roots]
        for i, values in enumerate(drawn):
            gathered[i].add(values)
        for i, values in runs(drawn).items():
            if values.shape[1:] == tracer.drafts[i].place.shape:
                gathered[i].add(values)
    return {
        i: gathered[i].result(draft.step.mean, draft.step.variance, draft.batch_dims)
        for i, draft in enumerate(tracer.drafts)
        if gathered[i].moments.count == samples
    }


def _draw(root: Root, count: int, generator: torch.Generator | None) -> Tensor:
    """Samples (count, *batch, *event) of the Gaussian whose root it is."""
    x = root.x
    shape = (count, *x.batch_shape, root.width)
    numbers = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
    return x.mean + root.times(numbers)
