"""`cp.trace`: record the Gaussian after every operation of a network, and run samples beside."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from covprop.activations import Activation
from covprop.covariance import Covariance
from covprop.diagnostics.outputs import ModuleOutputs, kept_gaussian
from covprop.diagnostics.steps import Normality, NormalityTest, Trace, TraceStep
from covprop.errors import UnsupportedOperation
from covprop.flow.batch_position import FIRST, Position
from covprop.flow.nests import leaves, map_leaves
from covprop.flow.table import TABLE, as_torch_function
from covprop.flow.tensor import GaussianTensor
from covprop.gaussian import Gaussian
from covprop.kernels.gradients import quiet
from covprop.methods import LayerwiseMethod, Root, as_method, is_method
from covprop.methods.plan import short_name
from covprop.modules import eager, module_names, running_module
from covprop.propagate import GAUSSIAN_LAYERS, checked_call, warn_of_arguments

LEAST = 100  # samples that are needed, at least, to describe their distribution
CHUNK = 2**25  # bytes of samples of all steps that are held at a time
AGREEMENT = 1e-3  # relative difference of a sample in a batch and by itself that is rounding
PROPERTIES: dict[str, Callable[..., Any]] = {"T": Tensor.t, "mT": Tensor.transpose}
"""Operations that in-flight Gaussians make of a tensor's properties."""
ALIASES = {"view": "reshape"}

Recorded: TypeAlias = dict[int, Tensor]
"""Samples (count, *shape of the mean) of steps, by their index."""


@dataclass
class _Draft:
    """A step before all orders of its series are known, and where its batch was."""

    index: int
    step: TraceStep
    batch_at: Position
    batch_dims: int
    orders: set[int] = field(default_factory=set)


@torch.no_grad()
def trace(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    method: LayerwiseMethod | str = GAUSSIAN_LAYERS,
    samples: int = 0,
    generator: torch.Generator | None = None,
    keep: bool | str | Sequence[str] = False,
    **named_inputs: Any,
) -> Trace:
    """Record the Gaussian after every operation of `cp.propagate`, without gradients.

    Each step has mean, variance, the largest correlation, the orders of the series and the time.
    With samples, it also has skewness, excess kurtosis and Kolmogorov distance, and the errors of
    mean and variance against samples.

    Args:
        module: a network or function, as for `cp.propagate`.
        inputs: its inputs, as for `cp.propagate`; a method may be the last.
        method: a layerwise method.
        samples: run the module also on this many samples, at least 100.
        generator: a random generator for the samples.
        keep: the path of a module, or several, whose returned Gaussians are kept, as
            `trace["layer1.0"]`; True keeps all Gaussians of steps and modules.
        named_inputs: keyword arguments of the module.

    Returns:
        The steps, and what `cp.propagate` returns as `output`.

    Example:
        print(cp.trace(model, x, samples=10_000))
        cp.trace(model, x, keep="0")["0"]
    """
    if inputs and is_method(inputs[-1]):
        *inputs, method = inputs  # type: ignore[assignment]
    if not isinstance(method := as_method(method), LayerwiseMethod):  # type: ignore[assignment]
        raise TypeError(
            "a trace follows a method that goes from layer to layer, such as cp.GaussianLayers(), "
            f"and not {method!r}; for samples, give cp.trace samples=10_000"
        )
    if type(samples) is not int or (samples != 0 and samples < LEAST):
        raise ValueError(
            f"samples is a whole number from {LEAST}, or 0 to take none, not {samples!r}; fewer do "
            "not tell how a step is distributed"
        )
    call, _ = checked_call(module, inputs, method, named_inputs)
    warn_of_arguments(call)
    method.check_skewness(call.inputs)
    outputs = ModuleOutputs(module_names(module), keep, method)
    tracer = Tracer(module, method, keep is True)
    tracer.begin(call.inputs)
    with outputs.watching():
        output = method.traverse(call, tracer, tracer.observe)
    arguments = (call.arguments, call.named_arguments)
    normality = _normality(module, arguments, tracer, samples, generator) if samples else {}
    steps = (
        replace(draft.step, orders=tuple(sorted(draft.orders)), normality=normality.get(i))
        for i, draft in enumerate(tracer.drafts)
    )
    return Trace(tuple(steps), output, samples, outputs.found)


