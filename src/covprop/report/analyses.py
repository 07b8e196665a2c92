"""Sections on results of `robustness.analyse`, `cp.trace` and `cp.compare`."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covprop.diagnostics.comparison import Comparison, ComparisonRow
from covprop.diagnostics.steps import NOT_GAUSSIAN, Trace, TraceStep, median_and_worst
from covprop.report.content import (
    BatchSelection,
    Section,
    beside,
    chart,
    folded,
    paragraph,
    picture,
    plane,
    rounded,
)
from covprop.robustness import Probabilities, Robustness
from covprop.robustness.budget import NO_NOISE
from covprop.text_table import in_digits, in_percent, in_percent_unlike, in_seconds

CLASSES = 20
"""Classes of an input that are drawn: all, or the likeliest."""
RISKIEST = 200
"""Inputs of a batch in the chart of all of them."""
BINS = 20
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
PIXELS = 40_000
"""Of the pictures of all steps."""
SIDE, LEAST_SIDE = 32, 8
QUANTILE_ELEMENTS = 1_000_000
"""Elements of which quantiles are taken; of more, evenly spaced ones."""
POINTS = 200
"""Outputs of a method that are shown as points; of more, evenly spaced ones."""
AMOUNTS = ("covariance_error", "wasserstein", "kl")
REFUSAL = 160
"""Letters of a refusal."""


def decision_section(
    result: Robustness, batch: BatchSelection, output_names: Sequence[str]
) -> Section:
    """How a classifier decides under noise: probabilities, margins, noise budget, attack."""
    names = _class_names(result, output_names)
    body = paragraph(
        f"Blue is what covprop finds, orange what {result.samples:,} samples of the network find, "
        "with two standard errors.",
        f"Of {len(names):,} classes, each input shows its {CLASSES} likeliest."
        if len(names) > CLASSES
        else "",
        _assumptions(result),
        batch.note,
    )
    if batch.labels:
        body += chart("risks", "Probability of a wrong decision for every input",
                      "Probability of a wrong decision, input by input")  # fmt: skip
    body += beside(
        chart("classes", "Probability of every class", "Which class wins"),
        chart("margins", "Margins of the label over every other class",
              "How far ahead the label is: its logit less that of each rival"),
    )  # fmt: skip
    target = in_percent(result.budget.target)
    body += beside(
        chart("budget", "Probability of keeping the label over the size of the noise",
              f"Noise budget: the noise that keeps the label with {target}"),
        chart("verdict", "The decision in words"),
    )  # fmt: skip
    body += folded("Numbers of the decision", result.table)
    data: dict[str, Any] = {
        "names": names, "samples": result.samples, "target": result.budget.target,
        "elements": [
            _decision(result, index, place)
            for index, place in zip(batch.indices, batch.places, strict=True)
        ],
        "risks": _risks(result, batch),
    }  # fmt: skip
    return Section("decision", "Decision", "Does the decision hold?", body, data)


def _assumptions(result: Robustness) -> str:
    """What covprop's probabilities rest on, and how far they may be off for that."""
    found = result.misclassification
    if found.assumption is None:
        return ""
    if result.counted:
        return "covprop counts decisions at fixed points and assumes nothing of the logits."
    worst = in_digits(float(found.assumption.max()), 1)
    return (
        "What is assumed of the distribution of the logits may move the probability of a wrong "
        f"decision by {worst}."
    )


