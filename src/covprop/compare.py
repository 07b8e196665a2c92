"""Methods against Monte Carlo, on a user's own network and input."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covprop.comparison import Agreement, Comparison, ComparisonRow, Reference
from covprop.dispatch import leaves
from covprop.divergences import kl_divergence, wasserstein_distance
from covprop.errors import CovpropError
from covprop.footprint import BRIEF, Footprint, footprint, timed
from covprop.gaussian import Gaussian
from covprop.methods import (
    AssumedDensity,
    ControlVariate,
    Exact,
    Linearized,
    Method,
    MonteCarlo,
    PiecewiseLinear,
    Series,
    Split,
    Unscented,
    Wu2019,
)
from covprop.methods.control import FEWEST
from covprop.progress import StageBar
from covprop.propagate import propagate
from covprop.verdict import Verdict, rank

SAMPLES = 75_000
SAMPLING = MonteCarlo(SAMPLES)
METHODS: tuple[Method, ...] = (
    Exact(), Split(), Series(order=4), Linearized(), Unscented(), PiecewiseLinear(),
    AssumedDensity(), Wu2019(),
)  # fmt: skip
"""What is compared unless the user says."""
RESOLVED = 10.0
"""Standard errors that a mean has to be from zero for a ratio to it to say something."""
MOST = 1e15
"""Samples that any reference is worth: of a linear network a control variate knows everything."""


@torch.no_grad()
def compare(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    methods: Method | Iterable[Method] | Mapping[str, Method] = METHODS,
    samples: int = SAMPLES,
    generator: torch.Generator | None = None,
    reference: MonteCarlo | ControlVariate | None = None,
    show: bool = True,
    progress: bool = False,
    **named_inputs: Any,
) -> Comparison:
    """How far methods are from Monte Carlo on this network and input, and what they take.

    module, inputs: as for `cp.propagate`; the module returns one tensor. methods: a method object,
    several, or a mapping from names to them; by default all that covprop has, and those that refuse
    or fail say why.
    samples, generator: of the Monte Carlo run that is the reference; or another reference, such as
    cp.ControlVariate(5_000), which is as exact as many more plain samples where the network is
    nearly linear, and gets there sooner. Prints the table unless show=False; the result has it as
    str() and every figure of every output. progress shows a bar.
    """
    named = _named(methods)
    _check_inputs(inputs, named_inputs)
    if reference is not None and not isinstance(reference, MonteCarlo | ControlVariate):
        raise TypeError(
            "reference samples, as cp.MonteCarlo(75_000) or cp.ControlVariate(5_000) do, and is "
            f"not {reference!r}"
        )
    given = [leaf for leaf in leaves((inputs, named_inputs)) if isinstance(leaf, Gaussian)]
    device = given[0].device if given else torch.device("cpu")

    def run(method: Method) -> Any:
        return propagate(module, *inputs, method=method, **named_inputs)

    rows = []
    with StageBar(1 + len(named), progress, unit="method") as bar:
        bar.begin("sampling")
        sampling = MonteCarlo(samples, generator) if reference is None else reference
        truth = _reference(_sampled(run, sampling, device), sampling)
        for name, method in named.items():
            bar.begin(name)
            rows.append(_row(name, method, run, truth, device))
    comparison = Comparison(truth, tuple(rows))
    if show:
        print(comparison)
    return comparison


def _named(methods: Any) -> dict[str, Method]:
    """Methods by name; a name that comes again is numbered."""
    if isinstance(methods, Mapping):
        names, given = [str(name) for name in methods], list(methods.values())
    else:
        alone = isinstance(methods, Method | str) or not isinstance(methods, Iterable)
        names, given = [], [methods] if alone else list(methods)
    for method in given:
        if not isinstance(method, Method):
            what = method.__name__ if isinstance(method, type) else repr(method)
            raise TypeError(
                f"methods holds {what}, and a method is an object such as cp.Exact() or "
                "cp.Series(order=4)"
            )
    names = names or [method_name(method) for method in given]
    counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
    numbered = (
        name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)
    )
    return dict(zip(numbered, given, strict=True))


def _check_inputs(inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
    """Methods among them belong elsewhere."""
    for leaf in leaves((inputs, named_inputs)):
        if isinstance(leaf, Method) or (isinstance(leaf, type) and issubclass(leaf, Method)):
            name = leaf.__name__ if isinstance(leaf, type) else type(leaf).__name__
            raise TypeError(
                f"compare takes methods as methods=[cp.{name}(), ...], and not as an input or as "
                "method=..."
            )


def _row(
    name: str, method: Method, run: Callable[[Method], Any], reference: Reference, device: Any
) -> ComparisonRow:
    """What a method found; the samples went through, so an error is the method's own."""
    try:
        call = footprint(partial(run, method), device)
        agreement = agree(call.result, reference)
    except (CovpropError, ValueError, RuntimeError) as error:
        reason = str(error).strip() or type(error).__name__
        return ComparisonRow(name, method, refusal=reason.splitlines()[0])
    return ComparisonRow(name, method, call.seconds, call.peak_bytes, call.result, agreement)


