"""Uncertainty through the layers, from a trace."""

from typing import Any

import torch
from torch import Tensor

from covprop.departure import median_and_worst
from covprop.report.page.markup import Section, beside, chart, folded, paragraph, rounded
from covprop.report.page.pictures import picture, plane
from covprop.report.table import in_digits, in_percent, in_seconds
from covprop.steps import NOT_GAUSSIAN, Trace, TraceStep

BINS = 20
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
PIXELS = 40_000
"""Of the pictures of all steps."""
SIDE, LEAST_SIDE = 32, 8
MANY = 1_000_000
"""Elements of which quantiles are taken; of more, evenly spaced ones."""


def layers_section(trace: Trace, batch_dims: int) -> Section:
    """How wide and how dependent the elements of every step are, and what samples say of them."""
    side = max(LEAST_SIDE, min(SIDE, int((PIXELS / max(1, len(trace.steps))) ** 0.5)))
    steps = [_step(step, batch_dims, side) for step in trace.steps]
    body = paragraph(
        "Each step is one operation of the network. The line is the median standard deviation of "
        "its elements, the band holds 90 of 100 of them.",
        "Numbers are over all inputs of the batch." if batch_dims else "",
    )
    body += paragraph(_diagnosis(trace))
    body += paragraph("Choose a step to see more of it.", kind="screen")
    body += beside(
        chart("steps", "Standard deviations and largest correlation of every step"),
        chart("step", "The chosen step"),
    )
    body += folded("Numbers of every step", trace.table)
    data: dict[str, Any] = {"steps": steps, "samples": trace.samples, "start": _worth_seeing(trace)}
    if trace.samples:
        data["threshold"] = NOT_GAUSSIAN
    return Section("layers", "Layers", "Uncertainty through the layers", body, data)


def _worth_seeing(trace: Trace) -> int:
    """The step that is wrong, or else not Gaussian, first; or else the last."""
    found = trace.first_error() or trace.first_departure()
    places = [i for i, step in enumerate(trace.steps) if step is found]
    return (places or [max(0, len(trace.steps) - 1)])[0]


def _diagnosis(trace: Trace) -> str:
    """Where the assumption of Gaussian layers fails, in words."""
    if not trace.samples:
        return (
            "Whether each step is Gaussian was not checked; cp.trace(..., samples=10_000) does so."
        )
    bent, wrong = trace.first_departure(), trace.first_error()
    shape = (
        f"The first that is clearly not Gaussian is “{bent.name}”."
        if bent
        else "Every step is Gaussian as far as they tell."
    )
    moments = (
        f"The first whose variance is off by more than {in_percent(0.01)} and the error of "
        f"sampling is “{wrong.name}”; what follows inherits it."
        if wrong
        else "No variance is off by more than sampling explains, which is what matters: a step may "
        "bend and still have the right moments."
    )
    return f"{trace.samples:,} samples went through the same steps. {shape} {moments}"


def _step(step: TraceStep, batch_dims: int, side: int) -> dict[str, Any]:
    stddev = step.stddev.detach().to("cpu", torch.float64)
    known = _spaced(stddev.flatten())
    known = known[known.isfinite()]
    counts, edges = _histogram(known)
    told: dict[str, Any] = {
        "name": step.name, "shape": " × ".join(map(str, step.shape)) or "one number",
        "quantiles": rounded(_quantiles(known)), "counts": counts, "edges": rounded(edges),
        "mean": rounded(float(step.mean.double().mean())),
        "correlation": rounded(step.largest_correlation), "series": step.series,
        "seconds": rounded(step.seconds), "time": in_seconds(step.seconds) if step.seconds else "",
    }  # fmt: skip
    shape = plane(step.mean.shape[batch_dims:])
    if shape:
        told["picture"] = picture(stddev.reshape(-1, *shape[1:]), side)
    return told | _departure(step)


def _departure(step: TraceStep) -> dict[str, Any]:
    found = step.departure
    if found is None:
        return {}
    measures = {
        "skewness": found.skewness, "kurtosis": found.excess_kurtosis,
        "kolmogorov": found.kolmogorov, "mean_error": found.mean_error,
        "variance_error": found.variance_error,
    }  # fmt: skip
    told: dict[str, Any] = {
        name: rounded(median_and_worst(values)) for name, values in measures.items()
    }
    noise = median_and_worst(found.variance_stderr)[0]
    return told | {
        "kolmogorov_noise": rounded(found.kolmogorov_noise),
        "noise": f"sampling alone: Kolmogorov {in_digits(found.kolmogorov_noise, 2)}, mean "
        f"{in_digits(found.mean_stderr, 2)} standard deviations, variance {in_percent(noise)}",
    }  # fmt: skip


def _spaced(values: Tensor) -> Tensor:
    every = -(-len(values) // MANY)
    return values[::every] if every > 1 else values


def _quantiles(values: Tensor) -> Tensor:
    if not len(values):
        return torch.full((len(QUANTILES),), torch.nan)
    return torch.quantile(values, torch.tensor(QUANTILES, dtype=values.dtype))


def _histogram(values: Tensor) -> tuple[list[int], Tensor]:
    """How many of the values are in each of some equal bins; none where all are the same."""
    if not len(values) or float(values.min()) == float(values.max()):
        return [], values[:1]
    counts, edges = torch.histogram(values, BINS)
    return counts.long().tolist(), edges[[0, -1]]