def _decision(result: Robustness, index: tuple[int, ...], place: int) -> dict[str, Any]:
    """The data of one input; place: in the flattened batch."""
    likeliest = result.probabilities.probability[index].argsort(descending=True)[:CLASSES]
    classes = likeliest.sort().values
    distance = result.margin_mean[index] / result.margin_stddev[index].clamp(min=0)
    nearest = distance.nan_to_num(math.inf).argsort()[:CLASSES]
    budget, ball = result.budget, result.adversary.ball
    curve = torch.stack([budget.levels, budget.probabilities])  # (2, evaluations, *batch)
    curve = curve.reshape(*curve.shape[:2], -1)[..., place]
    curve = curve[:, ~curve.isnan().any(0)]
    return {
        "label": int(result.label[index]), "predicted": int(result.predicted[index]),
        "classes": classes.tolist(),
        "probabilities": _pair(result.probabilities[(*index, classes)]),
        "sampled": _pair(result.sampled[(*index, classes)]),
        "softmax": rounded(result.softmax.probability[index][classes].double()),
        "wrong": _pair(result.misclassification[index]),
        "wrong_sampled": _pair(result.sampled_misclassification[index]),
        "rivals": result.rivals[index][nearest].tolist(),
        "margin_mean": rounded(result.margin_mean[index][nearest].double()),
        "margin_stddev": rounded(result.margin_stddev[index][nearest].double()),
        "entropy": rounded(float(result.decision_entropy[index])),
        "level": rounded(float(budget.level[index])),
        "stddev": rounded(float(budget.stddev[index])),
        "found": bool(budget.found[index]), "reason": budget.reason[place],
        "written": budget.written(index) if bool(budget.exists[index]) else "",
        "doubt": result.budget_remark(index), "curve": rounded(curve.double()),
        "kept_sampled": _pair(result.budget_sampled[index]),
        "robust": bool(result.adversary.robust[index]),
        "radius": rounded(float(torch.as_tensor(ball.radius).expand(result.label.shape)[index])),
        "norm": "∞" if ball.norm == math.inf else in_digits(ball.norm),
    }  # fmt: skip


def _pair(estimate: Probabilities) -> list[Any]:
    return [rounded(estimate.probability.double()), rounded(estimate.error.double())]


def _risks(result: Robustness, batch: BatchSelection) -> dict[str, Any]:
    """Every input of the batch, the likeliest to be wrong first."""
    wrong = result.misclassification.probability.flatten()
    order = wrong.argsort(descending=True)[:RISKIEST]
    names = list(itertools.product(*(range(length) for length in result.label.shape)))
    sampled = result.sampled_misclassification
    shown = {place: i for i, place in enumerate(batch.places)}
    return {
        "names": [f"input {', '.join(map(str, names[i]))}" for i in order.tolist()],
        "shown": [shown.get(place, -1) for place in order.tolist()], "of": len(wrong),
        "probability": rounded(wrong[order].double()),
        "sampled": rounded(sampled.probability.flatten()[order].double()),
        "stderr": rounded(sampled.stderr.flatten()[order].double()),
    }  # fmt: skip


def _class_names(result: Robustness, names: Sequence[str]) -> list[str]:
    """Names of the outputs where every class has one, else their numbers."""
    count = result.probabilities.probability.shape[-1]
    return list(map(str, names)) if len(names) == count else [f"class {i}" for i in range(count)]


def decision_sentences(result: Robustness, output_names: Sequence[str]) -> str:
    """Summarise an analysis in a sentence or two."""
    names = _class_names(result, output_names)
    wrong = result.misclassification.probability.double().flatten()
    sampled = result.sampled_misclassification.probability.double().flatten()
    if result.label.numel() > 1:
        average, worst, other = (
            in_percent(float(value)) for value in (wrong.mean(), wrong.max(), sampled.mean())
        )
        return (
            f"A decision is wrong with a probability of {average} on average (samples: {other}) "
            f"and of {worst} at worst. {_budget_sentence(result, '')}"
        )
    name, predicted = names[int(result.label)], names[int(result.predicted)]
    same = bool(result.label == result.predicted)
    kept, samples = (in_percent_unlike(1 - float(value), 1.0) for value in (wrong, sampled))
    return (
        f"It keeps to {name}{'' if same else f' (without noise it says {predicted})'} with a "
        f"probability of {kept}; samples say {samples}. {_budget_sentence(result, name)}"
    )


def budget_figure(result: Robustness) -> tuple[str, str]:
    """A number, and what it is: of one input, or of the typical one of a batch."""
    budget, target, typical = result.budget, in_percent(result.budget.target), _typical(result)
    if result.label.numel() == 1 and not bool(budget.exists):
        return "none", budget.reason[0]
    if typical is None:
        return "none", NO_NOISE
    keep = f"{_half(result)} keep their label" if result.label.numel() > 1 else "it keeps its label"
    return f"{typical} ×", f"this noise, and {keep} with {target}{_doubt(result)}"


