"""Methods against samples, on a user's own network and input."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from covprop.comparison import Agreement, Comparison, ComparisonRow, Reference
from covprop.dispatch import leaves
from covprop.divergences import kl_divergence, wasserstein_distance
from covprop.footprint import footprint
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
from covprop.plan import Plan
from covprop.progress import StageBar
from covprop.propagate import plan, propagate
from covprop.reference import FAILURES, divided, norm, sampled
from covprop.verdict import Verdict

METHODS: tuple[Method, ...] = (
    Exact(), Split(), Series(order=4), Linearized(), Unscented(), PiecewiseLinear(),
    AssumedDensity(), Wu2019(),
)  # fmt: skip
"""What is compared unless the user says."""


@torch.no_grad()
def compare(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    methods: Method | Iterable[Method] | Mapping[str, Method] = METHODS,
    samples: int | None = None,
    generator: torch.Generator | None = None,
    reference: MonteCarlo | ControlVariate | None = None,
    show: bool = True,
    progress: bool = False,
    **named_inputs: Any,
) -> Comparison:
    """How far methods are from the truth on this network and input, and what they take.

    module, inputs: as for `cp.propagate`; the module returns one tensor. methods: a method object,
    several, or a mapping from names to them; by default all that covprop has, and those that refuse
    or fail say why.
    The truth is sampled, with the generator. By default a control variate takes so few samples that
    they have the standard errors of 75,000 plain ones, if that is half of them or less, and else
    these are taken: the foot of the table tells. samples: so many plain ones instead. reference:
    another way of sampling, such as cp.ControlVariate(5_000, cp.Linearized()). Prints the table
    unless show=False; the result has it as str() and every figure of every output. progress shows a
    bar.
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

    def planned() -> Plan:
        return plan(module, *inputs, **named_inputs)

    rows = []
    with StageBar(1 + len(named), progress, unit="method") as bar:
        bar.begin("sampling")
        if reference is None and samples is not None:
            reference = MonteCarlo(samples, generator)
        truth = sampled(run, reference, planned, generator, device)
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
    except FAILURES as error:
        reason = str(error).strip() or type(error).__name__
        return ComparisonRow(name, method, refusal=reason.splitlines()[0])
    return ComparisonRow(name, method, call.seconds, call.peak_bytes, call.result, agreement)


def method_name(method: Any) -> str:
    """The class, and what is set that has another value by default."""
    if not dataclasses.is_dataclass(method):
        return type(method).__name__
    said = [
        f"{field.name}={method_name(value) if isinstance(value, Method) else repr(value)}"
        for field in dataclasses.fields(method)
        if field.compare  # a generator says nothing of the method
        and (value := getattr(method, field.name)) is not None
        and value != _default(field)
    ]
    return f"{type(method).__name__}({', '.join(said)})"


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


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
        divided(found.mean.double(), mean, known),
        divided(found.variance.double(), variance, varies),
        divided(shift, variance.sqrt(), varies),
        norm(ours - matrix) / norm(matrix),
        wasserstein_distance(found, truth),
        kl_divergence(truth, found),
        "",
    )
    verdict = Verdict(found, truth).of(agreement)
    return dataclasses.replace(agreement, verdict=verdict)