@final
class Tracer:
    """Records every operation of a propagation; of operations made of others the outer one."""

    def __init__(self, module: object, method: LayerwiseMethod, keep: bool) -> None:
        self.names = module_names(module)
        self.drafts: list[_Draft] = []
        self.calls: dict[tuple[str, str], list[list[_Draft | None]]] = {}
        """The results of every call, by the path of the module and the name of the operation."""
        self._method, self._keep = method, keep
        self._orders: set[int] | None = None

    def observe(self, activation: Activation) -> Activation:
        """Record the orders of the operation that is running, whenever they are chosen."""
        orders = self._orders
        return activation if orders is None else self._method.observed(activation, orders.add)

    def begin(self, inputs: Sequence[Gaussian]) -> None:
        """Record the inputs as the first steps."""
        for i, x in enumerate(inputs):
            name = "input" if len(inputs) == 1 else f"input {i}"
            step = self._step("", name, x.mean, x.covariance.diagonal(), x.covariance)
            if step.gaussian is not None:  # with the skewness, if it has one
                step = replace(step, gaussian=x.with_moments(covariance=step.gaussian.covariance))
            self.drafts.append(_Draft(i, step, FIRST, len(x.batch_shape)))

    def advance(self, share: float) -> None:
        """Nothing is recorded of an operation that is not done."""

    def run(self, function: Any, args: Any, kwargs: Any, proceed: Callable[[], Any]) -> Any:
        """Run an operation and record its results."""
        del args, kwargs
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
        several = sum(isinstance(out, GaussianTensor) for out in outputs) > 1
        module, operation = running_module(self.names), operation_name(function) or ""
        call: list[_Draft | None] = []
        self.calls.setdefault((module, operation), []).append(call)
        for i, out in enumerate(outputs):
            if not isinstance(out, GaussianTensor):
                call.append(None)
                continue
            if out.loc.is_cuda:
                torch.cuda.synchronize(out.loc.device)
            seconds = 0.0 if i else time.perf_counter() - started
            name = f"{operation} {i}" if several else operation
            covariance = self._covariance(out)
            step = self._step(module, name, out.loc, out.variances, covariance, out.batch_at)
            step, dims = replace(step, seconds=seconds), len(out.batch_shape)
            draft = _Draft(len(self.drafts), step, out.batch_at, dims, orders)
            self.drafts.append(draft)
            call.append(draft)
        return result

    def _covariance(self, out: GaussianTensor) -> Covariance | None:
        """That of all pairs, None where the method has none and it is not to be kept."""
        try:
            return out.covariance
        except UnsupportedOperation:
            if self._keep:
                raise
            return None

    def _step(
        self, module: str, name: str, mean: Tensor, variance: Tensor,
        covariance: Covariance | None, batch_at: Position = FIRST,
    ) -> TraceStep:  # fmt: skip
        whole = None
        if self._keep and covariance is not None:
            whole = kept_gaussian(mean, covariance, self._method)
        return TraceStep(
            module, name, tuple(batch_at.shape(mean.shape)), mean.clone(),
            variance.reshape(mean.shape).clone(),
            math.nan if covariance is None else min(1.0, covariance.largest_correlation()),
            (), 0.0, whole,
        )  # fmt: skip


def operation_name(function: Callable[..., Any]) -> str | None:
    """The name of an operation in a trace, however it is spelled; None without a rule."""
    if short_name(function) == "__get__":
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        function = PROPERTIES.get(owner, function)
    function = as_torch_function(function)
    row = TABLE.get(function)
    if row is None:
        return None
    name = short_name(row.in_place_of or function)
    return ALIASES.get(name, name).strip("_")