def _budget_sentence(result: Robustness, name: str) -> str:
    """The same as a sentence; name: of the label of a single input."""
    budget, target, typical = result.budget, in_percent(result.budget.target), _typical(result)
    if result.label.numel() > 1:
        if typical is None:
            return f"There is no budget: {NO_NOISE}."
        half = _half(result)
        return (
            f"{half[0].upper()}{half[1:]} keep their label with {target} up to {typical} times "
            f"this noise{_doubt(result)}."
        )
    if not bool(budget.exists):
        return f"Noise budget for {target}: {budget.reason[0]}."
    grow = f"may grow {typical} times"
    if float(budget.level) < 1:
        grow = f"would have to shrink to {typical} of itself"
    return f"The noise {grow} to keep {name} with {target}{_doubt(result)}."


def _typical(result: Robustness) -> str | None:
    """The budget that at least half of the inputs with noise have, or None if none has noise."""
    levels = result.budget.level.flatten()
    count = int((~levels.isnan()).sum())
    if not count:
        return None
    place = int(levels.argsort()[(count - 1) // 2])  # NaN last
    return result.budget.written(tuple(map(int, np.unravel_index(place, result.label.shape))))


def _half(result: Robustness) -> str:
    noisy = " with noise" if bool(result.budget.level.isnan().any()) else ""
    return f"half of the inputs{noisy}"


def _doubt(result: Robustness) -> str:
    """How samples contradict it; of a batch, for how many inputs, and for the worst of them."""
    wrong = (~result.budget_agrees).flatten()
    if not bool(wrong.any()):
        return ""
    if result.label.numel() == 1:
        return f" by propagation; {result.budget_remark((0,) * result.label.dim())}"
    lowest = float(result.budget_sampled.probability.double().flatten()[wrong].min())
    return (
        f", by propagation; samples disagree about {int(wrong.sum()):,} of {wrong.numel():,} "
        f"budgets and keep a label with {in_percent_unlike(lowest, result.budget.target)} there at "
        "the least"
    )


def layers_section(trace: Trace, batch_dims: int) -> Section:
    """How wide and how dependent the elements of every step are, and what samples say of them."""
    side = max(LEAST_SIDE, min(SIDE, int((PIXELS / max(1, len(trace.steps))) ** 0.5)))
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
    # The first step that is wrong, or else the first that is not Gaussian, or else the last.
    chosen = trace.first_error() or trace.first_non_gaussian()
    places = [i for i, step in enumerate(trace.steps) if step is chosen]
    data: dict[str, Any] = {
        "steps": [_step(step, batch_dims, side) for step in trace.steps],
        "samples": trace.samples, "start": (places or [max(0, len(trace.steps) - 1)])[0],
    }  # fmt: skip
    if trace.samples:
        data["threshold"] = NOT_GAUSSIAN
    return Section("layers", "Layers", "Uncertainty through the layers", body, data)


def _diagnosis(trace: Trace) -> str:
    """Where the assumption of Gaussian layers fails, in words."""
    if not trace.samples:
        return (
            "Whether each step is Gaussian was not checked; cp.trace(..., samples=10_000) does so."
        )
    not_gaussian, wrong = trace.first_non_gaussian(), trace.first_error()
    shape = "Every step is Gaussian as far as they tell."
    if not_gaussian:
        shape = f"The first that is clearly not Gaussian is “{not_gaussian.name}”."
    moments = (
        "No variance is off by more than sampling explains, which is what matters: a step may "
        "be nonlinear and still have the right moments."
    )
    if wrong:
        moments = (
            f"The first whose variance is off by more than {in_percent(0.01)} and the error of "
            f"sampling is “{wrong.name}”; what follows inherits it."
        )
    return f"{trace.samples:,} samples went through the same steps. {shape} {moments}"


def _step(step: TraceStep, batch_dims: int, side: int) -> dict[str, Any]:
    stddev = step.stddev.detach().to("cpu", torch.float64)
    flat = stddev.flatten()
    known = flat[:: max(1, -(-len(flat) // QUANTILE_ELEMENTS))]
    known = known[known.isfinite()]
    quantiles = torch.full((len(QUANTILES),), torch.nan)
    if len(known):
        quantiles = torch.quantile(known, torch.tensor(QUANTILES, dtype=known.dtype))
    counts, edges = _histogram(known)
    data: dict[str, Any] = {
        "name": step.name, "shape": " × ".join(map(str, step.shape)) or "one number",
        "quantiles": rounded(quantiles), "counts": counts, "edges": rounded(edges),
        "mean": rounded(float(step.mean.double().mean())),
        "correlation": rounded(step.largest_correlation), "series": step.series,
        "seconds": rounded(step.seconds), "time": in_seconds(step.seconds) if step.seconds else "",
    }  # fmt: skip
    shape = plane(step.mean.shape[batch_dims:])
    if shape:
        data["picture"] = picture(stddev.reshape(-1, *shape[1:]), side)
    return data | _normality(step)


def _histogram(values: Tensor) -> tuple[list[int], Tensor]:
    """Counts in equal bins, and the outer edges; no counts where all values are the same."""
    if not len(values) or float(values.min()) == float(values.max()):
        return [], values[:1]
    counts, edges = torch.histogram(values, BINS)
    return counts.long().tolist(), edges[[0, -1]]


def _normality(step: TraceStep) -> dict[str, Any]:
    """How far samples depart from the Gaussian of a step: median and worst of each measure."""
    normality = step.normality
    if normality is None:
        return {}
    measures = {
        "skewness": normality.skewness, "kurtosis": normality.excess_kurtosis,
        "kolmogorov": normality.kolmogorov, "mean_error": normality.mean_error,
        "variance_error": normality.variance_error,
    }  # fmt: skip
    data = {name: rounded(median_and_worst(values)) for name, values in measures.items()}
    variance_error = median_and_worst(normality.variance_stderr)[0]
    return data | {
        "kolmogorov_noise": rounded(normality.kolmogorov_noise),
        "noise": f"sampling alone: Kolmogorov {in_digits(normality.kolmogorov_noise, 2)}, mean "
        f"{in_digits(normality.mean_stderr, 2)} standard deviations, variance "
        f"{in_percent(variance_error)}",
    }


def sampling_section(comparison: Comparison) -> Section:
    """Errors of every method beside those of sampling, its time and its verdict."""
    reference = comparison.reference
    outputs = reference.gaussian.mean.numel()
    body = paragraph(
        f"Found by {reference.words}. Points are outputs; the grey band is two standard errors of "
        "sampling itself, so what lies in it cannot be distinguished from the truth. The "
        "lines of the small charts are what sampling alone would give.",
        f"Of {outputs:,} outputs of all inputs, {POINTS} that are evenly spaced are drawn."
        if outputs > POINTS
        else "",
    )
    body += chart("sampling", "Errors of mean and variance of every method against sampling")
    body += chart("amounts", "Distances from the sampled Gaussian, and time, of every method")
    body += folded("Numbers of the comparison", comparison.table)
    data = {
        "reference": _averages(reference, *AMOUNTS) | {
            "name": reference.name, "seconds": rounded(reference.seconds),
        } | _averages(reference, "mean_error", "variance_ratio"),
        "rows": [_method(row) for row in comparison.rows],
    }  # fmt: skip
    return Section("sampling", "Sampling", "Against sampling", body, data)


def _method(row: ComparisonRow) -> dict[str, Any]:
    if row.agreement is None:
        return {"name": row.name, "refusal": row.refusal[:REFUSAL]}
    return _averages(row.agreement, *AMOUNTS) | {
        "name": row.name, "verdict": row.agreement.verdict, "seconds": rounded(row.seconds),
        "mean_error": rounded(_points(row.agreement.mean_error)),
        "variance_ratio": rounded(_points(row.agreement.variance_ratio)),
    }  # fmt: skip


def _averages(result: Any, *names: str) -> dict[str, Any]:
    return {name: rounded(float(getattr(result, name).double().nanmean())) for name in names}


def _points(values: Tensor) -> Tensor:
    flat = values.detach().flatten().cpu()
    if len(flat) <= POINTS:
        return flat
    return flat[torch.linspace(0, len(flat) - 1, POINTS).round().long()]