def _sampled(
    run: Callable[[Method], Any], method: MonteCarlo | ControlVariate, device: Any
) -> Footprint:
    """A Monte Carlo run; its memory is that of another one, of as many samples as are brief.

    Two samples go first, to see what the module returns.
    """
    own = torch.Generator(device).manual_seed(0)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        result = run(MonteCarlo(2, own))
    if not isinstance(result, Gaussian):
        raise TypeError(
            f"compare takes a module that returns one tensor, and this one returns a "
            f"{type(result).__name__}; wrap it in a function that picks one"
        )
    result, seconds = timed(lambda: run(method), device)
    samples = method.samples
    brief = max(2, min(samples, int(samples * BRIEF / max(seconds, BRIEF))))
    with torch.random.fork_rng(cuda):
        again: Method = MonteCarlo(brief, own)
        if isinstance(method, ControlVariate):
            again = dataclasses.replace(method, samples=max(brief, FEWEST), generator=own)
        second = footprint(lambda: run(again), device, repeat=False)
    return Footprint(result, seconds, second.peak_bytes)


def method_name(method: Any) -> str:
    """The class, and what is set that has another value by default."""
    if not dataclasses.is_dataclass(method):
        return type(method).__name__
    said = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(method)
        if field.compare  # a generator says nothing of the method
        and (value := getattr(method, field.name)) is not None
        and value != _default(field)
    ]
    return f"{type(method).__name__}({', '.join(said)})"


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _reference(call: Footprint, method: Method = SAMPLING) -> Reference:
    """The sampled Gaussian, and what sampling does to every figure."""
    truth: Gaussian = call.result
    assert truth.samples is not None
    assert truth.mean_stderr is not None
    assert truth.covariance_stderr is not None
    samples = truth.samples
    mean, variance = truth.mean.double(), truth.variance.double()
    error, spread = truth.mean_stderr.double(), truth.covariance_stderr.double()
    resolved = mean.abs() > RESOLVED * error
    varies = variance > 0
    of_variance = spread.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
    matrix = truth.covariance_matrix.double()
    values = torch.linalg.eigvalsh(matrix).clamp(min=0)
    freedom = rank(values, truth.dtype)
    plain = isinstance(method, MonteCarlo)
    worth = samples if plain else _worth(variance, of_variance, samples)
    return Reference(
        f"{type(method).__name__}({samples:,})", truth, call.seconds, call.peak_bytes, samples,
        _divided(error, mean.abs(), resolved),
        _divided(of_variance, variance, varies),
        _divided(error, variance.sqrt(), varies),
        spread.square().sum((-2, -1)).sqrt() / _norm(matrix),
        wasserstein_of_sampling(values, worth),
        freedom * (freedom + 3) / (4 * worth),
    )  # fmt: skip


def _worth(variance: Tensor, error: Tensor, samples: int) -> int:
    """How many plain samples of a Gaussian know its variances as well, by the median output."""
    known = (variance > 0) & (error > 0)
    if not bool(known.any()):
        return samples
    median = float((2 * (variance[known] / error[known]).square()).median())
    return max(samples, int(min(median, MOST)))


def wasserstein_of_sampling(values: Tensor, samples: int) -> Tensor:
    """The root of E[W2^2] between a Gaussian with these eigenvalues and what N samples give of it.

    sum_i l_i / N for the mean; for the covariance (1/2) sum_ij E[D_ij^2] / (l_i + l_j), to second
    order, with E[D_ij^2] = l_i l_j (1 + delta_ij) / N.
    """
    left, right = values[..., :, None], values[..., None, :]
    total = left + right
    pairs = torch.where(total > 0, left * right / torch.where(total > 0, total, 1), 0)
    covariance = (pairs.sum((-2, -1)) + pairs.diagonal(dim1=-2, dim2=-1).sum(-1)) / 2
    return ((values.sum(-1) + covariance) / samples).sqrt()


def agree(found: Gaussian, reference: Reference) -> Agreement:
    """A method's Gaussian against the reference."""
    truth = reference.gaussian
    if found.mean.shape != truth.mean.shape:
        raise ValueError(
            f"the method's mean has shape {tuple(found.mean.shape)}, that of the samples "
            f"{tuple(truth.mean.shape)}"
        )
    mean, variance = truth.mean.double(), truth.variance.double()
    shift = found.mean.double() - mean
    matrix, ours = truth.covariance_matrix.double(), found.covariance_matrix.double()
    known = ~reference.mean_ratio.isnan()
    varies = variance > 0
    agreement = Agreement(
        _divided(found.mean.double(), mean, known),
        _divided(found.variance.double(), variance, varies),
        _divided(shift, variance.sqrt(), varies),
        _norm(ours - matrix) / _norm(matrix),
        wasserstein_distance(found, truth),
        kl_divergence(truth, found),
        "",
    )
    verdict = Verdict(found, truth).of(agreement)
    return dataclasses.replace(agreement, verdict=verdict)


def _divided(numerator: Tensor, denominator: Tensor, known: Tensor) -> Tensor:
    return torch.where(known, numerator / torch.where(known, denominator, 1), math.nan)


def _norm(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1)).sqrt()