@final
class Recorder(TorchFunctionMode):
    """Copies the results of the traced calls, while a module runs on samples.

    A call counts if an argument depends on the samples, as in-flight Gaussians do on the inputs.
    """

    def __init__(self, tracer: Tracer, samples: Sequence[Tensor]) -> None:
        super().__init__()
        self._tracer = tracer
        self._recorded: dict[tuple[str, str], Recorded] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._varies = WeakIdKeyDictionary({tensor: True for tensor in samples})

    def matched(self) -> Recorded:
        """Results of the operations that were called as often as in the trace."""
        traced = self._tracer.calls
        return {
            i: values
            for where, recorded in self._recorded.items()
            if self._count[where] == len(traced[where])
            for i, values in recorded.items()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; torch suspends this mode meanwhile."""
        del types
        result = func(*args, **(kwargs or {}))
        arguments = leaves((args, kwargs or {}))
        if not any(isinstance(leaf, Tensor) and leaf in self._varies for leaf in arguments):
            return result
        outputs, name = list(leaves(result)), operation_name(func)
        where = running_module(self._tracer.names), name or ""
        calls, count = self._tracer.calls.get(where, []) if name else [], self._count[where]
        self._count[where] += 1
        if count >= len(calls) or len(calls[count]) != len(outputs):
            self._varies.update({out: True for out in outputs if isinstance(out, Tensor)})
            return result
        for out, draft in zip(outputs, calls[count], strict=True):
            if draft is not None and isinstance(out, Tensor):
                self._varies[out] = True
                recorded = self._recorded.setdefault(where, {})
                recorded[draft.index] = out.clone()  # which may be changed in place
        return result


@final
class SampledRuns:
    """Runs a function of the varying inputs on many samples, in the first of three ways that works.

    With a batch, samples are more of it; else `torch.func.vmap` adds a dimension that the module
    does not see; what has no batching rule runs on one sample after another.
    """

    def __init__(self, function: Callable[..., Any], tracer: Tracer, batch: torch.Size) -> None:
        self._function, self._tracer, self._batch = function, tracer, batch
        self._ways = [self._mapped, self._one_by_one]
        if len(batch) == 1:
            self._ways.insert(0, self._merged)

    def __call__(self, samples: Sequence[Tensor]) -> Recorded:
        """Results of all calls for samples (count, *batch, *event) of each input."""
        while len(self._ways) > 1:
            try:
                return self._ways[0](samples)
            except Exception:  # a module may raise anything; the last way lets it through
                self._ways.pop(0)
        return self._ways[0](samples)

    def _recorded(self, *inputs: Tensor) -> Recorded:
        with Recorder(self._tracer, inputs) as recorder:
            self._function(*inputs)
        return recorder.matched()

    def _merged(self, samples: Sequence[Tensor]) -> Recorded:
        count = len(samples[0])
        recorded = self._recorded(*(tensor.flatten(0, 1) for tensor in samples))
        merged = {
            i: self._batch_to_front(i, values).unflatten(0, (count, *self._batch))
            for i, values in recorded.items()
        }
        single = self._one_by_one([tensor[:1] for tensor in samples])
        if merged.keys() != single.keys():
            raise RuntimeError("the module takes another way for another size of its batch")
        for i, values in single.items():
            torch.testing.assert_close(merged[i][:1], values, rtol=AGREEMENT, atol=AGREEMENT)
        return merged

    def _batch_to_front(self, index: int, values: Tensor) -> Tensor:
        """The merged batch is where the batch was; one of one may have been anywhere."""
        draft = self._tracer.drafts[index]
        moved = (at.first(values) for at in (draft.batch_at, *map(Position, range(values.dim()))))
        return next(tensor for tensor in moved if tensor.shape[1:] == draft.step.mean.shape[1:])

    def _mapped(self, samples: Sequence[Tensor]) -> Recorded:
        with quiet():
            recorded = torch.func.vmap(self._recorded, randomness="different")(*samples)
        return {i: self._batch_first(i, values) for i, values in recorded.items()}

    def _one_by_one(self, samples: Sequence[Tensor]) -> Recorded:
        runs = [self._recorded(*inputs) for inputs in zip(*samples, strict=True)]
        return {i: self._batch_first(i, torch.stack([run[i] for run in runs])) for i in runs[0]}

    def _batch_first(self, index: int, values: Tensor) -> Tensor:
        at = self._tracer.drafts[index].batch_at
        return torch.stack([at.first(value) for value in values]) if self._batch else values


def _normality(
    module: Any, arguments: Any, tracer: Tracer, samples: int, generator: torch.Generator | None
) -> dict[int, Normality]:
    """Run samples through a module, chunk by chunk, and compare the steps that all reach."""
    inputs = [leaf for leaf in leaves(arguments) if isinstance(leaf, Gaussian)]

    def of_varying(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = map_leaves(
            arguments, lambda leaf: next(rest) if isinstance(leaf, Gaussian) else leaf
        )
        return module(*args, **kwargs)

    runs = SampledRuns(eager(of_varying), tracer, inputs[0].batch_shape)
    steps = [draft.step for draft in tracer.drafts]
    tests = [NormalityTest(step.mean.numel()) for step in steps]
    count = max(1, min(samples, CHUNK // max(1, sum(step.mean.nbytes for step in steps))))
    roots = [Root.of(x) for x in inputs]
    for start in range(0, samples, count):
        drawn = [_draw(root, min(count, samples - start), generator) for root in roots]
        for i, values in enumerate(drawn):  # before the module may change them in place
            tests[i].add(values)
        for i, values in runs(drawn).items():
            if values.shape[1:] == steps[i].mean.shape:
                tests[i].add(values)
    return {
        draft.index: test.result(draft.step.mean, draft.step.variance, draft.batch_dims)
        for draft, test in zip(tracer.drafts, tests, strict=True)
        if test.moments.count == samples
    }


def _draw(root: Root, count: int, generator: torch.Generator | None) -> Tensor:
    """Samples (count, *batch, *event) of the Gaussian with this root."""
    return root.x.mean + root.times(root.standardised(count, generator))
